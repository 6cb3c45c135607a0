"""The values that diagnostics hand over, and how several candidates become one series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from verl_logsync.columns import STEP
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.series import Flags, Frame, Series, column_of, nothing, plain


@dataclass(frozen=True, slots=True)
class Given:
    """What the history itself does not say.

    `dump_rows` and `dump_scores` are the rows (without padding) and the mean score of training
    dumps by step. `gpu_memory_percent` (0 to 100, the fullest GPU) and `gpu_memory_bytes` are
    records of an offline run's system metrics, brought to steps. `device_memory_gb` is what one
    GPU has, in GiB; `device_memory_from` says who said so.
    """

    device_memory_gb: float | None = None
    device_memory_from: str = "--device-memory-gb"
    dump_rows: Mapping[int, int] = field(default_factory=dict)
    dump_scores: Mapping[int, float] = field(default_factory=dict)
    gpu_memory_percent: Mapping[int, float] = field(default_factory=dict)
    gpu_memory_bytes: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Derived:
    """What was added to a history.

    `columns` has `_step` and the added keys only, a row for each of the history's, an Arrow null
    where nothing could be computed. A key can be logged and added where only later rows log it;
    `verl_logsync.diagnostics.series.filled` brings the two together. `provenance` says of each key
    where it comes from, `missing` of keys (or some rows of them) why they could not be computed.
    """

    columns: pa.Table
    provenance: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to get a series: the values where it is possible, and what to say about it."""

    series: Series
    source: str
    formula: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A series under its key. `why_not` says why rows (or all) are without, empty if none are."""

    key: str
    series: Series
    facts: Mapping[str, Any] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every diagnostic is given: the rows, the configuration, and what else is known."""

    frame: Frame
    config: Configuration
    given: Given = field(default_factory=Given)


def choose(asked: Asked, key: str, candidates: Sequence[Candidate], why_not: str) -> Made:
    """The first candidate that has a value, row by row; nothing from where the key is logged."""
    frame = asked.frame
    rows = len(frame)
    free = np.arange(rows) < frame.first_rows.get(key, rows)
    values, there = np.full(rows, np.nan), np.zeros(rows, dtype=bool)
    sources: list[dict[str, Any]] = []
    notes: list[str] = []
    for candidate in candidates:
        take = candidate.series.there & free & ~there
        if take.any():
            values[take] = candidate.series.values[take]
            there |= take
            count = int(take.sum())
            sources.append({"from": candidate.source, "formula": candidate.formula, "rows": count})
            notes += [note for note in candidate.notes if note not in notes]
    facts: dict[str, Any] = {}
    if sources:
        facts = {**sources[0], "caveats": notes}
        if len(sources) > 1:
            facts["other_rows"] = sources[1:]
    wanted = free & frame.trained
    reason = why_not if bool((wanted & ~there).any()) else ""
    return Made(key, plain(values, there), facts, reason)


def gathered(frame: Frame, made: Sequence[Made]) -> Derived:
    """All series with a value as one table."""
    kept = [one for one in made if one.series.there.any()]
    columns = {one.key: column_of(one.series) for one in kept}
    return Derived(
        pa.table({STEP: pa.array(frame.steps, type=pa.int64()), **columns}),
        {one.key: dict(one.facts) for one in kept},
        {one.key: one.why_not for one in made if one.why_not},
    )


def where(condition: Flags, series: Series) -> Series:
    """The series in some of its rows."""
    there = series.there & condition
    return Series(np.where(there, series.values, np.nan), there, series.unknown & there)


def divided(above: Series, below: Series, *, times: float = 1.0) -> Series:
    """The quotient where the divisor is a number above 0."""
    there = above.there & below.finite & (below.values > 0)
    with np.errstate(all="ignore"):
        values = times * above.values / np.where(there, below.values, 1.0)
    return plain(values, there)


def constant(value: float | None, rows: int) -> Series:
    """The same number in every row; none at all for None."""
    if value is None:
        return nothing(rows)
    return plain(np.full(rows, value), np.ones(rows, dtype=bool))
