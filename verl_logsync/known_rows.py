"""Lines like those before them, decoded without making dicts.

A trainer logs the same keys step after step, and some more at the steps that it validates. When a
layout was seen a few times, a struct type is made that has exactly its keys and kinds of numbers,
and lines are decoded straight into it, many at once: that takes half the time of a bare
`orjson.loads` of them. Lines of which one differs in anything are refused by the decoder, and what
is refused alone is read the general way, so what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import astuple

from verl_logsync.structs import REFUSALS, SCALAR, WHOLE, strict_struct
from verl_logsync.table_builder import Layout, TableBuilder

#: A step that can be one of W&B's.
_Step = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_data = attrgetter("data")

#: So often a layout occurs before a decoder is made for it, which costs as much as 100 rows.
_OFTEN: Final = 8
#: So often another one occurs before it is added; each time that happens it takes twice as many.
_AGAIN: Final = 2
#: A log whose rows differ all the time is better read the general way.
_MISSES: Final = 64
#: A decoder takes rows of so many layouts; then a new one starts from the latest.
_MOST_LAYOUTS: Final = 16


@dataclass(frozen=True, slots=True)
class _Known:
    """How rows of some layouts are decoded, and where they are kept."""

    layout: Layout
    decoder: msgspec.json.Decoder[Any]


class KnownRows:
    """Decodes records whose values have the layouts of earlier rows of a table.

    Args:
        builder: the table that the rows are added to, here and by the caller.
        took: is called with the records that were added, their fields as attributes.
        fields: what may stand beside the `step` and the values (`data`) in a record; null where
            it does not.
    """

    def __init__(
        self,
        builder: TableBuilder,
        took: Callable[[list[Any]], None],
        fields: Sequence[str] = (),
    ) -> None:
        self._builder = builder
        self._took = took
        self._fields = tuple(fields)
        self._now: _Known | None = None
        #: The layouts that are known now, and of which kinds their numbers were then.
        self._parts: dict[Layout, tuple[Any, ...]] = {}
        self._often = _OFTEN
        self._hits = self._misses = 0
        self._taken = self._refused = 0

    def take(self, line: bytes) -> bool:
        """Append a line's row to the table; False when it is not known: nothing was added then."""
        if self._now is None:
            return False
        try:
            record = self._now.decoder.decode(line)
        except REFUSALS:
            self._misses += 1
            return False
        self._add(self._now.layout, [record])
        return True

    def take_lines(self, lines: bytes, count: int) -> bool:
        """Append the rows of so many lines, or none of them and return False."""
        # A log with an odd row in every block is better read line by line.
        if self._now is None or self._refused > _MISSES + self._taken:
            return False
        try:
            records = self._now.decoder.decode_lines(lines)
        except REFUSALS:
            self._refused += 1
            return False
        # The decoder would take two records in one line, too.
        if len(records) != count:
            return False
        self._taken += 1
        self._add(self._now.layout, records)
        return True

    def _add(self, layout: Layout, records: list[Any]) -> None:
        self._hits += len(records)
        # One row after the other: the numbers of many would not stay in the processor's cache.
        self._builder.add_known(layout, len(records), map(astuple, map(_data, records)))
        self._took(records)

    def learn(self) -> None:
        """What to expect next; to be called when a row was added to the table the general way."""
        if self._misses > _MISSES + self._hits:
            self._now = None
            return
        layout = self._builder.latest
        if layout is None or len(layout) < self._often:
            return
        if self._parts.get(layout) == layout.kinds:
            return
        self._often = 2 * self._often if self._parts else _AGAIN
        if layout not in self._parts and len(self._parts) == _MOST_LAYOUTS:
            self._parts.clear()
        self._parts[layout] = layout.kinds
        self._now = self._made() or self._now

    def _made(self) -> _Known | None:
        """The decoder of the known layouts; None where their keys cannot be a struct's."""
        kinds: dict[str, Any] = {}
        for layout, its_kinds in self._parts.items():
            for key, kind in zip(layout.keys, its_kinds, strict=True):
                kinds[key] = _either(kinds.get(key, kind), kind)
        in_all = set(kinds).intersection(*(layout.keys for layout in self._parts))
        keys = sorted(kinds, key=lambda key: key not in in_all)  # in their order otherwise
        numbers = [WHOLE if kinds[key] is int else kinds[key] for key in keys]
        row = strict_struct("Row", keys, numbers, required=len(in_all))
        if row is None:
            return None
        beside = [(name, SCALAR, None) for name in self._fields]
        fields: list[Any] = [("step", _Step), ("data", row), *beside]
        record = msgspec.defstruct("Record", fields, forbid_unknown_fields=True, gc=False)
        layout = self._builder.expect(tuple(keys), len(in_all))
        return _Known(layout, msgspec.json.Decoder(record))


def _either(one: Any, other: Any) -> Any:
    """The kind of a key whose numbers are of one kind in some rows and of another in others."""
    if one == other:
        return one
    return float if {one, other} == {int, float} else float | None
