"""The readings of several ranks of one attempt -> one reading with one row a step.

Each key is reduced by a rule that its name tells: by default the mean. A value that is missing on
a rank does not count; NaN on any rank gives NaN, and null gives null, whatever the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from verl_logsync.columns import (
    AXES,
    EXACT,
    MISSING,
    RUNTIME,
    STEP,
    TIMESTAMP,
    as_numbers,
    concat,
    decode,
    to_json,
)
from verl_logsync.model import Ending, LogFile, Reading
from verl_logsync.table_builder import TableBuilder
from verl_logsync.verl_keys import is_training_key

Rule = Literal["mean", "max", "min", "sum", "same"]
Piece = tuple[int, LogFile, Reading]

#: What names tell, in this order. "same" keys are stated by every rank and must agree.
SHIPPED: Final[tuple[tuple[str, Rule], ...]] = (
    ("training/global_step", "same"),
    ("epoch", "same"),
    ("*/epoch", "same"),
    ("*lr", "same"),
    ("*max*", "max"),
    ("*mem*", "max"),
    ("*/min", "min"),
    ("*timing*", "mean"),  # not a minimum, though it has the letters
    ("*min*", "min"),
    ("*num_tokens*", "sum"),
    ("*discount*", "mean"),
    ("*count*", "sum"),
)
#: Clocks that differ by more seconds than this are reported.
SKEW_REPORTED: Final = 1.0
# So many ranges of steps, or differing steps of a key, are named; the rest is counted.
_NAMED: Final = 3

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class RankRules:
    """How the values of several ranks become one.

    `patterns` are (shell pattern, rule) pairs that are asked before the shipped ones. For keys
    that match one of `per_rank` each rank's value is kept too, as `rank3/KEY`; for those that
    match one of `spread` the difference of the largest and the smallest, as `KEY/spread`.
    """

    patterns: tuple[tuple[str, Rule], ...] = ()
    per_rank: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()

    def rule(self, key: str) -> Rule:
        """The first rule whose pattern the key matches."""
        every = (*self.patterns, *SHIPPED)
        return next((rule for pattern, rule in every if fnmatchcase(key, pattern)), "mean")


@dataclass(frozen=True, slots=True)
class RankedReading:
    """One reading made of those of `ranks`.

    `skew` says how many seconds the clock of a rank is ahead of the first rank's, for those that
    have steps in common; `merged` how many rows became part of another one.
    """

    reading: Reading
    ranks: tuple[int, ...]
    notes: tuple[str, ...] = ()
    skew: Mapping[int, float] = field(default_factory=dict)
    merged: int = 0


def merge_ranks(pieces: Sequence[Piece], rules: RankRules | None = None) -> RankedReading:
    """Merge what the ranks of one attempt say.

    Args:
        pieces: (rank, its log, its reading) in any order; several of one rank follow one
            another in time. Of one rank alone the reading is given back as it is.
        rules: how values are reduced.

    Raises:
        ValueError: there are no pieces.
    """
    if not pieces:
        raise ValueError("no pieces to merge")
    ranks = sorted({rank for rank, _, _ in pieces})
    if len(ranks) == 1 and len(pieces) == 1:
        return RankedReading(pieces[0][2], tuple(ranks))
    return _Merge([_Rank.of(rank, pieces) for rank in ranks], rules or RankRules()).result()


# -- one rank ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's rows, one a step and ascending, and everything else that it says."""

    number: int
    table: pa.Table
    steps: _Ints
    readings: tuple[Reading, ...]
    world_size: int
    seen: int

    @staticmethod
    def of(number: int, pieces: Sequence[Piece]) -> _Rank:
        own = sorted((p for p in pieces if p[0] == number), key=_order)
        whole = concat([reading.rows for _, _, reading in own])
        table = _one_row_a_step(whole)
        world = max(file.facts.world_size or 1 for _, file, _ in own)
        readings = tuple(reading for _, _, reading in own)
        return _Rank(number, table, _steps(table), readings, world, whole.num_rows)

    def has(self, key: str) -> bool:
        return key in self.table.schema.names

    def times(self, axis: str) -> _Floats:
        """Seconds of each row; NaN where they are missing."""
        if not self.has(axis):
            return np.full(len(self.steps), np.nan)
        return as_numbers(self.table.column(axis))

    def trained(self) -> _Bools:
        """Which rows hold the result of a training step."""
        flags = np.zeros(len(self.steps), dtype=bool)
        for key in filter(is_training_key, self.table.schema.names):
            flags |= _present(self.table.column(key))
        return flags


def _order(piece: Piece) -> tuple[float, int, str]:
    _, file, reading = piece
    started = reading.started_at if reading.started_at is not None else math.inf
    steps = reading.rows.column(STEP)
    return started, steps[0].as_py() if len(steps) else -1, file.place


def _steps(table: pa.Table) -> _Ints:
    steps: _Ints = table.column(STEP).to_numpy()
    return steps


def _present(column: pa.ChunkedArray) -> _Bools:
    flags: _Bools = column.is_valid().to_numpy()
    return flags


def _one_row_a_step(table: pa.Table) -> pa.Table:
    """Ascending by step; of several rows of a step later keys win."""
    steps, first = np.unique(_steps(table), return_index=True)
    if len(steps) == table.num_rows:
        return table if np.all(np.diff(first) > 0) else table.take(pa.array(first))
    order = np.argsort(_steps(table), kind="stable")
    groups = np.searchsorted(steps, _steps(table)[order])
    columns: dict[str, Any] = {STEP: pa.array(steps)}
    for key in table.schema.names:
        if key != STEP:
            column = table.column(key)
            there = _present(column)[order]
            latest = np.full(len(steps), -1, dtype=np.int64)
            latest[groups[there]] = order[there]
            columns[key] = column.take(pa.array(latest, mask=latest < 0))
    return pa.table(columns)


# -- all of them ---------------------------------------------------------------------------


class _Merge:
    def __init__(self, ranks: Sequence[_Rank], rules: RankRules) -> None:
        self._ranks = ranks
        self._rules = rules
        self._notes: list[str] = []
        self._steps: _Ints = np.unique(np.concatenate([rank.steps for rank in ranks]))
        self._rows = {r.number: np.searchsorted(self._steps, r.steps) for r in ranks}
        self._columns: dict[str, Any] = {STEP: pa.array(self._steps, type=pa.int64())}

    def result(self) -> RankedReading:
        skew = self._skew()
        for axis in (TIMESTAMP, RUNTIME):
            self._add_times(axis, skew)
        keys = dict.fromkeys(k for r in self._ranks for k in r.table.schema.names)
        for key in keys:
            if key not in AXES:
                self._add_key(key, set(keys))
        self._note_missing_rows()
        self._note_missing_ranks()
        first = self._ranks[0].readings[0]
        every = [reading for rank in self._ranks for reading in rank.readings]
        reading = replace(
            first,
            rows=pa.table(self._columns),
            skips=tuple(skip for one in every for skip in one.skips),
            config=next((one.config for one in every if one.config), {}),
            ending=_ending(self._ranks),
            started_at=next((o.started_at for o in every if o.started_at is not None), None),
            ended_at=self._ended_at(skew),
            restarts=(),
            rounding=max(one.rounding for one in every),
            below_precision=tuple(sorted({k for one in every for k in one.below_precision})),
            notes=tuple(dict.fromkeys(note for one in every for note in one.notes)),
            earlier_configs=tuple(c for one in every for c in (*one.earlier_configs, one.config)),
        )
        numbers = tuple(rank.number for rank in self._ranks)
        seen = sum(rank.seen for rank in self._ranks)
        notes = tuple(self._notes)
        return RankedReading(reading, numbers, notes, skew, seen - len(self._steps))

    # -- clocks ----------------------------------------------------------------------------

    def _skew(self) -> dict[int, float]:
        """Median difference to the first rank's clock at the steps that both have."""
        base = self._ranks[0]
        ours = self._spread_out(base, base.times(TIMESTAMP))
        skew: dict[int, float] = {}
        for rank in self._ranks[1:]:
            apart = self._spread_out(rank, rank.times(TIMESTAMP)) - ours
            apart = apart[np.isfinite(apart)]
            if len(apart):
                skew[rank.number] = float(np.median(apart))
        for number, seconds in skew.items():
            if abs(seconds) > SKEW_REPORTED:
                way = "ahead of" if seconds > 0 else "behind"
                self._notes.append(
                    f"the clock of rank {number} is {abs(seconds):.1f} s {way} that of rank "
                    f"{base.number}; corrected"
                )
        return skew

    def _add_times(self, axis: str, skew: Mapping[int, float]) -> None:
        """The first rank's times, and those of the next ones, corrected, where it has none."""
        if not any(rank.has(axis) for rank in self._ranks):
            return
        times = np.full(len(self._steps), np.nan)
        for rank in self._ranks:
            own = rank.times(axis) - (skew.get(rank.number, 0.0) if axis == TIMESTAMP else 0.0)
            times = np.where(np.isnan(times), self._spread_out(rank, own), times)
        self._columns[axis] = pa.array(times, mask=np.isnan(times))

    def _ended_at(self, skew: Mapping[int, float]) -> float | None:
        ends = (
            one.ended_at - skew.get(rank.number, 0.0)
            for rank in self._ranks
            for one in rank.readings
            if one.ended_at is not None
        )
        return max(ends, default=None)

    def _spread_out(self, rank: _Rank, numbers: _Floats) -> _Floats:
        """Numbers of one rank's rows at the rows of all steps; NaN where it has no row."""
        out = np.full(len(self._steps), np.nan)
        out[self._rows[rank.number]] = numbers
        return out

    # -- keys ------------------------------------------------------------------------------

    def _add_key(self, key: str, keys: set[str]) -> None:
        having = [rank for rank in self._ranks if rank.has(key)]
        if len(having) == 1:
            self._columns[key] = self._taken(having[0], key)
        elif all(_is_number(rank.table.column(key).type) for rank in having):
            self._columns[key] = self._reduced(key, having)
        elif all(rank.table.column(key).type == pa.bool_() for rank in having):
            self._columns[key] = self._first_of(key, having)
        else:
            self._columns[key] = self._reduced_one_by_one(key, having)
        self._add_extras(key, having, keys)

    def _taken(self, rank: _Rank, key: str) -> pa.ChunkedArray:
        """One rank's column as it is, at the rows of all steps."""
        rows = np.full(len(self._steps), -1, dtype=np.int64)
        rows[self._rows[rank.number]] = np.arange(len(rank.steps))
        return rank.table.column(key).take(pa.array(rows, mask=rows < 0))

    def _reduced(self, key: str, having: Sequence[_Rank]) -> Any:
        rule = self._rules.rule(key)
        if rule == "same":
            return self._first_of(key, having)
        present, numbers = self._matrix(key, having)
        anywhere: _Bools = np.asarray(present.any(axis=0))
        whole = all(pa.types.is_int64(rank.table.column(key).type) for rank in having)
        integers = self._integers(key, having, rule, anywhere) if whole else None
        if integers is not None:
            return pa.array(integers, mask=~anywhere)
        return pa.array(_reduce(rule, present, numbers), mask=~anywhere)

    def _matrix(self, key: str, having: Sequence[_Rank]) -> tuple[_Bools, _Floats]:
        """Which rank has the key at which step, and the values as float64."""
        present = np.zeros((len(having), len(self._steps)), dtype=bool)
        numbers = np.zeros((len(having), len(self._steps)))
        for index, rank in enumerate(having):
            column, rows = rank.table.column(key), self._rows[rank.number]
            present[index, rows] = _present(column)
            numbers[index, rows] = as_numbers(column)
        return present, numbers

    def _integers(
        self, key: str, having: Sequence[_Rank], rule: Rule, anywhere: _Bools
    ) -> _Ints | None:
        """Reduced without leaving the integers; None when that is not possible."""
        if rule == "mean":  # of equal integers it is that integer
            low = self._integers(key, having, "min", anywhere)
            high = self._integers(key, having, "max", anywhere)
            if low is None or high is None:
                return None
            return low if np.array_equal(low[anywhere], high[anywhere]) else None
        limits = np.iinfo(np.int64)
        start = {"max": limits.min, "min": limits.max, "sum": 0}[rule]
        values = np.full((len(having), len(self._steps)), start, dtype=np.int64)
        for index, rank in enumerate(having):
            column, rows = rank.table.column(key), self._rows[rank.number]
            there = _present(column)
            values[index, rows[there]] = column.fill_null(0).to_numpy()[there]
        if rule == "sum" and np.abs(values.astype(np.float64)).sum(axis=0).max(initial=0) > EXACT:
            return None
        reduced: _Ints = _by_rule(rule, values)
        return reduced

    def _first_of(self, key: str, having: Sequence[_Rank]) -> Any:
        """The value of the first rank that has one; where another one differs it is noted."""
        taken = [self._taken(rank, key) for rank in having]
        columns = [decode(column) for column in taken]
        kept: list[Any] = [MISSING] * len(self._steps)
        differing: list[int] = []
        for index, values in enumerate(zip(*columns, strict=True)):
            there = [value for value in values if value is not MISSING]
            if there:
                kept[index] = there[0]
                if any(not _equal(there[0], other) for other in there[1:]):
                    differing.append(index)
        if differing:
            self._note_difference(key, having, columns, differing)
        if all(column.type == taken[0].type for column in taken):
            plain = [None if value is MISSING else value for value in kept]
            if not pa.types.is_string(taken[0].type):
                return pa.array(plain, type=taken[0].type)
        return _column(kept)

    def _note_difference(
        self,
        key: str,
        having: Sequence[_Rank],
        columns: Sequence[Sequence[Any]],
        differing: Sequence[int],
    ) -> None:
        index = differing[0]
        said = ", ".join(
            f"rank {rank.number}: {_short(values[index])}"
            for rank, values in zip(having, columns, strict=True)
            if values[index] is not MISSING
        )
        more = f" and at {len(differing) - 1} more steps" if len(differing) > 1 else ""
        self._notes.append(
            f"{key} differs between ranks at step {self._steps[index]} ({said}){more}; the first "
            "is kept"
        )

    def _reduced_one_by_one(self, key: str, having: Sequence[_Rank]) -> Any:
        """Reduce a key that is not everywhere a number: numbers by its rule, all else as it is."""
        rule = self._rules.rule(key)
        columns = [decode(self._taken(rank, key)) for rank in having]
        kept: list[Any] = [MISSING] * len(self._steps)
        differing: list[int] = []
        for index, values in enumerate(zip(*columns, strict=True)):
            there = [value for value in values if value is not MISSING]
            if not there:
                continue
            if rule != "same" and all(map(_counts, there)):
                kept[index] = None if None in there else _reduce_few(rule, there)
                continue
            kept[index] = there[0]
            if any(not _equal(there[0], other) for other in there[1:]):
                differing.append(index)
        if differing:
            self._note_difference(key, having, columns, differing)
        return _column(kept)

    def _add_extras(self, key: str, having: Sequence[_Rank], keys: set[str]) -> None:
        if _matches(key, self._rules.per_rank):
            for rank in having:
                self._add_extra(f"rank{rank.number}/{key}", self._taken(rank, key), keys)
        numeric = all(_is_number(rank.table.column(key).type) for rank in having)
        if _matches(key, self._rules.spread) and numeric:
            present, numbers = self._matrix(key, having)
            with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
                spread = _reduce("max", present, numbers) - _reduce("min", present, numbers)
            column = pa.array(spread, mask=~present.any(axis=0))
            self._add_extra(f"{key}/spread", column, keys)

    def _add_extra(self, name: str, column: Any, keys: set[str]) -> None:
        if name in keys:
            self._notes.append(f"{name} was logged, and is not replaced")
        else:
            self._columns[name] = column

    # -- what is missing -------------------------------------------------------------------

    def _note_missing_rows(self) -> None:
        """Say which ranks have no row at steps that another one trained."""
        trained = np.zeros(len(self._steps), dtype=bool)
        for rank in self._ranks:
            trained[self._rows[rank.number][rank.trained()]] = True
        alike: dict[tuple[str, str], list[int]] = {}
        for rank in self._ranks:
            lacking = trained.copy()
            lacking[self._rows[rank.number]] = False
            if lacking.any():
                last = int(rank.steps[-1]) if len(rank.steps) else None
                ends = lacking[-1] and last is not None
                end = f"ends at step {last}" if ends else ""
                where = _ranges(self._steps[lacking], self._steps[trained])
                alike.setdefault((where, end), []).append(rank.number)
        for (where, end), numbers in alike.items():
            one = len(numbers) == 1
            text = f"{_named(numbers)} {'has' if one else 'have'} no rows for {where}"
            owner = "its log " if one else "the log of each "
            self._notes.append(f"{text}; {owner}{end}" if end else text)

    def _note_missing_ranks(self) -> None:
        world = max(rank.world_size for rank in self._ranks)
        here = {rank.number for rank in self._ranks}
        gone = [number for number in range(min(world, 1 << 16)) if number not in here]
        if gone and len(here) > 1:  # many trainers log on one rank only, and mean to
            self._notes.append(f"{_named(gone)} of {world} left no log here")


# -- values --------------------------------------------------------------------------------


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float64(kind) or pa.types.is_int64(kind))


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _by_rule(rule: Rule, values: Any) -> Any:
    if rule == "max":
        return values.max(axis=0)
    return values.min(axis=0) if rule == "min" else values.sum(axis=0)


def _reduce(rule: Rule, present: _Bools, numbers: _Floats) -> _Floats:
    """One number a step of those that are present; NaN if any of them is NaN."""
    neutral = {"max": -math.inf, "min": math.inf}
    with np.errstate(invalid="ignore", over="ignore"):
        if rule in neutral:
            reduced: _Floats = _by_rule(rule, np.where(present, numbers, neutral[rule]))
            return reduced
        there = np.where(present, numbers, 0.0)
        total: _Floats = there.sum(axis=0)
        if rule == "sum":
            return total
        low = np.where(present, numbers, math.inf).min(axis=0)
        high = np.where(present, numbers, -math.inf).max(axis=0)
        count = np.maximum(present.sum(axis=0), 1)
        mean = np.where(np.isfinite(total), total / count, (there / count).sum(axis=0))
        # Equal numbers have themselves as mean, to the last digit.
        settled: _Floats = np.where(low == high, low, mean)
        return settled


def _reduce_few(rule: Rule, values: Sequence[float]) -> float:
    """The same for a few plain numbers, of which large integers stay exact."""
    if any(isinstance(value, float) and math.isnan(value) for value in values):
        return math.nan
    if rule == "max":
        return max(values)
    if rule == "min":
        return min(values)
    if rule == "sum":
        return sum(values)
    return values[0] if all(v == values[0] for v in values) else sum(values) / len(values)


def _counts(value: Any) -> bool:
    """Whether a value takes part in a reduction: a number, or null for one."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - NaN is NaN here


def _column(values: Sequence[Any]) -> Any:
    """A metric column of any values; MISSING where there is none."""
    builder = TableBuilder()
    for value in values:
        builder.add({} if value is MISSING else {"": value})
    return builder.columns().get("", pa.nulls(len(values), pa.float64()))


def _ending(ranks: Sequence[_Rank]) -> Ending | None:
    """The first failure that any rank tells of, else the first rank's end."""
    ends = [rank.readings[-1].ending for rank in ranks]
    return next((end for end in ends if end is not None and end.exit_code), ends[0])


# -- words ---------------------------------------------------------------------------------


def _short(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _named(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 1-4, 6`."""
    spans: list[str] = []
    start = before = numbers[0]
    for number in (*numbers[1:], None):
        if number is not None and number == before + 1:
            before = number
            continue
        spans.append(str(start) if start == before else f"{start}-{before}")
        if number is not None:
            start = before = number
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(spans)}"


def _ranges(steps: _Ints, every: _Ints) -> str:
    """`steps 60-99`, `step 5 and 8-9`: neighbours among all trained steps are one range."""
    places = np.searchsorted(every, steps)
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    spans = [
        str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        for part in np.split(steps, breaks)
    ]
    named = ", ".join(spans[:_NAMED])
    more = f" and {len(spans) - _NAMED} more stretches" if len(spans) > _NAMED else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {named}{more}"
