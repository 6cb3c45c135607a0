"""The program, top to bottom: find, read, align, plan, send, read back, remember.

`engine` holds what the stages are run with, `loading` reads and aligns a run, `preparing` plans
it, `delivering` sends it and reads it back. Only this package knows the ledger, and only it
decides what happens when something fails: `engine.attempted` is the one place that catches
everything, for one run of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from verl_logsync.binding import bind_checkpoint, checkpoint_root, read_binding
from verl_logsync.catalog import Grouping, bind, catalog, told_apart
from verl_logsync.discover import Recall, discover, remember_nothing
from verl_logsync.errors import ExitCode, LogsyncError
from verl_logsync.ledger import LedgerRun, RememberedFiles
from verl_logsync.model import Action, Catalog, Outcome, Report, RunSources
from verl_logsync.pipeline.delivering import carry_out
from verl_logsync.pipeline.deriving import check_options
from verl_logsync.pipeline.engine import Engine, Progress, failed_outcome, no_progress, sends
from verl_logsync.pipeline.loading import Loaded, load, load_or_error
from verl_logsync.pipeline.preparing import Prepared, outcome_of, prepare_batch, readiness_of
from verl_logsync.pipeline.shifting import with_offset

__all__ = [
    "Engine",
    "Loaded",
    "Progress",
    "load",
    "load_or_error",
    "no_progress",
    "readiness_of",
    "survey",
    "upload",
]

#: Runs that are looked up, sent and verified together, at first and at most. Reading overlaps with
#: sending, and a question to the server is asked for many runs at once.
FIRST_BATCH, LONGEST_BATCH = 3, 40
#: Log files of one batch have so many bytes at most (but a batch has one run): it is in memory.
BATCH_BYTES = 256 << 20


def survey(engine: Engine, paths: Sequence[Path]) -> Catalog:
    """Everything under the paths, grouped into runs, each with the target it is bound to."""
    settings, ledger = engine.settings, engine.ledger
    recall: Recall = ledger.recall(settings.step_key) if ledger is not None else remember_nothing
    found = discover(
        paths,
        engine.sources,
        recall,
        excluded=(settings.state_folder, settings.output),
        patterns=settings.exclude,
    )
    if ledger is not None and isinstance(recall, RememberedFiles) and not settings.dry_run:
        reached = tuple((path, recall.with_memory(path, file)) for path, file in found.reached)
        found = replace(found, files=tuple(file for _, file in reached), reached=reached)
        ledger.remember_files(reached, settings.step_key)
    placed = (with_offset(file, engine.by_name[file.source], settings) for file in found.files)
    found = replace(found, files=tuple(placed))
    runs = catalog(
        found, Grouping(settings.entity, settings.project, settings.runs, settings.merge)
    )
    known = ledger.bindings() if ledger is not None else []
    return replace(runs, runs=tuple(told_apart(bind(runs.runs, known, runs.runs))))


def upload(engine: Engine, paths: Sequence[Path]) -> Report:
    """Bring the server up to date with everything under the paths."""
    if engine.settings.diagnostics:
        check_options(engine)
    found = survey(engine, paths)
    runs, settled = _open_runs(engine, found)
    outcomes = [*settled, *_upload_all(engine, runs, found.runs)]
    if engine.settings.bind_checkpoints and sends(engine):
        outcomes = [_with_binding(o, engine.settings.binding_file) for o in outcomes]
    outcomes.sort(key=lambda o: (o.target.project, o.name, o.target.run_id))
    return Report(tuple(outcomes), found.skips, found, engine.settings.mode)


def _with_binding(outcome: Outcome, file_name: str) -> Outcome:
    """Write the id of a verified run into its checkpoint folders; failing that is partial."""
    if outcome.exit_code is not ExitCode.OK:
        return outcome
    notes = list(outcome.notes)
    known = outcome.remembered
    for folder in sorted({checkpoint_root(path) for path in outcome.checkpoints}):
        try:
            if read_binding(folder, file_name) != outcome.target.run_id:
                written = bind_checkpoint(folder, outcome.target.run_id, file_name)
                notes.append(f"bound its checkpoints: {written}")
        except (LogsyncError, OSError) as error:
            notes.append(f"its checkpoints were not bound: {error}")
            known = ExitCode.PARTIAL
    return replace(outcome, notes=tuple(notes), remembered=known)


@dataclass(frozen=True, slots=True)
class _Steps:
    """What is done with a batch of runs."""

    prepare: Callable[[Sequence[RunSources]], tuple[list[Outcome], list[Prepared]]]
    send: Callable[[Sequence[Prepared]], list[Outcome]]


def _upload_all(
    engine: Engine, runs: Sequence[RunSources], surveyed: Sequence[RunSources]
) -> list[Outcome]:
    """Read one batch while the one before it is being sent."""
    sink = engine.sink
    assert sink is not None, "an upload has a sink"
    outcomes: list[Outcome] = []
    sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sender")
    try:
        if runs and sends(engine):
            sender.submit(sink.warm_up)
        steps = _Steps(
            partial(prepare_batch, engine, sink, surveyed), partial(carry_out, engine, sink)
        )
        _hand_over(engine, steps, runs, sender, outcomes)
    except BaseException:
        # Interrupted: nobody waits for as long as the network takes.
        engine.stop.set()
        sink.close()
        sender.shutdown(wait=False, cancel_futures=True)
        raise
    sender.shutdown()
    return outcomes


def _hand_over(
    engine: Engine,
    steps: _Steps,
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
            stopped = _submit(engine, steps, batch, sender, sending, outcomes)
        else:
            outcomes.extend(failed_outcome(run, stopped) for run in batch)
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


def _submit(
    engine: Engine,
    steps: _Steps,
    batch: Sequence[RunSources],
    sender: Executor,
    sending: deque[tuple[Sequence[RunSources], Future[list[Outcome]]]],
    outcomes: list[Outcome],
) -> LogsyncError | None:
    """Prepare a batch and hand it over; the error, if no other run would fare better."""
    try:
        failed, prepared = steps.prepare(batch)
    except LogsyncError as error:
        outcomes.extend(failed_outcome(run, error) for run in batch)
        return error
    outcomes.extend(failed)
    if sends(engine):
        runs = [item.loaded.run for item in prepared]
        sending.append((runs, sender.submit(steps.send, prepared)))
    else:
        outcomes.extend(outcome_of(item, rows_sent=0, verdict=None) for item in prepared)
    return None


def _collect(
    batch: Sequence[RunSources], result: Future[list[Outcome]], outcomes: list[Outcome]
) -> LogsyncError | None:
    try:
        outcomes.extend(result.result())
    except LogsyncError as error:
        outcomes.extend(failed_outcome(run, error) for run in batch)
        return error
    return None


def _open_runs(engine: Engine, found: Catalog) -> tuple[list[RunSources], list[Outcome]]:
    """The runs that need work, those that waited longest first, and the outcomes of the rest."""
    ledger, settings = engine.ledger, engine.settings
    if ledger is None or settings.verify == "full" or settings.recompute:
        return sorted(found.runs, key=lambda run: run.changed_at), []
    done = ledger.settled(found.runs, engine.now(), engine.decisive)
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
        checkpoints=tuple(file.path for file in run.checkpoints),
    )
