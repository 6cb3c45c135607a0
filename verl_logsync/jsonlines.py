"""Lines of a JSON Lines file, however large, broken or unfinished it is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from verl_logsync.errors import unreadable

#: W&B's uploader skips rows over this size; a longer line is never held in memory.
LONGEST_LINE: Final = (10 << 20) - (100 << 10)

# Lines are read by so many bytes at a time: what is made of them stays in the processor's cache.
_BLOCK: Final = 1 << 16
_BRACE: Final = ord("{")

#: What some editors and file systems put before the first line.
BOM: Final = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line: its bytes without the line end, where it starts, and whether it had an end."""

    number: int
    offset: int
    data: bytes
    ended: bool
    too_long: bool = False


#: What may take several lines at once: it is given whole lines that all start with a brace, and
#: their number, and says whether it took them. If it did not, it changed nothing.
Taker = Callable[[bytes, int], bool]


def read_lines(path: Path, take: Taker | None = None) -> Iterator[Line]:
    """Every non-empty line of a file, split at line feeds only.

    (`str.splitlines` would also split at U+2028 and others, which occur inside JSON strings.)

    Args:
        path: the file.
        take: is offered lines before they are yielded, in the order of the file; those that it
            takes are not yielded.

    Raises:
        UnreadableInput: the file cannot be opened or read.
    """
    try:
        with path.open("rb", buffering=1 << 20) as stream:
            yield from _lines(stream, take)
    except OSError as error:
        raise unreadable(path, error) from error


def _lines(stream: BinaryIO, take: Taker | None) -> Iterator[Line]:
    number, offset = 1, 0
    while block := _block(stream):
        count = _records_in(block) if take and len(block) <= LONGEST_LINE else 0
        if count and take and take(block, count):
            number += count
        else:
            for line in _split(block, number, offset):
                if len(line.data) > 1 or not line.ended:
                    yield line
                number += 1
        offset += len(block)
        if not block.endswith(b"\n"):
            if not _is_cut(block):
                return  # what a writer adds meanwhile is the rest of this very line
            offset += _skip_line(stream)


def _block(stream: BinaryIO) -> bytes:
    """The next whole lines; the last one has no end where the file ends or it is too long."""
    block = stream.read(_BLOCK)
    if block and not block.endswith(b"\n"):
        block += stream.readline(LONGEST_LINE)
    return block


def _records_in(block: bytes) -> int:
    """How many lines there are, if all of them start with a brace, else 0."""
    count = at = 0
    last = len(block)
    while at < last and block[at] == _BRACE:
        count += 1
        # A loop of `find` takes a quarter of the time of `count`, where lines are long.
        at = block.find(b"\n", at) + 1 or last
    return count if at == last else 0


def _split(block: bytes, number: int, offset: int) -> Iterator[Line]:
    for line in io.BytesIO(block):
        if len(line) <= LONGEST_LINE:
            yield Line(number, offset, line, line.endswith(b"\n"))
        else:
            yield Line(number, offset, line[:80], ended=True, too_long=True)
        number += 1
        offset += len(line)


def _is_cut(block: bytes) -> bool:
    """Whether the last line is longer than what is held of it."""
    return len(block) - (block.rfind(b"\n") + 1) > LONGEST_LINE


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
