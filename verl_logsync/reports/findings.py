"""Findings as text: what was noticed, at which steps, by which numbers, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl_logsync.diagnostics import Diagnosis, Finding
from verl_logsync.diagnostics.wording import summed_up
from verl_logsync.model import RunSources

_MARKS = {"critical": "CRITICAL", "warning": "WARNING ", "hint": "hint    "}


def diagnosis_lines(
    run: RunSources, rows: int, diagnosis: Diagnosis, *, verbose: bool = False
) -> Iterator[str]:
    """One run: its findings, the gravest first, and what could not be computed, and why."""
    what = summed_up(diagnosis.findings) or "nothing found"
    yield f"{run.target.project}/{run.name} [{run.target.run_id}] {rows} rows: {what}"
    for finding in diagnosis.findings:
        yield from finding_lines(finding)
    if diagnosis.missing and not verbose:
        yield f"  not computed: {len(diagnosis.missing)} (--verbose says why)"
    elif diagnosis.missing:
        yield "  not computed:"
        yield from missing_lines(diagnosis.missing)


def missing_lines(missing: Mapping[str, str]) -> Iterator[str]:
    """Why series could not be computed; those with the same reason stand together."""
    keys: dict[str, list[str]] = {}
    for key, reason in missing.items():
        keys.setdefault(reason, []).append(key)
    for reason, names in keys.items():
        yield f"    {', '.join(names)}"
        yield f"      {reason}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """One finding."""
    steps = (
        f"step {finding.first_step}"
        if finding.first_step == finding.last_step
        else f"steps {finding.first_step}-{finding.last_step}"
    )
    yield f"  {_MARKS[finding.severity]}  {finding.code}  {steps}  {finding.key}"
    yield f"      {finding.says}"
    yield f"      -> {finding.advice}"
