"""What the logs mean: numbers that no trainer logs, and what to notice in them.

`diagnose` adds to an aligned history what can be derived from it and from rollout dumps, and
judges it by rules. Everything here is values in, values out. To add a diagnostic, write a function
from `Asked` to `Made`s in a file of its own, add it to `DERIVATIONS` and describe its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import STEP
from verl_logsync.diagnostics.canonical import canonical, is_fully_async, version_hint
from verl_logsync.diagnostics.column_set import ColumnSet
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.derived import Asked, Given, Made, gathered
from verl_logsync.diagnostics.described import DESCRIBED
from verl_logsync.diagnostics.exact import exact
from verl_logsync.diagnostics.findings import LEVELS, SEVERITIES, Finding, Severity, worst
from verl_logsync.diagnostics.groups import DESCRIBED as DESCRIBED_GROUPS
from verl_logsync.diagnostics.groups import Described, grpo_columns
from verl_logsync.diagnostics.learning import learning
from verl_logsync.diagnostics.rules import PREFIX, WORST, Rule, judge, load_rules
from verl_logsync.diagnostics.series import Frame, Series, filled
from verl_logsync.diagnostics.speed import speed
from verl_logsync.diagnostics.staleness import staleness

if TYPE_CHECKING:
    from verl_logsync.rollouts.values import StepReduction

__all__ = [
    "DERIVATIONS",
    "DIAGNOSTICS_VERSION",
    "Described",
    "DiagnoseOptions",
    "Diagnosis",
    "Finding",
    "Rule",
    "Severity",
    "described",
    "diagnose",
    "load_rules",
    "with_columns",
]

#: Raise it whenever a column changes its meaning or its values for the same rows, or is new: new
#: columns and rules name it as their `since`.
DIAGNOSTICS_VERSION: Final = "3"

#: Every derivation from the history: what it is given, and the series it makes of it.
DERIVATIONS: Final[tuple[Callable[[Asked], list[Made]], ...]] = (
    canonical,
    exact,
    learning,
    speed,
    staleness,
)


@dataclass(frozen=True)
class DiagnoseOptions:
    """What the history and the dumps do not say, and what to look for.

    Sizes are in GiB, `gpu_memory_percent` (0 to 100) and `gpu_memory_bytes` by step. `rules` are
    those of `load_rules`. Columns and rules that version `columns_of` of the diagnostics did not
    have are left out (empty: none are).
    """

    device_memory_gb: float | None = None
    device_memory_from: str = "--device-memory-gb"
    gpu_memory_percent: Mapping[int, float] = field(default_factory=dict)
    gpu_memory_bytes: Mapping[int, float] = field(default_factory=dict)
    rules: tuple[Rule, ...] | None = None
    columns_of: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a run tells.

    `columns` has `_step` for each row of the history and all added keys; where the history has a
    key of `columns` too, the added values belong into the rows that lack it (`with_columns`).
    `findings` are in order of gravity. `provenance` says of each added series where it comes from,
    `missing` why something could not be computed, `summary` is for the run's summary and config.
    `unused_steps` are steps of dumps that the history has no row for.
    """

    version: str
    columns: pa.Table
    findings: tuple[Finding, ...]
    provenance: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]
    summary: Mapping[str, float | int | str]
    unused_steps: tuple[int, ...] = ()

    @property
    def worst(self) -> Severity | None:
        return worst(self.findings)


def diagnose(
    table: pa.Table,
    config: Mapping[str, Any],
    reductions: Sequence[StepReduction] = (),
    options: DiagnoseOptions | None = None,
) -> Diagnosis:
    """Derive what the trainer did not log, and judge the run.

    What is said about a step depends on rows and dumps up to that step only.

    Args:
        table: the aligned history: one row a step, ascending.
        config: verl's configuration, nested or with dotted keys; may be empty.
        reductions: of rollout dumps, in any order.
        options: see `DiagnoseOptions`.
    """
    options = options or DiagnoseOptions()
    configuration = Configuration(config)
    frame = Frame(table, {})
    asked = Asked(frame, configuration, _given(options, reductions))
    allowed = ColumnSet(options.columns_of, described())
    computed = [one for derive in DERIVATIONS for one in derive(asked)]
    made = [one for one in computed if allowed.has(one.key)]
    derived = gathered(frame, made)
    groups, unused, why_not = _groups(frame, reductions)
    groups = groups.select([n for n in groups.schema.names if n == STEP or allowed.has(n)])
    full = frame.with_added(
        {**{m.key: m.series for m in made if m.series.there.any()}, **_numbers(groups)}
    )
    rules = load_rules() if options.rules is None else options.rules
    health = judge(full, configuration, allowed.rules(rules))
    later = allowed.lacking(one.key for one in computed)
    missing = {**derived.missing, **why_not, **_missing_of(reductions), **later}
    return Diagnosis(
        DIAGNOSTICS_VERSION,
        _joined(derived.columns, groups, health.columns),
        health.findings,
        derived.provenance,
        missing,
        _summary(frame, health.columns, health.findings),
        unused,
    )


def with_columns(table: pa.Table, columns: pa.Table) -> pa.Table:
    """A history with the columns of a diagnosis; nothing that was logged is changed."""
    for name in columns.schema.names:
        if name == STEP:
            continue
        if name not in table.schema.names:
            table = table.append_column(name, columns.column(name))
        else:
            place = table.schema.names.index(name)
            table = table.set_column(place, name, filled(table.column(name), columns.column(name)))
    return table


def described() -> tuple[Described, ...]:
    """Every key that can be added, with its formula, needs, healthy range and source."""
    return (*DESCRIBED, *DESCRIBED_GROUPS)


def _given(options: DiagnoseOptions, reductions: Sequence[StepReduction]) -> Given:
    dumps = [r for r in reductions if r.kind != "validation" and r.rows]
    return Given(
        options.device_memory_gb,
        options.device_memory_from,
        {r.step: r.rows for r in dumps},
        {r.step: r.statistics["score_mean"] for r in dumps if "score_mean" in r.statistics},
        options.gpu_memory_percent,
        options.gpu_memory_bytes,
    )


def _groups(
    frame: Frame, reductions: Sequence[StepReduction]
) -> tuple[pa.Table, tuple[int, ...], dict[str, str]]:
    """The columns of the dumps on the rows of the history."""
    known = set(frame.steps.tolist())
    unused = tuple(sorted({r.step for r in reductions if r.step not in known}))
    late = is_fully_async(frame)
    usable = {
        step for step, other in zip(frame.steps.tolist(), late.tolist(), strict=True) if not other
    }
    why_not = {}
    if any(r.step in known - usable for r in reductions):
        why_not["grpo"] = (
            "dumps of the fully-async trainer count its updates, not the steps of the log"
        )
    stacked = grpo_columns([r for r in reductions if r.step in usable])
    return _on_rows(frame, stacked), unused, why_not


def _on_rows(frame: Frame, stacked: pa.Table) -> pa.Table:
    """A row for each dump as a row for each of the history's."""
    steps = pa.array(frame.steps, type=pa.int64())
    rows = {step: row for row, step in enumerate(frame.steps.tolist())}
    places = np.array([rows[step] for step in stacked.column(STEP).to_pylist()], dtype=np.int64)
    columns = {}
    for name in stacked.schema.names:
        if name != STEP:
            column = stacked.column(name).combine_chunks()
            chosen = np.full(len(frame), -1, dtype=np.int64)
            there = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
            chosen[places[there]] = np.flatnonzero(there)
            columns[name] = column.take(pa.array(chosen, mask=chosen < 0))
    return pa.table({STEP: steps, **columns})


def _numbers(table: pa.Table) -> dict[str, Series]:
    frame = Frame(table, {})
    kept = [
        name for name in frame.first_rows if not pa.types.is_string(table.schema.field(name).type)
    ]
    return {name: frame.logged(name) for name in kept}


def _missing_of(reductions: Sequence[StepReduction]) -> dict[str, str]:
    """What dumps do not give; of steps that differ the first is named."""
    found: dict[str, str] = {}
    for reduction in sorted(reductions, key=lambda r: r.step):
        family = "grpo_val" if reduction.kind == "validation" else "grpo"
        for name, why in reduction.missing.items():
            key = name if "/" in name else f"{family}/{name}"
            found.setdefault(key, f"{why} (first at step {reduction.step})")
    return found


def _joined(*tables: pa.Table) -> pa.Table:
    first, *others = tables
    for other in others:
        for name in other.schema.names:
            if name != STEP:
                first = first.append_column(name, other.column(name))
    return first


def _summary(
    frame: Frame, columns: pa.Table, findings: Sequence[Finding]
) -> dict[str, float | int | str]:
    """The highest level of every rule in the whole run, and what there is to say first."""
    summary: dict[str, float | int | str] = {}
    for name in columns.schema.names:
        if name.startswith(PREFIX):
            values = columns.column(name).drop_null().to_numpy()
            summary[name] = int(values.max(initial=0))
    summary[WORST] = max((LEVELS[f.severity] for f in findings), default=0)
    for severity in SEVERITIES:
        count = sum(f.severity == severity for f in findings)
        summary[f"{PREFIX}{severity}s"] = count
    hint = version_hint(frozenset(frame.first_rows))
    if hint:
        summary[f"{PREFIX}verl_version_hint"] = hint
    return summary
