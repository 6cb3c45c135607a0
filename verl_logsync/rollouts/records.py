"""A dump file -> its rows, in blocks of equal keys: memory does not grow with the file.

verl 0.4.0 - 0.9.1 write one JSON object a response to `{step}.jsonl`. Rows are handed over
column by column, because a loop over single rows costs more than parsing them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
import orjson
from msgspec.structs import astuple

from verl_logsync.errors import UnreadableInput
from verl_logsync.jsonlines import parse_line
from verl_logsync.model import Skip, SkipReason
from verl_logsync.structs import NESTED, REFUSALS, SCALAR, strict_struct

#: Longer rows are skipped: a dump of any size must be read with little memory.
LONGEST_ROW: Final = 32 << 20
#: A file of this name is the dump of that step.
DUMP_NAME: Final = re.compile(r"^(\d{1,18})\.jsonl$", re.IGNORECASE)
#: What verl itself writes; all other keys are extras of the reward function.
OWN_KEYS: Final = frozenset({"input", "output", "gts", "score", "step", "uid", "request_id"})

# Small enough for the rows of a chunk to stay in the processor's cache.
_CHUNK: Final = 1 << 17
_NEEDED: Final = ("input", "output", "score")
_TEXTS: Final = frozenset({"input", "output"})
_LINE_FEED, _OPEN, _CLOSE = b"\n{}"
# So many bad lines are named one by one; of a file full of them the rest is counted.
_SKIPS_NAMED: Final = 100


class Record(NamedTuple):
    """One response. `reward` is only in validation dumps, `uid` only in those of the v1 trainer;
    None where the dump has no such key. `score` is as it stands in the file.
    """

    input: str
    output: str
    gts: Any
    score: Any
    step: Any
    uid: str | None
    request_id: Any
    reward: Any
    extras: Mapping[str, Any]


class Block(NamedTuple):
    """Rows of equal keys, column by column, and where in the file each of them starts."""

    columns: Mapping[str, Sequence[Any]]
    offsets: Sequence[int]


class DumpReader:
    """Reads one dump file once. What was left out is in `skips` when it has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[str, ...] = ()
        self._getter: Callable[[dict[str, Any]], tuple[Any, ...]] | None = None
        self._decode: Callable[[bytes], list[Any]] | None = None
        self._skips: list[Skip] = []
        self._more: dict[SkipReason, int] = {}
        self.malformed = 0
        self.partial = False

    @property
    def skips(self) -> tuple[Skip, ...]:
        """Lines that are no rows, each named; of very many the rest is counted."""
        more = (
            Skip(reason, str(self._path), f"{count} more like those above", records=count)
            for reason, count in self._more.items()
        )
        return (*self._skips, *more)

    def blocks(self) -> Iterator[Block]:
        """All rows that have an input, an output and a score.

        Raises:
            UnreadableInput: the file cannot be opened or read.
        """
        try:
            with self._path.open("rb", buffering=0) as stream:
                for lines in _chunks(stream):
                    yield from self._parsed(lines)
        except OSError as error:
            raise UnreadableInput(
                f"cannot be read: {error.strerror}",
                place=str(self._path),
                hint=f"Check it with: ls -l {str(self._path)!r}",
            ) from error

    def _parsed(self, lines: _Lines) -> Iterator[Block]:
        known = self._known(lines)
        if known is not None:
            yield known
            return
        places = _Places(range(lines.first, lines.first + len(lines)), lines.offsets)
        rows = _all_parsed(lines)
        if rows is None:
            rows, places = self._parsed_singly(lines, places)
        if not rows:
            return
        block = self._alike(rows, places.offsets)
        if block is not None:
            yield block
        else:
            yield from self._apart(rows, places)

    def _known(self, lines: _Lines) -> Block | None:
        """The lines as one block, if all of them are rows that have the keys of those before."""
        if self._decode is None or not lines.objects:
            return None
        try:
            rows = self._decode(lines.text)
        except REFUSALS:
            return None
        if len(rows) != len(lines):  # two of them on one line
            return None
        columns = dict(zip(self._keys, zip(*map(astuple, rows), strict=True), strict=True))
        return Block(columns, lines.offsets)

    def _parsed_singly(self, lines: _Lines, places: _Places) -> tuple[list[Any], _Places]:
        rows: list[Any] = []
        kept = _Places([], [])
        for data, number, offset in zip(lines.single(), *places, strict=True):
            last = number == lines.first + len(lines) - 1
            if not data.strip(b"\0\r\t "):
                continue
            if last and lines.too_long:
                self._skip(number, offset, f"over {LONGEST_ROW:,} bytes", SkipReason.TOO_LONG)
                continue
            try:
                rows.append(parse_line(data))
            except ValueError as error:
                self._broken(number, offset, error, ended=not last or lines.ended)
                continue
            kept.numbers.append(number)
            kept.offsets.append(offset)
        return rows, kept

    def _broken(self, number: int, offset: int, error: ValueError, *, ended: bool) -> None:
        if ended:
            self._skip(number, offset, str(error), SkipReason.MALFORMED)
        else:
            self.partial = True
            why = "the writer had not finished it"
            self._skip(number, offset, why, SkipReason.PARTIAL_LINE)

    def _alike(self, rows: list[Any], offsets: Sequence[int]) -> Block | None:
        """The rows as one block, if all of them have the keys of the rows before."""
        try:
            if self._getter is None:
                self._expect(rows[0])
            if self._getter is None or set(map(len, rows)) != {len(self._keys)}:
                return None
            columns = dict(zip(self._keys, zip(*map(self._getter, rows), strict=True), strict=True))
        except (KeyError, TypeError, IndexError):
            return None
        texts = set(map(type, columns["input"])) | set(map(type, columns["output"]))
        return Block(columns, offsets) if texts == {str} else None

    def _expect(self, row: Any) -> None:
        if type(row) is dict and all(key in row for key in _NEEDED):
            self._keys = tuple(row)
            self._getter = itemgetter(*self._keys)
            struct = strict_struct("Row", self._keys, list(map(_kind, row.items())))
            self._decode = struct and msgspec.json.Decoder(struct).decode_lines

    def _apart(self, rows: list[Any], places: _Places) -> Iterator[Block]:
        """The rows that are rows, sorted by their keys."""
        kinds: dict[tuple[str, ...], tuple[list[dict[str, Any]], list[int]]] = {}
        for row, number, offset in zip(rows, *places, strict=True):
            why = _fault(row)
            if why:
                self._skip(number, offset, why, SkipReason.MALFORMED)
                continue
            those, starts = kinds.setdefault(tuple(sorted(row)), ([], []))
            those.append(row)
            starts.append(offset)
        for keys, (those, starts) in kinds.items():
            columns = dict(zip(keys, zip(*map(itemgetter(*keys), those), strict=True), strict=True))
            yield Block(columns, starts)
            self._expect(those[-1])

    def _skip(self, number: int, offset: int, why: str, reason: SkipReason) -> None:
        records = 0 if reason is SkipReason.PARTIAL_LINE else 1
        self.malformed += records
        if len(self._skips) >= _SKIPS_NAMED:
            self._more[reason] = self._more.get(reason, 0) + records
            return
        place = f"{self._path}:{number} (byte {offset})"
        look = f"See it with: sed -n {number}p {str(self._path)!r} | head -c 300"
        self._skips.append(Skip(reason, place, why, look, records))


def _kind(item: tuple[str, Any]) -> Any:
    """What a key's values are decoded as; those of other rows are like this row's, or refused."""
    key, value = item
    return str if key in _TEXTS else NESTED if type(value) in (list, dict) else SCALAR


def _all_parsed(lines: _Lines) -> list[Any] | None:
    """The values of the lines, if each of them is a whole line of strict JSON."""
    if lines.too_long or not lines.ended:
        return None
    try:
        return list(map(orjson.loads, lines.single()))
    except ValueError:
        return None


def _fault(row: Any) -> str:
    """Why this is no row of a dump; empty when it is one."""
    if type(row) is not dict:
        return "no JSON object"
    lacking = [key for key in _NEEDED if key not in row]
    if lacking:
        return f"no {' and no '.join(lacking)}"
    odd = [key for key in ("input", "output") if type(row[key]) is not str]
    return f"{odd[0]} is no text" if odd else ""


def read_records(path: Path) -> Iterator[Record]:
    """Every row of a dump file as a `Record`; lines that are none are left out.

    Use `DumpReader` to learn what was left out.

    Raises:
        UnreadableInput: the file cannot be opened or read.
    """
    for block in DumpReader(path).blocks():
        names = tuple(block.columns)
        for values in zip(*block.columns.values(), strict=True):
            yield as_record(dict(zip(names, values, strict=True)))


def as_record(row: Mapping[str, Any]) -> Record:
    """A parsed row, its extras apart."""
    return Record(
        input=row["input"],
        output=row["output"],
        gts=row.get("gts"),
        score=row["score"],
        step=row.get("step"),
        uid=row.get("uid"),
        request_id=row.get("request_id"),
        reward=row.get("reward"),
        extras={k: v for k, v in row.items() if k not in OWN_KEYS and k != "reward"},
    )


def key_set(keys: Iterable[str]) -> str:
    """Which trainer and versions of verl write these keys, as far as they tell."""
    present = set(keys)
    if "uid" in present:
        return "v1 0.9"
    if "gts" in present:
        return "v0 0.8-0.9" if "request_id" in present else "v0 0.6-0.9"
    return "v0 0.5" if "request_id" in present else "v0 0.4-0.5"


def read_row(stream: BinaryIO, offset: int) -> Record | None:
    """The row that starts there; None if none does any more."""
    stream.seek(offset)
    try:
        row = parse_line(stream.readline(LONGEST_ROW))
    except ValueError:
        return None
    return None if _fault(row) else as_record(row)


# -- lines ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lines:
    """Consecutive lines: the number of the first, its place in the file, and that of each.

    Only the last can be `too_long` (then it is not whole) or not `ended`. They are `objects` when
    each has an end, and begins and ends as an object does: no value then goes on in the next line.
    """

    text: bytes
    first: int
    start: int
    ended: bool
    offsets: list[int]
    objects: bool = False
    too_long: bool = False

    def __len__(self) -> int:
        return len(self.offsets)

    def single(self) -> list[bytes]:
        """Each of them without its end; U+2028 and others occur inside strings and end none."""
        lines = self.text.split(b"\n")
        return lines[:-1] if self.ended else lines


class _Places(NamedTuple):
    """The numbers of lines, and where they start."""

    numbers: Any
    offsets: Any


def _chunks(stream: BinaryIO) -> Iterator[_Lines]:
    """The lines of a file, many at a time."""
    number, start = 1, 0
    rest: list[bytes] = []
    held = 0
    while data := stream.read(_CHUNK):
        end = data.rfind(b"\n") + 1
        if not end:
            rest.append(data)
            held += len(data)
            if held > LONGEST_ROW:
                yield _Lines(b"".join(rest)[:80], number, start, False, [start], too_long=True)
                start += held
                rest, held = [], 0
                tail, passed = _after_line(stream)
                start += passed
                number += 1
                if tail:
                    rest, held = [tail], len(tail)
            continue
        lines = _lines(b"".join([*rest, data[:end]]), number, start)
        yield lines
        number += len(lines)
        start += len(lines.text)
        rest, held = [data[end:]], len(data) - end
    if held:
        yield _lines(b"".join(rest), number, start)


def _lines(text: bytes, number: int, start: int) -> _Lines:
    data = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(data == _LINE_FEED)
    begins = [start, *(ends + (start + 1)).tolist()]
    if begins[-1] != start + len(text):
        return _Lines(text, number, start, False, begins)
    opened = data[0] == _OPEN and (data[ends[:-1] + 1] == _OPEN).all()
    objects = bool(opened and (data[ends - 1] == _CLOSE).all())
    return _Lines(text, number, start, True, begins[:-1], objects)


def _after_line(stream: BinaryIO) -> tuple[bytes, int]:
    """Skip to the end of the line; what was read beyond it, and how many bytes were skipped."""
    passed = 0
    while data := stream.read(_CHUNK):
        _, end, tail = data.partition(b"\n")
        if end:
            return tail, passed + len(data) - len(tail)
        passed += len(data)
    return b"", passed
