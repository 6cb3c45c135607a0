"""LevelDB log framing behind W&B's seven-byte file header.

Nothing here knows what a payload means; `reader` and `writer` do.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

BLOCK_SIZE = 32 * 1024
FILE_HEADER = b":W&B\xe1\xbe\x00"
FILE_HEADER_SIZE = len(FILE_HEADER)

_IDENT = FILE_HEADER[:6]
_VERSION = FILE_HEADER[6]
_CHUNK = struct.Struct("<IHB")
_CHUNK_SIZE = _CHUNK.size
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_CRC_OF_TYPE = tuple(zlib.crc32(bytes([kind])) for kind in range(5))
# After damage only a chunk that begins a record is of use.
_BEGINNING = re.compile(rb"[\x01\x02]")
# Block padding is at most six zero bytes, and JSON text holds no NUL: eight zeros before the
# end of a file were never written by a logger.
_ZERO_RUN = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole payload; `offset` is where its first chunk starts in the file."""

    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """A stretch of the file that gave no record.

    `tail` tells a file that ends inside a record (killed writer, live file: whatever is
    missing may still come) from one that is corrupt in the middle.
    """

    offset: int
    length: int
    reason: str
    tail: bool


class HeaderState(Enum):
    """What the first bytes of a file say."""

    OK = "ok"
    EMPTY = "empty"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class Header:
    """Verdict on the first bytes of a file; `reason` is empty when all is well."""

    state: HeaderState
    reason: str = ""


def check_header(head: bytes) -> Header:
    """Judge the first bytes of a file (eight or more, or all there are).

    A writer that has just opened its file leaves nothing or only the header, which is
    "nothing yet" rather than an error.
    """
    if not head:
        return Header(HeaderState.EMPTY, "empty")
    if head[: len(_IDENT)] != _IDENT[: len(head)]:
        return Header(HeaderState.FOREIGN, f"not a W&B log ({_describe(head)})")
    if len(head) < FILE_HEADER_SIZE:
        return Header(HeaderState.EMPTY, "header incomplete")
    if head[6] != _VERSION:
        return Header(
            HeaderState.FOREIGN, f"not a W&B log (header of version {head[6]}, which is not known)"
        )
    if len(head) == FILE_HEADER_SIZE:
        return Header(HeaderState.EMPTY, "header only")
    return Header(HeaderState.OK)


def _describe(head: bytes) -> str:
    start = head[:FILE_HEADER_SIZE]
    if not any(start):
        return "header is all zeros"
    return f"header {start.hex(' ')} = {start!r}"


def read_frames(stream: BinaryIO, *, start: int = 0) -> Iterator[Frame | Damage]:
    """Yield every readable frame of a seekable stream, and every stretch that is not one.

    One block is held in memory at a time, and the record being joined.

    After damage the reader goes on at the first place that proves itself by a checksum:
    where the damaged chunk says that the next one begins, else anywhere further in the same
    block, else the next block. One damaged region is one `Damage`, up to the next frame.

    Args:
        stream: the file, header included; the header itself is not judged here.
        start: offset of a block border to begin at. Frames that begin before it are ignored.
    """
    if start % BLOCK_SIZE:
        raise ValueError(f"start must be a multiple of {BLOCK_SIZE}, not {start}")
    stream.seek(start)
    joiner = _Joiner(inside=start > 0)
    base = start
    while block := _read_fully(stream, BLOCK_SIZE):
        yield from joiner.read_block(base, block)
        base += len(block)
        if len(block) < BLOCK_SIZE:
            break
    yield from joiner.finish(base)


def _read_fully(stream: BinaryIO, size: int) -> bytes:
    # An unbuffered stream may give less than asked for before its end.
    data = stream.read(size)
    while 0 < len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _chunk_header(block: bytes, pos: int) -> tuple[int, int, int]:
    checksum, length, kind = _CHUNK.unpack_from(block, pos)
    return checksum, length, kind


def _is_chunk(block: bytes, pos: int) -> bool:
    if pos + _CHUNK_SIZE > len(block):
        return False
    checksum, length, kind = _chunk_header(block, pos)
    stop = pos + _CHUNK_SIZE + length
    return (
        _FULL <= kind <= _LAST
        and stop <= len(block)
        and zlib.crc32(memoryview(block)[pos + 6 : stop]) == checksum
    )


def _next_chunk(block: bytes, pos: int) -> int | None:
    """Where the first chunk after the damaged one at `pos` starts, None if not in this block."""
    trusted = len(block)
    if pos + _CHUNK_SIZE <= len(block):
        trusted = pos + _CHUNK_SIZE + _chunk_header(block, pos)[1]
    if _is_chunk(block, trusted):
        return trusted
    for match in _BEGINNING.finditer(block, pos + _CHUNK_SIZE):
        candidate = match.start() - 6
        if _is_chunk(block, candidate):
            return candidate
    # A torn chunk cannot prove itself; it is told apart from the damage before it.
    is_torn = trusted < len(block) < BLOCK_SIZE and _fault(block, trusted)[1]
    return trusted if is_torn else None


def _fault(block: bytes, pos: int) -> tuple[str, bool]:
    """Why there is no chunk at `pos`, and whether that looks like a torn tail."""
    if pos + _CHUNK_SIZE > len(block):
        return "the file ends inside a record", True
    checksum, length, kind = _chunk_header(block, pos)
    if checksum == length == kind == 0:
        return "zero-filled", False
    if not _FULL <= kind <= _LAST:
        return f"impossible chunk type {kind}", False
    stop = pos + _CHUNK_SIZE + length
    if stop > BLOCK_SIZE:
        return f"impossible chunk length {length}", False
    if stop > len(block):
        return "the file ends inside a record", True
    return "checksum mismatch", False


class _Joiner:
    """Joins chunks to frames and keeps the account of what could not be joined."""

    def __init__(self, *, inside: bool) -> None:
        # True until the first record begins, when reading starts in the middle of a file.
        self._inside = inside
        self._parts: list[bytes] | None = None
        self._record_at = 0
        self._lost_at: int | None = None
        self._reason = ""
        self._torn_at: int | None = None
        self._zeros_at: int | None = None

    def read_block(self, base: int, block: bytes) -> Iterator[Frame | Damage]:
        view = memoryview(block)
        end = len(block)
        pos = FILE_HEADER_SIZE if base == 0 else 0
        # Fewer than seven bytes before a block border are padding.
        while pos < end and pos + _CHUNK_SIZE <= BLOCK_SIZE:
            if pos + _CHUNK_SIZE > end:
                self._resync(base, block, pos)
                return
            checksum, length, kind = _CHUNK.unpack_from(block, pos)
            stop = pos + _CHUNK_SIZE + length
            if (
                stop > end
                or not _FULL <= kind <= _LAST
                or zlib.crc32(view[pos + 6 : stop]) != checksum
            ):
                pos = self._resync(base, block, pos)
                continue
            data = block[pos + _CHUNK_SIZE : stop]
            if kind == _FULL and self._parts is None and self._lost_at is None:
                self._inside = False
                yield Frame(base + pos, data)
            else:
                yield from self._take(kind, base + pos, data)
            pos = stop

    def finish(self, end: int) -> Iterator[Damage]:
        """Report what is still open at the end of the file."""
        if self._parts is not None:
            self._lose(self._record_at, "the file ends inside a record")
            self._torn_at = self._record_at
        torn_at = self._zeros_at if self._torn_at is None else self._torn_at
        if self._lost_at is None:
            return
        if torn_at is None:
            yield Damage(self._lost_at, end - self._lost_at, self._reason, tail=False)
            return
        if self._lost_at < torn_at:
            yield Damage(self._lost_at, torn_at - self._lost_at, self._reason, tail=False)
        reason = "the file ends inside a record" if self._zeros_at is None else "zero-filled tail"
        yield Damage(torn_at, end - torn_at, reason, tail=True)

    def _take(self, kind: int, at: int, data: bytes) -> Iterator[Frame | Damage]:
        self._zeros_at = None
        if kind in (_FULL, _FIRST):
            self._inside = False
            self._give_up("a record without an end")
            self._parts, self._record_at = [data], at
        elif self._parts is not None:
            self._parts.append(data)
        elif not self._inside:
            self._lose(at, "a record without a beginning")
        if kind in (_FULL, _LAST) and self._parts is not None:
            payload, self._parts = b"".join(self._parts), None
            yield from self._close_loss(self._record_at)
            yield Frame(self._record_at, payload)

    def _close_loss(self, until: int) -> Iterator[Damage]:
        if self._lost_at is not None:
            yield Damage(self._lost_at, until - self._lost_at, self._reason, tail=False)
            self._lost_at = None

    def _lose(self, at: int, reason: str) -> None:
        if self._lost_at is None:
            self._lost_at, self._reason = at, reason

    def _give_up(self, reason: str) -> None:
        if self._parts is not None:
            self._lose(self._record_at, reason)
            self._parts = None

    def _resync(self, base: int, block: bytes, pos: int) -> int:
        """Account for the bad chunk at `pos`; return where to go on in the block."""
        reason, torn = _fault(block, pos)
        at = base + pos if self._parts is None else self._record_at
        self._give_up(reason)
        self._lose(at, reason)
        self._inside = False
        found = _next_chunk(block, pos)
        if found is not None:
            return found
        if torn:
            self._torn_at = at
        self._note_zeros(at, block[pos:])
        return len(block)

    def _note_zeros(self, at: int, rest: bytes) -> None:
        """Remember where the zeros begin that may reach to the end of the file."""
        content = len(rest.rstrip(b"\0"))
        if content and len(rest) - content < _ZERO_RUN:
            self._zeros_at = None
        elif content or self._zeros_at is None:
            self._zeros_at = at


class FrameWriter:
    """Writes the file header and frames to a binary stream that is at its beginning."""

    def __init__(self, stream: BinaryIO) -> None:
        self._write = stream.write
        self._write(FILE_HEADER)
        self._pos = FILE_HEADER_SIZE
        self._blocks = 0

    @property
    def offset(self) -> int:
        """Bytes written so far."""
        return self._blocks * BLOCK_SIZE + self._pos

    def write(self, payload: bytes) -> None:
        """Append one frame."""
        stop = self._pos + _CHUNK_SIZE + len(payload)
        if stop <= BLOCK_SIZE:
            checksum = zlib.crc32(payload, _CRC_OF_TYPE[_FULL])
            self._write(_CHUNK.pack(checksum, len(payload), _FULL) + payload)
            self._pos = stop
        else:
            self._write_split(payload)

    def _write_split(self, payload: bytes) -> None:
        rest = memoryview(payload)
        first = True
        while True:
            room = BLOCK_SIZE - self._pos - _CHUNK_SIZE
            if room < 0:
                self._next_block()
                continue
            last = len(rest) <= room
            self._write_chunk(_chunk_type(first=first, last=last), rest[:room])
            if last:
                return
            rest, first = rest[room:], False

    def _next_block(self) -> None:
        self._write(bytes(BLOCK_SIZE - self._pos))
        self._blocks += 1
        self._pos = 0

    def _write_chunk(self, kind: int, data: memoryview) -> None:
        self._write(_CHUNK.pack(zlib.crc32(data, _CRC_OF_TYPE[kind]), len(data), kind))
        self._write(data)
        self._pos += _CHUNK_SIZE + len(data)


def _chunk_type(*, first: bool, last: bool) -> int:
    if first:
        return _FULL if last else _FIRST
    return _LAST if last else _MIDDLE
