"""verl's `step:N - key:value - ...` lines."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from verl_logsync.columns import AXES

#: Half the last digit that verl up to 0.4.1 prints.
HALF_DIGIT: Final = 0.0005

_STEP: Final = re.compile(r"(?:^|(?<=[\s\])>|:]))step:(\d{1,18}) - ")
_BETWEEN: Final = " - "
_NUMPY: Final = re.compile(r"(?:np|numpy)\.\w+\('?([^()']*)'?\)")
_PLAIN: Final = re.compile(
    r" *(?:(-?(?:\d+\.\d+(?:e[+-]?\d{2,3})?|\d+e[+-]?\d{2,3}|nan|inf))"
    r"|(-?\d{1,400})|(True|False)) *"
)
_FLOAT, _INTEGER = 1, 2
_THREE_DECIMALS: Final = re.compile(r"-?(?:\d+\.\d{3}|nan|inf)")
_NOTHING: Final = frozenset({"0.000", "-0.000"})
# A key of verl has a family and no spaces; so a line that lost its `step:` is told from prose.
_TYPICAL_KEY: Final = re.compile(r"[\w.@()+-]+(?:/[\w.@()+-]+)+")
_PAIR_AT_END: Final = re.compile(r"\w+/[\w.@/()+-]+:-?[\w.()+-]+$")
_BEGINS_AS_PAIR: Final = re.compile(r"\w+/[\w.@/()+-]+:-?\d")
_BROKEN_HEAD: Final = re.compile(r"step:\d{1,18} -(?! )")
_REPLACED: Final = "\ufffd"  # stands for bytes that are no UTF-8
# Bytes that were no text, or a value inside: two pairs that became one.
_NO_KEY: Final = re.compile(r"[\ufffd\x00-\x1f\x7f-\x9f]|:-?\d")
_NOT_IN_KEY: Final = re.compile(r"[ :]")
_LISTED: Final = re.compile(r"\s*(?P<dash>- )?(?P<pairs>\S.*?)\s*$")
_FEWEST: Final = 3
_LONGEST_PAIR: Final = 300
_MOST_LINES: Final = 5000
_SAMPLE: Final = 40


@dataclass(frozen=True, slots=True)
class Record:
    """One step line.

    `dropped` holds the pieces that are no pair, `repeated` counts keys that came twice.
    `coarse` is whether all its numbers have three decimals, as verl up to 0.4.1 prints them,
    and `vanished` are the keys that were printed as 0.000.
    """

    step: int
    values: dict[str, Any]
    dropped: tuple[str, ...] = ()
    repeated: int = 0
    coarse: bool = False
    vanished: tuple[str, ...] = ()


def record_start(text: str) -> re.Match[str] | None:
    """Where a step line begins in a line; other text may stand in front of it."""
    return _STEP.search(text)


def parse_record(text: str) -> Record | None:
    """The record of a line, or None when it is prose.

    What stands in front of `step:` without being known (another scheduler's label, a progress
    bar that did not end its line) is no harm as long as everything behind it is a pair. A
    record without values is one of which nothing can be read.
    """
    found = record_start(text)
    if not found:
        return None
    pieces = text[found.end() :].rstrip().removesuffix(" -").split(_BETWEEN)
    record = _pairs(int(found[1]), pieces)
    if not record.values:
        return record if not found.start() and _is_damaged(pieces[0]) else None
    if found.start() and not text[: found.start()].endswith("]"):
        believable = not record.dropped or is_orphan(text)
        return record if len(record.values) > 1 and believable else None
    return record


def _pairs(step: int, pieces: Sequence[str]) -> Record:
    values: dict[str, Any] = {}
    lost: set[str] = set()
    dropped: list[str] = []
    vanished: list[str] = []
    repeated, coarse = 0, True
    for piece in pieces:
        key, _, printed = piece.rpartition(":")
        value = number(printed)
        if value is None or not _is_key(key):
            dropped.append(piece[:_SAMPLE])
            lost.add(piece.partition(":")[0])
        elif key in values or key in lost:
            repeated += 1  # another record lost its line end: the first is believed
        elif key not in AXES:
            values[key] = value
            coarse = coarse and _THREE_DECIMALS.fullmatch(printed) is not None
            if printed in _NOTHING:
                vanished.append(key)
    return Record(step, values, tuple(dropped), repeated, coarse, tuple(vanished))


@functools.lru_cache(1 << 14)
def _is_key(key: str) -> bool:
    return bool(key) and not _NO_KEY.search(key)


def _is_damaged(text: str) -> bool:
    """Whether text was a pair once, rather than prose."""
    return " " not in text or _has_junk(text) or _BEGINS_AS_PAIR.match(text) is not None


def _has_junk(text: str) -> bool:
    return _REPLACED in text or not text.replace("\t", " ").isprintable()


def number(printed: str) -> float | int | bool | None:
    """The value of a printed number, bare or in numpy's clothes; None when it is none.

    Strict, since a number that was cut (`0.`, `1e-`) must not pass for another one.
    """
    found = _PLAIN.fullmatch(printed)
    if not found:
        dressed = _NUMPY.fullmatch(printed.strip(" "))
        return number(dressed[1]) if dressed else None
    if found.lastindex == _FLOAT:
        return float(found[_FLOAT])
    if found.lastindex == _INTEGER:
        return int(found[_INTEGER])
    return found[0].strip(" ") == "True"


def is_orphan(text: str, first_key: str = "") -> bool:
    """Whether a line holds verl's pairs without a step: the rest of a damaged or broken line.

    Args:
        text: a line that is no record.
        first_key: of the records of this file, if it is known.
    """
    pieces = text.split(_BETWEEN)
    if sum(_is_pair(piece) for piece in pieces) >= _FEWEST or _BROKEN_HEAD.match(text):
        return True
    likely = _has_junk(text) or text.startswith("step") or f" {first_key}:" in f" {text}"
    return likely and bool(_PAIR_AT_END.search(text[-_LONGEST_PAIR:]))


def _is_pair(piece: str) -> bool:
    key, _, printed = piece.rpartition(":")
    return bool(_TYPICAL_KEY.fullmatch(key)) and number(printed) is not None


# -- lines that a terminal broke -----------------------------------------------------------


class Broken:
    """A record of which more lines may follow, because a terminal broke it at its width."""

    #: No terminal is wider; longer lines are broken only where the evidence is in the text.
    WIDEST: Final = 1000

    def __init__(self, text: str, width: int) -> None:
        self.text = text
        self.width = width
        self.lines = 1
        self.ended = False
        self.unsure = False

    def take_listed(self, more: str) -> bool:
        """Add a line of whole pairs when a dash at its start or at the end of the line before says
        that it goes on, as documents quote long records.
        """
        begun = self.text.rstrip()
        pairs = _LISTED.match(more)
        if pairs is None or self.lines >= _MOST_LINES:
            return False
        if bool(pairs["dash"]) == begun.endswith(" -"):
            return False
        begun = begun.removesuffix(" -")
        *whole, last = pairs["pairs"].split(_BETWEEN)
        if number(begun.rpartition(":")[2]) is None or not all(map(_is_pair, whole)):
            return False
        if not _is_pair(last.removesuffix(" -")):
            return False
        self.text = begun + _BETWEEN + pairs["pairs"]
        self.lines += 1
        self.ended = not _is_full(more, self.width)
        return True

    def take(self, more: str, *, known_width: int, longest: int) -> bool:
        """Add a line if it continues the record.

        Args:
            more: the next line, as it stands.
            known_width: the width at which lines of this file were seen to break, or 0.
            longest: of the file's lines so far.
        """
        width = self.width
        if not more or self.ended or _STEP.match(more) or self.lines >= _MOST_LINES:
            return False
        if known_width and not known_width - 1 <= width <= known_width:
            return False
        if len(more) > width + 1 and self.complete:
            return False
        last = self.text.rpartition(_BETWEEN)[2]
        joined = _joined(last, more, max(width, known_width))
        if joined is None:
            return False
        if self.complete and _BETWEEN not in joined and width != known_width:
            # "0.97" and then "8": a broken number, or a number that someone printed.
            self.unsure = _whole(joined) and longest <= width <= self.WIDEST
            return False
        self.text = self.text[: len(self.text) - len(last)] + joined
        self.lines += 1
        self.ended = not _is_full(more, max(width, known_width))
        if len(more) == width + 1:
            self.width += 1  # the first line had lost its trailing space
        return True

    @property
    def complete(self) -> bool:
        """Whether its last pair is whole."""
        return number(self.text.rpartition(":")[2]) is not None


def _joined(last: str, more: str, width: int) -> str | None:
    """The last piece and the new line, when together they are pairs."""
    ends = not _is_full(more, width)
    # A copied terminal line lacks its trailing space, which may belong to " - ".
    for between in ("", " "):
        joined = last + between + more
        *whole, rest = joined.split(_BETWEEN)
        if all(map(_whole, whole)) and (_whole(rest) if ends else " " not in rest.strip(" -")):
            return joined
    return None


def _is_full(line: str, width: int) -> bool:
    """Whether a line reaches the edge of a terminal that is about so wide."""
    return width - 1 <= len(line) <= width + 1


def _whole(piece: str) -> bool:
    key, _, printed = piece.strip(" ").rpartition(":")
    printed_so = not printed.startswith(" ")  # prose has "note: 5"
    return bool(key) and printed_so and not _NOT_IN_KEY.search(key) and number(printed) is not None


def without_last_pair(text: str) -> str:
    """A record's text up to its last pair."""
    return text.rpartition(_BETWEEN)[0] + _BETWEEN + "?"
