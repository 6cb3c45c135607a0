"""When every step happened: `_timestamp` and `_runtime` for readings that lack them.

verl's JSONL has no time. The time of a row is rebuilt from the sum of its step times, ending
at the file's last modification, and marked as estimated. The estimated start is pinned by the
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
from verl_logsync.verl_keys import STEP_SECONDS, TESTING_SECONDS

#: No training step takes longer, in seconds.
LONGEST_STEP: Final = 30 * 86400.0

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


def set_clocks(attempts: Sequence[AttemptReading], pins: Mapping[str, float]) -> Clocked:
    """Give all rows of a run their times, as far as they are known."""
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
    return Clocked(tuple(done), _overall(kinds), pinned, _first_start(done))


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
    recorded = [r.rows for _, r in attempt.readings if TIMESTAMP in r.rows.schema.names]
    readings: list[tuple[LogFile, Reading]] = []
    kind: Clock = "recorded"
    for file, reading in attempt.readings:
        rows, started = reading.rows, reading.started_at
        if TIMESTAMP not in rows.schema.names and rows.num_rows:
            seconds = _step_seconds(rows)
            kind = "unknown" if seconds is None else "estimated"
            if seconds is not None:
                head = file.facts.head_digest
                elapsed = np.cumsum(seconds)
                start = pins.get(head)
                if start is None:
                    end = min(file.stamp.mtime, window[1])
                    start = max(_start(rows, elapsed, recorded, end), window[0])
                pinned[head] = started = start
                rows = _with(rows, TIMESTAMP, start + elapsed)
        elif rows.num_rows:
            rows = _with_runtime(rows, reading.started_at)
        readings.append((file, replace(reading, rows=rows, started_at=started)))
    covered = {step for rows in recorded for step in rows.column(STEP).to_pylist()}
    if recorded and all(_inside(r.rows, covered) for _, r in readings):
        kind = "recorded"
    return AttemptReading(attempt.attempt, tuple(readings)), kind


def _known_end(attempt: AttemptReading, pins: Mapping[str, float]) -> float:
    """When an attempt certainly still ran: its last recorded or pinned time."""
    end = -math.inf
    for file, reading in attempt.readings:
        if not reading.rows.num_rows:
            continue
        pin = pins.get(file.facts.head_digest)
        if TIMESTAMP in reading.rows.schema.names:
            end = max(end, float(np.nanmax(as_numbers(reading.rows.column(TIMESTAMP)))))
        elif pin is not None and (seconds := _step_seconds(reading.rows)) is not None:
            end = max(end, pin + float(seconds.sum()))
    return end


def _inside(rows: pa.Table, steps: set[int]) -> bool:
    return set(rows.column(STEP).to_pylist()) <= steps


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
    # perf/... is logged with every training step only by versions whose step time (0.6.0 on)
    # does not contain the validation; update_weights came with them.
    if TESTING_SECONDS in names and "actor/entropy_loss" not in names:
        testing = as_numbers(rows.column(TESTING_SECONDS))
        seconds = seconds + np.where(np.isfinite(testing) & (testing > 0), testing, 0.0)
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


def _with_runtime(rows: pa.Table, started_at: float | None) -> pa.Table:
    """Recorded rows with their `_runtime`, which old logs may lack."""
    if RUNTIME in rows.schema.names:
        return rows
    times = as_numbers(rows.column(TIMESTAMP))
    start = started_at if started_at is not None else float(np.nanmin(times))
    return _with(rows, RUNTIME, times - start)


def _start_of(attempt: AttemptReading) -> float | None:
    starts = [r.started_at for _, r in attempt.readings if r.started_at is not None]
    firsts = [
        float(np.nanmin(as_numbers(r.rows.column(TIMESTAMP))))
        for _, r in attempt.readings
        if TIMESTAMP in r.rows.schema.names and r.rows.num_rows
    ]
    return min(starts or firsts, default=None)


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
            longest = max(longest, float(np.nanmax(as_numbers(rows.column(RUNTIME)))))
        elif TIMESTAMP in rows.schema.names and rows.num_rows and start is not None:
            longest = max(longest, float(np.nanmax(as_numbers(rows.column(TIMESTAMP)))) - start)
        if reading.ended_at is not None and start is not None:
            longest = max(longest, reading.ended_at - start)
    return longest


def _first_start(attempts: Sequence[AttemptReading]) -> float | None:
    return min((s for a in attempts if (s := _start_of(a)) is not None), default=None)
