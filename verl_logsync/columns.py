"""How metric values are kept in Arrow columns without losing anything.

A metric column has one of four types, and an Arrow null in it always means *missing*:

==========  =====================================================================
float64     numbers; NaN and infinities are values
int64       numbers that were all written as integers
bool        booleans
string      JSON text of anything else: explicit null, text, lists, objects, mixtures,
            integers beyond 2^53 (tokens ``NaN``, ``Infinity``, ``-Infinity`` may occur)
==========  =====================================================================

So null, NaN and missing stay three different things, numbers stay cheap, and odd values
survive to the last digit.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

#: Integers up to this size are exact as float64, so a number column may hold them.
EXACT: Final = 2**53

#: Relative difference up to which two prints of one number are the same.
ROUNDING: Final = 1e-6

#: Lists and objects nested more deeply than this are no metric.
DEEPEST: Final = 64

# So many columns are laid out at once: of thousands a second copy would not fit into memory.
_AT_ONCE: Final = 256

#: The columns that are not metrics.
STEP, TIMESTAMP, RUNTIME = "_step", "_timestamp", "_runtime"
AXES: Final = (STEP, TIMESTAMP, RUNTIME)


class Missing:
    """The value of a key that a row does not have (not null, not NaN)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


def to_json(value: object) -> str:
    """JSON text of a value, with the bare tokens NaN, Infinity and -Infinity.

    Integers beyond 64 bits become the floats that they are on W&B's wire anyway.

    Raises:
        ValueError: lists and objects are nested so deeply that no reader would take them.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = as_float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict | list | tuple):
        if _depth(value) > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        return json.dumps(value, separators=(",", ":"))
    try:
        return orjson.dumps(value).decode()
    except (TypeError, UnicodeEncodeError):  # a lone surrogate
        return json.dumps(value)


def as_float(number: int) -> float:
    """An integer as float; infinite when it is larger than any."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _depth(value: object) -> int:
    """How deeply a value is nested, without recursion: hostile input would exhaust it."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def from_json(text: str | bytes) -> Any:
    """The value of JSON text; bare NaN and infinities are accepted."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


class TableBuilder:
    """Turns rows (dicts) into one Arrow table, keeping their order.

    Rows of equal keys share a layout whose numbers are packed as they come, so that the
    parsed rows need not be kept: holding on to them costs more than parsing them.
    """

    def __init__(self) -> None:
        self._count = 0
        self._layouts: dict[tuple[str, ...], Layout] = {}
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
            layout = self._layouts.get(keys) or self._layouts.setdefault(keys, Layout(keys))
            self.latest = layout
        layout.add(self._count, row.values(), exactly)
        self._count += 1

    def add_known(self, layout: Layout, values: tuple[int | float | None, ...]) -> None:
        """Append a row of a layout of this table, whose values are of the layout's kinds."""
        if layout.take_fast(values):
            layout.rows.append(self._count)
        else:
            layout.add(self._count, values, exactly=False)
            layout.unchecked = True
        self._count += 1

    @property
    def rounded(self) -> bool:
        """Whether a number that was not checked may have been an integer beyond 2^53."""
        return any(layout.rounded for layout in self._layouts.values())

    def columns(self) -> dict[str, pa.Array]:
        """One array per key, each as long as rows were added."""
        found: dict[str, list[Layout]] = {}
        for layout in self._layouts.values():
            layout.freeze()
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
    """The rows that have the same keys in the same order."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.rows = array("q")
        self.odd: dict[int, dict[int, str]] = {}
        # Positions at which every row has an integer: were it the first row that decides on the
        # type of a column, the order of rows would.
        self.integral: Collection[int] = range(len(keys))
        self.matrix: np.ndarray[Any, np.dtype[np.float64]] = np.empty((0, 0))
        self.indices: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, dtype=np.int64)
        #: Whether there are numbers that were not looked at exactly.
        self.unchecked = False
        self._types: list[type] = []
        self._numbers_only = False
        self._pack = struct.Struct(f"{len(keys)}d").pack
        self._packed = bytearray()

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
        if exactly or not self._numbers_only or not self.take_fast(values):
            odd = {p: to_json(v) for p, v in enumerate(values) if not _is_number(v)}
            self._packed += self._pack(*(v if _is_number(v) else math.nan for v in values))
            for position, text in odd.items():
                self.odd.setdefault(position, {})[index] = text
        self.rows.append(index)

    def take_fast(self, numbers: Collection[Any]) -> bool:
        """Pack a row's numbers as they are; False when one is none or is too large."""
        try:
            self._packed += self._pack(*numbers)
        except (struct.error, OverflowError):
            return False
        self.unchecked = True
        return True

    @property
    def rounded(self) -> bool:
        """Whether a number is so large that packing it unchecked may have cost digits."""
        if not self.unchecked:
            return False
        numbers = np.frombuffer(self._packed)
        large = numbers[(numbers >= EXACT) | (numbers <= -EXACT)]
        return bool(np.isfinite(large).any())

    def freeze(self) -> None:
        self.matrix = np.frombuffer(self._packed).reshape(len(self.rows), len(self.keys))
        self.indices = np.asarray(self.rows, dtype=np.int64)

    def places_of(self, keys: Sequence[str]) -> Sequence[int]:
        """At which positions these keys stand in every row."""
        if tuple(keys) == self.keys:
            return range(len(keys))
        places = {key: position for position, key in enumerate(self.keys)}
        return [places[key] for key in keys]

    def values_at(self, positions: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The numbers at these positions, shape (rows, positions)."""
        return self.matrix if isinstance(positions, range) else self.matrix[:, positions]


def _is_number(value: object) -> bool:
    """Whether a value is held exactly by a number column."""
    kind = type(value)
    return kind is float or (kind is int and -EXACT <= value <= EXACT)  # type: ignore[operator]


def _columns(count: int, layouts: Sequence[Layout], keys: Sequence[str]) -> Iterator[pa.Array]:
    """The columns of keys that occur in the rows of these layouts and in no other."""
    rows = sum(map(len, layouts))
    present = np.zeros(count, dtype=bool)
    table = np.full((count, len(keys)), np.nan)
    places = [layout.places_of(keys) for layout in layouts]
    for layout, positions in zip(layouts, places, strict=True):
        present[layout.indices] = True
        table[layout.indices] = layout.values_at(positions)
    mask = None if rows == count else ~present
    block = np.ascontiguousarray(table.T)
    for numbers, positions in zip(block, zip(*places, strict=True), strict=True):
        odd: dict[int, str] = {}
        integral = True
        for layout, position in zip(layouts, positions, strict=True):
            odd |= layout.odd.get(position, {})
            integral = integral and position in layout.integral
        if odd:
            yield _odd_column(numbers, present, odd)
        elif integral:
            yield pa.array(np.where(present, numbers, 0).astype(np.int64), mask=mask)
        else:
            yield pa.array(numbers, mask=mask)


def _odd_column(
    numbers: np.ndarray[Any, np.dtype[np.float64]],
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


def number_text(value: float) -> str:
    """JSON text of a number as W&B's wire writes it: 1.0 is ``1``, -0.0 is ``0``."""
    if value == 0:
        return "0"
    if math.isfinite(value) and value == int(value) and abs(value) <= EXACT:
        return str(int(value))
    return to_json(value)


def decode(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The Python values of a metric column; MISSING where a row lacks the key."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_string(column.type):
        return [MISSING if text is None else from_json(text) for text in values]
    if column.null_count == 0:
        return values
    return [MISSING if value is None else value for value in values]


def as_numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A metric column as float64; missing, null and what is not a number become NaN."""
    if pa.types.is_string(column.type):
        return np.array([_number_or_nan(value) for value in decode(column)], dtype=np.float64)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return np.asarray(
        column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64
    )


def _number_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def as_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A metric column as JSON text, the one type that holds every value."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_string(column.type):
        return column
    return pa.array([_text_or_none(value) for value in column.to_pylist()], type=pa.string())


def _text_or_none(value: Any) -> str | None:
    if value is None:
        return None
    return number_text(value) if isinstance(value, float) else to_json(value)


def common_type(types: Iterable[pa.DataType], *, large_integers: bool) -> pa.DataType:
    """The narrowest column type that holds the values of all the given ones."""
    kinds = set(types)
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {pa.int64(), pa.float64()} and not large_integers:
        return pa.float64()
    return pa.string()


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Stack tables of rows; a key that a table lacks is missing in its rows."""
    if len(tables) == 1:
        return tables[0]
    names = list(dict.fromkeys(name for table in tables for name in table.schema.names))
    columns = {name: _concat_column(name, tables) for name in names}
    return pa.table(columns)


def _concat_column(name: str, tables: Sequence[pa.Table]) -> pa.ChunkedArray:
    having = [table.column(name) for table in tables if name in table.schema.names]
    large = any(pa.types.is_int64(c.type) and not _fits_float(c) for c in having)
    kind = common_type([column.type for column in having], large_integers=large)
    chunks: list[pa.Array] = []
    for table in tables:
        if name in table.schema.names:
            chunks.extend(_cast(table.column(name), kind))
        else:
            chunks.append(pa.nulls(table.num_rows, kind))
    return pa.chunked_array(chunks, type=kind)


def _fits_float(column: pa.ChunkedArray) -> bool:
    numbers = column.drop_null().to_numpy()
    return numbers.size == 0 or bool(np.abs(numbers).max() <= EXACT)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> list[pa.Array]:
    if column.type == kind:
        return list(column.chunks)
    if pa.types.is_string(kind):
        return [as_text(column)]
    return list(column.cast(kind).chunks)


def json_values(column: pa.Array | pa.ChunkedArray) -> list[bytes]:
    """JSON text of every value of a metric column; whatever where it is missing."""
    if pa.types.is_string(column.type):
        return [b"null" if text is None else text.encode() for text in column.to_pylist()]
    if pa.types.is_boolean(column.type):
        return [b"true" if flag else b"false" for flag in column.to_pylist()]
    if len(column) == 0:
        return []
    filled = column.fill_null(0) if column.null_count else column
    numbers = (
        filled.to_numpy(zero_copy_only=False) if isinstance(filled, pa.Array) else filled.to_numpy()
    )
    texts = orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)[
        1:-1
    ].split(b",")
    if numbers.dtype.kind == "f":
        # orjson writes null for what JSON cannot express.
        for index in np.flatnonzero(~np.isfinite(numbers)).tolist():
            texts[index] = to_json(float(numbers[index])).encode()
    return texts
