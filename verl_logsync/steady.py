"""Read a file that others may replace meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from verl_logsync.discover import discover, stamp_of
from verl_logsync.errors import UnreadableInput, UsageError
from verl_logsync.interfaces import Source
from verl_logsync.model import LogFile, Reading, Stamp
from verl_logsync.regular import read_start

# Two starts of a job print the same at first; the config and the times come within this much.
_HEAD_BYTES: Final = 1 << 18


def read_steadily(source: Source, file: LogFile) -> Reading:
    """What a file says, provided that it still is the file that was found.

    A job that restarts truncates its log: the new content is another attempt, or another run,
    and must not be taken for the one that was found, nor mixed with it.

    Raises:
        UnreadableInput: the operating system refuses, or another log lies there now.
        NotALog: nothing in the file can be used.
    """
    head = _head(file.path)
    reading = source.read(file)
    stamp = stamp_of(file.path)
    if stamp == file.stamp:
        return reading
    # Rewritten in place, the old beginning and the new end were read; after a rename only one was.
    mixed = _same_place(stamp, file.stamp) and not _head(file.path).startswith(head)
    now = None if mixed else _found_now(source, file)
    if now is None or _is_replaced(file, now):
        raise UnreadableInput(
            "was replaced while it was read", place=file.place, hint="The next upload takes it"
        )
    return reading


def _head(path: Path) -> bytes:
    """A file's first bytes; none of what cannot be read, which its source says."""
    try:
        return read_start(path, _HEAD_BYTES)
    except OSError:
        return b""


def _same_place(one: Stamp | None, other: Stamp) -> bool:
    return one is not None and (one.inode, one.device) == (other.inode, other.device)


def _found_now(source: Source, file: LogFile) -> LogFile | None:
    try:
        found = discover([file.path], [source]).files
    except UsageError:
        return None  # it was deleted
    return found[0] if found else None


def _is_replaced(known: LogFile, now: LogFile) -> bool:
    """Whether a path holds another log than before; a first record may have come meanwhile."""
    heads = (known.facts.head_digest, now.facts.head_digest)
    trained = (known.facts.training_digest, now.facts.training_digest)
    shrunk = now.stamp.size < known.stamp.size
    return shrunk or any(before and before != after for before, after in (heads, trained))
