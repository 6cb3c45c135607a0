"""The bytes of a plain or compressed file, piece by piece."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from verl_logsync.errors import InputError, NotALog, UnreadableInput

#: Bytes that are read at once.
PIECE: Final = 1 << 18

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
# A piece of a highly compressed file unpacks to this much at most before it is handed on.
_UNPACKED: Final = 1 << 20
_BITE: Final = 1 << 12
_OWN_WINDOW: Final = 31  # zlib's word for "expect a gzip header, and check the sum at the end"


class NoDecompressor(InputError):
    """This Python cannot unpack the file."""


class _Unpacker(Protocol):
    """One member (gzip) or frame (zstd) of a compressed file."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def unpack(self, data: bytes) -> Iterator[bytes]: ...


class Unpacked:
    """Iterates over a file's content.

    After the last piece `cut` says that a compressed file ends too early, and `trailing` how
    many bytes follow its end that are not part of it.
    """

    def __init__(self, path: Path) -> None:
        self.cut = False
        self.trailing = 0
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of at most about 1 MiB.

        Raises:
            UnreadableInput: the operating system refuses.
            NotALog: compressed data is damaged, so that none of it can be trusted.
            NoDecompressor: there is nothing to unpack it with.
        """
        try:
            with self._path.open("rb", buffering=0) as stream:
                first = stream.read(PIECE)
                kind = packing(first)
                if kind:
                    yield from self._unpacked(kind, first, stream)
                else:
                    yield from _read_on(first, stream)
        except OSError as error:
            raise UnreadableInput(
                f"cannot be read: {error.strerror}",
                place=str(self._path),
                hint=f"Check it with: ls -l {str(self._path)!r}",
            ) from error

    def _unpacked(self, kind: str, first: bytes, stream: BinaryIO) -> Iterator[bytes]:
        place = str(self._path)
        errors: tuple[type[Exception], ...] = (zlib.error, *_zstd_errors())
        unpacker: _Unpacker | None = None
        rest = b""
        for data in _read_on(first, stream):
            rest += data
            while unpacker is not None or len(rest) >= len(_ZSTD):
                if unpacker is None:
                    if packing(rest) != kind:
                        break
                    unpacker = _unpacker(kind, place)
                try:
                    yield from unpacker.unpack(rest)
                except errors as error:
                    raise _damaged(place, kind, str(error)) from error
                rest = unpacker.unused_data
                if not unpacker.eof:
                    break
                unpacker = None
            if unpacker is None and len(rest) >= len(_ZSTD):
                self.trailing += len(rest.strip(b"\0"))
                rest = b""
        self.cut = unpacker is not None


def packing(head: bytes) -> str:
    """How a file that begins so is compressed: "gzip", "zstd" or ""."""
    if head.startswith(_GZIP):
        return "gzip"
    return "zstd" if head.startswith(_ZSTD) else ""


def _read_on(first: bytes, stream: BinaryIO) -> Iterator[bytes]:
    data = first
    while data:
        yield data
        data = stream.read(PIECE)


def _damaged(place: str, kind: str, why: str) -> NotALog:
    tool = "gzip" if kind == "gzip" else "zstd"
    return NotALog(
        f"compressed data is damaged ({why}), so none of it can be trusted",
        place=place,
        hint=f"Copy it again, or see what is left with: {tool} -dc {place!r}",
    )


class _Gzip:
    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=_OWN_WINDOW)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def unpack(self, data: bytes) -> Iterator[bytes]:
        while not self._inner.eof:
            text = self._inner.decompress(data, _UNPACKED)
            yield text
            data = self._inner.unconsumed_tail
            if not data and len(text) < _UNPACKED:
                return


class _Zstd:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._behind = b""

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self._behind if self.eof else b""

    def unpack(self, data: bytes) -> Iterator[bytes]:
        # Small bites: a frame of zeros unpacks to thousands of times its size.
        for start in range(0, len(data), _BITE):
            yield self._inner.decompress(data[start : start + _BITE])
            if self._inner.eof:
                self._behind = data[start + _BITE :]
                return


def _unpacker(kind: str, place: str) -> _Unpacker:
    if kind == "gzip":
        return _Gzip()
    for name in ("compression.zstd", "zstandard"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        maker = module.ZstdDecompressor()
        return _Zstd(maker.decompressobj() if name == "zstandard" else maker)
    raise NoDecompressor(
        "this Python cannot unpack zstd",
        place=place,
        hint="Install it with: pip install zstandard (Python 3.14 has it built in)",
    )


def _zstd_errors() -> tuple[type[Exception], ...]:
    found: list[type[Exception]] = []
    for name in ("compression.zstd", "zstandard"):
        try:
            found.append(importlib.import_module(name).ZstdError)
        except ImportError:
            continue
    return tuple(found)
