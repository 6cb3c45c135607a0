"""Patterns of users, found in outputs in time that grows with the text and never faster.

They are RE2's, by Arrow's kernels: Python's `re` may need longer than the universe is old for
`(a+)+b`, and nothing ends it. RE2 has no look-around and no references back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from verl_logsync.errors import UsageError

#: A compiled pattern lives for one call: so many characters of text are looked at in each.
_AT_ONCE: Final = 1 << 20
# Put around a match. What holds them already is nobody's answer.
_OPEN, _CLOSE = "\x00\x01<", ">\x01\x00"


class TextPattern:
    """A pattern, and how it is applied to many texts.

    Raises:
        UsageError: RE2 does not know it.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            pc.match_substring_regex(_array([""]), pattern)
        except (pa.ArrowInvalid, UnicodeEncodeError) as error:
            # Arrow itself does not name what it refuses to replace by.
            raise UsageError(
                f"{pattern!r} is no pattern that can be used: {error}",
                hint="Patterns are RE2's (https://github.com/google/re2/wiki/Syntax): as Python's,"
                " without look-around and references back",
            ) from None
        self._group = 1 if _replaces(pattern, r"\1") else 0

    def found(self, texts: pa.Array) -> Sequence[bool]:
        """Whether each text holds a match."""
        found: list[bool] = pc.match_substring_regex(texts, self.pattern).to_pylist()
        return found

    def last(self, texts: pa.Array) -> Sequence[str]:
        """The last match in each text (its first bracket if it has one); empty without one."""
        marked = pc.replace_substring_regex(texts, self.pattern, rf"{_OPEN}\{self._group}{_CLOSE}")
        parts = pc.split_pattern(marked, _OPEN, max_splits=1, reverse=True)
        any_there = pc.greater(pc.list_value_length(parts), 1)
        tails = pc.list_element(parts.filter(any_there), 1).to_pylist()
        found = iter(tail.partition(_CLOSE)[0] for tail in tails)
        return [next(found) if there else "" for there in any_there.to_pylist()]


class Texts:
    """Texts that come in pieces, handed to several uses in pieces large enough to be worth it."""

    def __init__(self, *uses: Any) -> None:
        self._uses = uses
        self._waiting: list[str] = []
        self._size = 0

    def take(self, texts: Sequence[str]) -> None:
        """Add some more."""
        self._waiting.extend(texts)
        self._size += sum(map(len, texts))
        if self._size >= _AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Hand over those that are left."""
        if self._waiting:
            texts = _array(self._waiting)
            for use in self._uses:
                use(texts)
        self._waiting, self._size = [], 0


def _array(texts: Sequence[str]) -> pa.Array:
    """Texts as Arrow has them; halves of surrogate pairs, which no UTF-8 has, become `?`."""
    try:
        return pa.array(texts, type=pa.string())
    except UnicodeEncodeError:
        valid = [text.encode(errors="replace").decode() for text in texts]
        return pa.array(valid, type=pa.string())


def _replaces(pattern: str, by: str) -> bool:
    try:
        pc.replace_substring_regex(_array([""]), pattern, by)
    except pa.ArrowInvalid:
        return False
    return True
