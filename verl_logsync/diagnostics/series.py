"""A table of rows as series of numbers, and what was known at which row.

Everything that diagnostics say about a step may depend on that row and earlier ones only, so
that what was sent of a step stays true when later steps arrive. Questions such as "which
trainer wrote this?" are therefore answered row by row, from the keys seen up to there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_logsync.columns import AXES, MISSING, STEP, as_text, common_type, decode
from verl_logsync.verl_keys import training_rows

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


# `cached_property` needs a place to keep its value, which slots take away.
@dataclass(frozen=True)
class Series:
    """The numbers of one key, a value a row.

    `there` says which rows have a number; NaN and infinities are numbers, and so is JSON null,
    which newer verl writes for them (`unknown`: not finite, which of the three is not known).
    """

    values: Floats
    there: Flags
    unknown: Flags

    @cached_property
    def finite(self) -> Flags:
        return self.there & np.isfinite(self.values)


@dataclass(frozen=True)
class Frame:
    """The rows of a run, ascending by step, and columns that were added to them."""

    table: pa.Table
    added: Mapping[str, Series]

    @cached_property
    def steps(self) -> Ints:
        column = self.table.column(STEP)
        return np.asarray(column.to_numpy(), dtype=np.int64)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def first_rows(self) -> dict[str, int]:
        """The logged keys that have a value anywhere, and the row where each is first seen."""
        found = {}
        for name in self.table.schema.names:
            if name in AXES:
                continue
            column = self.table.column(name)
            if column.null_count == 0 and len(column):
                found[name] = 0
            elif column.null_count < len(column):
                found[name] = int(np.argmax(column.is_valid().to_numpy()))
        return found

    @cached_property
    def trained(self) -> Flags:
        """The rows of training steps; of others, validations for example, little is expected."""
        return training_rows(self.table) if len(self) else np.zeros(0, dtype=bool)

    @cached_property
    def _read(self) -> dict[str, Series]:
        return {}

    def logged(self, name: str) -> Series:
        """A key as it was logged; nowhere there if it never was."""
        if name not in self._read:
            known = name in self.first_rows
            self._read[name] = _series(self.table.column(name)) if known else nothing(len(self))
        return self._read[name]

    def series(self, name: str) -> Series:
        """A key as logged, with the values that were added where it was not."""
        added = self.added.get(name)
        if added is None:
            return self.logged(name)
        if name not in self.first_rows:
            return added
        return either(self.logged(name), added)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All keys that have a value, logged ones first."""
        return tuple(dict.fromkeys([*self.first_rows, *self.added]))

    def with_added(self, more: Mapping[str, Series]) -> Frame:
        """The same rows with more columns."""
        frame = Frame(self.table, {**self.added, **more})
        frame.__dict__.update(
            {key: self.__dict__[key] for key in ("_read", "first_rows") if key in self.__dict__}
        )
        return frame

    def seen(self, matches: Callable[[str], bool]) -> Flags:
        """For each row: had a key that matches a value in this row or before it?"""
        rows = [row for name, row in self.first_rows.items() if matches(name)]
        return np.arange(len(self)) >= min(rows, default=len(self))

    def seen_any(self, *names: str) -> Flags:
        """`seen` for names, or prefixes that end with a slash."""
        prefixes = tuple(name for name in names if name.endswith("/"))
        exact = frozenset(names)
        return self.seen(lambda key: key in exact or bool(prefixes and key.startswith(prefixes)))

    def stretches(self) -> list[tuple[slice, frozenset[str]]]:
        """Stretches of rows in which no new key appears, with the keys seen by then."""
        if len(self) == 0:
            return []
        starts = sorted({0, *self.first_rows.values()})
        known = sorted((row, name) for name, row in self.first_rows.items())
        found: list[tuple[slice, frozenset[str]]] = []
        for start, end in zip(starts, [*starts[1:], len(self)], strict=True):
            names = frozenset(name for row, name in known if row <= start)
            found.append((slice(start, end), names))
        return found


def nothing(rows: int) -> Series:
    """A series without any value."""
    no = np.zeros(rows, dtype=bool)
    return Series(np.full(rows, np.nan), no, no)


def plain(values: Floats, there: Flags) -> Series:
    """A series of computed numbers."""
    return Series(np.where(there, values, np.nan), there, np.zeros(len(there), dtype=bool))


def either(first: Series, second: Series) -> Series:
    """The first where it is there, else the second."""
    take = first.there
    return Series(
        np.where(take, first.values, second.values),
        take | second.there,
        np.where(take, first.unknown, second.unknown),
    )


def by_step(steps: Ints, given: Mapping[int, float]) -> Series:
    """Values given by step, on the rows of these steps."""
    if not given:
        return nothing(len(steps))
    listed = [given.get(step) for step in steps.tolist()]
    there = np.array([value is not None for value in listed], dtype=bool)
    values = np.array([math.nan if value is None else value for value in listed], dtype=np.float64)
    return plain(values, there)


def column_of(series: Series, *, integral: bool = False) -> pa.Array:
    """A series as a metric column: an Arrow null where it is not there."""
    if integral:
        whole = np.where(series.there, series.values, 0).astype(np.int64)
        return pa.array(whole, mask=~series.there)
    return pa.array(series.values, mask=~series.there)


def filled(logged: pa.Array | pa.ChunkedArray, added: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A logged column with added values in the rows that lack the key.

    That happens where a run went on under a verl that logs what the earlier one did not.
    """
    kind = common_type([logged.type, added.type], large_integers=True)
    if pa.types.is_string(kind):
        return pc.coalesce(as_text(logged), as_text(added))
    return pc.coalesce(logged.cast(kind), added.cast(kind))


def _series(column: pa.ChunkedArray) -> Series:
    if pa.types.is_string(column.type):
        return _odd_series(column)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    whole = column.combine_chunks()
    there = np.asarray(whole.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    values = np.asarray(whole.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    return plain(values.astype(np.float64), there)


def _odd_series(column: pa.ChunkedArray) -> Series:
    """Texts, lists and objects are no numbers, null is one of which too little is known."""
    values, there, unknown = [], [], []
    for value in decode(column):
        number = isinstance(value, int | float)
        values.append(float(value) if number else math.nan)
        unknown.append(value is None)
        there.append(number or value is None)
        assert value is not MISSING or not there[-1]
    return Series(np.array(values), np.array(there, dtype=bool), np.array(unknown, dtype=bool))
