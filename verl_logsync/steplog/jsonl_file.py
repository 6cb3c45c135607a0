"""A step log as JSON lines: one `write` a record, whole to the last record whatever happens."""

from __future__ import annotations

import errno
import fcntl
import os
import time

from verl_logsync.steplog.chain import Known, look
from verl_logsync.steplog.layout import live_name, sealed_name, sealed_number

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Final

    from verl_logsync.steplog.store import Fsync, HeaderMaker

_KIND: Final = "jsonl"
_STALE: Final = frozenset({errno.ESTALE, errno.EBADF, errno.EIO, errno.ENODEV})


class JsonlFile:
    """One rank's JSON lines, appended to those of earlier starts.

    Args:
        folder: where; made when it is not there.
        stem: name without extension.
        make_header: see `HeaderMaker`.
        max_bytes: begin a new file beyond this size, at the next step; None for never.
        fsync: see `Fsync`.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        make_header: HeaderMaker,
        *,
        max_bytes: int | None = None,
        fsync: Fsync = "never",
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._make_header = make_header
        self._max_bytes = max_bytes
        self._fsync: Final = fsync
        self._descriptor: int | None = None
        self._header = b""
        self._begun = False
        self._torn = False
        self._size = 0
        self._number = 1
        self._step: int | None = None
        self._first_step: int | None = None
        self._synced = time.monotonic()
        self.unsynced = 0
        self.trouble = ""

    @property
    def path(self) -> str:
        return str(self._live)

    @property
    def _live(self) -> Path:
        return self._folder / live_name(self._stem, _KIND)

    def begin(self) -> None:
        if self._descriptor is not None and self._is_lost(self._descriptor):
            self.forget()
        if self._descriptor is None:
            self._open()
        if self._header:
            self._put(self._header)
            self._header = b""
            self._begun = True

    def append(self, line: bytes, step: int) -> None:
        self.begin()
        if self._is_full and step != self._step:  # a step is never split over two files
            self._rotate()
        self._put(line)
        self._step = step
        if self._first_step is None:
            self._first_step = step

    def close(self, end: bytes) -> int:
        try:
            if self._descriptor is not None:
                self.begin()
                self._put(end)
        finally:
            self.forget()
        return 0

    def forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close(descriptor)

    # -- writing ---------------------------------------------------------------------------

    def _put(self, line: bytes) -> None:
        descriptor = self._descriptor
        assert descriptor is not None
        data = b"\n" + line if self._torn else line
        done = 0
        try:
            while done < len(data):
                done += os.write(descriptor, data[done:] if done else data)
        except OSError as error:
            # What was written of it stays as a line of its own.
            self._torn = self._torn or done > 0
            if error.errno in _STALE:
                self.forget()
            raise
        finally:
            self._size += done
        self._torn = False
        if self._fsync != "never":
            self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        now = time.monotonic()
        if not isinstance(self._fsync, str) and now - self._synced < self._fsync:
            return
        self._synced = now
        try:
            os.fsync(descriptor)
        except OSError:
            self.unsynced += 1

    # -- opening ---------------------------------------------------------------------------

    @staticmethod
    def _is_lost(descriptor: int) -> bool:
        """Whether the file was deleted under us; what is written to it would vanish."""
        try:
            return os.fstat(descriptor).st_nlink == 0
        except OSError:
            return True

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = self._open_own()
        try:
            known = look(descriptor)
            previous, number = self._place(known)
            if number > 1 and not known.header:
                before = self._look_at(previous)
                known = Known(before.header, before.first_step, torn=known.torn)
            header = self._make_header(
                known, number=number, continues=self._begun, previous=previous
            )
            size = os.fstat(descriptor).st_size
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._header, self._torn = descriptor, header, known.torn
        self._number, self._first_step, self._size = number, known.first_step, size

    def _open_own(self) -> int:
        """Open the file of this rank, or one of our own when another process writes to it."""
        descriptor = _open_locked(self._live)
        if descriptor is None:
            self._stem = f"{self._stem.removesuffix('.steps')}-p{os.getpid()}.steps"
            descriptor = _open_locked(self._live)
        if descriptor is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process writes to it", self.path)
        return descriptor

    def _place(self, known: Known) -> tuple[str, int]:
        """The name of the file before this one, and this one's number."""
        recorded = known.header.get("file")
        if isinstance(recorded, int) and recorded > 0:
            return str(known.header.get("previous", "")), recorded
        numbers = [sealed_number(name, self._stem, _KIND) for name in os.listdir(self._folder)]
        last = max(numbers, default=0)
        return (sealed_name(self._stem, last, _KIND) if last else ""), last + 1

    def _look_at(self, name: str) -> Known:
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return look(descriptor)
        finally:
            os.close(descriptor)

    # -- rotation --------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._max_bytes is not None and self._size >= self._max_bytes

    def _rotate(self) -> None:
        """Seal the file and go on in a new one; when that fails stay in the old one.

        The new file is made whole under another name first, so that there is never a moment
        without a log, nor one in which a file without header bears its name.
        """
        sealed = sealed_name(self._stem, self._number, _KIND)
        place = self._folder / sealed
        made = self._folder / f".{live_name(self._stem, _KIND)}.new"
        try:
            if place.exists():
                return
            descriptor, size = self._make_next(made, sealed)
        except OSError as error:
            import contextlib

            self.trouble = f"no new file could be begun: {error.strerror or error}"
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            return
        try:
            self._live.rename(place)
            made.rename(self._live)
        except OSError:
            os.close(descriptor)
            if not self._live.exists():
                place.rename(self._live)
            return
        self.forget()
        self._descriptor, self._size = descriptor, size
        self._number += 1

    def _make_next(self, made: Path, sealed: str) -> tuple[int, int]:
        """The next file with its header, under a passing name."""
        header = self._make_header(
            Known({}, self._first_step, torn=False),
            number=self._number + 1,
            continues=True,
            previous=sealed,
        )
        made.unlink(missing_ok=True)
        descriptor = _open_locked(made)
        if descriptor is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process writes to it", str(made))
        if os.write(descriptor, header) != len(header):
            os.close(descriptor)
            raise OSError(errno.ENOSPC, "no room for a header", str(made))
        return descriptor, len(header)


def _close(descriptor: int) -> None:
    """Close a file; what the system says to that changes nothing any more."""
    try:
        os.close(descriptor)
    except OSError:
        return


def _open_locked(path: Path) -> int | None:
    """Open for appending and lock; None when another process holds the lock."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass  # a file system without locks
    return descriptor
