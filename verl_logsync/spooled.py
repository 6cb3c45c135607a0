"""Lines of text that are too many for memory: they wait in a temporary file until they are sent.

A console may have millions of lines, of which nothing but the last ones is looked at again. The
file has no name, lies in `$TMPDIR`, and is gone with its reader.
"""

from __future__ import annotations

import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar, overload

from verl_logsync.errors import WriteError

_T = TypeVar("_T")

# Shorter texts never leave memory; of longer ones so much is read at once, or one line.
_IN_MEMORY: Final = 4 << 20
_BLOCK: Final = 1 << 16
# Single lines are written so many at once.
_TOGETHER: Final = 256


class Spool:
    """Takes lines one after another; a line that was taken can be replaced."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - closed by the next
        weakref.finalize(self, self._file.close)
        self._count = self._size = 0
        self._numbers, self._offsets = array("Q", [0]), array("Q", [0])
        self._replaced: dict[int, str] = {}
        self._waiting: list[str] = []
        self._at_end = True

    def __len__(self) -> int:
        return self._count + len(self._waiting)

    def __getitem__(self, index: int) -> str:
        return next(self.between(index, index + 1))

    def __setitem__(self, index: int, line: str) -> None:
        self._replaced[index] = line

    def append(self, line: str) -> None:
        """Take one line, which holds no line feed. Raises WriteError."""
        self._waiting.append(line)
        if len(self._waiting) >= _TOGETHER:
            self._flush()

    def extend(self, lines: Sequence[str]) -> None:
        """Take lines, none of which holds a line feed. Raises WriteError."""
        self._flush()
        self._write(lines)

    def _flush(self) -> None:
        lines, self._waiting = self._waiting, []
        self._write(lines)

    def _write(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        if self._size - self._offsets[-1] >= _BLOCK:
            self._numbers.append(self._count)
            self._offsets.append(self._size)
        data = "\n".join((*lines, "")).encode(errors="surrogatepass")
        with _explained():
            if not self._at_end:
                self._file.seek(0, 2)
                self._at_end = True
            self._file.write(data)
        self._count += len(lines)
        self._size += len(data)

    def between(self, start: int, stop: int) -> Iterator[str]:
        """The lines from one number up to another. Raises WriteError."""
        self._flush()
        block = bisect_right(self._numbers, start) - 1
        ends = (*self._offsets[block + 1 :], self._size)
        number = self._numbers[block]
        for offset, end in zip(self._offsets[block:], ends, strict=True):
            if number >= stop:
                return
            lines = self._read(offset, end)
            for index in range(max(start, number), min(stop, number + len(lines))):
                yield self._replaced.get(index, lines[index - number])
            number += len(lines)

    def _read(self, offset: int, end: int) -> list[str]:
        with _explained():
            self._at_end = False
            self._file.seek(offset)
            data = self._file.read(end - offset)
        return data.decode(errors="surrogatepass").split("\n")[:-1]

    def lines(self) -> Lines:
        """What was taken until now."""
        return Lines(self, 0, len(self))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"the temporary file for console text cannot be used: {error.strerror or error}",
            place=tempfile.gettempdir(),
            hint="Set TMPDIR to a folder with room for the logs that are read",
        ) from error


class Lines(Sequence[str]):
    """A stretch of a spool's lines, changed on their way out."""

    def __init__(
        self, spool: Spool, start: int, stop: int, changes: tuple[Callable[[str], str], ...] = ()
    ) -> None:
        self._spool = spool
        self._start = start
        self._stop = stop
        self._changes = changes

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[str]:
        lines = self._spool.between(self._start, self._stop)
        for change in self._changes:
            lines = map(change, lines)
        return lines

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Lines: ...
    def __getitem__(self, index: int | slice) -> str | Lines:
        """A line, or consecutive lines, which are not read yet."""
        places = range(self._start, self._stop)[index]
        if isinstance(places, int):
            return next(iter(Lines(self._spool, places, places + 1, self._changes)))
        if places.step != 1:
            raise ValueError("only consecutive lines")
        return Lines(self._spool, places.start, max(places.start, places.stop), self._changes)

    def changed(self, change: Callable[[str], str]) -> Lines:
        """The same lines, each as `change` gives it."""
        return Lines(self._spool, self._start, self._stop, (*self._changes, change))


class Joined(Sequence[_T]):
    """Several sequences as one that is not copied."""

    def __init__(self, parts: Sequence[Sequence[_T]]) -> None:
        self._parts = tuple(part for part in parts if len(part))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[_T]:
        for part in self._parts:
            yield from part

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Joined[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Joined[_T]:
        """An item, or consecutive ones."""
        places = range(len(self))[index]
        found: list[Sequence[_T]] = []
        begun = 0
        for part in self._parts:
            if isinstance(places, int):
                if places < begun + len(part):
                    return part[places - begun]
            else:
                found.append(part[max(0, places.start - begun) : max(0, places.stop - begun)])
            begun += len(part)
        return Joined(found)


def changed(lines: Sequence[str], change: Callable[[str], str]) -> Sequence[str]:
    """Lines as `change` gives them, read when they are needed if they lie in a file."""
    return lines.changed(change) if isinstance(lines, Lines) else tuple(map(change, lines))


def joined(parts: Sequence[Sequence[_T]]) -> Sequence[_T]:
    """Several sequences one after another: copied only where they are in memory anyway."""
    if all(isinstance(part, tuple) for part in parts):
        return tuple(item for part in parts for item in part)
    return Joined(parts)
