"""Lines of a JSON Lines file, however large, broken or unfinished it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from verl_logsync.errors import unreadable

#: W&B's uploader skips rows over this size; a longer line is never held in memory.
LONGEST_LINE: Final = (10 << 20) - (100 << 10)


#: What some editors and file systems put before the first line.
BOM: Final = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line: its bytes without the line end, where it starts, and whether it had an end."""

    number: int
    offset: int
    data: bytes
    ended: bool
    too_long: bool = False


def read_lines(path: Path) -> Iterator[Line]:
    """Every non-empty line of a file, split at line feeds only.

    (`str.splitlines` would also split at U+2028 and others, which occur inside JSON strings.)

    Raises:
        UnreadableInput: the file cannot be opened or read.
    """
    try:
        with path.open("rb", buffering=1 << 20) as stream:
            yield from _lines(stream)
    except OSError as error:
        raise unreadable(path, error) from error


def _lines(stream: BinaryIO) -> Iterator[Line]:
    number = offset = 0
    while data := stream.readline(LONGEST_LINE):
        number += 1
        start = offset
        offset += len(data)
        if data.endswith(b"\n"):
            if len(data) > 1:
                yield Line(number, start, data, True)
        elif len(data) < LONGEST_LINE:
            yield Line(number, start, data, ended=False)
            return  # what a writer adds meanwhile is the rest of this very line
        else:
            offset += _skip_line(stream)
            yield Line(number, start, data[:80], ended=True, too_long=True)


def _skip_line(stream: BinaryIO) -> int:
    skipped = 0
    while data := stream.readline(LONGEST_LINE):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped


def parse_line(data: bytes) -> Any:
    """The value of a line; bare NaN and infinities (verl before 0.7.1) are numbers.

    Raises:
        ValueError: it is not JSON; the message says why in a few words.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(data.removeprefix(BOM).decode())
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no character") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
