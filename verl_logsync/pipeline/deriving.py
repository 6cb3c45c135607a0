"""Add to a history what can be derived from it and from rollout dumps.

The dumps are large: what each step comes to is kept in the state folder, so that unchanged dumps
are read once. Deleting that cache costs time, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl_logsync.columns import STEP, TIMESTAMP, as_numbers
from verl_logsync.diagnostics import DiagnoseOptions, Diagnosis, Finding, diagnose
from verl_logsync.diagnostics.canonical import is_fully_async
from verl_logsync.diagnostics.rules import PREFIX, WORST
from verl_logsync.diagnostics.series import Frame, filled
from verl_logsync.diagnostics.tables import SAMPLES, sample_tables
from verl_logsync.diagnostics.wording import summed_up
from verl_logsync.errors import InputError, LogsyncError
from verl_logsync.model import Alert, DerivedBy, FileRef, History, PassThrough, Skip, SkipReason
from verl_logsync.pipeline.engine import Engine, attempted
from verl_logsync.pipeline.loading import Loaded
from verl_logsync.plan import Derived
from verl_logsync.readiness import NO_DUMP_YET
from verl_logsync.rollouts.cache import ReductionCache
from verl_logsync.rollouts.folder import reduce_folder
from verl_logsync.rollouts.values import ReductionOptions, StepReduction
from verl_logsync.settings import Settings
from verl_logsync.transaction_log import gpu_memory

#: The config key of a run under which it is said where the derived series come from.
PROVENANCE_KEY: Final = "verl_logsync_series"
#: The same for why other series could not be computed: so many of them, in so many characters each.
MISSING_KEY: Final = "verl_logsync_missing"
MOST_MISSING: Final = 100
LONGEST_REASON: Final = 300

_TAGS: Final = {"critical": "health:critical"}


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """A run with its derived columns, and what was noticed in it."""

    loaded: Loaded
    diagnosis: Diagnosis


def check_options(engine: Engine) -> None:
    """Rules and patterns that cannot be used are said before anything is sent.

    Raises:
        UsageError: which, and what is wrong with it.
    """
    _ = engine.recipe
    _reduction_options(engine.settings, {})


def diagnosed_or_plain(engine: Engine, loaded: Loaded, columns_of: str = "") -> Loaded:
    """A run with what can be derived; where that fails, with a word about it and as it was."""
    result = diagnosed_or_error(engine, loaded, columns_of)
    if isinstance(result, Diagnosed):
        return result.loaded
    what = f"diagnostics: {result.message}; the logged values are sent without them"
    hint = ". ".join(filter(None, (result.hint, "--recompute adds them later")))
    skip = Skip(SkipReason.FAILED, result.place or loaded.run.name, what, hint)
    account = replace(loaded.account, skips=(*loaded.account.skips, skip))
    return replace(loaded, account=account)


def diagnosed_or_error(
    engine: Engine, loaded: Loaded, columns_of: str = ""
) -> Diagnosed | LogsyncError:
    """A run with what can be derived, or what prevents it."""
    result = attempted(engine, loaded.run, partial(diagnosed, engine, loaded, columns_of))
    if isinstance(result, Diagnosed):
        return result
    assert result.error is not None, "a failed run has an error"
    return result.error


def diagnosed(engine: Engine, loaded: Loaded, columns_of: str = "") -> Diagnosed:
    """Diagnose a run that was read and aligned.

    Args:
        columns_of: the version of diagnostics whose set of columns the run keeps to; empty for
            that of this program.
    """
    settings, history = engine.settings, loaded.history
    reductions, notes, skips = _reductions(engine, loaded)
    diagnosis = diagnose(
        history.table, loaded.around.config, reductions, _options(engine, loaded, columns_of)
    )
    files, tables = sample_tables(reductions, history.steps, settings.tables_every)
    columns = {
        name: diagnosis.columns.column(name)
        for name in diagnosis.columns.schema.names
        if name != STEP
    } | ({SAMPLES: tables} if files else {})
    account = loaded.account
    account = replace(account, notes=(*account.notes, *notes), skips=(*account.skips, *skips))
    loaded = replace(
        _with_files(loaded, files),
        history=_with_columns(history, columns),
        account=account,
        derived=_derived(diagnosis, columns_of, engine.recipe.options),
        dumped_to=_dumped_to(loaded, reductions),
    )
    return Diagnosed(loaded, diagnosis)


def _with_columns(history: History, columns: Mapping[str, Any]) -> History:
    """The history with those columns that hold anything, up to where they are logged."""
    table = history.table
    added: set[str] = set()
    logged_from: dict[str, int] = {}
    for name, whole in columns.items():
        column = _from_first_alarm(name, whole)
        if name in table.schema.names:
            place, logged = table.schema.names.index(name), table.column(name)
            row = _first_there(logged)
            column = _up_to(column, row)
            if column.null_count < len(column):
                table = table.set_column(place, name, filled(logged, column))
                added.add(name)
                logged_from[name] = int(history.steps[row])
        elif column.null_count < len(column):
            table = table.append_column(name, column)
            added.add(name)
    return replace(history, table=table, added=history.added | added, logged_from=logged_from)


def _first_there(column: Any) -> int:
    """The first row that has a value; 0 if none has, for then nothing is known of the key."""
    return int(column.is_valid().to_numpy().argmax()) if len(column) else 0


def _up_to(column: Any, row: int) -> Any:
    return pc.if_else(pa.array(np.arange(len(column)) < row), column, pa.scalar(None, column.type))


def _from_first_alarm(name: str, column: Any) -> Any:
    """A rule that never spoke needs no column: its level begins with its first alarm."""
    if not name.startswith(PREFIX) or name == WORST:
        return column
    levels = as_numbers(column)
    alarms = np.flatnonzero(levels > 0)
    first = int(alarms[0]) if len(alarms) else len(levels)
    shown = (np.arange(len(levels)) >= first) & np.isfinite(levels)
    return pa.array(np.where(shown, levels, 0).astype(np.int64), mask=~shown)


def _with_files(loaded: Loaded, files: Iterable[FileRef]) -> Loaded:
    extra: PassThrough = loaded.around.extra
    around = replace(loaded.around, extra=replace(extra, files=(*extra.files, *files)))
    return replace(loaded, around=around)


def _derived(diagnosis: Diagnosis, columns_of: str, options: str) -> Derived:
    worst = diagnosis.worst
    return Derived(
        by=DerivedBy(diagnosis.version, columns_of or diagnosis.version, options),
        config={
            PROVENANCE_KEY: {k: dict(v) for k, v in diagnosis.provenance.items()},
            MISSING_KEY: _missing(diagnosis.missing),
        },
        summary=_summary(diagnosis),
        notes=(f"health: {said}",) if (said := summed_up(diagnosis.findings)) else (),
        tags=(_TAGS[worst],) if worst in _TAGS else (),
        alerts=tuple(_alert(f) for f in diagnosis.findings if f.severity == "critical"),
    )


def _missing(reasons: Mapping[str, str]) -> dict[str, str]:
    """Why series are missing, of a size that a run's config can hold."""
    shown = {
        key[:LONGEST_REASON]: reason[:LONGEST_REASON]
        for key, reason in list(reasons.items())[:MOST_MISSING]
    }
    more = len(reasons) - MOST_MISSING
    return {**shown, "...": f"{more} more: verl-logsync diagnose --json"} if more > 0 else shown


def _summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """What a table of runs should show: the worst of the whole run, not of its last row."""
    counts = {
        f"{PREFIX}{s}s": diagnosis.summary.get(f"{PREFIX}{s}s", 0) for s in ("critical", "warning")
    }
    return counts | {WORST: diagnosis.summary.get(WORST, 0)}


def _alert(finding: Finding) -> Alert:
    code, severity, first = finding.identity
    title = f"{code} from step {first} on"
    return Alert(f"{code}:{severity}@{first}", first, title, f"{finding.says} {finding.advice}")


# -- dumps ---------------------------------------------------------------------------------


def _reductions(
    engine: Engine, loaded: Loaded
) -> tuple[list[StepReduction], list[str], list[Skip]]:
    """What the rollout dumps of a run come to, one a step and kind; the newest file's counts."""
    cache = ReductionCache(engine.settings.state_folder / "reductions") if engine.ledger else None
    found: dict[tuple[int, bool], StepReduction] = {}
    skips: list[Skip] = []
    for file in sorted(loaded.run.rollouts, key=lambda f: (f.stamp.mtime_ns, f.place)):
        options = _reduction_options(engine.settings, loaded.around.config)
        try:
            for reduction in reduce_folder(file, options, cache):
                found[reduction.step, reduction.kind == "validation"] = reduction
                skips.extend(reduction.skips)
        except InputError as error:
            skips.append(Skip(SkipReason.UNREADABLE, error.place, error.message, error.hint))
    notes = list(dict.fromkeys(note for r in found.values() for note in r.notes))
    if cache is not None and cache.trouble:
        notes.append(cache.trouble)
    return [found[key] for key in sorted(found)], notes, skips


def _dumped_to(loaded: Loaded, reductions: Iterable[StepReduction]) -> int | None:
    """The last step whose training dump is whole; None where none is to be waited for.

    The fully-async trainer's dumps count its updates, not the steps of the log.
    """
    frame = Frame(loaded.history.table, {})
    if not _at(loaded.around.config, "trainer.rollout_data_dir") or is_fully_async(frame).any():
        return None
    whole = (r.step for r in reductions if r.kind != "validation" and r.rows and not r.partial)
    return max(whole, default=NO_DUMP_YET)


def _reduction_options(settings: Settings, config: Mapping[str, Any]) -> ReductionOptions:
    size = _at(config, "actor_rollout_ref.rollout.n")
    kept_only = _at(config, "algorithm.filter_groups.enable")
    return ReductionOptions(
        group_size=size if isinstance(size, int) and size > 0 else None,
        success=settings.success_threshold,
        answer_pattern=settings.answer_pattern,
        format_pattern=settings.format_pattern,
        kept_groups_only=kept_only is True,
    )


def _at(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# -- what the history does not say -----------------------------------------------------------


def _options(engine: Engine, loaded: Loaded, columns_of: str) -> DiagnoseOptions:
    percent, used = _gpu_memory(loaded)
    return DiagnoseOptions(
        device_memory_gb=engine.settings.device_memory_gb,
        gpu_memory_percent=percent,
        gpu_memory_bytes=used,
        rules=engine.recipe.rules,
        columns_of=columns_of,
    )


def _gpu_memory(loaded: Loaded) -> tuple[dict[int, float], dict[int, float]]:
    """The fullest GPU's memory by step, from the system metrics of offline runs."""
    history = loaded.history
    if TIMESTAMP not in history.table.schema.names:
        return {}, {}
    ends = as_numbers(history.table.column(TIMESTAMP))
    percent: dict[int, float] = {}
    used: dict[int, float] = {}
    for seconds, share, size in _records(loaded):
        row = int(np.searchsorted(ends, seconds))
        if row < len(ends):
            step = int(history.steps[row])
            if share is not None:
                percent[step] = max(share, percent.get(step, -math.inf))
            if size is not None:
                used[step] = max(size, used.get(step, -math.inf))
    return percent, used


def _records(loaded: Loaded) -> Iterator[tuple[float, float | None, float | None]]:
    for _, extra in loaded.around.streams:
        for payload in extra.events:
            yield gpu_memory(payload)
