"""What reward functions returned beside the score, gathered column by column as numbers.

verl 0.8 - 0.9 (v0) fall back to `str()` for numpy values, so booleans and numbers may stand in
a dump as text. A column is taken back to numbers only when all of its values are such text, and
never when its name says that it holds answers.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from verl_logsync.columns import as_float
from verl_logsync.rollouts.records import OWN_KEYS

#: Names (or last words of names) of columns whose text is text, also where it looks like numbers.
TEXT_NAMES: Final = frozenset(
    {
        "pred",
        "prediction",
        "answer",
        "ans",
        "gts",
        "gt",
        "ground_truth",
        "truth",
        "solution",
        "label",
        "target",
        "text",
        "source",
        "data_source",
        "id",
        "uid",
        "index",
    }
)
#: More keys than this are no reward function's; the others are counted.
MOST_EXTRAS: Final = 256

_NUMBER: Final = re.compile(
    r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?inf|nan", re.IGNORECASE
)
_LONGEST_NUMBER: Final = 40
_TRUTH: Final = {"True": 1.0, "False": 0.0}
_PLAIN: Final = frozenset({float, int, bool})

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Extra:
    """One extra of a dump. `values` has one number a row (NaN: none); None when it is text.

    `coerced` names what was written as text and taken as what it says.
    """

    values: _Floats | None
    why_not: str = ""
    coerced: str = ""


class Extras:
    """The extras of a file, gathered block by block."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._beyond: set[str] = set()
        self._rows = 0

    def take(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Add the extras of `count` more rows."""
        for key, values in columns.items():
            if key in OWN_KEYS:
                continue
            column = self._columns.get(key)
            if column is None:
                if len(self._columns) >= MOST_EXTRAS:
                    self._note_beyond(key)
                    continue
                column = self._columns[key] = _Column(key)
            column.take(values, self._rows)
        self._rows += count

    def _note_beyond(self, key: str) -> None:
        if len(self._beyond) < MOST_EXTRAS:
            self._beyond.add(key)

    @property
    def beyond(self) -> int:
        """How many further keys were seen and left out (counted up to `MOST_EXTRAS`)."""
        return len(self._beyond)

    def finish(self) -> dict[str, Extra]:
        """Every extra, one number a row where it is numbers."""
        return {key: column.finish(self._rows) for key, column in sorted(self._columns.items())}


class _Column:
    def __init__(self, key: str) -> None:
        self._is_text = _last_word(key) in TEXT_NAMES or key.lower() in TEXT_NAMES
        self._numbers = array("d")
        self._as_written = self._as_numbers = self._as_truth = False
        self._why_not = ""

    def take(self, values: Sequence[Any], row: int) -> None:
        if self._why_not:
            return
        self._pad(row)
        kinds = set(map(type, values)) - {type(None)}
        if kinds <= _PLAIN:
            self._as_written = self._as_written or bool(kinds)
            self._numbers.extend(map(_number, values))
        elif kinds == {str} and not self._is_text:
            self._take_texts(values)
        else:
            self._give_up("text" if str in kinds else "lists or objects")

    def _take_texts(self, values: Sequence[Any]) -> None:
        for value in values:
            if value is None:
                self._numbers.append(math.nan)
            elif value in _TRUTH:
                self._as_truth = True
                self._numbers.append(_TRUTH[value])
            elif (number := as_number(value)) is not None:
                self._as_numbers = True
                self._numbers.append(number)
            else:
                self._give_up("text")
                return

    def _pad(self, row: int) -> None:
        if len(self._numbers) < row:
            self._numbers.extend([math.nan] * (row - len(self._numbers)))

    def _give_up(self, why: str) -> None:
        self._why_not = f"its values are {why}, no numbers"
        self._numbers = array("d")

    def finish(self, rows: int) -> Extra:
        if self._why_not:
            return Extra(None, self._why_not)
        if self._as_written + self._as_numbers + self._as_truth > 1:
            return Extra(None, "its values are partly text, partly numbers")
        self._pad(rows)
        coerced = "numbers" if self._as_numbers else "booleans" if self._as_truth else ""
        return Extra(np.frombuffer(self._numbers) if rows else np.empty(0), coerced=coerced)


def _last_word(key: str) -> str:
    return re.split(r"[^a-z]+", key.lower().rstrip("_"))[-1]


def _number(value: float | None) -> float:
    if value is None:
        return math.nan
    return as_float(value) if type(value) is int else value


def as_number(value: Any) -> float | None:
    """The number that a value is or that its text says; None when it is none."""
    if type(value) in _PLAIN:
        return _number(value)
    if type(value) is str and len(value) < _LONGEST_NUMBER and _NUMBER.fullmatch(value):
        return float(value)
    return None
