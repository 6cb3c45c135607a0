"""Things that happen to a file while it is read, at a chosen call to the operating system."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from typing_extensions import Self

# What a reader asks of a file or folder; before each of these others may have changed it.
_ASKS: Final = frozenset(
    {"open", "read", "readline", "readinto", "seek", "stat", "fstat", "listdir", "scandir"}
)


class Meanwhile:
    """Within it, `change` is called before the `at`-th question about a file; `asked` counts.

    Python tells its profile function of every call of a built-in function, so that the place is
    the same in every run, which a second thread could not promise.
    """

    def __init__(self, change: Callable[[], None], at: int) -> None:
        self.asked = 0
        self._change = change
        self._at = at
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _called(self, _: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or getattr(function, "__name__", "") not in _ASKS:
            return
        self.asked += 1
        if self.asked == self._at:
            sys.setprofile(None)
            self._change()
            sys.setprofile(self._called)
