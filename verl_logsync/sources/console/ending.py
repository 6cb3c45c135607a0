"""How a console ends: done, broken by an error, or not at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from verl_logsync.model import Ending
from verl_logsync.sources.console.attempts import Attempts
from verl_logsync.sources.console.lines import content

_TAIL: Final = 2000
_BAR: Final = re.compile(r"Training Progress: *\d+%\|.*?\| (\d+)/(\d+) ")
_TRACEBACK: Final = "Traceback (most recent call last)"
_ERROR: Final = re.compile(
    r"(?:ray\.exceptions\.)?(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\b"
    r"(?:\([\w.]+\))?)(?::\s|$)"
)
_LONGEST: Final = 200
_LONGEST_LINE: Final = 4_000


def ending(
    attempts: Attempts, console: Sequence[str], prefix: re.Pattern[str] | None = None
) -> Ending | None:
    """What the text says about the end of the last start of the job.

    Training that ended by itself is done, whatever its processes say when they are torn down.
    """
    if not attempts.began_again:
        if attempts.now.finals:
            return Ending(0, "the final validation was printed")
        if attempts.reached_total:
            return Ending(0, "the last training step was logged")
    tail = list(console[-_TAIL:])
    bar = _last_bar(tail)
    if bar is not None and bar[1] and bar[0] >= bar[1] and not attempts.began_again:
        return Ending(0, "the progress bar reached its end")
    error = _last_error(tail, attempts.now.owners, prefix)
    return Ending(1, error) if error else None


def _last_bar(tail: Sequence[str]) -> tuple[int, int] | None:
    for line in reversed(tail):
        found = _BAR.search(line[-_LONGEST_LINE:])
        if found:
            return int(found[1][:18]), int(found[2][:18])
    return None


def _last_error(tail: Sequence[str], owners: set[str], prefix: re.Pattern[str] | None) -> str:
    """The exception that ended the driver or the trainer; empty if it went on or there is none.

    Tracebacks of other workers are no end: many are survived.
    """
    error, seen = "", False
    for line in tail:
        inside = content(line, prefix)
        if inside.owner and inside.owner not in owners:
            continue
        text = inside.text.strip()[:_LONGEST_LINE]
        if _TRACEBACK in text:
            seen = True
        elif seen and (found := _ERROR.match(text)):
            error = text[:_LONGEST] if found["name"] else error
        elif text.startswith("step:") or _BAR.search(text):
            error, seen = "", False
    return error
