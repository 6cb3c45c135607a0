"""The program, top to bottom: find, read, align, plan, send, read back, remember.

Only this module knows the ledger, and only it decides what happens when something fails:
`_attempted` is the one place that catches everything, for one run of the batch.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from verl_logsync.align import Policy, align, training_rows
from verl_logsync.assemble import Surroundings, assemble
from verl_logsync.catalog import Grouping, bind, catalog, told_apart
from verl_logsync.clock import set_clocks
from verl_logsync.columns import AXES, STEP, TableBuilder
from verl_logsync.digests import wire_changes
from verl_logsync.discover import Recall, discover, remember_nothing
from verl_logsync.errors import (
    AuthError,
    ExitCode,
    LogsyncError,
    RefusedByServer,
    Unreachable,
    UnreadableInput,
)
from verl_logsync.interfaces import Parcel, Sent, Sink, Source
from verl_logsync.ledger import Ledger, LedgerRun, RememberedFiles
from verl_logsync.model import (
    HARMLESS,
    Account,
    Action,
    Attempt,
    AttemptReading,
    Catalog,
    Confirmed,
    Facts,
    History,
    LogFile,
    Outcome,
    Reading,
    RemoteState,
    Report,
    RunSources,
    Skip,
    SkipReason,
    Stamp,
    Target,
    UploadPlan,
    Verdict,
)
from verl_logsync.plan import Held, Situation, held_after, held_from_rows, held_rows, make_plan
from verl_logsync.readiness import Patience, Readiness, judge
from verl_logsync.settings import Settings
from verl_logsync.verify import verify_counts, verify_rows
from verl_logsync.verl_keys import is_training_key

#: Runs that are looked up, sent and verified together, at first and at most. Reading overlaps with
#: sending, and a question to the server is asked for many runs at once.
FIRST_BATCH, LONGEST_BATCH = 3, 40
#: Log files of one batch have so many bytes at most (but a batch has one run): it is in memory.
BATCH_BYTES = 256 << 20
#: Seconds that the server is given to index what it accepted; less when the sender complained.
INDEXING, COMPLAINED = 30.0, 3.0

_T = TypeVar("_T")

#: A run is sent at most so often in one upload: a rewind, what it could not carry, and once more
#: when the rewind was refused.
_ROUNDS = 3
#: Words of the uploader about a failure that passes.
_PASSING = ("408", "413", "429", "500", "502", "503", "504", "timeout", "connection")

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` for when nobody is looking."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One run, read and aligned. `continued` says that rows of the server are in it."""

    run: RunSources
    history: History
    account: Account
    around: Surroundings
    pins: Mapping[str, float]
    started_at: float | None
    continued: bool = False


@dataclass(slots=True)
class Engine:
    """What the stages are run with.

    `ledger` is None where nothing is remembered; `stop` ends all waiting at once.
    """

    settings: Settings
    sources: Sequence[Source]
    sink: Sink | None = None
    ledger: Ledger | None = None
    progress: Progress = no_progress
    now: Callable[[], float] = time.time
    stop: threading.Event = field(default_factory=threading.Event)
    by_name: Mapping[str, Source] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {source.name: source for source in self.sources}


# -- find ----------------------------------------------------------------------------------


def survey(engine: Engine, paths: Sequence[Path]) -> Catalog:
    """Everything under the paths, grouped into runs, each with the target it is bound to."""
    settings, ledger = engine.settings, engine.ledger
    recall: Recall = ledger.recall() if ledger is not None else remember_nothing
    found = discover(
        paths, engine.sources, recall, excluded=(settings.state_folder, settings.output)
    )
    if ledger is not None and isinstance(recall, RememberedFiles):
        reached = tuple((path, recall.with_memory(path, file)) for path, file in found.reached)
        found = replace(found, files=tuple(file for _, file in reached), reached=reached)
        ledger.remember_files(reached)
    runs = catalog(found, Grouping(settings.entity, settings.project, settings.runs))
    known = ledger.bindings() if ledger is not None else []
    return replace(runs, runs=tuple(told_apart([bind(run, known) for run in runs.runs])))


# -- read and align ------------------------------------------------------------------------


def load(
    engine: Engine,
    run: RunSources,
    pins: Mapping[str, float] | None = None,
    stored: Sequence[AttemptReading] = (),
) -> Loaded:
    """Read all files of a run and align them.

    Args:
        pins: estimated starts that an earlier upload settled on.
        stored: rows that only the server still has, as an attempt before all others.
    """
    attempts = [_read_attempt(engine, attempt) for attempt in run.attempts]
    if stored:
        attempts = [*stored, *(_without_held(a, stored, engine) for a in attempts)]
    configs = [engine.by_name[file.source].read(file) for file in run.configs]
    clocked = set_clocks(attempts, pins or {})
    settings = engine.settings
    precisions = {source.name: source.precision for source in engine.sources} | {_STORED: 100}
    history, account = align(
        clocked.attempts,
        precisions,
        Policy(settings.on_overlap, settings.keep_tail),
        clocked.clock,
    )
    around = assemble(attempts[len(stored) :], configs)
    return Loaded(run, history, account, around, clocked.pins, clocked.started_at)


def load_or_error(engine: Engine, run: RunSources) -> Loaded | LogsyncError:
    """The same for one run of many; what prevents it is its result."""
    result = _attempted(engine, run, partial(load, engine, run))
    if isinstance(result, Outcome):
        assert result.error is not None, "a failed run has an error"
        return result.error
    return result


def _read_attempt(engine: Engine, attempt: Attempt) -> AttemptReading:
    return AttemptReading(attempt, tuple((file, _read(engine, file)) for file in attempt.files))


def _read(engine: Engine, file: LogFile) -> Reading:
    """What a file says, provided that it still is the file that was found.

    A job that restarts truncates its log: the new content is another attempt, or another run,
    and must not be taken for the one that was found.
    """
    source = engine.by_name[file.source]
    reading = source.read(file)
    now = discover([file.path], [source]).files
    if not now or _is_replaced(file, now[0]):
        raise UnreadableInput(
            "was replaced while it was read", place=file.place, hint="The next upload takes it"
        )
    return reading


def _is_replaced(known: LogFile, now: LogFile) -> bool:
    """Whether a path holds another log than before; a first record may have come meanwhile."""
    other = bool(known.facts.head_digest) and now.facts.head_digest != known.facts.head_digest
    return other or now.stamp.size < known.stamp.size


_STORED = "stored rows"


def _stored_attempt(rows: Sequence[Mapping[str, object]], target: Target) -> AttemptReading:
    """Rows read back from the server, as the attempt whose files are gone."""
    builder = TableBuilder()
    axes: dict[str, list[object]] = {axis: [] for axis in AXES}
    for row in rows:
        for axis in AXES:
            axes[axis].append(row.get(axis))
        builder.add({key: value for key, value in row.items() if key not in AXES})
    columns = {STEP: pa.array(axes[STEP], type=pa.int64())}
    for axis in AXES[1:]:
        if any(value is not None for value in axes[axis]):
            columns[axis] = pa.array(axes[axis], type=pa.float64())
    reading = Reading(pa.table(columns | builder.columns()))
    file = LogFile(Path(str(target)), _STORED, Stamp(0, 0, 0, 0), Facts())
    return AttemptReading(Attempt((file,), None, "recorded start"), ((file, reading),))


# -- upload --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A run with its plan, what the plan was made from, and what is ready to be sent."""

    loaded: Loaded
    ready: Readiness
    held: Held
    remote: RemoteState | None
    plan: UploadPlan
    parcel: Parcel | None


def upload(engine: Engine, paths: Sequence[Path]) -> Report:
    """Bring the server up to date with everything under the paths."""
    found = survey(engine, paths)
    runs, settled = _open_runs(engine, found)
    outcomes = [*settled, *_upload_all(engine, runs)]
    outcomes.sort(key=lambda o: (o.target.project, o.name, o.target.run_id))
    return Report(tuple(outcomes), found.skips, found, engine.settings.mode)


def _upload_all(engine: Engine, runs: Sequence[RunSources]) -> list[Outcome]:
    """Read one batch while the one before it is being sent."""
    sink = engine.sink
    assert sink is not None, "an upload has a sink"
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sender") as sender:
        try:
            if runs and _sends(engine):
                sender.submit(sink.warm_up)
            _hand_over(engine, sink, runs, sender, outcomes)
        except BaseException:
            # Interrupted: the sender must not go on for as long as the network takes.
            engine.stop.set()
            sink.close()
            raise
    return outcomes


def _hand_over(
    engine: Engine,
    sink: Sink,
    runs: Sequence[RunSources],
    sender: Executor,
    outcomes: list[Outcome],
) -> None:
    """Prepare batch after batch in this thread, and have them sent in the other."""
    sending: deque[tuple[Sequence[RunSources], Future[list[Outcome]]]] = deque()
    stopped: LogsyncError | None = None
    for start, batch in _batches(runs):
        if stopped is None and len(sending) > 1:
            stopped = _collect(*sending.popleft(), outcomes)
        if stopped is None:
            stopped = _submit(engine, sink, batch, sender, sending, outcomes)
        else:
            outcomes.extend(_failed(run, stopped) for run in batch)
        engine.progress("upload", start + len(batch), len(runs))
    while sending:
        _collect(*sending.popleft(), outcomes)


def _batches(runs: Sequence[RunSources]) -> Iterator[tuple[int, Sequence[RunSources]]]:
    """Stretches of the runs and where they begin: a short one first, to start sending early, then
    ever longer ones, since every batch ends with workers that wait for the slowest run.
    """
    start, size = 0, FIRST_BATCH
    while start < len(runs):
        end = start + 1
        held = _bytes(runs[start])
        while end < min(start + size, len(runs)) and held + _bytes(runs[end]) <= BATCH_BYTES:
            held += _bytes(runs[end])
            end += 1
        yield start, runs[start:end]
        start, size = end, min(2 * size, LONGEST_BATCH)


def _bytes(run: RunSources) -> int:
    return sum(file.stamp.size for file in run.files)


def _sends(engine: Engine) -> bool:
    return not engine.settings.dry_run and engine.settings.mode != "disabled"


def _submit(
    engine: Engine,
    sink: Sink,
    batch: Sequence[RunSources],
    sender: Executor,
    sending: deque[tuple[Sequence[RunSources], Future[list[Outcome]]]],
    outcomes: list[Outcome],
) -> LogsyncError | None:
    """Prepare a batch and hand it over; the error, if no other run would fare better."""
    try:
        failed, prepared = _prepare_batch(engine, sink, batch)
    except LogsyncError as error:
        outcomes.extend(_failed(run, error) for run in batch)
        return error
    outcomes.extend(failed)
    if _sends(engine):
        runs = [item.loaded.run for item in prepared]
        sending.append((runs, sender.submit(_carry_out, engine, sink, prepared)))
    else:
        outcomes.extend(_outcome(item, rows_sent=0, verdict=None) for item in prepared)
    return None


def _collect(
    batch: Sequence[RunSources], result: Future[list[Outcome]], outcomes: list[Outcome]
) -> LogsyncError | None:
    try:
        outcomes.extend(result.result())
    except LogsyncError as error:
        outcomes.extend(_failed(run, error) for run in batch)
        return error
    return None


def _open_runs(engine: Engine, found: Catalog) -> tuple[list[RunSources], list[Outcome]]:
    """The runs that need work, those that waited longest first, and the outcomes of the rest."""
    ledger, settings = engine.ledger, engine.settings
    if ledger is None or settings.verify == "full":
        return sorted(found.runs, key=lambda run: run.changed_at), []
    done = ledger.settled(found.runs, engine.now(), settings.decisive)
    remembered = {run.target: run for run in ledger.runs()}
    outcomes = [_unchanged(run, remembered[run.target]) for run in found.runs if run.target in done]
    todo = [run for run in found.runs if run.target not in done]
    return sorted(todo, key=lambda run: (run.changed_at, run.name)), outcomes


def _unchanged(run: RunSources, known: LedgerRun) -> Outcome:
    """The outcome of a run in whose files nothing changed: the same as last time."""
    return Outcome(
        run.target,
        run.name,
        Action.NOTHING,
        rows_total=known.rows,
        state=known.state,
        notes=known.attention,
        remembered=ExitCode(known.exit_code),
    )


def _prepare_batch(
    engine: Engine, sink: Sink, batch: Sequence[RunSources]
) -> tuple[list[Outcome], list[_Prepared]]:
    """Ask the server about some runs, read them and plan: those that failed, and the others."""
    failed: list[Outcome] = []
    prepared: list[_Prepared] = []
    for group in _by_project(batch):
        bound = _attempted(engine, group[0], partial(_bound_and_known, engine, sink, group))
        if isinstance(bound, Outcome):
            assert bound.error is not None, "a failed run has an error"
            failed.extend(_failed(run, bound.error) for run in group)
            continue
        for run, state in bound:
            result = _attempted(engine, run, partial(_prepare, engine, sink, run, state))
            if isinstance(result, Outcome):
                failed.append(result)
            else:
                prepared.append(result)
    return failed, prepared


def _by_project(runs: Sequence[RunSources]) -> list[list[RunSources]]:
    """Groups of runs that the server may refuse together."""
    groups: dict[Target, list[RunSources]] = {}
    for run in runs:
        groups.setdefault(replace(run.target, run_id=""), []).append(run)
    return list(groups.values())


def _bound_and_known(
    engine: Engine, sink: Sink, runs: Sequence[RunSources]
) -> list[tuple[RunSources, RemoteState | None]]:
    """Runs of one project with the targets that they are bound to, and what is there now."""
    bound = _bound(engine, sink, runs)
    states = sink.look([run.target for run in bound])
    return [(run, states.get(run.target)) for run in bound]


def _attempted(engine: Engine, run: RunSources, work: Callable[[], _T]) -> _T | Outcome:
    """Do the work of one run; whatever goes wrong is that run's outcome alone."""
    try:
        return work()
    except Exception as error:
        known = _explained(run, error)
        if engine.sink is not None and _concerns_all(engine.sink, known):
            raise known from error
        return _failed(run, known)


def _explained(run: RunSources, error: Exception) -> LogsyncError:
    """An error that is ours, or a word about one that should not have happened."""
    if isinstance(error, LogsyncError):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1]
    return LogsyncError(
        f"internal error: {type(error).__name__}: {error} ({Path(where.filename).name}:"
        f"{where.lineno})",
        place=run.files[0].place if run.files else run.name,
        hint="Please report it with the output of: verl-logsync scan --json PATH",
    )


def _concerns_all(sink: Sink, error: LogsyncError) -> bool:
    """Whether the server as a whole is away or refuses, so that no other run would fare better."""
    if not isinstance(error, AuthError | Unreachable):
        return False
    try:
        sink.probe()
    except LogsyncError:
        return True
    return False


def _failed(run: RunSources, error: LogsyncError) -> Outcome:
    return Outcome(run.target, run.name, None, error=error, notes=run.notes)


def _bound(engine: Engine, sink: Sink, runs: Sequence[RunSources]) -> list[RunSources]:
    """Runs that another machine may have uploaded under another id are found by their marker."""
    known_here = (
        {b.target for b in engine.ledger.bindings()} if engine.ledger is not None else set()
    )
    unknown = [run for run in runs if run.target not in known_here]
    if not unknown:
        return list(runs)
    found = sink.find(replace(runs[0].target, run_id=""), [run.names_key for run in unknown])
    return told_apart([bind(run, found) if run in unknown else run for run in runs])


def _prepare(engine: Engine, sink: Sink, run: RunSources, remote: RemoteState | None) -> _Prepared:
    """Read, align and plan one run."""
    confirmed = engine.ledger.confirmed(run.target) if engine.ledger is not None else None
    loaded = load(engine, run, _pins(remote, confirmed) or sink.pins(run.target))
    if remote is not None and remote.lines and _starts_late(loaded, confirmed):
        loaded = _with_stored_rows(engine, sink, loaded, _pins(remote, confirmed))
    return _planned_with(engine, sink, loaded, remote, confirmed)


def _pins(remote: RemoteState | None, confirmed: Confirmed | None) -> Mapping[str, float]:
    if confirmed is not None:
        return confirmed.clock
    return remote.marker.clock if remote is not None and remote.marker is not None else {}


def _starts_late(loaded: Loaded, confirmed: Confirmed | None) -> bool:
    """Whether the server may hold rows from before the first row that is left on disk."""
    if not len(loaded.history) or loaded.history.steps[0] <= 1:
        return False
    return confirmed is None or bool(confirmed.steps[0] < loaded.history.steps[0])


def _with_stored_rows(
    engine: Engine, sink: Sink, loaded: Loaded, pins: Mapping[str, float]
) -> Loaded:
    """A log that was truncated at a restart continues the rows that the server holds.

    They are aligned like the attempt that wrote them, so that nothing of it is erased and a
    validation record at the resume step merges into its row.
    """
    rows = list(sink.rows(loaded.run.target))
    first = int(loaded.history.steps[0])
    if not rows or int(rows[0][STEP]) >= first:
        return loaded
    if engine.settings.on_overlap == "last":
        rows = [row for row in rows if row[STEP] < _first_trained(loaded.history)]
    whole = load(engine, loaded.run, pins, (_stored_attempt(rows, loaded.run.target),))
    note = (
        f"its log starts at step {first}: the file was replaced at a restart. Rows that only "
        "the server still has stay there (verl-logsync scan shows the files)"
    )
    account = replace(whole.account, notes=(*whole.account.notes, note))
    return replace(whole, account=account, continued=True)


def _without_held(
    attempt: AttemptReading, stored: Sequence[AttemptReading], engine: Engine
) -> AttemptReading:
    """An attempt without validation records at steps whose rows only the server has.

    Merging them would mean to take such a row from the server and to send it again; if that
    failed half-way its training metrics, which are nowhere else, would be gone.
    """
    if engine.settings.on_overlap != "last":
        return attempt
    steps = np.concatenate([r.rows.column(STEP).to_numpy() for s in stored for _, r in s.readings])
    readings = []
    for file, reading in attempt.readings:
        held = np.isin(reading.rows.column(STEP).to_numpy(), steps) & ~training_rows(reading.rows)
        if held.any():
            count = int(held.sum())
            detail = f"{count} validation records at steps that are on the server already"
            skip = Skip(SkipReason.HELD, file.place, detail, records=count)
            rows = reading.rows.filter(pa.array(~held))
            readings.append((file, replace(reading, rows=rows, skips=(*reading.skips, skip))))
        else:
            readings.append((file, reading))
    return AttemptReading(attempt.attempt, tuple(readings))


def _first_trained(history: History) -> float:
    """The first step that the history trains; what the server has from there on is superseded."""
    trained = [
        int(history.steps[int(valid.argmax())])
        for name in history.table.column_names
        if is_training_key(name)
        and (valid := history.table.column(name).is_valid().to_numpy()).any()
    ]
    return min(trained, default=math.inf)


def readiness_of(loaded: Loaded, settings: Settings, now: float) -> Readiness:
    """Which rows of a run may be sent, and the state in which that leaves it."""
    return judge(
        loaded.history,
        loaded.around,
        loaded.run.changed_at,
        now,
        Patience(settings.settle, settings.stale_after, settings.final),
    )


def _planned_with(
    engine: Engine,
    sink: Sink,
    loaded: Loaded,
    remote: RemoteState | None,
    confirmed: Confirmed | None,
) -> _Prepared:
    settings, run = engine.settings, loaded.run
    ready = readiness_of(loaded, settings, engine.now())
    history = loaded.history.head(ready.rows)
    held = held_rows(history, remote, confirmed)
    if held is None:
        assert remote is not None, "without a run nothing is held"
        held = _read_held(sink, run.target, remote)
    extra = loaded.around.extra
    if remote is not None and (extra.files or extra.artifacts):
        remote = sink.with_parts(run.target, remote)
    situation = Situation(
        run=run,
        history=history,
        around=loaded.around,
        ready=ready,
        pins=loaded.pins,
        started_at=loaded.started_at or min(f.stamp.mtime for f in run.files),
        remote=remote,
        held=held,
        can_rewind=remote is not None and sink.can_rewind(run.target),
        knows_less=not loaded.continued and _knows_less(run, remote, confirmed),
        held_back=len(loaded.history) - ready.rows,
        on_rewrite=settings.on_rewrite,
    )
    plan = make_plan(situation)
    parcel = sink.pack(plan) if plan.sends and _sends(engine) else None
    return _Prepared(loaded, ready, held, remote, plan, parcel)


def _read_held(sink: Sink, target: Target, remote: RemoteState) -> Held:
    """All rows that the server holds; fewer than it counts prove nothing."""
    held = held_from_rows(sink.rows(target))
    if len(held.steps) != remote.lines:
        raise RefusedByServer(
            f"the server counts {remote.lines} rows of this run but gives {len(held.steps)} back, "
            "so what it lacks cannot be told; nothing was sent",
            hint="Run the same command again later",
        )
    return held


def _knows_less(run: RunSources, remote: RemoteState | None, confirmed: Confirmed | None) -> bool:
    """Whether the server's rows were made from more logs than are here.

    Then what differs is no news: these files are an older copy. Unless it was we who sent
    what the server holds.
    """
    if remote is None or remote.marker is None:
        return False
    if confirmed is not None and len(confirmed.steps) == remote.lines:
        return False
    return run.heads < remote.marker.heads


def _outcome(prepared: _Prepared, *, rows_sent: int, verdict: Verdict | None) -> Outcome:
    plan, loaded = prepared.plan, prepared.loaded
    return Outcome(
        plan.target,
        plan.name,
        plan.action,
        rows_sent=rows_sent,
        rows_total=len(plan.history),
        state=plan.state,
        account=loaded.account,
        verdict=verdict,
        clock=loaded.history.clock,
        notes=(*loaded.run.notes, *loaded.account.notes, *_data_notes(loaded), *plan.notes),
        rows_planned=plan.rows_to_send,
    )


def _data_notes(loaded: Loaded) -> tuple[str, ...]:
    """What is not as the logs say it, although nothing is wrong."""
    notes = []
    if loaded.history.clock == "estimated":
        notes.append("times are estimated from the durations of the steps")
    if rewritten := wire_changes(loaded.history):
        notes.append(
            f"{rewritten} values are written otherwise on W&B's wire (-0.0 as 0, integers of 2^63 "
            "and more as floats, empty objects not at all)"
        )
    return tuple(notes)


# -- send, read back, remember -------------------------------------------------------------


def _carry_out(engine: Engine, sink: Sink, prepared: Sequence[_Prepared]) -> list[Outcome]:
    """Send what is planned, verify, and plan again where one sending is not enough.

    A rewind carries rows only, so its run's other records follow in a second round; a rewind
    that the server refused is planned again without.
    """
    outcomes: dict[Target, Outcome] = {}
    todo: list[_Prepared] = []
    states = _states_now(sink, [item for item in prepared if item.plan.sends])
    for item in prepared:
        refresh = partial(_refreshed, engine, sink, item, states)
        fresh = _attempted(engine, item.loaded.run, refresh)
        if isinstance(fresh, Outcome):
            outcomes[item.plan.target] = fresh
        else:
            todo.append(fresh)
    for _ in range(_ROUNDS):
        again: list[_Prepared] = []
        for item, outcome in _one_round(engine, sink, todo):
            target = item.plan.target
            outcomes[target] = _combined(outcomes.get(target), outcome)
            more = _attempted(
                engine, item.loaded.run, partial(_next_plan, engine, sink, item, outcome)
            )
            if isinstance(more, Outcome):
                outcomes[target] = more
            elif more is not None:
                again.append(more)
        todo = again
        if not todo or engine.stop.is_set():
            break
    return list(outcomes.values())


def _states_now(sink: Sink, items: Sequence[_Prepared]) -> dict[Target, RemoteState] | None:
    """What the server holds at the moment of sending; None when it does not say."""
    states: dict[Target, RemoteState] = {}
    try:
        for group in _same_project(items):
            states.update(sink.look([item.plan.target for item in group]))
    except LogsyncError:
        return None
    return states


def _refreshed(
    engine: Engine, sink: Sink, item: _Prepared, states: Mapping[Target, RemoteState] | None
) -> _Prepared:
    """The same plan, or a new one if the server changed since it was made."""
    if not item.plan.sends:
        return item
    now = states if states is not None else sink.look([item.plan.target])
    state = now.get(item.plan.target)
    if _holds(state) == _holds(item.remote):
        return item
    return _planned_with(engine, sink, item.loaded, state, None)


def _holds(state: RemoteState | None) -> tuple[object, ...]:
    if state is None:
        return ()
    return state.lines, state.last_step, state.summary_step, state.events, state.logs


def _combined(first: Outcome | None, second: Outcome) -> Outcome:
    """The outcome of two rounds; rows of a rewind that did not happen were not sent."""
    if first is None:
        return second
    arrived = first.rows_sent if first.verdict is not None and first.verdict.agrees else 0
    action = first.action if second.action is Action.APPEND and arrived else second.action
    notes = tuple(dict.fromkeys((*first.notes, *second.notes)))
    return replace(second, action=action, rows_sent=arrived + second.rows_sent, notes=notes)


def _one_round(
    engine: Engine, sink: Sink, prepared: Sequence[_Prepared]
) -> Iterator[tuple[_Prepared, Outcome]]:
    sending = [item for item in prepared if item.plan.sends]
    parcels = [item.parcel for item in sending if item.parcel is not None]
    sent = sink.send(parcels) if parcels else {}
    complained = any(s.error is not None or s.messages for s in sent.values())
    results = _read_back(engine, sink, sending, complained)
    for item in prepared:
        run, said = item.loaded.run, sent.get(item.plan.target, Sent())
        result = results.get(item.plan.target)
        finish = partial(_concluded, engine, sink, item, said, result)
        yield item, _attempted(engine, run, finish)


def _concluded(
    engine: Engine, sink: Sink, item: _Prepared, said: Sent, result: Verdict | LogsyncError | None
) -> Outcome:
    """What became of one run in one round; a verified one is remembered."""
    if not item.plan.sends:
        return _left_alone(engine, sink, item)
    verdict = result if isinstance(result, Verdict) else None
    outcome = replace(
        _outcome(item, rows_sent=item.plan.rows_to_send, verdict=verdict),
        url=sink.url(item.plan.target),
    )
    if verdict is not None and verdict.agrees:
        _remember(engine, item)
        return outcome
    error = said.error or (result if isinstance(result, LogsyncError) else None)
    if error is not None:
        outcome = replace(outcome, rows_sent=0, error=error)
    elif verdict is None:
        outcome = replace(outcome, notes=(*outcome.notes, "NOT VERIFIED: --verify none"))
    words = tuple(f"the uploader says: {m}" for m in said.messages[:5])
    return replace(outcome, notes=(*outcome.notes, *words))


def _left_alone(engine: Engine, sink: Sink, item: _Prepared) -> Outcome:
    """A run for which nothing is sent."""
    verdict = None
    if engine.settings.verify == "full" and item.plan.action is Action.NOTHING and item.remote:
        verdict = verify_rows(item.plan, item.held, sink.rows(item.plan.target))
    if item.plan.action is not Action.AHEAD and (verdict is None or verdict.agrees):
        _remember(engine, item)
    return _outcome(item, rows_sent=0, verdict=verdict)


def _read_back(
    engine: Engine, sink: Sink, items: Sequence[_Prepared], complained: bool
) -> dict[Target, Verdict | LogsyncError]:
    """Ask the server until it agrees with every plan, or has had its time to index.

    A question that fails is a question that is asked again; the last failure is the result.
    """
    if engine.settings.verify == "none" or not items:
        return {}
    results: dict[Target, Verdict | LogsyncError] = {}
    end = time.monotonic() + (COMPLAINED if complained else INDEXING)
    pause = 0.1
    open_items = list(items)
    while True:
        for group in _same_project(open_items):
            results.update(_asked(engine, sink, group))
        open_items = [i for i in open_items if not _agrees(results[i.plan.target])]
        if not open_items or time.monotonic() + pause > end or engine.stop.wait(pause):
            return results
        pause = min(2 * pause, 5.0)


def _same_project(items: Sequence[_Prepared]) -> list[list[_Prepared]]:
    groups: dict[Target, list[_Prepared]] = {}
    for item in items:
        groups.setdefault(replace(item.plan.target, run_id=""), []).append(item)
    return list(groups.values())


def _asked(
    engine: Engine, sink: Sink, items: Sequence[_Prepared]
) -> dict[Target, Verdict | LogsyncError]:
    try:
        states = sink.look([item.plan.target for item in items])
        return {i.plan.target: _verdict(engine, sink, i, states) for i in items}
    except LogsyncError as error:
        return {item.plan.target: error for item in items}


def _agrees(result: Verdict | LogsyncError) -> bool:
    return isinstance(result, Verdict) and result.agrees


def _verdict(
    engine: Engine, sink: Sink, item: _Prepared, states: Mapping[Target, RemoteState]
) -> Verdict:
    target, expect = item.plan.target, item.plan.expect
    state = states.get(target)
    if state is not None and (expect.files or expect.artifacts):
        state = sink.with_parts(target, state)
    verdict = verify_counts(item.plan, state)
    if verdict.agrees and engine.settings.verify == "full":
        return verify_rows(item.plan, held_after(item.plan, item.held), sink.rows(target))
    return verdict


def _next_plan(engine: Engine, sink: Sink, item: _Prepared, outcome: Outcome) -> _Prepared | None:
    """The plan of a further round; None when this run is done."""
    plan = item.plan
    refused = outcome.error is None or isinstance(outcome.error, RefusedByServer)
    if plan.action is not Action.REWIND or not refused:
        return None
    state = sink.look([plan.target]).get(plan.target)
    agreed = outcome.verdict is not None and outcome.verdict.agrees
    if not agreed:
        if state is None or _was_rewound(plan, item.held, state):
            return None
        if any(word in note for note in outcome.notes for word in _PASSING):
            return None  # it may well rewind next time; adding rows now would only be undone
        sink.refuses_rewind(plan.target)
        return _planned_with(engine, sink, item.loaded, state, None)
    confirmed = engine.ledger.confirmed(plan.target) if engine.ledger is not None else None
    more = _planned_with(engine, sink, item.loaded, state, confirmed)
    if more.plan.sends:
        return more
    _remember(engine, more)
    return None


def _was_rewound(plan: UploadPlan, held: Held, state: RemoteState) -> bool:
    """Whether the rows on the server are no longer those from before the rewind."""
    return state.lines != len(held.steps) or (
        state.marker is not None and state.marker.digest == plan.marker.digest
    )


def _remember(engine: Engine, item: _Prepared) -> None:
    if engine.ledger is None:
        return
    plan, run = item.plan, item.loaded.run
    if plan.action is Action.NOTHING and not len(plan.history) and not len(item.held.steps):
        return
    after = held_after(plan, item.held)
    confirmed = Confirmed(
        plan.target,
        run.names_key,
        plan.marker.heads,
        run.fingerprint,
        after.steps,
        after.digests,
        plan.state,
        plan.marker.clock,
    )
    # The rest of a rewound run (events, files) is still to be sent.
    recheck = 0.0 if plan.action is Action.REWIND else item.ready.recheck_at
    outcome = _outcome(item, rows_sent=0, verdict=None)
    engine.ledger.confirm(
        run,
        confirmed,
        engine.settings.decisive,
        recheck,
        int(outcome.exit_code),
        _attention(item) if outcome.exit_code else (),
    )


def _attention(item: _Prepared) -> list[str]:
    """What a run still lacks, to be said again while its files stay as they are."""
    kept_old = item.plan.notes[:1] if item.plan.action is Action.KEPT_OLD else ()
    skips = (s for s in item.loaded.account.skips if s.reason not in HARMLESS)
    return [*kept_old, *(f"skipped {skip}" for skip in skips)]
