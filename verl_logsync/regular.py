"""Small files that are read by their name alone.

What has that name may be no file: opening a pipe waits for its writer, maybe for ever.
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
