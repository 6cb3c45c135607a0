"""Lines like those before them, decoded without making dicts.

A trainer logs the same keys step after step. When a layout was seen a few times, a struct type is
made that has exactly its keys and kinds of numbers, and lines are decoded straight into it: that
takes less time than a bare `orjson.loads` of them. A line that differs in anything is refused by
the decoder and read the general way, so what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import astuple

from verl_logsync.columns import Layout, TableBuilder
from verl_logsync.structs import REFUSALS, SCALAR, strict_struct

#: A step that can be one of W&B's.
_Step = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

#: So often a layout occurs before a decoder is made for it, which costs as much as 100 rows.
_OFTEN: Final = 8
#: A log whose rows differ all the time is better read the general way.
_MISSES: Final = 64


@dataclass(frozen=True, slots=True)
class _Known:
    layout: Layout
    kinds: tuple[Any, ...]
    decode: Callable[[bytes], Any]


class KnownRows:
    """Decodes records whose values have the layout of the latest row in a table.

    Args:
        builder: the table that the rows are added to, here and by the caller.
        fields: what may stand beside the `step` and the values (`data`) in a record; null where
            it does not.
    """

    def __init__(self, builder: TableBuilder, fields: Sequence[str] = ()) -> None:
        self._builder = builder
        self._fields = tuple(fields)
        self._all: dict[int, _Known | None] = {}
        self._now: _Known | None = None
        self._missed: Layout | None = None
        self._hits = self._hits_then = self._misses = 0

    def take(self, line: bytes) -> Any:
        """Append a line's row to the table.

        Returns:
            The record, with its fields as attributes; None when it is not known. Nothing was
            added then.
        """
        known = self._now
        if known is None:
            return None
        try:
            record = known.decode(line)
        except REFUSALS:
            self._misses += 1
            return None
        self._hits += 1
        self._builder.add_known(known.layout, astuple(record.data))
        return record

    def learn(self) -> None:
        """What to expect next; to be called when a row was added to the table the general way."""
        layout = self._builder.latest
        # A single row of other keys is a step that was validated: the next will be as before.
        once = layout is not self._missed or self._hits != self._hits_then
        self._missed, self._hits_then = layout, self._hits
        if self._now is not None and self._now.layout is not layout and once:
            return
        self._now = None
        if layout is None or len(layout) < _OFTEN or self._misses > _MISSES + self._hits:
            return
        known = self._all.get(id(layout))
        if id(layout) not in self._all or (known and known.kinds != layout.kinds):
            known = self._all[id(layout)] = self._made(layout)
        self._now = known

    def _made(self, layout: Layout) -> _Known | None:
        """The decoder of a layout; None where its keys cannot be a struct's."""
        row = strict_struct("Row", layout.keys, layout.kinds)
        if row is None:
            return None
        beside = [(name, SCALAR, None) for name in self._fields]
        fields: list[Any] = [("step", _Step), ("data", row), *beside]
        record = msgspec.defstruct("Record", fields, forbid_unknown_fields=True, gc=False)
        return _Known(layout, layout.kinds, msgspec.json.Decoder(record).decode)
