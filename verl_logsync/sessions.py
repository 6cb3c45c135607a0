"""Readings -> true attempts: a file may hold several starts of the job, an attempt several files.

The quick look that the catalog goes by sees a file's first and last step only. Here the rows are
known: files that are appended to are cut where the job was started again, and the pieces of
different files that tell of the same start are put together, by what their logs recorded or by
their values. Ranks of one start become one reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import ROUNDING, STEP, as_numbers
from verl_logsync.model import Attempt, AttemptReading, LogFile, PassThrough, Reading, Restart
from verl_logsync.ranks import RankRules, merge_ranks
from verl_logsync.verl_keys import COUNTERS, LATEST_START, training_keys, training_rows

#: Recorded starts of the ranks of one attempt lie closer together than this, in seconds.
_SAME_START: Final = 900.0
#: So many steps that two pieces share are compared, and of their values this share must agree.
_COMPARED, _AGREEING = 24, 0.9

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one file says of one attempt. `alone` when that is all that the file says."""

    file: LogFile
    reading: Reading
    attempt: int
    started_at: float | None
    attempt_id: str
    alone: bool

    @property
    def log(self) -> tuple[str, int | None]:
        return self.file.source, self.file.facts.rank

    @property
    def first_step(self) -> int | None:
        steps = self.reading.rows.column(STEP)
        return int(steps[0].as_py()) if len(steps) else self.file.facts.first_step


def sort_out(
    attempts: Sequence[AttemptReading], rules: RankRules | None = None
) -> tuple[AttemptReading, ...]:
    """The attempts that the rows themselves tell of, in order.

    Args:
        attempts: as the catalog has them, one reading a file.
        rules: how the values of several ranks become one.
    """
    files = [
        (number, list(_pieces(file, reading, number)))
        for number, attempt in enumerate(attempts)
        for file, reading in attempt.readings
    ]
    plain = all(len(pieces) == 1 and pieces[0].file.facts.rank is None for _, pieces in files)
    if plain and (len(attempts) < 2 or len({p.log for _, pieces in files for p in pieces}) < 2):
        return tuple(attempts)
    groups: list[list[_Piece]] = []
    for number in range(len(attempts)):
        of_attempt = [pieces for attempt, pieces in files if attempt == number]
        for pieces in sorted(of_attempt, key=len, reverse=True):
            after = -1
            for piece in pieces:
                after = _put(groups, piece, after)
    return tuple(_attempt(group, attempts, rules) for group in groups)


# -- cutting -------------------------------------------------------------------------------


def _pieces(file: LogFile, reading: Reading, attempt: int) -> Iterator[_Piece]:
    """One piece for every start that a file tells of; rows decide, not empty starts."""
    restarts = restarts_of(reading)
    starts = [Restart(0, reading.started_at, file.facts.attempt_id), *restarts]
    ends = [start.row for start in starts[1:]] + [reading.rows.num_rows]
    cuts = [(s, end) for s, end in zip(starts, ends, strict=True) if end > s.row] or [
        (starts[-1], reading.rows.num_rows)
    ]
    for number, (start, end) in enumerate(cuts):
        last = number == len(cuts) - 1
        yield _Piece(
            file if len(cuts) == 1 else _named(file, reading, start, end, number),
            _cut(reading, start, end, first=number == 0, last=last),
            attempt,
            start.started_at,
            start.attempt_id,
            alone=len(cuts) == 1,
        )


def _named(file: LogFile, reading: Reading, start: Restart, end: int, number: int) -> LogFile:
    """The file, as the log of its n-th start: clocks are pinned by the first record's digest."""
    steps = reading.rows.column(STEP).to_numpy()[start.row : end]
    facts = replace(file.facts, last_step=int(steps.max()) if len(steps) else None)
    if number == 0:
        return replace(file, facts=facts)
    facts = replace(
        facts,
        head_digest=f"{facts.head_digest}#{number}",
        first_step=int(steps[0]) if len(steps) else None,
        started_at=start.started_at,
        attempt_id=start.attempt_id,
    )
    return replace(file, facts=facts)


def _cut(reading: Reading, start: Restart, end: int, *, first: bool, last: bool) -> Reading:
    """A stretch of the rows; what is not about single rows stays with the first or last piece."""
    if first and last:
        return reading
    return replace(
        reading,
        rows=reading.rows.slice(start.row, end - start.row),
        skips=reading.skips if first else (),
        notes=reading.notes if first else (),
        extra=reading.extra if first else PassThrough(),
        ending=reading.ending if last else None,
        started_at=start.started_at,
        ended_at=reading.ended_at if last else None,
        restarts=(),
    )


def restarts_of(reading: Reading) -> tuple[Restart, ...]:
    """Where a log says, or its rows give away, that the job was started again."""
    return reading.restarts or _restarts(reading.rows)


def counted_anew(reading: Reading) -> tuple[int, ...]:
    """The rows at which the steps of one log begin at the beginning again."""
    steps, training = reading.rows.column(STEP).to_numpy(), training_rows(reading.rows)
    rows = [0, *(restart.row for restart in restarts_of(reading)), len(steps)]
    found, reached = [], LATEST_START
    for start, end in itertools.pairwise(rows):
        trained = steps[start:end][training[start:end]]
        if not len(trained):
            continue
        if trained.min() <= LATEST_START < reached:
            found.append(start)
        reached = max(reached, int(trained.max()))
    return tuple(found)


def _restarts(table: pa.Table) -> tuple[Restart, ...]:
    """The restarts that steps and keys give away.

    Steps may go back without a restart: a late validation or a late aggregate has keys that
    were not logged at such a step yet. A restart logs training keys again that were already
    logged at that step or a later one.
    """
    steps = table.column(STEP).to_numpy()
    if not bool(np.any(np.diff(steps) < 0)):
        return ()
    training = training_rows(table)
    names = training_keys(table)
    present = _present(table, names)
    reached = np.full(len(names), np.iinfo(np.int64).min)
    highest = steps[0]
    found: list[int] = []
    for index, step in enumerate(steps):
        having = present[index]
        if step < highest and training[index] and bool(np.any(reached[having] >= step)):
            found.append(_with_validation_before(index, steps, training))
            highest = step
            reached[:] = np.iinfo(np.int64).min
        highest = max(highest, step)
        reached[having] = np.maximum(reached[having], step)
    return tuple(Restart(row) for row in dict.fromkeys(found))


def _with_validation_before(index: int, steps: _Ints, training: _Bools) -> int:
    """Where a restart's records begin: a resumed job validates before it trains."""
    before = index - 1
    resumed = before > 0 and not training[before] and steps[before - 1] > steps[before]
    return before if resumed and steps[before] <= steps[index] else index


def _present(table: pa.Table, names: Sequence[str]) -> _Bools:
    """Which rows have which of the columns, shape (rows, names)."""
    if not names:
        return np.zeros((table.num_rows, 0), dtype=bool)
    return np.column_stack([table.column(name).is_valid().to_numpy() for name in names])


# -- putting together ----------------------------------------------------------------------


def _put(groups: list[list[_Piece]], piece: _Piece, after: int) -> int:
    """Add a piece to the attempt that it tells of, or as a new one; the attempt's index.

    Args:
        after: the attempt of the file's piece before: this one is of a later start.
    """
    later = range(after + 1, len(groups))
    # Values are the best evidence: what the catalog says goes by first steps only.
    fitting = [i for i in later if _states_the_same(groups[i], piece)] or [
        i for i in later if _fits(groups[i], piece)
    ]
    if fitting:
        index = min(fitting, key=lambda i: _apart(groups[i], piece))
        groups[index].append(piece)
        return index
    index = _place(groups, piece, after)
    groups.insert(index, [piece])
    return index


def _states_the_same(group: Sequence[_Piece], piece: _Piece) -> bool:
    """Whether a log of another format in an attempt has the values of a piece."""
    return any(
        other.file.source != piece.file.source
        and (not (other.attempt_id and piece.attempt_id) or other.attempt_id == piece.attempt_id)
        and _agree(other.reading, piece.reading) is True
        for other in group
    )


def _fits(group: Sequence[_Piece], piece: _Piece) -> bool:
    alike = [other for other in group if other.log == piece.log]
    if any(not piece.attempt_id or other.attempt_id != piece.attempt_id for other in alike):
        return False  # one log tells of one start once, unless it says that it goes on
    return any(_together(other, piece) for other in group)


def _apart(group: Sequence[_Piece], piece: _Piece) -> float:
    """Seconds between the recorded starts of an attempt and of a piece of it."""
    if piece.started_at is None:
        return 0.0
    starts = [other.started_at for other in group if other.started_at is not None]
    return min((abs(start - piece.started_at) for start in starts), default=0.0)


def _together(one: _Piece, other: _Piece) -> bool:
    """Whether two pieces tell of the same start of the job."""
    same_id = bool(one.attempt_id) and one.attempt_id == other.attempt_id
    if one.log != other.log and one.file.source == other.file.source:
        return same_id or _started_together(one, other)  # ranks that may not know of one another
    if one.attempt_id and other.attempt_id:
        return same_id
    agree = _agree(one.reading, other.reading)
    if one.attempt == other.attempt and one.alone and other.alone:
        return agree is not False  # as the catalog says, unless their values say otherwise
    return agree if agree is not None else _same_first_step(one, other)


def _started_together(one: _Piece, other: _Piece) -> bool:
    """Ranks of one start begin at nearly the same time; their values differ."""
    if one.started_at is not None and other.started_at is not None:
        return abs(one.started_at - other.started_at) <= _SAME_START
    return _same_first_step(one, other)


def _same_first_step(one: _Piece, other: _Piece) -> bool:
    first, second = one.first_step, other.first_step
    if first is None or second is None or first == second:
        return True
    return max(first, second) <= LATEST_START


def _agree(one: Reading, other: Reading) -> bool | None:
    """Whether two readings state the same values at the steps that they share.

    None when they have too little in common to tell.
    """
    rows, others = (_last_training_rows(reading.rows) for reading in (one, other))
    shared = np.array(sorted(rows.keys() & others.keys()), dtype=np.int64)
    if not len(shared):
        return None
    picked = shared[np.linspace(0, len(shared) - 1, min(len(shared), _COMPARED)).astype(int)]
    left = pa.array([rows[step] for step in picked.tolist()])
    right = pa.array([others[step] for step in picked.tolist()])
    slack = max(one.rounding, other.rounding)
    same = total = 0
    for name in _shared_numbers(one.rows, other.rows):
        ours = as_numbers(one.rows.column(name).take(left))
        theirs = as_numbers(other.rows.column(name).take(right))
        usable = np.isfinite(ours) & np.isfinite(theirs)
        close = np.isclose(ours, theirs, rtol=ROUNDING, atol=slack) & usable
        total += int(usable.sum())
        same += int(close.sum())
    return same >= _AGREEING * total if total > 2 else None


def _last_training_rows(table: pa.Table) -> dict[int, int]:
    """The last row of every step that has training results."""
    index = np.flatnonzero(training_rows(table))
    return dict(zip(table.column(STEP).to_numpy()[index].tolist(), index.tolist(), strict=True))


def _shared_numbers(one: pa.Table, other: pa.Table) -> list[str]:
    names = set(other.schema.names)
    return [
        name
        for name in training_keys(one)
        if name in names
        and name not in COUNTERS  # the same at every start
        and not pa.types.is_string(one.column(name).type)
        and not pa.types.is_string(other.column(name).type)
    ]


def _place(groups: Sequence[Sequence[_Piece]], piece: _Piece, after: int) -> int:
    """Where a new attempt stands among the others."""
    for index in range(after + 1, len(groups)):
        if any(_is_before(piece, other) for other in groups[index]):
            return index
    return len(groups)


def _is_before(piece: _Piece, other: _Piece) -> bool:
    if piece.started_at is not None and other.started_at is not None:
        return piece.started_at < other.started_at
    if piece.attempt != other.attempt:
        return piece.attempt < other.attempt
    first, second = piece.first_step or 0, other.first_step or 0
    return (first, piece.file.stamp.mtime) < (second, other.file.stamp.mtime)


def _attempt(
    group: Sequence[_Piece], attempts: Sequence[AttemptReading], rules: RankRules | None
) -> AttemptReading:
    first = min(group, key=lambda piece: piece.attempt)
    known = attempts[first.attempt].attempt
    starts = [piece.started_at for piece in group if piece.started_at is not None]
    attempt = Attempt(
        tuple(piece.file for piece in group), min(starts, default=None), known.ordered_by
    )
    return AttemptReading(attempt, tuple(_by_source(group, rules)))


def _by_source(
    group: Sequence[_Piece], rules: RankRules | None
) -> Iterator[tuple[LogFile, Reading]]:
    """One reading a log; those of all ranks of a format are one."""
    ranked: dict[str, list[_Piece]] = {}
    for piece in group:
        if piece.file.facts.rank is None:
            yield piece.file, piece.reading
        else:
            ranked.setdefault(piece.file.source, []).append(piece)
    for pieces in ranked.values():
        yield _one_of_ranks(pieces, rules)


def _one_of_ranks(pieces: Sequence[_Piece], rules: RankRules | None) -> tuple[LogFile, Reading]:
    lead = min(pieces, key=lambda piece: (piece.file.facts.rank or 0, piece.file.place))
    done = merge_ranks([(p.file.facts.rank or 0, p.file, p.reading) for p in pieces], rules)
    notes = tuple(dict.fromkeys((*done.reading.notes, *done.notes)))
    return lead.file, replace(done.reading, notes=notes, merged=done.merged)
