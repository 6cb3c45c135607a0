"""Read all files of a run and align them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import numpy as np
import pyarrow as pa

from verl_logsync.align import Policy, align
from verl_logsync.assemble import Surroundings, assemble
from verl_logsync.beginnings import Checkpoints
from verl_logsync.clock import set_clocks
from verl_logsync.columns import AXES, STEP
from verl_logsync.config_files import config_artifact
from verl_logsync.errors import InputError, LogsyncError
from verl_logsync.hush import hushed_rows
from verl_logsync.model import (
    Account,
    Attempt,
    AttemptReading,
    Facts,
    History,
    LogFile,
    Outcome,
    Reading,
    RunSources,
    Skip,
    SkipReason,
    Stamp,
    Target,
)
from verl_logsync.pipeline.engine import Engine, attempted
from verl_logsync.pipeline.shifting import offsets_of, shifted
from verl_logsync.plan import NOTHING_DERIVED, Derived
from verl_logsync.ranks import RankRules, Rule
from verl_logsync.sessions import sort_out
from verl_logsync.settings import Settings
from verl_logsync.steady import read_steadily
from verl_logsync.table_builder import TableBuilder
from verl_logsync.verl_keys import training_rows

#: The source that rows read back from a server are said to come from.
_STORED: Final = "stored rows"


@dataclass(frozen=True, slots=True)
class Loaded:
    """One run, read and aligned.

    `attempts` are those that the rows tell of; `continued` says that rows of the server are in it,
    `derived` what was derived besides columns of the history; `dumped_to` is the last step whose
    rollout dump is there, where the run's config asks for dumps (see `readiness`).
    """

    run: RunSources
    history: History
    account: Account
    around: Surroundings
    pins: Mapping[str, float]
    started_at: float | None
    attempts: tuple[Attempt, ...]
    continued: bool = False
    derived: Derived = NOTHING_DERIVED
    dumped_to: int | None = None


def load(
    engine: Engine,
    run: RunSources,
    pins: Mapping[str, float] | None = None,
    stored: Sequence[AttemptReading] = (),
) -> Loaded:
    """Read all files of a run and align them.

    Args:
        pins: estimated starts that an earlier upload settled on.
        stored: rows that only the server still has, as an attempt before all others.
    """
    attempts = sort_out(
        [_read_attempt(engine, attempt) for attempt in run.attempts], _rank_rules(engine.settings)
    )
    if stored:
        attempts = (*stored, *(_without_held(a, stored, engine) for a in attempts))
    configs = [engine.by_name[file.source].read(file) for file in run.configs]
    belongings = _belongings(engine, run)
    settings = engine.settings
    clocked = set_clocks(attempts, pins or {}, wall=settings.runtime == "wall")
    precisions = {source.name: source.precision for source in engine.sources} | {_STORED: 100}
    history, account = align(
        clocked.attempts,
        precisions,
        Policy(settings.on_overlap, settings.keep_tail, settings.on_restart),
        clocked.clock,
        Checkpoints(tuple(config.config for config in configs), belongings.checkpoints),
    )
    history = replace(hushed_rows(history), added=_derived_before(attempts))
    around = _with_config(assemble(attempts[len(stored) :], configs), run)
    account = replace(
        account,
        notes=(*account.notes, *belongings.notes),
        skips=(*account.skips, *belongings.skips),
    )
    own = tuple(reading.attempt for reading in attempts[len(stored) :])
    return Loaded(run, history, account, around, clocked.pins, clocked.started_at, own)


def _derived_before(attempts: Sequence[AttemptReading]) -> frozenset[str]:
    """The columns that fragments of our own brought along and that nobody logged."""
    derived: set[str] = set()
    logged: set[str] = set()
    for file, reading in (pair for attempt in attempts for pair in attempt.readings):
        names = set(reading.rows.schema.names)
        brought = names.intersection(file.facts.derived)
        derived |= brought
        logged |= names - brought
    return frozenset(derived - logged)


def _with_config(around: Surroundings, run: RunSources) -> Surroundings:
    """With the config's files as an artifact too."""
    artifact = config_artifact(around.extra.files, run.target.run_id)
    if artifact is None:
        return around
    extra = replace(around.extra, artifacts=(*around.extra.artifacts, artifact))
    return replace(around, extra=extra)


@dataclass(frozen=True, slots=True)
class _Belongings:
    """What is to be said about a run's dumps and checkpoints; `checkpoints` are their steps, None
    when a folder of them cannot be read.
    """

    notes: tuple[str, ...]
    skips: tuple[Skip, ...]
    checkpoints: frozenset[int] | None


def _belongings(engine: Engine, run: RunSources) -> _Belongings:
    notes: list[str] = []
    skips: list[Skip] = []
    steps: set[int] = set()
    readable = True
    for file in (*run.rollouts, *run.checkpoints):
        try:
            reading = engine.by_name[file.source].read(file)
        except InputError as error:
            skips.append(Skip(SkipReason.UNREADABLE, error.place, error.message, error.hint))
            readable = readable and file.role != "checkpoint"
        else:
            notes.extend(reading.notes)
            skips.extend(reading.skips)
            steps |= reading.checkpoints
    return _Belongings(tuple(notes), tuple(skips), frozenset(steps) if readable else None)


def _rank_rules(settings: Settings) -> RankRules:
    rules = tuple((pattern, cast("Rule", rule)) for pattern, rule in settings.rank_rules)
    return RankRules(rules, settings.per_rank, settings.rank_spread)


def load_or_error(engine: Engine, run: RunSources) -> Loaded | LogsyncError:
    """The same for one run of many; what prevents it is its result."""
    result = attempted(engine, run, partial(load, engine, run))
    if isinstance(result, Outcome):
        assert result.error is not None, "a failed run has an error"
        return result.error
    return result


def _read_attempt(engine: Engine, attempt: Attempt) -> AttemptReading:
    return AttemptReading(attempt, tuple((file, _read(engine, file)) for file in attempt.files))


def _read(engine: Engine, file: LogFile) -> Reading:
    reading = read_steadily(engine.by_name[file.source], file)
    return shifted(reading, offsets_of(file.path, engine.settings))


def stored_attempt(rows: Sequence[Mapping[str, object]], target: Target) -> AttemptReading:
    """Rows read back from the server, as the attempt whose files are gone."""
    builder = TableBuilder()
    axes: dict[str, list[object]] = {axis: [] for axis in AXES}
    for row in rows:
        for axis in AXES:
            axes[axis].append(row.get(axis))
        builder.add({key: value for key, value in row.items() if key not in AXES})
    columns = {STEP: pa.array(axes[STEP], type=pa.int64())}
    for axis in AXES[1:]:
        if any(value is not None for value in axes[axis]):
            columns[axis] = pa.array(axes[axis], type=pa.float64())
    reading = Reading(pa.table(columns | builder.columns()))
    file = LogFile(Path(str(target)), _STORED, Stamp(0, 0, 0, 0), Facts())
    return AttemptReading(Attempt((file,), None, "recorded start"), ((file, reading),))


def _without_held(
    attempt: AttemptReading, stored: Sequence[AttemptReading], engine: Engine
) -> AttemptReading:
    """An attempt without validation records at steps whose rows only the server has.

    Merging them would mean to take such a row from the server and to send it again; if that
    failed half-way its training metrics, which are nowhere else, would be gone.
    """
    if engine.settings.on_overlap != "last":
        return attempt
    steps = np.concatenate([r.rows.column(STEP).to_numpy() for s in stored for _, r in s.readings])
    readings = []
    for file, reading in attempt.readings:
        held = np.isin(reading.rows.column(STEP).to_numpy(), steps) & ~training_rows(reading.rows)
        if held.any():
            count = int(held.sum())
            detail = f"{count} validation records at steps that are on the server already"
            skip = Skip(SkipReason.HELD, file.place, detail, records=count)
            rows = reading.rows.filter(pa.array(~held))
            readings.append((file, replace(reading, rows=rows, skips=(*reading.skips, skip))))
        else:
            readings.append((file, reading))
    return AttemptReading(attempt.attempt, tuple(readings))
