"""When every step happened: `_timestamp` and `_runtime` for readings that lack them.

Recorded times go first: of offline runs and step logs, else of the container's or scheduler's
stamps in console text. verl's JSONL has no time: where nothing else was recorded, the time of a
row is rebuilt from the sum of its step times, ending at the file's last modification, and marked
as estimated. The estimated start is pinned by the
first upload, so that rows sent later continue the same clock.

`_runtime` is the time since the run's first start without the idle time between attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import RUNTIME, STEP, TIMESTAMP, as_numbers
from verl_logsync.model import AttemptReading, Clock, LogFile, Reading
from verl_logsync.verl_keys import STEP_SECONDS, beside_step_time

#: No training step takes longer, in seconds.
LONGEST_STEP: Final = 30 * 86400.0
#: Clocks that differ by less than this, in seconds, are the same: a line is written late.
SKEW: Final = 2.0
#: Sources that record when a step was logged; others when its line was printed or written.
_TRUE_CLOCKS: Final = frozenset({"offline_run", "step_log"})

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Clocked:
    """Readings whose rows have times.

    `pins` hold what a first upload settled on, so that later rows continue the same clock: by
    a file's head digest its estimated start (seconds since 1970), by `DIGEST:after:DIGESTS`
    the active seconds of the attempts before it. `started_at` is the run's first start.
    """

    attempts: tuple[AttemptReading, ...]
    clock: Clock
    pins: Mapping[str, float]
    started_at: float | None


def set_clocks(
    attempts: Sequence[AttemptReading], pins: Mapping[str, float], *, wall: bool = False
) -> Clocked:
    """Give all rows of a run their times, as far as they are known.

    Args:
        attempts: in order.
        pins: what an earlier upload settled on.
        wall: keep the idle time between attempts in `_runtime`.
    """
    pinned: dict[str, float] = {}
    timed: list[AttemptReading] = []
    kinds: set[Clock] = set()
    next_start = float("inf")
    ends = [_known_end(attempt, pins) for attempt in attempts]
    for number in reversed(range(len(attempts))):  # one is over before the next one starts
        window = max(ends[:number], default=-math.inf), next_start
        with_times, kind = _timed(attempts[number], pins, pinned, window)
        kinds.add(kind)
        timed.insert(0, with_times)
        next_start = min(next_start, _start_of(with_times) or next_start)
    done: list[AttemptReading] = []
    active = 0.0
    before: list[str] = []
    for attempt in timed:
        active = _pinned_active(attempt, active, before, pins, pinned)
        before.extend(f.facts.head_digest for f, _ in attempt.readings)
        done.append(_shifted(attempt, active))
        active += _active_seconds(attempt)
    started_at = _first_start(done)
    if wall and started_at is not None:
        done = [_by_the_wall(attempt, started_at) for attempt in done]
    return Clocked(tuple(done), _overall(kinds), pinned, started_at)


def _by_the_wall(attempt: AttemptReading, started_at: float) -> AttemptReading:
    """`_runtime` of all rows since the first start, idle time included."""
    readings = [
        (
            file,
            replace(
                r, rows=_with(r.rows, RUNTIME, as_numbers(r.rows.column(TIMESTAMP)) - started_at)
            ),
        )
        if TIMESTAMP in r.rows.schema.names
        else (file, r)
        for file, r in attempt.readings
    ]
    return AttemptReading(attempt.attempt, tuple(readings))


def _pinned_active(
    attempt: AttemptReading,
    active: float,
    before: Sequence[str],
    pins: Mapping[str, float],
    pinned: dict[str, float],
) -> float:
    """The active seconds before an attempt, as an earlier upload counted them.

    That count does not hold any more when files of an earlier attempt turn up later.
    """
    known = "+".join(sorted(filter(None, before)))
    keys = sorted(
        f"{f.facts.head_digest}:after:{known}" for f, _ in attempt.readings if f.facts.head_digest
    )
    active = next((pins[key] for key in keys if key in pins), active)
    pinned.update((key, active) for key in keys)
    return active


def _overall(kinds: set[Clock]) -> Clock:
    for kind in ("unknown", "estimated", "recorded"):
        if kind in kinds:
            return kind
    return "unknown"


def _timed(
    attempt: AttemptReading,
    pins: Mapping[str, float],
    pinned: dict[str, float],
    window: tuple[float, float],
) -> tuple[AttemptReading, Clock]:
    """Estimate the times of readings without, by the recorded ones of the same attempt.

    `window` lies between the known end of the attempts before and the start of the next.
    """
    with_clock = _without_skew([(file, _without_empty_clock(r)) for file, r in attempt.readings])
    recorded = [r.rows for _, r in with_clock if TIMESTAMP in r.rows.schema.names]
    readings = [
        (file, reading)
        if TIMESTAMP in reading.rows.schema.names or not reading.rows.num_rows
        else (file, _estimated(file, reading, recorded, pins, pinned, window))
        for file, reading in with_clock
    ]
    return AttemptReading(attempt.attempt, tuple(readings)), _kind(readings, recorded)


def _without_empty_clock(reading: Reading) -> Reading:
    """A start without times in a file of which other starts have some is one without a clock."""
    rows = reading.rows
    if TIMESTAMP not in rows.schema.names or len(_finite(rows, TIMESTAMP)) or not rows.num_rows:
        return reading
    return replace(reading, rows=rows.drop_columns([TIMESTAMP]))


def _kind(readings: Sequence[tuple[LogFile, Reading]], recorded: Sequence[pa.Table]) -> Clock:
    """How well the times of an attempt are known: as well as that of its least known step."""
    tables = [reading.rows for _, reading in readings]
    steps = np.concatenate([np.empty(0, np.int64), *(r.column(STEP).to_numpy() for r in tables)])
    if np.isin(steps, _timed_steps(recorded)).all():
        return "recorded"
    timed = _timed_steps([rows for rows in tables if TIMESTAMP in rows.schema.names])
    return "estimated" if np.isin(steps, timed).all() else "unknown"


def _estimated(
    file: LogFile,
    reading: Reading,
    recorded: Sequence[pa.Table],
    pins: Mapping[str, float],
    pinned: dict[str, float],
    window: tuple[float, float],
) -> Reading:
    """A reading without times, with those that its step times give where none is recorded."""
    rows = reading.rows
    seconds = _step_seconds(rows)
    if seconds is None:
        return reading
    head = file.facts.head_digest
    elapsed = np.cumsum(seconds)
    start = pins.get(head)
    if start is None:
        end = min(file.stamp.mtime, window[1])
        start = max(_start(rows, elapsed, recorded, end), window[0])
    pinned[head] = start
    times = start + elapsed
    known = np.isin(rows.column(STEP).to_numpy(), _timed_steps(recorded))
    rows = _with(rows, TIMESTAMP, np.where(known, np.nan, times))
    return replace(reading, rows=rows, started_at=start)


def _timed_steps(recorded: Sequence[pa.Table]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Steps for which some log has a time."""
    steps = [
        rows.column(STEP).filter(rows.column(TIMESTAMP).is_valid()).to_numpy() for rows in recorded
    ]
    return np.concatenate([np.empty(0, np.int64), *steps])


def _without_skew(
    readings: Sequence[tuple[LogFile, Reading]],
) -> list[tuple[LogFile, Reading]]:
    """Recorded clocks of one attempt, set by the one that is recorded best, or has most rows.

    Containers and nodes have clocks of their own; a constant difference is corrected and said.
    """
    timed = [
        (file.source in _TRUE_CLOCKS, reading.rows.num_rows, number)
        for number, (file, reading) in enumerate(readings)
        if TIMESTAMP in reading.rows.schema.names and reading.rows.num_rows
    ]
    if len(timed) < 2:
        return list(readings)
    clocks = [readings[number][1] for *_, number in timed]
    leader = readings[max(timed)[-1]][1]
    return [
        (file, _set_by(leader, reading, file))
        if any(reading is other for other in clocks) and reading is not leader
        else (file, reading)
        for file, reading in readings
    ]


def _set_by(leader: Reading, reading: Reading, file: LogFile) -> Reading:
    _, ours, theirs = np.intersect1d(
        reading.rows.column(STEP).to_numpy(),
        leader.rows.column(STEP).to_numpy(),
        return_indices=True,
    )
    times = as_numbers(reading.rows.column(TIMESTAMP))
    differences = times[ours] - as_numbers(leader.rows.column(TIMESTAMP))[theirs]
    usable = differences[np.isfinite(differences)]
    skew = float(np.median(usable)) if len(usable) else 0.0
    if abs(skew) <= SKEW:
        return reading
    started = reading.started_at - skew if reading.started_at is not None else None
    note = f"the clock of {file.place} differs by {skew:+.1f} s; its times are corrected by that"
    return replace(
        reading,
        rows=_with(reading.rows, TIMESTAMP, times - skew),
        started_at=started,
        notes=(*reading.notes, note),
    )


def _known_end(attempt: AttemptReading, pins: Mapping[str, float]) -> float:
    """When an attempt certainly still ran: its last recorded or pinned time."""
    end = -math.inf
    for file, reading in attempt.readings:
        if not reading.rows.num_rows:
            continue
        pin = pins.get(file.facts.head_digest)
        if TIMESTAMP in reading.rows.schema.names:
            end = max(end, _latest(reading.rows, TIMESTAMP))
        elif pin is not None and (seconds := _step_seconds(reading.rows)) is not None:
            end = max(end, pin + float(seconds.sum()))
    return end


def _step_seconds(rows: pa.Table) -> _Floats | None:
    """Seconds that each record took; None when no record says so."""
    names = rows.schema.names
    key = next((key for key in STEP_SECONDS if key in names), None)
    if key is None:
        return None
    seconds = as_numbers(rows.column(key))
    usable = np.isfinite(seconds) & (seconds >= 0)
    if not usable.any() or float(seconds[usable].max()) > LONGEST_STEP:
        return None  # whatever was logged there, it is no duration
    seconds = np.where(usable, seconds, 0.0)
    for key in beside_step_time(names):
        if key in names:
            more = as_numbers(rows.column(key))
            seconds = seconds + np.where(np.isfinite(more) & (more > 0), more, 0.0)
    return seconds


def _start(
    rows: pa.Table,
    elapsed: _Floats,
    recorded: Sequence[pa.Table],
    end: float,
) -> float:
    """The estimated start: by a recorded clock of the attempt, else counted back from the end."""
    steps = rows.column(STEP).to_numpy()
    for table in recorded:
        times = as_numbers(table.column(TIMESTAMP))
        shared, ours, theirs = np.intersect1d(
            steps, table.column(STEP).to_numpy(), return_indices=True
        )
        if len(shared) and np.isfinite(times[theirs[-1]]):
            return float(times[theirs[-1]] - elapsed[ours[-1]])
    return float(end - elapsed[-1])


def _with(rows: pa.Table, name: str, values: _Floats) -> pa.Table:
    column = pa.array(values, mask=~np.isfinite(values))
    if name in rows.schema.names:
        return rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows.append_column(name, column)


def _start_of(attempt: AttemptReading) -> float | None:
    starts = [r.started_at for _, r in attempt.readings if r.started_at is not None]
    firsts = [
        float(times.min())
        for _, r in attempt.readings
        if TIMESTAMP in r.rows.schema.names and len(times := _finite(r.rows, TIMESTAMP))
    ]
    return min(starts or firsts, default=None)


def _finite(rows: pa.Table, name: str) -> _Floats:
    """A column's numbers; none in a reading whose steps all have their times elsewhere."""
    values = as_numbers(rows.column(name))
    finite: _Floats = values[np.isfinite(values)]
    return finite


def _latest(rows: pa.Table, name: str) -> float:
    return float(_finite(rows, name).max(initial=-math.inf))


def _shifted(attempt: AttemptReading, active: float) -> AttemptReading:
    """`_runtime` of all rows, counted on from the active time of the earlier attempts."""
    start = _start_of(attempt)
    readings: list[tuple[LogFile, Reading]] = []
    for file, reading in attempt.readings:
        rows = reading.rows
        if RUNTIME in rows.schema.names:
            rows = _with(rows, RUNTIME, as_numbers(rows.column(RUNTIME)) + active)
        elif TIMESTAMP in rows.schema.names and start is not None:
            rows = _with(rows, RUNTIME, as_numbers(rows.column(TIMESTAMP)) - start + active)
        readings.append((file, replace(reading, rows=rows)))
    return AttemptReading(attempt.attempt, tuple(readings))


def _active_seconds(attempt: AttemptReading) -> float:
    """How long an attempt ran, superseded steps included: they were computed too."""
    longest = 0.0
    start = _start_of(attempt)
    for _, reading in attempt.readings:
        rows = reading.rows
        if RUNTIME in rows.schema.names and rows.num_rows:
            longest = max(longest, _latest(rows, RUNTIME))
        elif TIMESTAMP in rows.schema.names and rows.num_rows and start is not None:
            longest = max(longest, _latest(rows, TIMESTAMP) - start)
        if reading.ended_at is not None and start is not None:
            longest = max(longest, reading.ended_at - start)
    return longest


def _first_start(attempts: Sequence[AttemptReading]) -> float | None:
    return min((s for a in attempts if (s := _start_of(a)) is not None), default=None)
