"""What an existing log of this rank says: where a new start of the job goes on."""

from __future__ import annotations

import os

from verl_logsync.steplog.layout import HEADER_START, SCHEMA

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

_BLOCK: Final = 1 << 20
_FIRST_STEP: Final = rb'(?m)^\{"step":(\d{1,18}),'


class Known:
    """The state of a rank's log before this start.

    `header` is the latest header in it (empty when there is none), `first_step` the step of its
    first record, `torn` whether its last line has no end.
    """

    __slots__ = ("first_step", "header", "torn")

    def __init__(self, header: Mapping[str, Any], first_step: int | None, *, torn: bool) -> None:
        self.header = header
        self.first_step = first_step
        self.torn = torn


def look(descriptor: int) -> Known:
    """Look at an open log file.

    Raises:
        OSError: it cannot be read.
    """
    size = os.fstat(descriptor).st_size
    if not size:
        return Known({}, None, torn=False)
    header = _last_header(descriptor, size)
    torn = os.pread(descriptor, 1, size - 1) != b"\n"
    return Known(header, _first_step(descriptor, header), torn=torn)


def parse_header(line: bytes) -> dict[str, Any]:
    """The header on a line; empty when there is none or it is of a newer format."""
    if not line.startswith(HEADER_START):
        return {}
    import json

    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    known = isinstance(header, dict) and header.get("step_log") == SCHEMA
    return header if known else {}


def _last_header(descriptor: int, size: int) -> dict[str, Any]:
    """Searched from the end, block by block: an attempt's records may be many."""
    start = size
    while start > 0:
        start = max(0, start - _BLOCK)
        block = os.pread(descriptor, 2 * _BLOCK, start)
        place = len(block)
        while (place := block.rfind(HEADER_START, 0, place)) >= 0:
            at_line_start = place == 0 or block[place - 1 : place] == b"\n"
            header = parse_header(_line(descriptor, start + place)) if at_line_start else {}
            if header:
                return header
    return {}


def _line(descriptor: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while part := os.pread(descriptor, _BLOCK, offset):
        head, end, _ = part.partition(b"\n")
        parts.append(head)
        offset += len(part)
        if end:
            break
    return b"".join(parts)


def _first_step(descriptor: int, header: Mapping[str, Any]) -> int | None:
    log = header.get("log")
    known = log.get("first_step") if isinstance(log, dict) else None
    if isinstance(known, int):
        return known
    import re

    found = re.search(_FIRST_STEP, os.pread(descriptor, 2 * _BLOCK, 0))
    return int(found[1]) if found else None
