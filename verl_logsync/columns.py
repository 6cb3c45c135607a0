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
from collections.abc import Iterable, Sequence
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
