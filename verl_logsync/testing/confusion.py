"""Which rules name which simulated disease: the table that the rules were judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from verl_logsync.diagnostics import DiagnoseOptions, Finding, diagnose
from verl_logsync.testing.simulate import (
    DEVICE_MEMORY_GB,
    DISEASES,
    Disease,
    SimulatedRun,
    simulate,
)

#: How each kind of healthy run differs from the others.
HEALTHY: Final[dict[str, dict[str, Any]]] = {
    "2,000 steps": {"steps": 2000},
    "2,000 steps, 8 prompts of 5 answers": {"steps": 2000, "prompts": 8, "group_size": 5},
    "2,000 steps, asynchronous": {"steps": 2000, "keys": "async"},
    "2,000 steps, keys of verl 0.4": {"steps": 2000, "keys": "0.4"},
    "2,000 steps with gaps": {"steps": 2000, "without": frozenset((*range(300, 420), 901, 902))},
    "15 steps": {"steps": 15},
}
ONSET: Final = 150
#: The disease that has its own day.
NAN_STEP: Final = 27


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run and what was found in it, hints left out."""

    run: SimulatedRun
    findings: tuple[Finding, ...]

    @property
    def hit(self) -> Finding | None:
        """The first finding that names the disease, in time."""
        disease, onset = self.run.disease, self.run.onset
        if disease is None or onset is None:
            return None
        found = [
            finding
            for finding in self.findings
            if finding.code in disease.codes
            and onset <= finding.first_step <= onset + disease.within
        ]
        return min(found, key=lambda f: f.first_step, default=None)

    @property
    def false_alarms(self) -> tuple[Finding, ...]:
        """Findings before the onset, or of rules that this disease does not set off."""
        disease, onset = self.run.disease, self.run.onset
        if disease is None or onset is None:
            return self.findings
        known = disease.codes | disease.others
        return tuple(f for f in self.findings if f.code not in known or f.first_step < onset)


def try_disease(disease: Disease, seed: int) -> Trial:
    """One run with a disease, diagnosed."""
    onset = NAN_STEP if disease.name == "nan_gradient" else ONSET
    return _tried(simulate(disease.name, onset=onset, seed=seed))


def try_healthy(kind: str, seed: int) -> Trial:
    """One healthy run, diagnosed; `kind` is a key of `HEALTHY`."""
    return _tried(simulate(seed=seed, **HEALTHY[kind]))


def _tried(run: SimulatedRun) -> Trial:
    options = DiagnoseOptions(device_memory_gb=DEVICE_MEMORY_GB)
    found = diagnose(run.table, run.config, run.reductions, options).findings
    return Trial(run, tuple(f for f in found if not f.hint))


def confusion_page(seeds: Sequence[int] = range(10)) -> str:
    """The table as a page of the documentation; the same on every machine."""
    return "\n".join(_page(seeds)) + "\n"


def _page(seeds: Sequence[int]) -> Iterator[str]:
    yield "# What the rules find in simulated runs\n"
    yield (
        f"Each line stands for {len(seeds)} simulated runs (`verl_logsync.testing.simulate`, seeds"
        f" {seeds[0]} to {seeds[-1]}) of 300 steps that fall ill at step {ONSET} ({NAN_STEP} for"
        " the gradient), judged by the rules as they are shipped. Found means: by a rule that names"
        " the disease, no earlier than it began and within the steps given. Alarms besides are"
        " warnings and critical findings of rules that the disease should not set off, or before it"
        " began."
        " Simulated runs are not real ones; they show what the rules see, not how often they err.\n"
    )
    yield (
        "| disease | what happens | found | after steps (median) | within | by | also set off"
        " | alarms besides |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for disease in DISEASES.values():
        yield _disease_line(disease, [try_disease(disease, seed) for seed in seeds])
    yield "\n| healthy runs | steps judged | warnings | critical findings |"
    yield "| --- | --- | --- | --- |"
    for kind in HEALTHY:
        yield _healthy_line(kind, [try_healthy(kind, seed) for seed in seeds])


def _disease_line(disease: Disease, trials: Sequence[Trial]) -> str:
    hits = [trial.hit for trial in trials]
    delays = [h.first_step - (t.run.onset or 0) for h, t in zip(hits, trials, strict=True) if h]
    all_codes = {f.code for trial in trials for f in trial.findings}
    by = ", ".join(f"`{code}`" for code in sorted(all_codes & disease.codes))
    also = ", ".join(f"`{code}`" for code in sorted(all_codes & disease.others))
    besides = sum(len(trial.false_alarms) for trial in trials)
    after = f"{median(delays):g}" if delays else ""
    found = f"{len(delays)} of {len(trials)}"
    cells = (disease.name, disease.what, found, after, disease.within, by, also, besides)
    return f"| {' | '.join(map(str, cells))} |"


def _healthy_line(kind: str, trials: Sequence[Trial]) -> str:
    steps = sum(trial.run.table.num_rows for trial in trials)
    found = [f.severity for trial in trials for f in trial.findings]
    return f"| {kind} | {steps:,} | {found.count('warning')} | {found.count('critical')} |"
