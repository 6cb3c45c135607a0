"""Events of a console -> rows, and where in the file a job was started again."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from verl_logsync.columns import AXES, EXACT, STEP, TIMESTAMP
from verl_logsync.model import Restart, SkipReason
from verl_logsync.sources.console.records import HALF_DIGIT, Record
from verl_logsync.sources.console.transcript import (
    Config,
    Event,
    Notebook,
    Printed,
    Sign,
    Step,
    Validation,
)
from verl_logsync.table_builder import TableBuilder
from verl_logsync.verl_keys import is_training_key, is_validation_only

_UNKNOWN_STEP: Final = "its step is not known yet"


@dataclass(slots=True)
class _Start:
    """What was printed since the last row about a start of the job."""

    started_at: float | None = None
    step: int | None = None
    certain: bool = False
    config: Mapping[str, Any] | None = None
    initial: tuple[Printed, Mapping[str, Any]] | None = None
    total: int | None = None


@dataclass(slots=True)
class Attempt:
    """One start of the job, as far as the file tells."""

    owners: set[str]
    start: _Start
    rows: int = 0
    highest: int = -1
    total: int | None = None
    finals: int = 0
    coarse: bool = True
    vanished: set[str] = field(default_factory=set)
    reached: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    step: int
    values: dict[str, Any]
    stamp: float | None


_trains = functools.lru_cache(1 << 14)(is_training_key)


class Attempts:
    """Collects the rows of a file."""

    def __init__(self, notes: Notebook) -> None:
        self.restarts: list[Restart] = []
        self.config: dict[str, Any] = {}
        self.earlier_configs: list[Mapping[str, Any]] = []
        self.last_line = 0
        self._notes = notes
        self._builder = TableBuilder()
        self._steps = array("q")
        self._stamps: list[float | None] = []
        self._pending: _Row | None = None
        self._final: tuple[Printed, Mapping[str, Any]] | None = None
        self._next = _Start()
        self._done: list[Attempt] = []
        self._owners: set[str] = set()
        self.now = Attempt(set(), self._next)

    # -- events ----------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Add one event."""
        if isinstance(event, Step):
            self._step(event.at, event.record)
        elif isinstance(event, Validation):
            self._validation(event)
        elif isinstance(event, Config):
            if self.config and self.config != event.values:
                self.earlier_configs.append(dict(self.config))
            self.config.update(event.values)
            self._hint(event.at, certain=True)
        elif isinstance(event, Sign):
            self._sign(event)

    def _hint(self, at: Printed, *, certain: bool = False) -> None:
        """Something that is printed when a job starts."""
        coming = self._next
        if coming.started_at is None:
            coming.started_at = at.stamp
        coming.certain = coming.certain or certain

    def _sign(self, sign: Sign) -> None:
        if sign.kind == "total":
            self._next.total = sign.value
            self.now.total = self.now.total or sign.value
        self._hint(sign.at)
        if sign.kind in ("scratch", "resumed"):
            self._next.step = sign.value

    def _validation(self, event: Validation) -> None:
        if event.values is None:
            if not event.final and self.now.rows > 1:
                self._hint(event.at, certain=True)
        elif event.final:
            self._final = event.at, event.values
            self.now.finals += 1
        elif self.now.rows == 1 and self._pending is not None and not self._next.certain:
            _add_missing(self._pending.values, event.values)
        else:
            self._next.initial = event.at, event.values

    # -- rows ------------------------------------------------------------------------------

    def _step(self, at: Printed, record: Record) -> None:
        self.last_line = at.line
        if self.now.rows and self._is_restart(at, record):
            self._end_attempt()
            self.restarts.append(Restart(len(self._steps), self._next.started_at or at.stamp))
            self.now = Attempt(set(), self._next, total=self._next.total)
        self._begin_row(at, record)
        self._next = _Start()

    def _begin_row(self, at: Printed, record: Record) -> None:
        values = dict(record.values)
        self._initial(at, record.step, values)
        self._flush()
        self._pending = _Row(record.step, values, at.stamp)
        now = self.now
        now.rows += 1
        now.highest = max(now.highest, record.step)
        now.coarse = now.coarse and record.coarse
        now.vanished.update(record.vanished)
        if at.owner:
            now.owners.add(at.owner)
            self._owners.add(at.owner)
        if record.step == now.highest:
            now.reached.update(dict.fromkeys(filter(_trains, record.values), record.step))
        else:
            for key in filter(_trains, record.values):
                now.reached[key] = max(record.step, now.reached.get(key, -1))

    def _initial(self, at: Printed, step: int, values: dict[str, Any]) -> None:
        """Put the initial validation where it belongs: to the step that training starts at."""
        initial = self._next.initial
        if initial is None:
            return
        known = self._next.step
        if self.now.rows:
            detail = "initial validation metrics without a start of the job"
            self._notes.skip(initial[0], SkipReason.NO_STEP, detail, 1)
        elif is_validation_only(values) or step == known:
            _add_missing(values, initial[1])
        elif known is not None or step > 0:
            start = known if known is not None else step - 1
            self._add(_Row(start, dict(initial[1]), initial[0].stamp))

    def _is_restart(self, at: Printed, record: Record) -> bool:
        """Whether a record is the first of another start of the job.

        A late record (fully asynchronous trainers log validation and aggregates late) has keys
        that were not logged at its step yet.
        """
        now, coming, step = self.now, self._next, record.step
        if coming.certain:
            return True
        if at.owner and now.owners and at.owner not in self._owners:
            return True
        if step > now.highest and coming.step != now.highest:
            return False
        training = list(filter(_trains, record.values))
        if step < now.highest:
            if coming.step is not None and step - coming.step in (0, 1):
                return True
            return any(now.reached.get(key, -1) >= step for key in training)
        if coming.step == now.highest and now.rows > 1:
            # Resumed where the first job ended; else the sign belongs to a row that overtook it.
            return step == coming.step + 1 or (step == coming.step and not training)
        if step > now.highest or at.owner:
            return False
        again = sum(now.reached.get(key, -1) == step for key in training)
        return again * 2 > len(training) and not self._is_echo(record)

    def _is_echo(self, record: Record) -> bool:
        """Whether the same record was printed twice (by two ranks, or through two handlers)."""
        row = self._pending
        return (
            row is not None
            and row.step == record.step
            and all(
                key in row.values and repr(row.values[key]) == repr(value)
                for key, value in record.values.items()
            )
        )

    def _end_attempt(self) -> None:
        self._finish_final()
        self._flush()
        self._done.append(self.now)

    def _finish_final(self) -> None:
        """Put the final validation to the last step."""
        if self._final is None:
            return
        (at, values), self._final = self._final, None
        row, last = self._pending, self.now.highest
        if row is not None and row.step == last:
            _add_missing(row.values, values)
        elif last >= 0:
            self._flush()
            self._pending = _Row(last, dict(values), at.stamp)
        else:
            detail = "final validation metrics without any step"
            self._notes.skip(at, SkipReason.NO_STEP, detail, 1)

    def close(self) -> None:
        """No more events will come."""
        self._end_attempt()
        initial = self._next.initial
        if initial is None:
            return
        at, values = initial
        if self._next.step is None:
            detail = f"initial validation metrics: {_UNKNOWN_STEP}"
            self._notes.skip(at, SkipReason.PARTIAL_LINE, detail)
            return
        if self._steps:
            self.restarts.append(Restart(len(self._steps), self._next.started_at))
        self._add(_Row(self._next.step, dict(values), at.stamp))

    def _flush(self) -> None:
        if self._pending is not None:
            self._add(self._pending)
            self._pending = None

    def _add(self, row: _Row) -> None:
        values = {key: value for key, value in row.values.items() if key not in AXES}
        large = any(type(v) is int and not -EXACT <= v <= EXACT for v in values.values())
        self._builder.add(values, exactly=large)
        self._steps.append(row.step)
        self._stamps.append(row.stamp)

    # -- results ---------------------------------------------------------------------------

    @property
    def table(self) -> Any:
        """All rows, as an Arrow table."""
        import pyarrow as pa

        columns: dict[str, Any] = {STEP: pa.array(np.array(self._steps, dtype=np.int64))}
        if any(stamp is not None for stamp in self._stamps):
            columns[TIMESTAMP] = pa.array(self._stamps, type=pa.float64())
        return pa.table(columns | self._builder.columns())

    @property
    def _coarse(self) -> list[Attempt]:
        return [attempt for attempt in self._done if attempt.rows and attempt.coarse]

    @property
    def rounding(self) -> float:
        """Half the last digit of its numbers, 0 where they are exact."""
        return HALF_DIGIT if self._coarse else 0.0

    @property
    def below_precision(self) -> tuple[str, ...]:
        """The keys that were printed as 0.000 at least once."""
        return tuple(sorted(set().union(*(attempt.vanished for attempt in self._coarse))))

    @property
    def began_again(self) -> bool:
        """Whether the job was started once more after the last row."""
        return self._next.certain

    @property
    def reached_total(self) -> bool:
        """Whether the last start of the job logged its last step."""
        total = self.now.total or _total_of(self.config)
        return total is not None and self.now.highest >= total


def _total_of(config: Mapping[str, Any]) -> int | None:
    trainer = config.get("trainer")
    total = trainer.get("total_training_steps") if isinstance(trainer, Mapping) else None
    return total if type(total) is int and total > 0 else None


def _add_missing(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        values.setdefault(key, value)


def collect(events: Iterable[Event], notes: Notebook) -> Attempts:
    """The rows of all events."""
    attempts = Attempts(notes)
    for event in events:
        attempts.take(event)
    attempts.close()
    return attempts
