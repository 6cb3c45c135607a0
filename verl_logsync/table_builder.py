"""Rows, as they come, made into one Arrow table (of the columns that `columns` describes).

Rows of equal keys share a layout whose numbers are packed at once, so that the parsed rows need
not be kept: holding on to them costs more than parsing them.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import EXACT, number_text, to_json

# So many columns are laid out at once: of thousands a second copy would not fit into memory.
_AT_ONCE: Final = 256
# So many bytes of packed rows are moved at once, into arrays of so many.
_MOVED: Final = 1 << 18
_PART: Final = 1 << 24
# Stretches of fewer rows are not copied one by one.
_STRETCH: Final = 8
# So many rows are turned into columns at once.
_TILE: Final = 256

#: Numbers; of which shape is said where it is used.
Matrix = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

#: The values of a row that has nothing but numbers and nulls.
Numbers = tuple[int | float | None, ...]


class TableBuilder:
    """Turns rows (dicts) into one Arrow table, keeping their order."""

    def __init__(self) -> None:
        self._count = 0
        self._by_keys: dict[tuple[str, ...], Layout] = {}
        self._layouts: list[Layout] = []
        #: The layout of the row that was added last.
        self.latest: Layout | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, row: Mapping[str, Any], *, exactly: bool = True) -> None:
        """Append a row.

        Args:
            row: the values by key.
            exactly: check every number for its size. Without it rows are added twice as fast,
                and `rounded` tells afterwards whether that cost digits.

        Raises:
            ValueError: a value is nested too deeply; nothing was added.
        """
        keys = tuple(row)
        layout = self.latest
        if layout is None or layout.keys != keys:
            layout = self._by_keys.get(keys)
            if layout is None:
                layout = self._by_keys[keys] = self.expect(keys, len(keys))
            self.latest = layout
        layout.add(self._count, row.values(), exactly)
        self._count += 1

    def expect(self, keys: tuple[str, ...], required: int) -> Layout:
        """A layout for rows of which all have the first `required` keys, and some the others.

        Where its keys have integers only, its rows must have, too: it has no say in that.
        """
        layout = Layout(keys, required)
        self._layouts.append(layout)
        return layout

    def add_known(self, layout: Layout, count: int, rows: Iterable[Numbers]) -> None:
        """Append so many rows of a layout of this table.

        Args:
            layout: of the rows.
            count: how many there are.
            rows: numbers of 64 bits at most, None for null; NaN where a row lacks a key.
        """
        layout.take_known(range(self._count, self._count + count), rows)
        self._count += count

    @property
    def rounded(self) -> bool:
        """Whether a number that was not checked may have been an integer beyond 2^53."""
        return any(layout.rounded for layout in self._layouts)

    def columns(self) -> dict[str, pa.Array]:
        """One array per key, each as long as rows were added."""
        found: dict[str, list[Layout]] = {}
        for layout in filter(len, self._layouts):
            for key in layout.keys:
                found.setdefault(key, []).append(layout)
        # Keys that occur in the same rows are laid out at once: most do.
        alike: dict[tuple[int, ...], list[str]] = {}
        for key, layouts in found.items():
            alike.setdefault(tuple(map(id, layouts)), []).append(key)
        made: dict[str, pa.Array] = {}
        for keys in alike.values():
            for some in (keys[at : at + _AT_ONCE] for at in range(0, len(keys), _AT_ONCE)):
                made |= zip(some, _columns(self._count, found[some[0]], some), strict=True)
        return {key: made[key] for key in found}


class Layout:
    """Rows that have the same keys in the same order.

    Args:
        keys: in their order.
        required: how many of them, from the first, every row has.
    """

    def __init__(self, keys: tuple[str, ...], required: int) -> None:
        self.keys = keys
        self.required = required
        self.rows = array("q")
        self.odd: dict[int, dict[int, str]] = {}
        # Positions at which every row has an integer: were it the first row that decides on the
        # type of a column, the order of rows would.
        self.integral: Collection[int] = range(len(keys))
        #: Whether there are numbers that were not looked at exactly.
        self.unchecked = False
        self._types: list[type] = []
        self._numbers_only = False
        self._pack = struct.Struct(f"{len(keys)}d").pack
        self._packed = _PackedRows(len(keys))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that hold the numbers of the rows so far, and no other number."""
        kinds: list[Any] = [float] * len(self.keys)
        for position in self.integral:
            kinds[position] = int
        for position in self.odd:
            kinds[position] = float | None
        return tuple(kinds)

    def add(self, index: int, values: Collection[Any], exactly: bool) -> None:
        types = [*map(type, values)]
        if types != self._types:  # hardly ever: one trainer logs a key as one type
            self._types = types
            self._numbers_only = {int, float}.issuperset(types)
            self.integral = [p for p in self.integral if types[p] is int]
        if exactly or not self._numbers_only or not self._take_fast(values):
            odd = {p: to_json(v) for p, v in enumerate(values) if not _is_number(v)}
            self._packed.fresh += self._pack(*(v if _is_number(v) else math.nan for v in values))
            for position, text in odd.items():
                self.odd.setdefault(position, {})[index] = text
        self.rows.append(index)

    def _take_fast(self, numbers: Collection[Any]) -> bool:
        """Pack a row's numbers as they are; False when one is none or is too large."""
        try:
            self._packed.fresh += self._pack(*numbers)
        except (struct.error, OverflowError):
            return False
        self.unchecked = True
        return True

    def take_known(self, indices: range, rows: Iterable[Numbers]) -> None:
        """Pack rows of numbers and nulls, which are at these indices of the table."""
        pack, packed = self._pack, self._packed.fresh
        for index, values in zip(indices, rows, strict=True):
            try:
                packed += pack(*values)
            except struct.error:
                packed += self._nulls(index, values)
        self.rows.extend(indices)
        self.unchecked = True
        self._packed.settle()

    def _nulls(self, index: int, values: Numbers) -> bytes:
        for position, value in enumerate(values):
            if value is None:
                self.odd.setdefault(position, {})[index] = "null"
        return self._pack(*(math.nan if v is None else v for v in values))

    @property
    def rounded(self) -> bool:
        """Whether a number is so large that packing it unchecked may have cost digits."""
        if not self.unchecked:
            return False
        return any(_has_large(numbers) for numbers, _ in self.parts())

    @property
    def indices(self) -> Indices:
        """Which rows of the table these are."""
        return np.asarray(self.rows, dtype=np.int64)

    def parts(self) -> Iterator[tuple[Matrix, Indices]]:
        """All numbers, shape (rows, keys), and which rows of the table they are."""
        indices = self.indices
        start = 0
        for numbers in self._packed.parts(len(indices)):
            end = start + len(numbers)
            yield numbers, indices[start:end]
            start = end

    def places_of(self, keys: Sequence[str]) -> Sequence[int]:
        """At which positions these keys stand in every row."""
        places = {key: position for position, key in enumerate(self.keys)}
        found = [places[key] for key in keys]
        together = range(found[0], found[0] + len(found))
        return together if found == list(together) else found


class _PackedRows:
    """Rows of float64 that grow; of a long log this is most of the memory that reading takes.

    What is fresh is moved into large arrays, to which the system gives large pages: getting small
    ones for one row after the other costs a tenth of the time of reading.
    """

    def __init__(self, width: int) -> None:
        self.fresh = bytearray()
        self._width = width
        self._settled: list[Matrix] = []
        self._array: Matrix = np.empty((0, width))
        self._filled = 0

    def settle(self) -> None:
        """Move what is fresh, if it is much."""
        if len(self.fresh) < _MOVED:
            return
        rows = np.frombuffer(self.fresh).reshape(-1, self._width)
        if self._filled + len(rows) > len(self._array):
            self._array = np.empty((max(len(rows), _PART // rows[0].nbytes), self._width))
            self._filled = 0
            self._settled.append(self._array[:0])
        end = self._filled + len(rows)
        self._array[self._filled : end] = rows
        self._settled[-1] = self._array[:end]
        self._filled = end
        self.fresh = bytearray()

    def parts(self, count: int) -> Iterator[Matrix]:
        """All rows in their order, of which there are so many."""
        yield from self._settled
        left = count - sum(map(len, self._settled))
        yield np.frombuffer(self.fresh).reshape(left, self._width)


def _has_large(numbers: Matrix) -> bool:
    """Whether there is a number at which integers are not exact any more."""
    large = numbers[(numbers >= EXACT) | (numbers <= -EXACT)]
    return bool(np.isfinite(large).any())


def _is_number(value: object) -> bool:
    """Whether a value is held exactly by a number column."""
    kind = type(value)
    return kind is float or (kind is int and -EXACT <= value <= EXACT)  # type: ignore[operator]


def _columns(count: int, layouts: Sequence[Layout], keys: Sequence[str]) -> Iterator[pa.Array]:
    """The columns of keys that occur in the rows of these layouts and in no other."""
    places = [layout.places_of(keys) for layout in layouts]
    everywhere = sum(map(len, layouts)) == count
    block = _numbers(count, layouts, places, len(keys))
    for numbers, positions in zip(block, zip(*places, strict=True), strict=True):
        at = list(zip(layouts, positions, strict=True))
        integral = all(position in layout.integral for layout, position in at)
        odd: dict[int, str] = {}
        for layout, position in at:
            odd |= layout.odd.get(position, {})
        if everywhere and all(position < layout.required for layout, position in at):
            present, mask = np.ones(count, dtype=bool), None
        else:
            present = _present(numbers, at)
            mask = ~present
        if odd:
            yield _odd_column(numbers, present, odd)
        elif integral:
            whole = numbers if mask is None else np.where(present, numbers, 0)
            yield pa.array(whole.astype(np.int64), mask=mask)
        else:
            yield pa.array(numbers, mask=mask)


def _present(
    numbers: Matrix,
    at: Sequence[tuple[Layout, int]],
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows have a number: NaN is one only in rows of layouts that require the key."""
    present: np.ndarray[Any, np.dtype[np.bool_]] = ~np.isnan(numbers)
    for layout, position in at:
        if position < layout.required:
            present[layout.indices] = True
    return present


def _numbers(
    count: int, layouts: Sequence[Layout], places: Sequence[Sequence[int]], keys: int
) -> Matrix:
    """The numbers at these places of the layouts, shape (keys, count)."""
    everywhere = sum(map(len, layouts)) == count
    numbers = np.empty((keys, count)) if everywhere else np.full((keys, count), np.nan)
    for layout, positions in zip(layouts, places, strict=True):
        for matrix, indices in layout.parts():
            _copy_rows(_at_places(matrix, positions), indices, numbers)
    return numbers


def _at_places(matrix: Matrix, positions: Sequence[int]) -> Matrix:
    """The columns at these positions; no copy of them if they follow one another."""
    if isinstance(positions, range):
        return matrix[:, positions.start : positions.stop]
    return matrix[:, positions]


def _copy_rows(values: Matrix, indices: Indices, into: Matrix) -> None:
    """Copy `values`, shape (rows, keys), to these rows of `into`, shape (keys, all rows)."""
    starts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist()]
    if len(starts) > len(indices) // _STRETCH:
        into[:, indices] = values.T
        return
    # Most rows follow one another, and copying a stretch of them is by far the fastest, as long
    # as it fits into the processor's cache.
    for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
        for at in range(start, end, _TILE):
            tile = values[at : min(at + _TILE, end)]
            into[:, indices[at] : indices[at] + len(tile)] = tile.T


def _odd_column(
    numbers: Matrix,
    present: np.ndarray[Any, np.dtype[np.bool_]],
    odd: Mapping[int, str],
) -> pa.Array:
    if len(odd) == int(present.sum()) and set(odd.values()) <= {"true", "false"}:
        flags: list[bool | None] = [None] * len(numbers)
        for index, text in odd.items():
            flags[index] = text == "true"
        return pa.array(flags, type=pa.bool_())
    texts: list[str | None] = [
        number_text(value) if there else None
        for value, there in zip(numbers.tolist(), present.tolist(), strict=True)
    ]
    for index, text in odd.items():
        texts[index] = text
    return pa.array(texts, type=pa.string())
