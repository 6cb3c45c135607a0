"""Files that are known by their name alone: what has that name may be no file, or be closed to us.

Opening a pipe waits for its writer, maybe for ever. Where a folder may not be entered, the methods
of `Path` raise PermissionError; the questions here are answered with no.
"""

from __future__ import annotations

import errno
import os
import stat


def read_start(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first bytes of a regular file, `limit` at most.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
        return stream.read(limit)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file is there, as far as we may know."""
    return os.path.isfile(path)  # noqa: PTH113 - see above


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is there, as far as we may know."""
    return os.path.isdir(path)  # noqa: PTH112 - see above


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether a symbolic link is there, as far as we may know."""
    return os.path.islink(path)  # noqa: PTH114 - see above


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether anything is there, as far as we may know."""
    return os.path.exists(path)  # noqa: PTH110 - see above
