"""Metric values -> JSON text, without importing the libraries that the values come from.

numpy and torch values are known by their `tolist`, W&B's histograms and tables by their
attributes. Whatever a value does when it is asked, `encode` returns.
"""

from __future__ import annotations

import math

from verl_logsync.steplog.layout import HISTOGRAM, LONGEST_RECORD, TABLE

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, Final

#: Bins of a histogram unless told otherwise. W&B shows at most 512.
BINS: Final = 64
#: Rows of a table that are kept unless told otherwise.
TABLE_ROWS: Final = 100
# More dimensions than numpy has.
_DEEPEST: Final = 64


def histogram(values: Any, bins: int = BINS) -> dict[str, Any]:
    """Counts of numbers between their smallest and largest, in W&B's form.

    Args:
        values: an array, a tensor, or a sequence of numbers, however nested.
        bins: how many bins of equal width.

    Returns:
        `_type`, `bins` (one edge more than bins), `values` (counts); `not_finite` counts NaN
        and infinities, when there are any.

    Raises:
        ValueError: there is no finite number.
    """
    numbers = _flat(values.tolist() if hasattr(values, "tolist") else values)
    finite = [number for number in numbers if math.isfinite(number)]
    if not finite:
        raise ValueError("no finite number to count")
    low, high = min(finite), max(finite)
    width = high / bins - low / bins
    if not width > 0:
        around = max(0.5, abs(low) * 1e-9)
        low, high = low - around, high + around
        width = high / bins - low / bins
    counts = [0] * bins
    base = low / width
    for number in finite:
        counts[min(bins - 1, max(0, int(number / width - base)))] += 1
    edges = [low + width * index for index in range(bins)]
    made: dict[str, Any] = {"_type": HISTOGRAM, "bins": [*edges, high], "values": counts}
    if len(finite) < len(numbers):
        made["not_finite"] = len(numbers) - len(finite)
    return made


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], limit: int = TABLE_ROWS
) -> dict[str, Any]:
    """A small table. Rows beyond the limit are left out, and `rows` says how many there were."""
    whole = [list(row) for row in rows]
    made = {"_type": TABLE, "columns": [str(name) for name in columns], "data": whole[:limit]}
    return made if len(whole) <= limit else {**made, "rows": len(whole)}


def encode(data: Mapping[str, Any]) -> tuple[bytes, Mapping[str, int]]:
    """JSON text of a record's data; values that cannot be written are left out and counted."""
    try:
        text = _encode(data).encode()
    # Values are asked by their own methods, which may raise whatever they like (a CUDA error in
    # `tolist`, a mapping that changes meanwhile): no value may end the training.
    except Exception:  # noqa: BLE001
        return _piecewise(data)
    return (text, {}) if len(text) <= LONGEST_RECORD else _piecewise(data)


def encode_config(config: Any) -> bytes:
    """JSON text of a config; what JSON does not know is kept as its text.

    Raises:
        ValueError: it is nested too deeply, or holds itself.
    """
    import json

    try:
        text = json.dumps(config, separators=(",", ":"), skipkeys=True, default=_mapping_or_text)
    except Exception as error:  # noqa: BLE001 - see `encode`
        raise ValueError(f"config: {type(error).__name__}") from None
    return text.encode()


def _mapping_or_text(value: Any) -> Any:
    return dict(value.items()) if hasattr(value, "items") else str(value)


def _piecewise(data: Mapping[str, Any]) -> tuple[bytes, Mapping[str, int]]:
    """Each value by itself: the bad ones, and the largest ones of too many, are left out."""
    left_out: dict[str, int] = {}
    pieces: list[bytes] = []
    for key, value in list(data.items()):
        piece, reason = _piece(key, value)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        if piece:
            pieces.append(piece)
    pieces, too_large = _fitting(pieces)
    if too_large:
        left_out["too large"] = too_large
    return (b"{" + b",".join(pieces) + b"}", left_out)


def _piece(key: Any, value: Any) -> tuple[bytes, str]:
    """`"key":value`, empty when it cannot be written, and what is wrong with it."""
    try:
        text = _encode({key: value})[1:-1]
    except Exception as error:  # noqa: BLE001 - see `encode`
        return b"", f"{_type_name(value)}: {type(error).__name__}"
    try:
        return text.encode(), ""
    except UnicodeEncodeError:
        return text.encode(errors="replace"), "text mended: half of a surrogate pair"


def _fitting(pieces: list[bytes]) -> tuple[list[bytes], int]:
    """The pieces without the largest ones, so that a record of them is not too long."""
    room = LONGEST_RECORD
    kept: set[int] = set()
    for index in sorted(range(len(pieces)), key=lambda i: len(pieces[i])):
        room -= len(pieces[index]) + 1
        if room < 0:
            break
        kept.add(index)
    return [p for i, p in enumerate(pieces) if i in kept], len(pieces) - len(kept)


def _type_name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _plain(value: Any) -> Any:
    """What stands for a value that JSON does not know. Raises TypeError for all others."""
    if hasattr(value, "tolist"):
        return _from_array(value)
    if hasattr(value, "histogram") and hasattr(value, "bins"):
        edges, counts = _as_list(value.bins), _as_list(value.histogram)
        return {"_type": HISTOGRAM, "bins": edges, "values": counts}
    if hasattr(value, "columns") and hasattr(value, "data"):
        return table(value.columns, value.data)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, set | frozenset | range):
        return list(value)
    if hasattr(value, "items"):
        return dict(value.items())
    if hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"no number, text or array: {_type_name(value)}")


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _from_array(value: Any) -> Any:
    plain = value.tolist()
    if isinstance(plain, list):
        numbers = _flat(plain)
        return numbers[0] if len(numbers) == 1 else histogram(numbers)
    if type(plain) is type(value):  # numpy's long double gives itself
        return float(plain)
    return plain


def _flat(values: Any) -> list[float]:
    """The numbers in nested sequences, in order."""
    from collections.abc import Iterable, Mapping

    numbers: list[float] = []
    level = [(values, 0)]
    while level:
        item, depth = level.pop()
        if isinstance(item, int | float):
            numbers.append(item)
        elif isinstance(item, Iterable) and not isinstance(item, str | bytes | Mapping):
            if depth > _DEEPEST:  # also a list that holds itself
                raise ValueError("nested too deeply")
            level.extend((inner, depth + 1) for inner in reversed(list(item)))
        elif hasattr(item, "__float__"):
            numbers.append(float(item))
        else:
            raise TypeError(f"no number: {_type_name(item)}")
    return numbers


def _encode(data: Mapping[Any, Any]) -> str:
    import json

    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, default=_plain)
