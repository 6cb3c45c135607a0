"""A console as a stream of events: records, blocks, signs of a start, and its plain lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from verl_logsync.hush import (
    begins_key_block,
    hush_broken_block,
    hush_key_blocks,
    hushed,
    hushing,
    lines_with,
    secrets_of,
    suspects,
)
from verl_logsync.model import Skip, SkipReason
from verl_logsync.secrets_mask import MASK
from verl_logsync.sources.console.blocks import (
    Block,
    block_start,
    hides_metrics,
    is_training_config,
)
from verl_logsync.sources.console.lines import (
    LONGEST_LINE,
    Content,
    Stretch,
    content,
    inner_stamp,
    last_return,
    plain_line,
    plain_lines,
    shown,
    still_wrapped,
    without_ansi,
)
from verl_logsync.sources.console.records import (
    Broken,
    Record,
    is_orphan,
    parse_record,
    record_start,
    without_last_pair,
)
from verl_logsync.spooled import Lines, Spool

_DIGITS: Final = b"0123456789\0"
# A line without its digits in which one of these occurs is looked at closely.
_MARKS: Final = (
    b"step:",
    b"validation metrics",
    b"{'",
    b"raining steps",
    b"Training from scratch",
    b"lobal step to",
    b"Resuming from",
    b"INFO worker.py",
    b"Syncing run ",
    b"/runs/",
    b"file logger at",
    b"actor/",
    b"critic/",
    b"train/",
    b"val-aux/",
    b"val-core/",
)
_TOTAL: Final = re.compile(r"Total training steps: (\d{1,18})")
_RESUMED: Final = re.compile(
    r"[Ss]etting global step to (\d{1,18})|Resuming from .*global_step_(\d{1,18})"
)
_SCRATCH: Final = "Training from scratch"
_RAY_STARTS: Final = "INFO worker.py"
_LOGGER: Final = re.compile(r"Creating file logger at (.*?([^/]+)/([^/]+)\.jsonl)\s*$")
_SYNCING: Final = re.compile(r"Syncing run (\S.*?)\s*$")
_VIEW: Final = re.compile(
    r"View run(?: (?P<name>\S.*?))? at:? https?://[^\s/]+/(?P<entity>[^/\s]+)/(?P<project>[^/\s]+)/runs/(?P<id>[^/\s?]+)"
)
# So many lines at the start of a file are searched for a time.
_OPENING: Final = 200
# What is searched for signs and names; no line that has one is longer.
_LONGEST_SIGN: Final = 4_000
_KNOWN_BYTES: Final = 16 << 20
_NOISE, _SECRET, _MARK = 0, 1, 2
_SKIPS_NAMED: Final = 100

SignKind = Literal["scratch", "resumed", "total", "ray"]


@dataclass(frozen=True, slots=True)
class Printed:
    """Where and when something was printed, and by which process."""

    line: int
    offset: int
    owner: str
    stamp: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """A record."""

    at: Printed
    record: Record


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved config."""

    at: Printed
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Validation:
    """The initial or final validation begins (`values` is None) or was read."""

    at: Printed
    final: bool
    values: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Sign:
    """A line that tells how training starts."""

    at: Printed
    kind: SignKind
    value: int | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """What the run is called; empty strings are not said."""

    project: str = ""
    name: str = ""
    entity: str = ""
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """The first time that a line carries; `outside` if not printed by the program itself."""

    stamp: float
    outside: bool


Event = Step | Config | Validation | Sign | Named | Began


@dataclass(slots=True)
class Notebook:
    """What was left out of a file; `unpacker` is the command that unpacks it, if any."""

    place: str
    unpacker: str
    skips: list[Skip] = field(default_factory=list)
    more: dict[SkipReason, int] = field(default_factory=dict)

    def skip(self, at: Printed, reason: SkipReason, detail: str, records: int = 0) -> None:
        """Note something that was left out; only the first of many are named one by one."""
        if len(self.skips) >= _SKIPS_NAMED:
            self.more[reason] = self.more.get(reason, 0) + records
            return
        place = f"{self.place}:{at.line} (byte {at.offset})"
        line = f"sed -n {at.line}p"
        shown_by = f"{self.unpacker} {self.place!r} | {line}" if self.unpacker else ""
        hint = f"See it with: {shown_by or f'{line} {self.place!r}'} | head -c 300"
        self.skips.append(Skip(reason, place, detail, hint, records))

    def all(self) -> tuple[Skip, ...]:
        """Everything noted."""
        counted = (
            Skip(reason, self.place, f"{count} more like those above", records=count)
            for reason, count in self.more.items()
        )
        return (*self.skips, *counted)


class Transcript:
    """Turns stretches of lines into events; with `keep` also into the console's lines.

    Args:
        prefix: what stands in front of this file's lines besides what is known.
    """

    def __init__(
        self, notes: Notebook, *, keep: bool, prefix: re.Pattern[str] | None = None
    ) -> None:
        self._console = Spool()
        self.unfinished = ""
        self._notes = notes
        self._keep = keep
        self._prefix = prefix
        self._known: dict[bytes, int] = {}
        self._known_bytes = 0
        self._open: tuple[Printed, Broken, bool] | None = None
        self._blocks: dict[str, tuple[Printed, Block]] = {}
        self._began: Began | None = None
        self._width = 0
        self._longest = 0
        self._orphan = -1
        self._first_key = "?"
        self._secrets: frozenset[str] = frozenset()
        self._keys: list[int] = []

    @property
    def console(self) -> Lines:
        """All whole lines until now, without the secrets that are known by now."""
        return self._console.lines().changed(hushing(self._secrets))

    # -- lines -----------------------------------------------------------------------------

    def feed(self, stretch: Stretch) -> Iterator[Event]:
        """The events of more lines."""
        if not stretch.ended:
            yield from self._last(stretch)
            return
        data = stretch.data
        raw = data.split(b"\n")
        lines = plain_lines(raw)
        if lines is not raw:
            data = b"\n".join(lines)
            self._damaged(lines, raw, stretch.number, stretch.offset)
        forms = data.translate(None, _DIGITS).split(b"\n")
        begun, offset = 0, stretch.offset
        if stretch.too_long:
            self._too_long(stretch)
            begun, offset = 1, offset + len(raw[0]) + 1
        kinds = self._kinds(forms)
        if lines is not raw:  # a damaged line of Docker's means nothing
            kinds = [
                kind & ~_MARK if still_wrapped(line) else kind
                for kind, line in zip(kinds, lines, strict=True)
            ]
        marked = [index for index, kind in enumerate(kinds) if kind]
        index = begun
        while index < len(lines):
            if not self._busy and index >= self._opening(stretch.number):
                position = bisect_left(marked, index)
                if position == len(marked):
                    break
                index = marked[position]
            self._noise(lines[begun:index])
            offset += sum(map(len, raw[begun:index])) + index - begun
            yield from self._line(lines[index], stretch.number + index, offset, kinds[index])
            offset += len(raw[index]) + 1
            begun = index = index + 1
        self._noise(lines[begun:])

    @property
    def _busy(self) -> bool:
        """Whether every line counts now, since something goes on in the next one."""
        return self._open is not None or bool(self._blocks)

    def _opening(self, number: int) -> int:
        """How many lines after that one are searched for a time."""
        return max(0, _OPENING - number) if self._began is None else 0

    def _kinds(self, forms: list[bytes]) -> list[int]:
        """What a line of each form may mean; forms are remembered, since most come again."""
        if self._known_bytes > _KNOWN_BYTES:
            self._known.clear()
            self._known_bytes = 0
        try:
            return list(map(self._known.__getitem__, forms))
        except KeyError:
            self._learn({form for form in forms if form not in self._known})
        return list(map(self._known.__getitem__, forms))

    def _learn(self, forms: set[bytes]) -> None:
        self._known_bytes += sum(map(len, forms))
        new = list(forms)
        self._known.update(dict.fromkeys(new, _NOISE))
        for form in lines_with(_MARKS, new):
            self._known[form] |= _MARK
        if self._keep:
            for form in suspects(new):
                self._known[form] |= _SECRET

    def _noise(self, lines: list[bytes]) -> None:
        """Lines without a meaning for us, many at once."""
        if not self._keep or not lines:
            return
        text = without_ansi(b"\n".join(lines).decode(errors="replace"))
        if "\0" in text:
            text = text.replace("\0", "")
        pieces = text.split("\n")
        if "\r" in text:
            pieces = [last_return(piece) if "\r" in piece else piece for piece in pieces]
        self._longest = max(self._longest, *map(len, pieces))
        self._console.extend(pieces)

    def _line(self, raw: bytes, number: int, offset: int, kind: int) -> Iterator[Event]:
        """One line that may mean something."""
        text = without_ansi(raw.decode(errors="replace"))
        visible = shown(text)
        if self._keep:
            self._console.append(self._hushed(visible) if kind & _SECRET else visible)
        inside = content(text, self._prefix)
        at = Printed(number, offset, inside.owner, inside.stamp)
        if self._began is None:
            yield from self._time(inside)
        if self._open is not None:
            if self._continues(visible, inside):
                return
            yield from self._closed()
        self._longest = max(self._longest, len(visible))
        if inside.hidden:
            self._hidden(at, inside.hidden)
        if self._blocks:
            yield from self._in_block(at, inside.text)
        if kind & _MARK:
            width = Broken.WIDEST + 1 if inside.hidden else len(visible)
            yield from self._meaning(at, inside, width)

    def _hushed(self, line: str) -> str:
        masked = hushed(line)
        if begins_key_block(masked):
            self._keys.append(len(self._console))
        return masked

    def _last(self, stretch: Stretch) -> Iterator[Event]:
        """What follows the last line feed: its writer has not finished it."""
        text = without_ansi(plain_line(stretch.data).decode(errors="replace"))
        inside = content(text, self._prefix)
        at = Printed(stretch.number, stretch.offset, inside.owner, inside.stamp)
        wrapped = still_wrapped(stretch.data) and "step:" in text
        starts = wrapped or record_start(inside.text) is not None
        if self._open is not None:
            before, broken, partial = self._open
            if partial or (inside.bare and not starts and self._may_go_on(broken)):
                self._unfinished(before)
            else:
                yield from self._closed()
        if starts:
            self._unfinished(at)
        if self._keep:
            self.unfinished = hushed(shown(text))

    def close(self) -> Iterator[Event]:
        """The events of what was still open when the file ended."""
        if self._open is not None:
            before, broken, partial = self._open
            if partial or self._may_go_on(broken):
                self._unfinished(before)
            else:
                yield from self._closed()
        for at, block in self._blocks.values():
            self._broken_block(block)
            if block.kind != "config":
                detail = f"the {block.kind} validation metrics are not complete yet"
                self._notes.skip(at, SkipReason.PARTIAL_LINE, detail)
        self._blocks.clear()
        in_key = hush_key_blocks(self._console, self._keys)
        self.unfinished = MASK if in_key else hushing(self._secrets)(self.unfinished)

    def _may_go_on(self, broken: Broken) -> bool:
        """Whether a terminal broke the record there, and its next line is still to come."""
        if broken.ended:
            return False
        if self._width:
            return self._width - 1 <= broken.width <= self._width
        return not broken.complete and self._longest <= broken.width <= Broken.WIDEST

    def _unfinished(self, at: Printed) -> None:
        self._open = None
        self._notes.skip(at, SkipReason.PARTIAL_LINE, _UNFINISHED)

    def _damaged(self, lines: list[bytes], raw: list[bytes], number: int, offset: int) -> None:
        """Say which lines of Docker's log cannot be unwrapped although a record is in them."""
        for index, line in enumerate(lines):
            if still_wrapped(line) and b"step:" in line:
                at = Printed(number + index, offset + sum(map(len, raw[:index])) + index, "", None)
                self._notes.skip(at, SkipReason.MALFORMED, "a damaged line of Docker's log", 1)

    def _too_long(self, stretch: Stretch) -> None:
        at = Printed(stretch.number, stretch.offset, "", None)
        first = stretch.data.split(b"\n", 1)[0]
        records = int(b"step:" in first[:200])
        detail = f"over {LONGEST_LINE:,} bytes, which W&B does not take"
        self._notes.skip(at, SkipReason.TOO_LONG, detail, records)

    def _hidden(self, at: Printed, hidden: str) -> None:
        detail = f"{len(hidden)} characters behind a carriage return inside a record"
        self._notes.skip(at, SkipReason.MALFORMED, detail)

    def _time(self, inside: Content) -> Iterator[Began]:
        stamp = inside.stamp
        if stamp is None:
            stamp = inner_stamp(inside.text)
        if stamp is not None:
            self._began = Began(stamp, inside.stamp is not None)
            yield self._began

    # -- meaning ---------------------------------------------------------------------------

    def _meaning(self, at: Printed, inside: Content, width: int) -> Iterator[Event]:
        text = inside.text
        if record_start(text):
            self._open = at, Broken(text, width), inside.partial
            return
        kind = block_start(text)
        if kind:
            yield from self._block_starts(at, kind, text)
        elif hides_metrics(text):
            detail = "validation metrics behind a prefix of no known form; cut it off to read them"
            self._notes.skip(at, SkipReason.MALFORMED, detail, 1)
        elif is_orphan(inside.whole, self._first_key):
            if self._orphan != at.line - 1:
                detail = "values without a step: the beginning of the line is lost"
                self._notes.skip(at, SkipReason.NO_STEP, detail, 1)
            self._orphan = at.line
        elif len(text) <= _LONGEST_SIGN:
            yield from _signs(at, text)
            yield from _names(text)

    def _continues(self, visible: str, inside: Content) -> bool:
        """Whether the line belongs to the open record; then it was added."""
        assert self._open is not None
        at, broken, partial = self._open
        if partial:  # a container runtime cut the line, not a terminal
            broken.text += inside.text
            self._open = at, broken, inside.partial
            return True
        if not inside.bare:
            return False
        if broken.take_listed(visible):
            return True
        taken = broken.take(visible, known_width=self._width, longest=self._longest)
        if taken and len(visible) <= broken.width <= Broken.WIDEST:
            self._width = max(self._width, broken.width)
        return taken

    def _closed(self) -> Iterator[Step]:
        """The record that was open, now that nothing more can belong to it."""
        assert self._open is not None
        at, broken, _ = self._open
        self._open = None
        text = without_last_pair(broken.text) if broken.unsure else broken.text
        record = parse_record(text)
        if record is None:
            return
        self._longest = max(self._longest, broken.width)
        if not record.values:
            detail = f"nothing of step {record.step} can be read"
            self._notes.skip(at, SkipReason.MALFORMED, detail, 1)
            return
        if record.dropped:
            detail = (
                f"{len(record.dropped)} values of step {record.step} cannot be read: "
                f"{', '.join(map(repr, record.dropped[:3]))}"
            )
            if broken.unsure:
                detail = f"the last value of step {record.step} may go on in the next line"
            self._notes.skip(at, SkipReason.MALFORMED, detail)
        if record.repeated:
            detail = f"two records in one line: {record.repeated} keys come twice"
            self._notes.skip(at, SkipReason.MALFORMED, detail, 1)
        self._first_key = next(iter(record.values))
        yield Step(at, record)

    # -- blocks ----------------------------------------------------------------------------

    def _block_starts(self, at: Printed, kind: Any, text: str) -> Iterator[Event]:
        if at.owner in self._blocks:
            self._broken_block(self._blocks.pop(at.owner)[1])
        block = Block(kind, at.line)
        self._blocks[at.owner] = at, block
        if kind != "config":
            yield Validation(at, kind == "final", None)
        yield from self._more_of(at, block, text)

    def _in_block(self, at: Printed, text: str) -> Iterator[Event]:
        found = self._blocks.get(at.owner)
        if found is None:
            for owner, (_, block) in list(self._blocks.items()):
                block.foreign += 1
                if block.hopeless:
                    self._abandon(owner)
            return
        begun, block = found
        if block.belongs(text):
            yield from self._more_of(begun, block, text)
        else:
            block.foreign += 1
        if block.hopeless:
            self._abandon(at.owner)

    def _more_of(self, begun: Printed, block: Block, text: str) -> Iterator[Event]:
        values = block.add(text, len(self._console) - 1)
        if values is None:
            return
        del self._blocks[begun.owner]
        if block.kind != "config":
            yield Validation(begun, block.kind == "final", values)
        elif is_training_config(values):
            self._secrets |= secrets_of(values)
            yield Config(begun, values)

    def _abandon(self, owner: str) -> None:
        at, block = self._blocks.pop(owner)
        self._broken_block(block)
        if block.kind != "config":
            detail = f"the end of the {block.kind} validation metrics is missing"
            self._notes.skip(at, SkipReason.MALFORMED, detail)

    def _broken_block(self, block: Block) -> None:
        if self._keep and block.kind == "config":
            hush_broken_block(self._console, block.entries)


_UNFINISHED: Final = "the writer had not finished it"


def _signs(at: Printed, text: str) -> Iterator[Sign]:
    if at.stamp is None and (stamp := inner_stamp(text)) is not None:
        at = Printed(at.line, at.offset, at.owner, stamp)
    if found := _TOTAL.search(text):
        yield Sign(at, "total", int(found[1]))
    elif found := _RESUMED.search(text):
        yield Sign(at, "resumed", int(found[1] or found[2]))
    elif _SCRATCH in text:
        yield Sign(at, "scratch", 0)
    elif _RAY_STARTS in text:
        yield Sign(at, "ray")


def _names(text: str) -> Iterator[Named]:
    if found := _LOGGER.search(text):
        yield Named(project=found[2], name=found[3])
    elif found := _VIEW.search(text):
        yield Named(found["project"], found["name"] or "", found["entity"], found["id"])
    elif found := _SYNCING.search(text):
        yield Named(name=found[1])
