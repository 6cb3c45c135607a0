"""verl's own `file` logger: `PROJECT/EXPERIMENT.jsonl`, one `{"step":, "data":}` a line.

Written by verl 0.6.0 - 0.9.1. Until 0.7.0 the encoder writes bare NaN and infinities and may
leave a cut last line; from 0.7.1 they are `null`. verl truncates the file at every start, so
people keep copies under names that share the experiment's stem.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

from verl_logsync.columns import AXES, STEP, TableBuilder
from verl_logsync.errors import NotALog, UnreadableInput, quoted
from verl_logsync.interfaces import Candidate
from verl_logsync.jsonlines import LONGEST_LINE, Line, parse_line, read_lines
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason, Stamp
from verl_logsync.verl_keys import is_validation_only

_NAMED_SO: Final = re.compile(r"\.(jsonl|ndjson)(\.\w+)*$")
_RECORD_START: Final = re.compile(rb'\s*\{\s*"step"\s*:\s*(-?\d+)\s*,\s*"data"\s*:\s*\{')
# EXP.jsonl.1, EXP.20250405_142311.jsonl, EXP.attempt2.jsonl, EXP.jsonl.bak are EXP.
_COPY_MARKS: Final = re.compile(
    r"(\.(jsonl|ndjson|json|log|txt)|\.\d{8}[_-]?\d{6}|[._-]attempt[_-]?\d+"
    r"|(?<=\.jsonl)\.(\d+|bak|old|prev|orig|save|copy))$"
)
_TAIL_BYTES: Final = 1 << 20
# So far into a file whose name promises a log a first record is looked for.
_SEARCHED: Final = 64 << 20
# So many bad lines are named one by one; of a file full of them the rest is counted.
_SKIPS_NAMED: Final = 100


class VerlFile:
    """Source `verl_file`."""

    name = "verl_file"
    precision = 20
    patterns = ("*.jsonl", "*.jsonl.*", "*.ndjson", "*.json", "*.log", "*.txt")

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        if candidate.names is not None:
            return None
        named_so = bool(_NAMED_SO.search(candidate.path.name))
        first = _first_record(candidate.head)
        if first is None and named_so and candidate.stamp.size > len(candidate.head):
            first = _first_record_beyond(candidate.path)
        if first is None:
            if not candidate.head.strip(b"\0\n\r "):
                return _nothing_yet(candidate) if named_so else None
            return _refusal(candidate) if named_so else None
        step, opens_with_validation, line = first
        facts = Facts(
            project=candidate.path.absolute().parent.name,
            name=experiment_name(candidate.path.name),
            first_step=step,
            last_step=_last_step(candidate.path, candidate.stamp, step),
            opens_with_validation=opens_with_validation,
            head_digest=_digest(line),
            training_digest=_training_digest(candidate, line, opens_with_validation),
        )
        return LogFile(candidate.path, self.name, candidate.stamp, facts)

    def read(self, file: LogFile) -> Reading:
        rows = _Rows(file.place)
        for line in read_lines(file.path):
            rows.take(line)
        if rows.rounded:
            rows = _Rows(file.place, exactly=True)
            for line in read_lines(file.path):
                rows.take(line)
        return rows.reading()


class _Rows:
    """Collects the records of one file, and what is wrong with the others."""

    def __init__(self, place: str, *, exactly: bool = False) -> None:
        self._place = place
        self._exactly = exactly
        self._steps: list[int] = []
        self._builder = TableBuilder()
        self._skips: list[Skip] = []
        self._more: dict[SkipReason, int] = {}

    def take(self, line: Line) -> None:
        if line.too_long:
            self._skip(
                line, SkipReason.TOO_LONG, f"over {LONGEST_LINE:,} bytes, which W&B does not take"
            )
            return
        try:
            record = parse_line(line.data)
            step, values = record["step"], record["data"]
        except ValueError as error:
            self._broken(line, str(error))
            return
        except (KeyError, TypeError, IndexError):
            self._skip(line, SkipReason.NO_STEP, 'no "step" and "data"')
            return
        if type(step) is not int or type(values) is not dict or not 0 <= step < 2**63:
            self._skip(line, SkipReason.NO_STEP, f"step is {str(step)[:40]!r}")
            return
        if "_step" in values or "_timestamp" in values or "_runtime" in values:
            values = {key: value for key, value in values.items() if key not in AXES}
        try:
            flags = b"true" in line.data or b"false" in line.data
            self._builder.add(values, exactly=self._exactly, flags=flags)
        except ValueError as error:
            self._skip(line, SkipReason.MALFORMED, str(error))
            return
        self._steps.append(step)

    @property
    def rounded(self) -> bool:
        return self._builder.rounded

    def _broken(self, line: Line, why: str) -> None:
        if not line.data.strip(b"\0\n\r\t "):
            return
        if line.ended:
            self._skip(line, SkipReason.MALFORMED, why)
        else:
            self._skip(line, SkipReason.PARTIAL_LINE, "the writer had not finished it")

    def _skip(self, line: Line, reason: SkipReason, detail: str) -> None:
        place = f"{self._place}:{line.number} (byte {line.offset})"
        # An unfinished line is not a record yet: it is read when the writer completes it.
        records = 0 if reason is SkipReason.PARTIAL_LINE else 1
        if len(self._skips) >= _SKIPS_NAMED:
            self._more[reason] = self._more.get(reason, 0) + records
            return
        self._skips.append(Skip(reason, place, detail, _look(self._place, line), records))

    def reading(self) -> Reading:
        import pyarrow as pa

        if not self._steps and not self._skips:
            raise NotALog("holds no record", place=self._place, hint="It is read again next time.")
        columns: dict[str, Any] = {STEP: pa.array(self._steps, type=pa.int64())}
        more = (
            Skip(reason, self._place, f"{count} more like those above", records=count)
            for reason, count in self._more.items()
        )
        return Reading(pa.table(columns | self._builder.columns()), (*self._skips, *more))


def _look(place: str, line: Line) -> str:
    return f"See it with: sed -n {line.number}p {quoted(place)} | head -c 300"


def experiment_name(file_name: str) -> str:
    """The experiment that a file name belongs to, without extension and copy marks."""
    name = file_name
    while (shorter := _COPY_MARKS.sub("", name)) != name and shorter:
        name = shorter
    return name


def _nothing_yet(candidate: Candidate) -> Skip:
    size = candidate.stamp.size
    detail = "the file is empty" if not size else f"{size} bytes, all of them blank"
    return Skip(SkipReason.NOTHING_YET, str(candidate.path), detail, "It is read next time.")


def _first_record_beyond(path: Path) -> tuple[int, bool, bytes] | None:
    """The first record of a file whose beginning is damaged: a hole that a truncation under an
    open writer leaves, or a long line of junk.
    """
    try:
        for line in read_lines(path):
            if line.offset > _SEARCHED:
                return None
            if not line.too_long and (found := _first_record(line.data.lstrip(b"\0"))):
                return found
    except UnreadableInput:
        pass  # it will be said when the file is read
    return None


def _refusal(candidate: Candidate) -> Skip:
    place = str(candidate.path)
    for line in candidate.head.split(b"\n"):
        try:
            value = parse_line(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            keys = ", ".join(sorted(map(str, value))[:6])
            return Skip(
                SkipReason.NOT_RECOGNISED, place, f'JSON lines without "step" and "data": {keys}'
            )
    return Skip(
        SkipReason.NOT_A_LOG,
        place,
        "no JSON lines",
        f"Look at it with: head -c 200 {quoted(place)} | xxd",
    )


def _first_record(head: bytes) -> tuple[int, bool, bytes] | None:
    for line in head.split(b"\n"):
        found = _RECORD_START.match(line.lstrip(b"\0"))
        if found:
            return int(found[1]), _opens_with_validation(line), line
    return None


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line.strip(b"\0\r\n "), digest_size=8).hexdigest()


def _training_digest(candidate: Candidate, first: bytes, validates: bool) -> str:
    """Of the first record with results of a training step; empty while there is none."""
    if not validates:
        return _digest(first)
    for line in _head(candidate, _TAIL_BYTES).split(b"\n")[:-1]:
        if _RECORD_START.match(line.lstrip(b"\0")) and not _opens_with_validation(line):
            return _digest(line)
    return ""


def _head(candidate: Candidate, size: int) -> bytes:
    """So many first bytes of a file, of which the candidate may hold fewer."""
    if len(candidate.head) >= min(size, candidate.stamp.size):
        return candidate.head
    try:
        with candidate.path.open("rb") as stream:
            return stream.read(size)
    except OSError:
        return candidate.head


def _opens_with_validation(line: bytes) -> bool:
    try:
        return is_validation_only(parse_line(line)["data"])
    except (ValueError, KeyError, TypeError):
        return False


def _last_step(path: Path, stamp: Stamp, default: int) -> int:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stamp.size - _TAIL_BYTES))
            tail = stream.read(_TAIL_BYTES)
    except OSError:
        return default
    for line in reversed(tail.split(b"\n")[:-1]):  # what follows the last line end may be cut
        found = _RECORD_START.match(line)
        if found:
            return max(default, int(found[1]))
    return default
