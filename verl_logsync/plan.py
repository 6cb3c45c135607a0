"""History minus what the server holds -> an UploadPlan.

`compare` says how much of the history is on the server already, and admits when counts alone
cannot tell; `make_plan` turns that into one action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from verl_logsync.assemble import Surroundings, summarise
from verl_logsync.columns import AXES, STEP, TableBuilder
from verl_logsync.digests import canonical, overall_digest, row_digests
from verl_logsync.model import (
    Action,
    Confirmed,
    Expectation,
    FileRef,
    History,
    Marker,
    PassThrough,
    RemoteState,
    RunSources,
    UploadPlan,
)
from verl_logsync.readiness import Readiness

OnRewrite = Literal["rewind", "keep"]


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

    Memory (the ledger) is believed when the server's line count and last step agree with it.
    Without memory the marker in the run's config is: its digest must match the history's rows
    up to its step, and the server's line count and the counts of every key must match too.
    """
    if remote is None or remote.lines == 0:
        return NOTHING_HELD
    if (
        confirmed is not None
        and len(confirmed.steps) == remote.lines
        and (int(confirmed.steps[-1]) == remote.last_step)
    ):
        return Held(confirmed.steps, confirmed.digests)
    if remote.marker is None or remote.last_step != remote.marker.last_step:
        return None
    count = int(np.searchsorted(history.steps, remote.marker.last_step, side="right"))
    part = history.head(count)
    digests = row_digests(part)
    if count != remote.lines or overall_digest(digests) != remote.marker.digest:
        return None
    if differing_counts(key_counts(part), remote.key_counts):
        return None
    return Held(part.steps, digests)


def held_from_rows(rows: Iterable[Mapping[str, Any]]) -> Held:
    """The same from the rows themselves, as the server returns them."""
    builder = TableBuilder()
    steps: list[int] = []
    for row in rows:
        steps.append(int(row.get(STEP, -1)))
        builder.add({key: value for key, value in row.items() if key not in AXES})
    table = pa.table({STEP: pa.array(steps, type=pa.int64()), **builder.columns()})
    history = History(table, np.zeros(len(steps), dtype=np.int64))
    return Held(history.steps, row_digests(history))


def key_counts(history: History, first_row: int = 0) -> dict[str, int]:
    """How many rows (from `first_row` on) have each key; a `{}` is absent on the wire."""
    counts = {}
    for name in history.table.column_names:
        column = history.table.column(name).slice(first_row)
        count = len(column) - column.null_count
        if pa.types.is_string(column.type):
            count -= sum(text == "{}" for text in column.to_pylist())
        if count:
            counts[name] = count
    return counts


def differing_counts(meant: Mapping[str, int], found: Mapping[str, int]) -> dict[str, str]:
    """Keys whose row counts differ. Keys that the server does not list at all are no evidence
    when it lists none; objects may be listed under their parts (`KEY._type`).
    """
    if not found:
        return {}
    wrong = {}
    for key, count in meant.items():
        if key in AXES:
            continue
        got = found.get(key)
        if got is None:
            got = max((n for k, n in found.items() if k.startswith(f"{key}.")), default=0)
        if got != count:
            wrong[key] = f"{count} rows sent, {got} found"
    return wrong


# -- comparing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a history and the server's rows relate.

    The first `shared` rows of the history are held as they are; `extra` held rows follow them
    (changed ones, or ones beyond the history's end), of which `changed` are the steps that the
    history states otherwise. `branch_step` is the last shared step, `last_held` the highest
    step held.
    """

    shared: int
    extra: int
    changed: tuple[int, ...]
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
        int(steps[shared - 1]) if shared else None,
        int(held.steps.max()) if len(held.steps) else None,
    )


def _changed(steps: _Ints, digests: _Hashes, held: Held, shared: int) -> tuple[int, ...]:
    meant = dict(zip(steps.tolist(), digests.tolist(), strict=True))
    found = zip(held.steps[shared:].tolist(), held.digests[shared:].tolist(), strict=True)
    return tuple(sorted({step for step, digest in found if meant.get(step, digest) != digest}))


# -- planning ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on; `history` holds the rows that are ready."""

    run: RunSources
    history: History
    around: Surroundings
    ready: Readiness
    pins: Mapping[str, float]
    started_at: float | None
    remote: RemoteState | None
    held: Held
    can_rewind: bool
    on_rewrite: OnRewrite = "rewind"


def make_plan(situation: Situation) -> UploadPlan:
    """Decide what to send for one run."""
    meant = Held(situation.history.steps, row_digests(situation.history))
    relation = compare(meant, situation.held)
    action, first_row, branch, notes = _decide(situation, relation)
    extra = _lacking(situation, rows_only=action is Action.REWIND)
    if action is Action.NOTHING and _has_more(situation, extra):
        action = Action.APPEND if extra.carries else Action.FINISH
    return _filled(situation, relation, action, first_row, branch, extra, notes, meant.digests)


def _decide(
    situation: Situation, relation: Comparison
) -> tuple[Action, int, int | None, tuple[str, ...]]:
    """The action, the first row to send, the rewind's branch step, and what to say about it."""
    history, remote = situation.history, situation.remote
    if remote is None:
        return (
            Action.NEW if len(history) or situation.around.extra.events else Action.NOTHING,
            0,
            None,
            (),
        )
    to_send = len(history) - relation.shared
    if relation.extra == 0:
        if to_send and _would_shift(history, relation, remote):
            return _rewind(situation, relation, "an earlier rewind lost its rows on the way")
        return (Action.APPEND if to_send else Action.NOTHING), relation.shared, None, ()
    if to_send == 0:
        note = (
            f"the server holds {relation.extra} rows more than the files, up to step "
            f"{relation.last_held}; nothing was changed",
        )
        return Action.AHEAD, len(history), None, note
    return _rewind(situation, relation, "rows changed after they were uploaded")


def _would_shift(history: History, relation: Comparison, remote: RemoteState) -> bool:
    """Whether the client would renumber an append.

    It starts at the highest of the summary's step + 1, the last row's step + 1 and the line
    count: the summary is ahead when a rewind lost its rows, the lines when some step has two.
    """
    next_step = int(history.steps[relation.shared])
    summary_step = remote.summary_step if remote.summary_step is not None else -1
    return summary_step >= next_step or remote.lines > next_step


def _rewind(
    situation: Situation, relation: Comparison, why: str
) -> tuple[Action, int, int | None, tuple[str, ...]]:
    history = situation.history
    step = int(history.steps[relation.shared])
    if situation.can_rewind and situation.on_rewrite == "rewind":
        branch = relation.branch_step if relation.branch_step is not None else -1
        note = (f"rewound to step {branch}: {why} (from step {step} on)",)
        return Action.REWIND, relation.shared, branch, note
    because = (
        "--on-rewrite keep" if situation.on_rewrite == "keep" else "this server cannot rewind a run"
    )
    last = relation.last_held if relation.last_held is not None else -1
    first_new = int(np.searchsorted(history.steps, last, side="right"))
    changed = relation.changed or (step,)
    note = (
        f"OLD ROWS KEPT: {why}, but {because}. Steps {changed[0]}-{changed[-1]} on the server are "
        "those of an earlier attempt; only newer steps are sent. To get the whole history, upload "
        "it as a new run: --run 'NEW_NAME=GLOB'",
    )
    return Action.KEPT_OLD, first_new, None, note


def _has_more(situation: Situation, extra: PassThrough) -> bool:
    remote = situation.remote
    if remote is None or extra.carries:
        return extra.carries
    wanted = situation.ready.state
    fitting = {"finished": {"finished"}, "failed": {"failed", "crashed"}}
    return wanted != "running" and remote.state not in fitting[wanted]


def _lacking(situation: Situation, *, rows_only: bool) -> PassThrough:
    """The pass-through records that the server lacks; a rewind must carry rows only."""
    extra, remote = situation.around.extra, situation.remote
    console = extra.console
    if situation.ready.state != "running" and extra.unfinished:
        console = (*console, extra.unfinished)
    if rows_only:
        return replace(
            extra, events=(), console=(), unfinished="", files=(), artifacts=(), others=()
        )
    if remote is None:
        return replace(extra, console=console, unfinished="")
    return replace(
        extra,
        events=extra.events[remote.events :],
        console=console[remote.logs :],
        unfinished="",
        files=tuple(f for f in extra.files if not _is_there(f, remote)),
        artifacts=tuple(a for a in extra.artifacts if a.key not in remote.artifacts),
        others=(),
    )


def _is_there(file: FileRef, remote: RemoteState) -> bool:
    try:
        return remote.files.get(file.name) == file.path.stat().st_size
    except OSError:
        return True  # gone since it was found; there is nothing to send


def _filled(
    situation: Situation,
    relation: Comparison,
    action: Action,
    first_row: int,
    branch: int | None,
    extra: PassThrough,
    notes: tuple[str, ...],
    digests: _Hashes,
) -> UploadPlan:
    run, history, ready = situation.run, situation.history, situation.ready
    summary = summarise(
        history, situation.around.extra.summary, defined=bool(situation.around.extra.metrics)
    )
    marker = Marker(
        run.names_key,
        run.heads,
        run.fingerprint,
        # Rows that differ on the server must never be taken for these by another machine.
        "" if action is Action.KEPT_OLD else overall_digest(digests),
        history.last_step if history.last_step is not None else -1,
        situation.pins,
    )
    plan = UploadPlan(
        target=run.target,
        name=run.name,
        action=action,
        history=history,
        digests=digests,
        first_row=first_row,
        branch_step=branch,
        extra=extra,
        summary=summary,
        sends_summary=_sends_summary(situation, first_row, summary),
        config=situation.around.config,
        marker=marker,
        state=ready.state,
        exit_code=ready.exit_code,
        started_at=situation.started_at,
        new_run=situation.remote is None,
        expect=_NO_EXPECTATION,
        notes=(*notes, *ready.notes),
    )
    return replace(plan, expect=_expectation(situation, relation, plan))


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
    if rewinds or remote is None:
        base_lines, base_counts, first_counted = relation.shared if rewinds else 0, {}, 0
    else:
        base_lines, base_counts, first_counted = (
            remote.lines,
            dict(remote.key_counts),
            plan.first_row,
        )
    for key, count in key_counts(history, first_counted).items():
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
