"""A 64-bit digest of every row, by which a row that changed after its upload is found.

A digest covers the metrics in the canonical form of W&B's wire (1.0 = 1, -0.0 = 0), not the
clock: re-estimated times are no reason to rewrite history. It does not depend on the order of
keys, on column types, or on which other rows there are. It is no protection against forgery.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import AXES, from_json
from verl_logsync.model import History

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_NAN: Final = np.float64(math.nan).view(np.uint64)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


def row_digests(history: History) -> _Hashes:
    """One digest per row of a history, shape (rows,), uint64."""
    total = _mix(history.steps.astype(np.uint64))
    for name in history.table.column_names:
        if name not in AXES:
            total = total + _column_hashes(name, history.table.column(name))
    return total


def overall_digest(digests: _Hashes) -> str:
    """One digest over the digests of consecutive rows."""
    return hashlib.blake2b(np.ascontiguousarray(digests).tobytes(), digest_size=8).hexdigest()


def _mix(bits: _Hashes) -> _Hashes:
    """The finaliser of splitmix64: spreads every bit over the whole word."""
    bits = bits + _ODD
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _word(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


def _column_hashes(name: str, column: pa.ChunkedArray) -> _Hashes:
    salt = _word(name.encode(errors="surrogatepass"))
    valid = column.is_valid().to_numpy()
    if pa.types.is_string(column.type):
        bits = np.array([_text_bits(text) for text in column.to_pylist()], dtype=np.uint64)
    elif pa.types.is_boolean(column.type):
        bits = np.array([_bool_bits(flag) for flag in column.to_pylist()], dtype=np.uint64)
    else:
        numbers = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy()
        bits = _number_bits(np.asarray(numbers, dtype=np.float64))
    return np.where(valid, _mix(bits ^ salt), np.uint64(0))


def _number_bits(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> _Hashes:
    bits = (numbers + 0.0).view(np.uint64)  # adding 0.0 turns -0.0 into 0.0
    return np.where(np.isnan(numbers), _NAN, bits)


def _bool_bits(flag: bool | None) -> np.uint64:
    return _word(b"true" if flag else b"false")


def _text_bits(text: str | None) -> np.uint64:
    if text is None:
        return np.uint64(0)
    value = from_json(text)
    if isinstance(value, bool):
        return _bool_bits(value)
    if isinstance(value, int | float):
        return np.uint64(_number_bits(np.array([float(value)]))[0])
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return _word(canonical.encode(errors="surrogatepass"))
