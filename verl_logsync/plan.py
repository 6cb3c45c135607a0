"""History minus what the server holds -> an UploadPlan.

`compare` says how much of the history is on the server already, and admits when counts alone
cannot tell; `make_plan` turns that into one action.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa

from verl_logsync.assemble import Surroundings, summarise
from verl_logsync.columns import AXES, STEP, TableBuilder
from verl_logsync.config_files import artifact_name
from verl_logsync.derived_by import changed, continued, of_others
from verl_logsync.digests import canonical, overall_digest, row_digests
from verl_logsync.model import (
    SENDING,
    Action,
    Alert,
    Confirmed,
    DerivedBy,
    Expectation,
    FileRef,
    History,
    Marker,
    PassThrough,
    RemoteState,
    RunSources,
    Segment,
    UploadPlan,
)
from verl_logsync.readiness import Readiness

OnRewrite = Literal["rewind", "keep"]


_T = TypeVar("_T")
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Held:
    """The rows that the server holds: their steps and digests, in stored order."""

    steps: _Ints
    digests: _Hashes


NOTHING_HELD: Final = Held(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))


def held_rows(
    history: History, remote: RemoteState | None, confirmed: Confirmed | None
) -> Held | None:
    """What the server holds, as far as counts and memory prove it; None: the rows must be read.

    Memory (the ledger) is believed when the server's line count, last step and marker agree with
    it: another machine may have replaced rows since.
    Without memory the marker in the run's config is: its digest must match the history's rows
    up to its step, and the server's line count and the counts of every key must match too.
    """
    if remote is None or remote.lines == 0:
        return NOTHING_HELD
    if (
        confirmed is not None
        and len(confirmed.steps) == remote.lines
        and int(confirmed.steps[-1]) == remote.last_step
        and remote.marker is not None
        and remote.marker.digest == overall_digest(confirmed.digests)
    ):
        return Held(confirmed.steps, confirmed.digests)
    if remote.marker is None or remote.last_step != remote.marker.last_step:
        return None
    count = int(np.searchsorted(history.steps, remote.marker.last_step, side="right"))
    part = history.head(count)
    digests = row_digests(part)
    if count != remote.lines or overall_digest(digests) != remote.marker.digest:
        return None
    logged = _countable(part) - history.added - remote.marker.added
    counts = {k: n for k, n in key_counts(part).items() if k in logged}
    if differing_counts(counts, remote.key_counts):
        return None
    return Held(part.steps, digests)


def held_from_rows(
    rows: Iterable[Mapping[str, Any]],
    added: Collection[str],
    logged_from: Mapping[str, int],
) -> Held:
    """The same from the rows themselves, as the server returns them.

    Args:
        added: derived columns, which are no part of a row's identity.
        logged_from: the steps from which on some of them are logged, and are.
    """
    left_out = {*AXES, *added}
    builder = TableBuilder()
    steps: list[int] = []
    for row in rows:
        step = int(row.get(STEP, -1))
        steps.append(step)
        logged = {key for key, first in logged_from.items() if step >= first}
        builder.add({k: v for k, v in row.items() if k not in left_out or k in logged})
    table = pa.table({STEP: pa.array(steps, type=pa.int64()), **builder.columns()})
    history = History(table, np.zeros(len(steps), dtype=np.int64))
    return Held(history.steps, row_digests(history))


def key_counts(history: History, first_row: int = 0) -> dict[str, int]:
    """How many rows (from `first_row` on) have each key."""
    counts = {}
    for name in history.table.column_names:
        column = history.table.column(name).slice(first_row)
        count = len(column) - column.null_count
        if count:
            counts[name] = count
    return counts


def _countable(history: History) -> set[str]:
    """The keys that a server lists by their own name: not objects, which may be listed under
    their parts (`KEY._type`), nor empty ones, which are absent on the wire.
    """
    names = [name for name in history.table.column_names if name not in AXES]
    objects = {name for name in names if _holds_objects(history.table.column(name))}
    return {n for n in names if n not in objects and n.partition(".")[0] not in objects}


def _holds_objects(column: pa.ChunkedArray) -> bool:
    if not pa.types.is_string(column.type):
        return False
    return any(text is not None and text.startswith("{") for text in column.to_pylist())


def differing_counts(meant: Mapping[str, int], found: Mapping[str, int]) -> dict[str, str]:
    """Keys whose row counts differ. A server that lists no keys at all proves nothing."""
    if not found:
        return {}
    return {
        key: f"{count} rows meant, {found.get(key, 0)} found"
        for key, count in meant.items()
        if key not in AXES and found.get(key, 0) != count
    }


# -- comparing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a history and the server's rows relate.

    The first `shared` rows of the history are held as they are; `extra` held rows follow them
    (changed ones, or ones beyond the history's end), of which `changed` are the steps that the
    history states otherwise and `repeated` those held more than once or out of order.
    `branch_step` is the last shared step, `last_held` the highest step held.
    """

    shared: int
    extra: int
    changed: tuple[int, ...]
    repeated: tuple[int, ...]
    branch_step: int | None
    last_held: int | None


def compare(meant: Held, held: Held) -> Comparison:
    """Find the first row in which what is meant and what is held differ."""
    steps, digests = meant.steps, meant.digests
    length = min(len(steps), len(held.steps))
    same = (steps[:length] == held.steps[:length]) & (digests[:length] == held.digests[:length])
    shared = length if bool(same.all()) else int(np.argmin(same))
    return Comparison(
        shared,
        len(held.steps) - shared,
        _changed(steps[shared:], digests[shared:], held, shared),
        _repeated(held.steps),
        int(steps[shared - 1]) if shared else None,
        int(held.steps.max()) if len(held.steps) else None,
    )


def _changed(steps: _Ints, digests: _Hashes, held: Held, shared: int) -> tuple[int, ...]:
    meant = dict(zip(steps.tolist(), digests.tolist(), strict=True))
    found = zip(held.steps[shared:].tolist(), held.digests[shared:].tolist(), strict=True)
    return tuple(sorted({step for step, digest in found if meant.get(step, digest) != digest}))


def _repeated(steps: _Ints) -> tuple[int, ...]:
    highest = np.maximum.accumulate(steps)[:-1] if len(steps) else steps
    return tuple(sorted(set(steps[1:][steps[1:] <= highest].tolist())))


# -- planning ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Derived:
    """What was derived from the history besides columns.

    `by` says which diagnostics derived them; `config` goes into the run's config, `summary`
    into its summary, `tags` are added to the run's, `alerts` are told once each, `notes` are for
    the report.
    """

    by: DerivedBy = field(default_factory=DerivedBy)
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_DERIVED: Final = Derived()


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on.

    `history` holds the rows that are ready, `held_back` more wait. `knows_less` says that the
    server's rows came from logs of which only some are here; `recompute` asks for rows to be sent
    anew, for the sake of the derived columns, but never the first `only_there`: these are nowhere
    but on the server.
    """

    run: RunSources
    history: History
    around: Surroundings
    ready: Readiness
    pins: Mapping[str, float]
    started_at: float | None
    remote: RemoteState | None
    held: Held
    can_rewind: bool
    knows_less: bool = False
    held_back: int = 0
    on_rewrite: OnRewrite = "rewind"
    derived: Derived = NOTHING_DERIVED
    recompute: bool = False
    only_there: int = 0


def make_plan(situation: Situation) -> UploadPlan:
    """Decide what to send for one run."""
    meant = Held(situation.history.steps, row_digests(situation.history))
    relation = compare(meant, situation.held)
    decision = _decide(situation, relation)
    lacking = _lacking(situation, rows_only=decision.action is Action.REWIND)
    if decision.action is Action.NOTHING and _has_more(situation, lacking.extra):
        more = Action.APPEND if lacking.extra.carries else Action.FINISH
        decision = replace(decision, action=more)
    decision = replace(decision, notes=(*decision.notes, *lacking.notes))
    return _filled(situation, relation, decision, lacking, meant.digests)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The action, the first row to send, a rewind's branch step, and what to say about it."""

    action: Action
    first_row: int
    branch_step: int | None = None
    notes: tuple[str, ...] = ()


def _decide(situation: Situation, relation: Comparison) -> _Decision:
    history, remote = situation.history, situation.remote
    if remote is None:
        something = len(history) or any(e.events for _, e in situation.around.streams)
        return _Decision(Action.NEW if something else Action.NOTHING, 0)
    kept = min(situation.only_there, relation.shared)
    if situation.recompute and len(history) > kept:
        branch = int(history.steps[kept - 1]) if kept else None
        anew = replace(relation, shared=kept, branch_step=branch)
        which = "all rows that the logs here hold" if kept else "all rows"
        return _rewind(situation, anew, f"{which} are sent anew because of --recompute")
    to_send = len(history) - relation.shared
    if relation.extra == 0:
        if to_send and _would_shift(history, relation, remote):
            return _rewind(situation, relation, "an earlier rewind lost its rows on the way")
        return _Decision(Action.APPEND if to_send else Action.NOTHING, relation.shared)
    if relation.repeated:
        return _rewind(situation, _before_repeats(history, relation), "the server holds rows twice")
    if to_send == 0:
        return _ahead(situation, relation)
    if situation.knows_less:
        note = (
            f"the server holds rows of attempts whose logs are not here (up to step "
            f"{relation.last_held}): these files are an older copy. Nothing was changed",
        )
        return _Decision(Action.AHEAD, len(history), None, note)
    return _rewind(situation, relation, "rows changed after they were uploaded")


def _before_repeats(history: History, relation: Comparison) -> Comparison:
    """The same, as if nothing from the first repeated step on were shared."""
    first = int(np.searchsorted(history.steps, relation.repeated[0]))
    shared = min(first, relation.shared)
    branch = int(history.steps[shared - 1]) if shared else None
    return replace(relation, shared=shared, branch_step=branch)


def _ahead(situation: Situation, relation: Comparison) -> _Decision:
    """The server holds rows that follow all of ours."""
    marker = situation.remote.marker if situation.remote is not None else None
    last = situation.history.last_step
    if (
        marker is not None
        and last is not None
        and marker.last_step <= last
        and not (situation.held_back)
    ):
        why = "the server holds rows beyond those that were ever meant (two uploads at once?)"
        shared = len(situation.history) - 1  # the last row goes again, to set the summary right
        branch = int(situation.history.steps[shared - 1]) if shared else None
        return _rewind(situation, replace(relation, shared=shared, branch_step=branch), why)
    if situation.held_back and relation.extra <= situation.held_back:
        return _Decision(Action.NOTHING, len(situation.history))
    note = (
        f"the server holds {relation.extra} rows more than the files, up to step "
        f"{relation.last_held}; nothing was changed",
    )
    return _Decision(Action.AHEAD, len(situation.history), None, note)


def _would_shift(history: History, relation: Comparison, remote: RemoteState) -> bool:
    """Whether the client would renumber an append.

    It starts at the highest of the summary's step + 1, the last row's step + 1 and the line
    count: the summary is ahead when a rewind lost its rows, the lines when some step has two.
    """
    next_step = int(history.steps[relation.shared])
    summary_step = remote.summary_step if remote.summary_step is not None else -1
    return summary_step >= next_step or remote.lines > next_step


def _rewind(situation: Situation, relation: Comparison, why: str) -> _Decision:
    history = situation.history
    start = min(relation.shared, max(len(history) - 1, 0))
    step = int(history.steps[start]) if len(history) else 0
    if situation.can_rewind and situation.on_rewrite == "rewind":
        branch = relation.branch_step if relation.branch_step is not None else -1
        note = (f"rewound to step {branch}: {why} (from step {step} on)",)
        return _Decision(Action.REWIND, relation.shared, branch, note)
    because = (
        "--on-rewrite keep" if situation.on_rewrite == "keep" else "this server cannot rewind a run"
    )
    last = relation.last_held if relation.last_held is not None else -1
    first_new = int(np.searchsorted(history.steps, last, side="right"))
    changed = relation.changed or relation.repeated or (step,)
    note = (
        f"OLD ROWS KEPT: {why}, but {because}. Steps {changed[0]}-{changed[-1]} on the server are "
        "not those of the files; only newer steps are sent. To get the whole history, upload "
        "it as a new run: --run 'NEW_NAME=GLOB'",
    )
    return _Decision(Action.KEPT_OLD, first_new, None, note)


def _has_more(situation: Situation, extra: PassThrough) -> bool:
    remote = situation.remote
    if remote is None or extra.carries:
        return extra.carries
    wanted = situation.ready.state
    fitting = {"finished": {"finished"}, "failed": {"failed", "crashed"}}
    return wanted != "running" and remote.state not in fitting[wanted]


def _lacking(situation: Situation, *, rows_only: bool) -> _Lacking:
    """The pass-through records that the server lacks; a rewind must carry rows only."""
    extra, remote = situation.around.extra, situation.remote
    marker = remote.marker if remote is not None else None
    if rows_only:
        carried = replace(extra, files=(), artifacts=(), others=())
        stored = (marker.events, marker.logs) if marker is not None else ((), ())
        return _Lacking(carried, *stored, ())
    events = _continue(
        [(key, e.events) for key, e in situation.around.streams],
        marker.events if marker is not None else (),
        remote.events if remote is not None else 0,
    )
    logs = _continue(
        [(key, _lines(e, situation)) for key, e in situation.around.streams],
        marker.logs if marker is not None else (),
        remote.logs if remote is not None else 0,
    )
    carried = replace(extra, events=events.items, console=logs.items)
    if remote is not None:
        artifacts = tuple(a for a in extra.artifacts if a.key not in remote.artifacts)
        # It is sent from the same files, also if the run has files of their size already.
        anew = any(a.name == artifact_name(situation.run.target.run_id) for a in artifacts)
        carried = replace(
            carried,
            files=tuple(
                f
                for f in extra.files
                if (anew and f.content is not None) or not _is_there(f, remote)
            ),
            artifacts=artifacts,
            others=(),
        )
    strange = [n for n, s in (("system metrics", events), ("console", logs)) if s.strange]
    notes = tuple(
        f"the server holds {what} lines that did not come from these logs; none are added"
        for what in strange
    )
    return _Lacking(carried, events.stored, logs.stored, notes)


def _lines(extra: PassThrough, situation: Situation) -> tuple[str, ...]:
    ended = situation.ready.state != "running" and extra.unfinished
    return (*extra.console, extra.unfinished) if ended else extra.console


@dataclass(frozen=True, slots=True)
class _Lacking:
    """What goes along with the rows, and what the server's streams consist of afterwards."""

    extra: PassThrough
    events: tuple[Segment, ...]
    logs: tuple[Segment, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stream(Generic[_T]):
    items: tuple[_T, ...]
    stored: tuple[Segment, ...]
    strange: bool = False


def _continue(
    logs: Sequence[tuple[str, Sequence[_T]]], recorded: Sequence[Segment], held: int
) -> _Stream[_T]:
    """What of some logs follows the lines that the server holds.

    The marker records in which order stretches of which log were sent, before they were; the
    server's line count says how many of them arrived. Lines that are not explained so came
    from elsewhere: of a single log they are taken for its beginning, otherwise nothing is sent.
    """
    stored: list[Segment] = []
    left = held
    for key, first, end in recorded:
        taken = min(end - first, left)
        if taken:
            stored.append((key, first, first + taken))
        left -= taken
    if left and not recorded and len(logs) == 1:
        stored.append((logs[0][0], 0, min(left, len(logs[0][1]))))
        left = 0
    if left:
        return _Stream((), tuple(recorded), strange=any(len(lines) for _, lines in logs))
    items: list[_T] = []
    for key, lines in logs:
        reached = max((end for k, _, end in stored if k == key), default=0)
        if reached < len(lines):
            items.extend(lines[reached:])
            stored.append((key, reached, len(lines)))
    return _Stream(tuple(items), tuple(stored))


def _is_there(file: FileRef, remote: RemoteState) -> bool:
    try:
        return remote.files.get(file.name) == file.size
    except OSError:
        return True  # gone since it was found; there is nothing to send


def _filled(
    situation: Situation,
    relation: Comparison,
    decision: _Decision,
    lacking: _Lacking,
    digests: _Hashes,
) -> UploadPlan:
    run, history, ready = situation.run, situation.history, situation.ready
    recorded = situation.around.extra
    summary = summarise(history, recorded.summary, defined=bool(recorded.metrics))
    summary |= situation.derived.summary
    plan = UploadPlan(
        target=run.target,
        name=run.name,
        action=decision.action,
        history=history,
        digests=digests,
        first_row=decision.first_row,
        branch_step=decision.branch_step,
        extra=lacking.extra,
        summary=summary,
        sends_summary=_sends_summary(situation, decision.first_row, summary),
        config={**situation.around.config, **situation.derived.config},
        marker=_marker(situation, decision, lacking, digests),
        state=ready.state,
        exit_code=ready.exit_code,
        started_at=situation.started_at,
        new_run=situation.remote is None,
        expect=_NO_EXPECTATION,
        notes=(
            *decision.notes,
            *ready.notes,
            *_version_note(situation, decision),
            *_late_note(situation, decision),
            *situation.derived.notes,
        ),
        alerts=_alerts(situation, decision),
        tags=_tags(situation),
    )
    return replace(plan, expect=_expectation(situation, relation, plan))


def _alerts(situation: Situation, decision: _Decision) -> tuple[Alert, ...]:
    """What was not told yet; the marker that says so goes first, so that nothing is told twice.

    Steps that other diagnostics were about already are told nothing new of.
    """
    remote, last, by = situation.remote, situation.history.last_step, situation.derived.by
    marker = remote.marker if remote is not None else None
    told, stretches = (marker.alerts, marker.diagnostics) if marker is not None else ((), ())
    sent_from = _first_sent(situation, decision)
    return tuple(
        alert
        for alert in situation.derived.alerts
        if alert.key not in told
        and last is not None
        and alert.step <= last
        and (
            (sent_from is not None and alert.step >= sent_from)
            or not of_others(stretches, by, alert.step)
        )
    )


def _first_sent(situation: Situation, decision: _Decision) -> int | None:
    """The step of the first row that goes over the wire."""
    steps = situation.history.steps
    sends = decision.action in SENDING and decision.first_row < len(steps)
    return int(steps[decision.first_row]) if sends else None


def _tags(situation: Situation) -> tuple[str, ...] | None:
    """All tags of the run, when there are new ones; else None: people may have changed them."""
    wanted, remote = situation.derived.tags, situation.remote
    if remote is None:
        return (*situation.around.extra.tags, *wanted)
    new = [tag for tag in wanted if tag not in remote.tags]
    return (*remote.tags, *new) if new else None


def _version_note(situation: Situation, decision: _Decision) -> tuple[str, ...]:
    """Earlier rows keep the derived columns that they were sent with."""
    remote, by = situation.remote, situation.derived.by
    known = remote.marker.diagnostics if remote is not None and remote.marker is not None else ()
    if not known or not known[-1].version or not by.version or decision.first_row == 0:
        return ()
    if not (what := changed(known[-1], by)):
        return ()
    sent_from = _first_sent(situation, decision)
    since = f" from step {sent_from} on" if sent_from is not None else ""
    return (
        f"diagnostics are {what}{since}; earlier rows keep theirs, and the run its set of columns: "
        "--recompute sends all rows anew",
    )


def _late_note(situation: Situation, decision: _Decision) -> tuple[str, ...]:
    """Dumps that came after their rows were sent give those rows nothing any more."""
    remote, history = situation.remote, situation.history
    if remote is None or not remote.key_counts or decision.action is Action.REWIND:
        return ()
    names = _countable(history) & history.added
    here = key_counts(history.head(decision.first_row))
    late = sorted(n for n in names if here.get(n, 0) > remote.key_counts.get(n, 0))
    if not late:
        return ()
    return (
        f"{len(late)} derived columns ({', '.join(late[:2])}, ...) came after their rows: "
        "--recompute sends these rows anew",
    )


def _marker(
    situation: Situation, decision: _Decision, lacking: _Lacking, digests: _Hashes
) -> Marker:
    run, history, remote = situation.run, situation.history, situation.remote
    before = remote.marker if remote is not None else None
    known = before.heads if before is not None else ()
    return Marker(
        run.names_key,
        # Logs that are gone by now made rows that are still there.
        run.heads.union(known),
        run.fingerprint,
        # Rows that differ on the server must never be taken for these by another machine.
        "" if decision.action is Action.KEPT_OLD else overall_digest(digests),
        history.last_step if history.last_step is not None else -1,
        situation.pins,
        lacking.events,
        lacking.logs,
        continued(
            before.diagnostics if before is not None else (),
            situation.derived.by,
            _first_sent(situation, decision),
        ),
        history.added | (before.added if before is not None else frozenset()),
        tuple(
            dict.fromkeys((*(before.alerts if before else ()), *_alert_keys(situation, decision)))
        ),
        history.logged_from,
    )


def _alert_keys(situation: Situation, decision: _Decision) -> Iterator[str]:
    return (alert.key for alert in _alerts(situation, decision))


def _sends_summary(situation: Situation, first_row: int, summary: Mapping[str, Any]) -> bool:
    """Whether the summary must go along.

    Without rows the uploader sends it without its `_step`, so then only when it changed.
    """
    remote = situation.remote
    if remote is None or first_row < len(situation.history):
        return True
    return any(
        canonical(value) != canonical(remote.summary.get(key))
        for key, value in summary.items()
        if key not in (STEP, "_wandb") and not isinstance(value, dict)
    )


_NO_EXPECTATION: Final = Expectation(0, 0, 0, None, {}, None, "running")


def _expectation(situation: Situation, relation: Comparison, plan: UploadPlan) -> Expectation:
    remote, history = situation.remote, situation.history
    rewinds = plan.action is Action.REWIND
    countable = _countable(history)
    if rewinds and plan.first_row:
        # Kept rows have the derived columns that they were sent with.
        countable -= plan.marker.added
    if rewinds or remote is None:
        base_lines, base_counts, first_counted = plan.first_row if rewinds else 0, {}, 0
    else:
        base_lines, base_counts, first_counted = (
            remote.lines,
            dict(remote.key_counts),
            plan.first_row,
        )
    base_counts = {k: n for k, n in base_counts.items() if k in countable}
    for key, count in key_counts(history, first_counted).items():
        if key in countable:
            base_counts[key] = base_counts.get(key, 0) + count
    comparable = rewinds or remote is None or bool(remote.key_counts) or not remote.lines
    return Expectation(
        lines=base_lines + plan.rows_to_send,
        events=(remote.events if remote else 0) + len(plan.extra.events),
        logs=(remote.logs if remote else 0) + len(plan.extra.console),
        last_step=history.last_step if plan.rows_to_send else relation.last_held,
        summary=plan.summary,
        key_counts=base_counts if comparable else None,
        state=plan.state,
        artifacts=frozenset(a.key for a in plan.extra.artifacts),
        files=frozenset(f.name for f in plan.extra.files),
    )


def held_after(plan: UploadPlan, held: Held) -> Held:
    """The rows that the server holds once a plan is carried out, given those before it."""
    sent = slice(plan.first_row, None)
    steps, digests = plan.history.steps, plan.digests
    if plan.action in (Action.REWIND, Action.NEW):
        return Held(steps, digests)
    return Held(
        np.concatenate([held.steps, steps[sent]]), np.concatenate([held.digests, digests[sent]])
    )
