"""What a launcher of no known form puts in front of the lines, learnt from the step lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from verl_logsync.sources.console.lines import (
    RAY,
    STAMP,
    content,
    plain_line,
    stretches,
    without_ansi,
)
from verl_logsync.sources.console.records import parse_record, record_start

#: So many records show what stands in front of all, so far into the file at most.
_SHOWN: Final = 16
_SEARCHED: Final = 64 << 20
# Lines that look like records and are none: after so many nothing is learnt any more.
_MOST_TRIES: Final = 500
#: No prefix is longer, with and without colours.
_LONGEST: Final = 200
_LONGEST_RAW: Final = 2_000
#: This share of the records has the same one.
_NEARLY_ALL: Final = 0.9
_STEP: Final = re.compile(rb"step:\d{1,18} - ")
# What differs from line to line: numbers, padded with spaces, and the words of a date.
_VARIES: Final = re.compile(
    r"(?P<number> *\d+)|\b(?P<day>Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b|\b(?P<half>[AP]M)\b"
    r"|\b(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b"
)
# Neighbours never match the same character, so that no line is tried in more than one way.
_ANY: Final = {
    "number": r" {0,8}\d{1,20}",
    "day": r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)",
    "half": r"(?:AM|PM)",
    "month": r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)",
}
_KNOWN_FORM: Final = re.compile(rf"{RAY}|{STAMP}")


def learn_prefix(pieces: Iterable[bytes]) -> re.Pattern[str] | None:
    """What nearly all of a file's first records have in front of them, apart from numbers.

    None where that is nothing, or not the same. The pattern is tried at the start of a line that
    `content` has freed of what is known.

    Args:
        pieces: the file from its start; only as much of it is taken as is needed.
    """
    forms: list[str] = []
    for before in _before_records(pieces):
        forms.append(_form(before))
        if len(forms) == _SHOWN or forms == ["", ""]:  # most files have none: that is soon clear
            break
    usual, count = Counter(forms).most_common(1)[0] if forms else ("", 0)
    return re.compile(usual) if usual and count >= _NEARLY_ALL * len(forms) else None


def _before_records(pieces: Iterable[bytes]) -> Iterator[str]:
    """What stands in front of each record, without what has a known form."""
    tries = 0
    for stretch in stretches(pieces):
        if stretch.offset > _SEARCHED or not stretch.ended:
            return
        data, position = stretch.data, 0
        while found := _STEP.search(data, position):
            start = data.rfind(b"\n", 0, found.start()) + 1
            end = data.find(b"\n", found.start())
            end = end if end >= 0 else len(data)
            position, tries = end, tries + 1
            if tries > _MOST_TRIES:
                return
            if found.start() - start <= _LONGEST_RAW:
                before = _before_record(data[start:end])
                if before is not None:
                    yield before


def _before_record(line: bytes) -> str | None:
    text = content(without_ansi(plain_line(line).decode(errors="replace"))).text
    found = record_start(text)
    if found is None or found.start() > _LONGEST or parse_record(text) is None:
        return None
    before = text[: found.start()]
    # Who printed a line, and when, is read from it once the rest is gone.
    known = _KNOWN_FORM.search(before)
    if known and not content(before[known.start() :]).text:
        before = before[: known.start()]
    return before if before.strip() else ""  # indented lines are quoted, and may be broken


def _form(before: str) -> str:
    """A pattern of everything that is the same text but for its numbers and dates."""
    parts, end = [], 0
    for found in _VARIES.finditer(before):
        parts += [re.escape(before[end : found.start()]), _ANY[found.lastgroup or ""]]
        end = found.end()
    return "".join(parts) + re.escape(before[end:])
