"""verl's own `file` logger: `PROJECT/EXPERIMENT.jsonl`, one `{"step":, "data":}` a line.

Written by verl 0.6.0 - 0.9.1. Until 0.7.0 the encoder writes bare NaN and infinities and may
leave a cut last line; from 0.7.1 they are `null`. verl truncates the file at every start, so
people keep copies under names that share the experiment's stem.

Other JSON lines are read too when the user names the key that counts their steps; metrics are then
in `data`, if there is such an object, else beside that key.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from verl_logsync.columns import AXES, STEP, TIMESTAMP
from verl_logsync.errors import NotALog, UnreadableInput, quoted
from verl_logsync.interfaces import Candidate
from verl_logsync.jsonlines import BOM, LONGEST_LINE, Line, parse_line, read_lines
from verl_logsync.known_rows import KnownRows
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason
from verl_logsync.table_builder import TableBuilder
from verl_logsync.verl_keys import is_validation_only

_NAMED_SO: Final = re.compile(r"\.(jsonl|ndjson)(\.\w+)*$", re.IGNORECASE)
_RECORD_START: Final = re.compile(rb'\s*\{\s*"step"\s*:\s*(-?\d+)\s*,\s*"data"\s*:\s*\{')
# EXP.jsonl.1, EXP.20250405_142311.jsonl, EXP.attempt2.jsonl, EXP.jsonl.bak are EXP.
_COPY_MARKS: Final = re.compile(
    r"(\.(jsonl|ndjson|json|log|txt)|\.\d{8}[_-]?\d{6}|[._-]attempt[_-]?\d+"
    r"|(?<=\.jsonl)\.(\d+|bak|old|prev|orig|save|copy))$",
    re.IGNORECASE,
)
_PACKED: Final = {
    b"\x1f\x8b": "gunzip -k",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"BZh": "bunzip2 -k",
    b"\xfd7zXZ": "unxz -k",
}
#: Keys that count steps where there is no `step` and `data`, likeliest first.
STEP_KEYS: Final = (
    *("step", "global_step", "training/global_step", "trainer/global_step", "train/global_step"),
    *("_step", "train_step", "global_steps", "iteration", "iter"),
)
# Seconds since 1970 from 1990 to 2100; another number is no time.
_EARLIEST, _LATEST = 631152000, 4102444800
_TAIL_BYTES: Final = 1 << 20
# Where no record is in that, so many times as much is looked at.
_WIDER: Final = 8
# So far into a file whose name promises a log its first record is looked for, and the last one.
_SEARCHED: Final = 64 << 20
# So many bad lines are named one by one; of a file full of them the rest is counted.
_SKIPS_NAMED: Final = 100


class VerlFile:
    """Source `verl_file`.

    Args:
        step_key: the key whose value is a record's step; by default that of verl's own form.
    """

    name = "verl_file"
    precision = 20
    patterns = ("*.jsonl", "*.jsonl.*", "*.ndjson", "*.json", "*.log", "*.txt")

    def __init__(self, step_key: str = "") -> None:
        self._form = _Form(step_key)

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        if candidate.names is not None:
            return None
        named_so = bool(_NAMED_SO.search(candidate.path.name))
        first = self._form.first_record(candidate.head)
        if first is None and named_so and candidate.stamp.size > len(candidate.head):
            first = _first_record_beyond(candidate.path, self._form)
        if first is None:
            if not candidate.head.strip(b"\0\n\r "):
                return _nothing_yet(candidate) if named_so else None
            return _refusal(candidate, self._form) if named_so else None
        step, opens_with_validation, line = first
        facts = Facts(
            project=candidate.path.absolute().parent.name,
            name=experiment_name(candidate.path.name),
            first_step=step,
            last_step=_last_step(candidate, self._form, step),
            opens_with_validation=opens_with_validation,
            head_digest=_digest(line),
            training_digest=_training_digest(candidate, self._form, line, opens_with_validation),
        )
        return LogFile(candidate.path, self.name, candidate.stamp, facts)

    def read(self, file: LogFile) -> Reading:
        rows = _Rows(file.place, self._form)
        rows.take_all(file.path)
        if rows.rounded:
            rows = _Rows(file.place, self._form, exactly=True)
            rows.take_all(file.path)
        return rows.reading()


@dataclass(frozen=True, slots=True)
class _Form:
    """Where the step and the metrics of a record stand."""

    step_key: str

    def split(self, record: Any) -> tuple[Any, Any]:
        """Step and metrics. Raises KeyError, TypeError or IndexError where there are none."""
        if not self.step_key:
            return record["step"], record["data"]
        values = record.get("data") if type(record) is dict else record["data"]
        if type(values) is not dict:
            values = {key: value for key, value in record.items() if key != self.step_key}
        step = record[self.step_key] if self.step_key in record else values[self.step_key]
        return int(step) if type(step) is float and step.is_integer() else step, values

    def step_in(self, line: bytes) -> int | None:
        """The step of a line, if it is a whole record."""
        line = line.removeprefix(BOM).lstrip(b"\0")
        if not self.step_key:
            found = _RECORD_START.match(line)
            return int(found[1]) if found else None
        if not line.strip().startswith(b"{"):
            return None
        try:
            step, _ = self.split(parse_line(line))
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        return step if type(step) is int else None

    def first_record(self, head: bytes) -> tuple[int, bool, bytes] | None:
        for line in head.split(b"\n"):
            step = self.step_in(line)
            if step is not None:
                return step, self.validates(line), line
        return None

    def validates(self, line: bytes) -> bool:
        """Whether a record holds nothing but validation results."""
        try:
            return is_validation_only(self.split(parse_line(line))[1])
        except (ValueError, KeyError, TypeError, IndexError):
            return False

    def time_in(self, values: dict[str, Any]) -> float | None:
        """When a record was logged; verl's own form does not say it."""
        time = values.get(TIMESTAMP) if self.step_key else None
        sane = isinstance(time, int | float) and _EARLIEST <= time <= _LATEST
        return float(time) if time is not None and sane else None

    @property
    def lacking(self) -> str:
        """What a record without a step lacks."""
        return f'no "{self.step_key}"' if self.step_key else 'no "step" and "data"'


class _Rows:
    """Collects the records of one file, and what is wrong with the others."""

    def __init__(self, place: str, form: _Form, *, exactly: bool = False) -> None:
        self._place = place
        self._form = form
        self._exactly = exactly
        self._steps = array("q")
        #: By the row; verl's own form has none.
        self._times: dict[int, float] = {}
        self._builder = TableBuilder()
        self._known = KnownRows(self._builder, self._took)
        self._skips: list[Skip] = []
        self._more: dict[SkipReason, int] = {}

    def take_all(self, path: Path) -> None:
        """All lines of a file. Raises UnreadableInput."""
        for line in read_lines(path, self._known.take_lines):
            if line.too_long or not self._known.take(line.data):
                self._take_unknown(line)

    def _took(self, records: list[Any]) -> None:
        self._steps.extend([record.step for record in records])

    def _take_unknown(self, line: Line) -> None:
        if line.too_long:
            self._skip(
                line, SkipReason.TOO_LONG, f"over {LONGEST_LINE:,} bytes, which W&B does not take"
            )
            return
        try:
            step, values = self._form.split(parse_line(line.data))
        except ValueError as error:
            self._broken(line, str(error))
            return
        except (KeyError, TypeError, IndexError):
            self._skip(line, SkipReason.NO_STEP, self._form.lacking)
            return
        if type(step) is not int or type(values) is not dict or not 0 <= step < 2**63:
            self._skip(line, SkipReason.NO_STEP, f"step is {str(step)[:40]!r}")
            return
        time = None
        if "_step" in values or "_timestamp" in values or "_runtime" in values:
            time = self._form.time_in(values)
            values = {key: value for key, value in values.items() if key not in AXES}
        try:
            self._builder.add(values, exactly=self._exactly)
        except ValueError as error:
            self._skip(line, SkipReason.MALFORMED, str(error))
            return
        if time is not None:
            self._times[len(self._steps)] = time
        self._steps.append(step)
        if not self._form.step_key and not self._exactly:
            self._known.learn()

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
        rows = len(self._steps)
        columns: dict[str, Any] = {STEP: pa.array(np.frombuffer(self._steps, np.int64))}
        if self._times:
            columns[TIMESTAMP] = pa.array(
                map(self._times.get, range(rows)), pa.float64(), size=rows
            )
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


def _first_record_beyond(path: Path, form: _Form) -> tuple[int, bool, bytes] | None:
    """The first record of a file whose beginning is damaged: a hole that a truncation under an
    open writer leaves, or a long line of junk.
    """
    try:
        for line in read_lines(path):
            if line.offset > _SEARCHED:
                return None
            if not line.too_long and (found := form.first_record(line.data)):
                return found
    except UnreadableInput:
        pass  # it will be said when the file is read
    return None


def _refusal(candidate: Candidate, form: _Form) -> Skip:
    place = str(candidate.path)
    for magic, program in _PACKED.items():
        if candidate.head.startswith(magic):
            detail = "compressed; of compressed files only console text is read"
            return Skip(
                SkipReason.NOT_RECOGNISED, place, detail, f"Unpack it: {program} {quoted(place)}"
            )
    for line in candidate.head.split(b"\n"):
        try:
            value = parse_line(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            keys = ", ".join(sorted(map(str, value))[:6])
            lacking = form.lacking.removeprefix("no ")
            detail = f"JSON lines without {lacking}: {keys}"
            return Skip(SkipReason.NOT_RECOGNISED, place, detail, _other_key(value))
    return Skip(
        SkipReason.NOT_A_LOG,
        place,
        "no JSON lines",
        f"Look at it with: head -c 200 {quoted(place)} | xxd",
    )


def _other_key(record: dict[str, Any]) -> str:
    """What to say when another key may count the steps of these lines."""
    for key in STEP_KEYS:
        form = _Form(key)
        try:
            step, values = form.split(record)
        except (KeyError, TypeError):
            continue
        if type(step) is int and values:
            return f"If {key} counts its steps: --step-key {quoted(key)}"
    return ""


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line.strip(b"\0\r\n "), digest_size=8).hexdigest()


def _training_digest(candidate: Candidate, form: _Form, first: bytes, validates: bool) -> str:
    """Of the first record with results of a training step; empty while there is none."""
    if not validates:
        return _digest(first)
    for line in _head(candidate, _TAIL_BYTES).split(b"\n")[:-1]:
        if form.step_in(line) is not None and not form.validates(line):
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


def _last_step(candidate: Candidate, form: _Form, default: int) -> int:
    """The last record's step, from the end of the file: as much of it as it takes to find one."""
    size = candidate.stamp.size
    looked_at = _TAIL_BYTES
    while True:
        lines = _tail(candidate.path, size, looked_at).split(b"\n")
        for line in reversed(lines[:-1]):  # what follows the last line end may be cut
            step = form.step_in(line)
            if step is not None:
                return max(default, step)
        if looked_at >= min(size, _SEARCHED):
            return default
        looked_at *= _WIDER


def _tail(path: Path, size: int, looked_at: int) -> bytes:
    """So many bytes before the end of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, size - looked_at))
            return stream.read(looked_at)
    except OSError:
        return b""
