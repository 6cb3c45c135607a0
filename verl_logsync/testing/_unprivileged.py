"""Permission denied, also for root: a thread that gives up its capabilities.

Linux keeps capabilities a thread, so that nothing else in the process loses its rights, and what
was imported before stays at hand.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

_T = TypeVar("_T")
_VERSION: Final = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: three sets of two words each
_WORDS: Final = 6


class StillAllowed(Exception):
    """This machine lets us read what nobody may: the check says nothing here."""


def without_rights(denied: Path, work: Callable[[], _T]) -> _T:
    """Run something in a thread to which the modes of files apply, even if we are root.

    Args:
        denied: a file or folder without permissions, which proves that they apply.
        work: what is run; its exceptions are raised here.

    Raises:
        StillAllowed: `denied` can be opened all the same.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _give_up_capabilities()
            _expect_denied(denied)
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _give_up_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * _WORDS)()
    try:
        ctypes.CDLL(None).capset(header, sets)
    except (OSError, AttributeError):
        return  # no Linux: whether it matters is seen at once


def _expect_denied(path: Path) -> None:
    try:
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            path.open("rb").close()
    except PermissionError:
        return
    raise StillAllowed(f"{path} can be read although its mode forbids it")
