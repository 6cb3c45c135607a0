"""What the server holds of a history: how much is proven, and where the two part ways."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import AXES, STEP
from verl_logsync.digests import overall_digest, row_digests
from verl_logsync.model import Action, Confirmed, History, RemoteState, UploadPlan
from verl_logsync.table_builder import TableBuilder

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
    logged = countable_keys(part) - history.added - remote.marker.added
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
    for name in history.table.schema.names:
        column = history.table.column(name).slice(first_row)
        count = len(column) - column.null_count
        if count:
            counts[name] = count
    return counts


def countable_keys(history: History) -> set[str]:
    """The keys that a server lists by their own name: not objects, which may be listed under
    their parts (`KEY._type`), nor empty ones, which are absent on the wire.
    """
    names = [name for name in history.table.schema.names if name not in AXES]
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


def held_after(plan: UploadPlan, held: Held) -> Held:
    """The rows that the server holds once a plan is carried out, given those before it."""
    sent = slice(plan.first_row, None)
    steps, digests = plan.history.steps, plan.digests
    if plan.action in (Action.REWIND, Action.NEW):
        return Held(steps, digests)
    return Held(
        np.concatenate([held.steps, steps[sent]]), np.concatenate([held.digests, digests[sent]])
    )
