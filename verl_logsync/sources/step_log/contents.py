"""Collects everything that the files of one rank's log hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from verl_logsync.columns import AXES, STEP, TIMESTAMP, from_json, to_json
from verl_logsync.errors import LogsyncError, NotALog
from verl_logsync.jsonlines import LONGEST_LINE, Line, parse_line, read_lines
from verl_logsync.known_rows import KnownRows
from verl_logsync.model import Ending, Reading, Restart, Skip, SkipReason
from verl_logsync.sources.step_log.headers import Header, header_of, newer_version
from verl_logsync.sources.step_log.parquet import Group, read_groups
from verl_logsync.steplog.layout import END_START, HEADER_START, HISTOGRAM, MONO, TABLE, TIME
from verl_logsync.table_builder import TableBuilder

# So many bad lines are named one by one; of a file full of them the rest is counted.
_SKIPS_NAMED: Final = 100
# A wall clock that moves against the monotonic one by more than this was set.
_CLOCK_SET: Final = 1.0


class Contents:
    """The records of one log, and what is wrong with the others.

    Args:
        place: of the log, for what concerns all of it.
        exactly: check every integer for its size (twice as slow; see `rounded`).
    """

    def __init__(self, place: str, *, exactly: bool) -> None:
        self._place = place
        self._exactly = exactly
        self._steps: list[int] = []
        self._times: list[float | None] = []
        self._builder = TableBuilder()
        self._known = KnownRows(self._builder, self._took_all, fields=("time", "mono"))
        self._skips: list[Skip] = []
        self._more: dict[SkipReason, int] = {}
        self._notes: dict[str, int] = {}
        self._header: Header | None = None
        self._started_at: float | None = None
        self._config: Mapping[str, Any] = {}
        self._earlier_configs: list[Mapping[str, Any]] = []
        self._restarts: list[Restart] = []
        self._ending: Ending | None = None
        self._ended_at: float | None = None
        self._clock: tuple[float, float] | None = None

    @property
    def rounded(self) -> bool:
        """Whether an integer may have lost digits, since it was not looked at exactly."""
        return self._builder.rounded

    def missing(self, folder: Path, name: str) -> None:
        """Say that the file before the first one is not here."""
        detail = "the log's earlier file, whose rows are not read"
        hint = "Copy it from the training machine if it still exists there"
        self._skips.append(Skip(SkipReason.FILE_GONE, str(folder / name), detail, hint))

    def unusable(self, error: LogsyncError) -> None:
        """Say that one of the earlier files cannot be read; the others are."""
        self._skips.append(
            Skip(SkipReason.UNREADABLE, error.place or self._place, error.message, error.hint)
        )

    # -- JSON lines ------------------------------------------------------------------------

    def take_lines(self, path: Path) -> None:
        """All lines of a file. Raises UnreadableInput."""
        for line in read_lines(path, self._known.take_lines):
            self._take_line(str(path), line)

    def _take_line(self, place: str, line: Line) -> None:
        if not line.too_long and self._known.take(line.data):
            return
        data = line.data.lstrip(b"\0\r\t ")
        if line.too_long:
            detail = f"over {LONGEST_LINE:,} bytes, which W&B does not take"
            self._skip(place, line, SkipReason.TOO_LONG, detail)
        elif data.startswith(HEADER_START):
            self._take_header(place, line, data)
        elif data.startswith(END_START):
            self._take_end_line(place, line, data)
        elif data.strip():
            self._take_record(place, line, data)

    def _take_header(self, place: str, line: Line, data: bytes) -> None:
        header = header_of(data)
        if header is not None:
            self.start(header)
        elif version := newer_version(data):
            detail = f"a start of the job in version {version} of the format"
            self._skip(place, line, SkipReason.MALFORMED, detail, records=0)
        elif line.ended:
            self._skip(place, line, SkipReason.MALFORMED, "a damaged header", records=0)
        else:
            self._broken(place, line, "")

    def _take_end_line(self, place: str, line: Line, data: bytes) -> None:
        try:
            self.end(parse_line(data))
        except ValueError as error:
            self._broken(place, line, str(error), records=0)

    def _take_record(self, place: str, line: Line, data: bytes) -> None:
        try:
            record = parse_line(data)
            step, values = record["step"], record["data"]
            time, mono = record.get("time"), record.get("mono")
        except ValueError as error:
            self._broken(place, line, str(error))
            return
        except (KeyError, TypeError, IndexError, AttributeError):
            self._skip(place, line, SkipReason.NO_STEP, 'no "step" and "data"')
            return
        if type(step) is not int or type(values) is not dict or not 0 <= step < 2**63:
            self._skip(place, line, SkipReason.NO_STEP, f"step is {str(step)[:40]!r}")
            return
        try:
            self._builder.add(self._row(values), exactly=self._exactly)
        except ValueError as error:
            self._skip(place, line, SkipReason.MALFORMED, str(error))
            return
        self._took(step, time, mono)
        if not self._exactly:
            self._known.learn()

    def _took_all(self, records: list[Any]) -> None:
        for record in records:
            self._took(record.step, record.time, record.mono)

    def _took(self, step: int, time: Any, mono: Any) -> None:
        self._steps.append(step)
        self._times.append(time if type(time) is float else None)
        if type(time) is float and type(mono) is float:
            self._watch_clock(time - mono)

    def _row(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a record as they are kept."""
        if any(axis in values for axis in AXES):
            values = {key: value for key, value in values.items() if key not in AXES}
        if dict in map(type, values.values()):
            return {
                key: self._typed(key, value) if type(value) is dict else value
                for key, value in values.items()
            }
        return values

    def _typed(self, key: str, value: dict[str, Any]) -> Any:
        """W&B's form of a histogram; a table as the JSON text of its columns and rows."""
        kind = value.get("_type")
        if kind == HISTOGRAM and isinstance(value.get("bins"), list):
            if count := value.get("not_finite"):
                self._note(f"histograms of {key} leave out numbers that are not finite", count)
            return {name: value[name] for name in ("_type", "bins", "values") if name in value}
        if kind == TABLE and isinstance(value.get("data"), list):
            return to_json({"columns": value.get("columns"), "data": value["data"]})
        return value

    def _broken(self, place: str, line: Line, why: str, records: int = 1) -> None:
        if line.ended:
            self._skip(place, line, SkipReason.MALFORMED, why, records=records)
        else:
            # It is read when the writer completes it.
            detail = "the writer had not finished it"
            self._skip(place, line, SkipReason.PARTIAL_LINE, detail, records=0)

    def _skip(
        self, place: str, line: Line, reason: SkipReason, detail: str, *, records: int = 1
    ) -> None:
        if len(self._skips) >= _SKIPS_NAMED:
            self._more[reason] = self._more.get(reason, 0) + records
            return
        hint = f"See it with: sed -n {line.number}p {place!r} | head -c 300"
        where = f"{place}:{line.number} (byte {line.offset})"
        self._skips.append(Skip(reason, where, detail, hint, records))

    # -- Parquet ---------------------------------------------------------------------------

    def take_parquet(self, path: Path) -> None:
        """All row groups of a file. Raises UnreadableInput or NotALog."""
        header, groups = read_groups(path)
        self.start(header)
        for group in groups:
            if isinstance(group, Skip):
                self._skips.append(group)
            else:
                self._take_group(str(path), group)
        if header.end is not None:
            self.end(header.end)

    def _take_group(self, place: str, group: Group) -> None:
        for index, row in enumerate(group.rows()):
            step, time, mono = row.pop(STEP, None), row.pop(TIME, None), row.pop(MONO, None)
            where = f"{place} (row {group.first + index})"
            if type(step) is not int or step < 0:
                self._skips.append(Skip(SkipReason.NO_STEP, where, f"step is {step!r}", records=1))
                continue
            try:
                values = {key: from_json(v) if type(v) is str else v for key, v in row.items()}
                self._builder.add(self._row(values))
            except ValueError as error:
                detail = f"not JSON: {error}"[:200]
                self._skips.append(Skip(SkipReason.MALFORMED, where, detail, records=1))
                continue
            self._steps.append(step)
            self._times.append(time if type(time) is float else None)
            if type(time) is float and type(mono) is float:
                self._watch_clock(time - mono)

    # -- starts and ends -------------------------------------------------------------------

    def start(self, header: Header) -> None:
        """A header: the first, a new start of the job, or the same one in its next file."""
        if not self._steps:
            if self._header is not None and not header.continues:
                self._note("starts of the job that logged no step", 1)
            self._started_at = header.started_at
        elif not header.continues:
            self._restart(Restart(len(self._steps), header.started_at, header.attempt_id))
        self._header = header
        if header.config and self._config and header.config != self._config:
            self._earlier_configs.append(self._config)
        self._config = header.config or self._config
        self._ending = None
        if not header.continues:
            self._clock = None

    def _restart(self, restart: Restart) -> None:
        if self._restarts and self._restarts[-1].row == restart.row:
            self._note("starts of the job that logged no step", 1)
            self._restarts.pop()
        self._restarts.append(restart)

    def end(self, record: Any) -> None:
        """The last record of a logger that was closed."""
        if not isinstance(record, dict):
            return
        code, time = record.get("exit_code"), record.get("time")
        if type(code) is int:
            self._ending = Ending(code, f"the step log's end, code {code}")
        if type(time) is float:
            self._ended_at = max(self._ended_at or 0.0, time)
        self._note("the trainer could not write its last records", record.get("lost"))
        for word, what in (("dropped", "records"), ("left_out", "values")):
            losses = record.get(word)
            for reason, count in losses.items() if isinstance(losses, dict) else ():
                self._note(f"the trainer could not log some {what} ({reason})", count)

    def _watch_clock(self, offset: float) -> None:
        low, high = self._clock or (offset, offset)
        self._clock = min(low, offset), max(high, offset)
        if high - low <= _CLOCK_SET < self._clock[1] - self._clock[0]:
            self._note("the training machine's clock was set while it ran", 1)

    def _note(self, text: str, count: object) -> None:
        if type(count) is int and count > 0:
            self._notes[text] = self._notes.get(text, 0) + count

    # -- the result ------------------------------------------------------------------------

    def reading(self) -> Reading:
        """Everything as one reading.

        Raises:
            NotALog: there is no record.
        """
        if not self._steps and not any(skip.records for skip in self._skips):
            raise NotALog("holds no record", place=self._place, hint="It is read again next time.")
        more = (
            Skip(reason, self._place, f"{count} more like those above", records=count)
            for reason, count in self._more.items()
        )
        return Reading(
            self._table(),
            (*self._skips, *more),
            self._config,
            ending=self._ending,
            started_at=self._started_at,
            ended_at=self._ended_at,
            restarts=tuple(self._restarts),
            notes=tuple(f"{text}: {count}" for text, count in self._notes.items()),
            earlier_configs=tuple(self._earlier_configs),
        )

    def _table(self) -> pa.Table:
        columns: dict[str, Any] = {STEP: pa.array(self._steps, type=pa.int64())}
        if any(time is not None for time in self._times):
            columns[TIMESTAMP] = pa.array(self._times, type=pa.float64())
        return pa.table(columns | self._builder.columns())
