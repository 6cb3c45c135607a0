"""A 64-bit digest of every row, by which a row that changed after its upload is found.

A digest covers the metrics in the canonical form of W&B's wire (1.0 = 1, -0.0 = 0), not the
clock: re-estimated times are no reason to rewrite history. It does not depend on the order of
keys, on column types, or on which other rows there are. It is no protection against forgery.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import AXES, MISSING, as_float, decode
from verl_logsync.model import History

_TOKENS: Final = ("NaN", "Infinity", "-Infinity")

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_NAN: Final = np.float64(math.nan).view(np.uint64)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


def row_digests(history: History) -> _Hashes:
    """One digest per row of a history, shape (rows,), uint64; derived values do not count."""
    total: _Hashes = _mix(history.steps.astype(np.uint64))
    for name in history.table.schema.names:
        if name in AXES or (name in history.added and name not in history.logged_from):
            continue
        hashes = _column_hashes(name, history.table.column(name))
        if name in history.added:
            is_logged = history.steps >= history.logged_from[name]
            hashes = np.where(is_logged, hashes, np.uint64(0))
        total = total + hashes
    return total


def overall_digest(digests: _Hashes) -> str:
    """One digest over the digests of consecutive rows."""
    return hashlib.blake2b(np.ascontiguousarray(digests).tobytes(), digest_size=8).hexdigest()


def _mix(words: _Hashes) -> _Hashes:
    """The finaliser of splitmix64: spreads every bit over the whole word."""
    bits: _Hashes = words + _ODD
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Hashes = bits ^ (bits >> np.uint64(31))
    return mixed


def _word(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _column_hashes(name: str, column: pa.ChunkedArray) -> _Hashes:
    salt = np.uint64(_word(name.encode(errors="surrogatepass")))
    whole = column.null_count == 0
    valid = np.full(len(column), True) if whole else np.array(column.is_valid().to_numpy())
    if pa.types.is_string(column.type):
        values = [canonical(value) for value in decode(column)]
        valid &= np.array([value is not MISSING for value in values], dtype=bool)
        bits = np.array([_value_bits(value) for value in values], dtype=np.uint64)
    elif pa.types.is_boolean(column.type):
        bits = np.array([_bool_bits(flag) for flag in column.to_pylist()], dtype=np.uint64)
    else:
        floats = column.cast(pa.float64(), safe=False)
        numbers = (floats if whole else floats.fill_null(0.0)).to_numpy()
        bits = _number_bits(np.asarray(numbers, dtype=np.float64))
    hashes = _mix(bits ^ salt)
    return hashes if valid.all() else np.where(valid, hashes, np.uint64(0))


def _number_bits(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> _Hashes:
    bits = (numbers + 0.0).view(np.uint64)  # adding 0.0 turns -0.0 into 0.0
    return np.where(np.isnan(numbers), _NAN, bits)


def _bool_bits(flag: bool | None) -> int:
    return _word(b"true" if flag else b"false")


def _value_bits(value: Any) -> int:
    if value is MISSING:
        return 0
    return _present_bits(value)


def _present_bits(value: Any) -> int:
    """Bits of a value in canonical form; numbers alike, whatever column they stand in."""
    if isinstance(value, bool):
        return _bool_bits(value)
    # Servers return what JSON cannot express as text.
    number = float(value) if isinstance(value, str) and value in _TOKENS else value
    if isinstance(number, int):
        number = as_float(number)
    if isinstance(number, float):
        return int(_number_bits(np.array([number]))[0])
    return _word(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def canonical(value: Any) -> Any:
    """A value as it comes back from W&B: 1.0 is 1, -0.0 is 0, integers of 2^63 and more are
    floats, NaN and infinities are tokens, empty objects are MISSING.
    """
    if isinstance(value, float):
        return _canonical_number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**63 else _canonical_number(as_float(value))
    if isinstance(value, Mapping):
        inner = {str(key): canonical(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not MISSING} or MISSING
    if isinstance(value, list | tuple):
        return [None if (c := canonical(item)) is MISSING else c for item in value]
    return value


def wire_changes(history: History) -> int:
    """How many values W&B's wire writes otherwise: -0.0, integers of 2^63 and more, `{}`."""
    total = 0
    for name in history.table.schema.names:
        column = history.table.column(name)
        if pa.types.is_floating(column.type):
            numbers = column.drop_null().to_numpy()
            total += int(((numbers == 0) & np.signbit(numbers)).sum())
        elif pa.types.is_string(column.type):
            total += sum(_is_rewritten(value) for value in decode(column))
    return total


def _is_rewritten(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value == {} or (isinstance(value, int) and not -(2**63) <= value < 2**63)


def _canonical_number(value: float) -> int | float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return int(value) if value.is_integer() and abs(value) < 2**63 else value
