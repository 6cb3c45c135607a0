"""Findings as text: what was noticed, at which steps, by which numbers, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from verl_logsync.diagnostics import Diagnosis, Finding
from verl_logsync.diagnostics.wording import summed_up
from verl_logsync.model import RunSources

_MARKS = {"critical": "CRITICAL", "warning": "WARNING ", "hint": "hint    "}


def diagnosis_lines(run: RunSources, rows: int, diagnosis: Diagnosis) -> Iterator[str]:
    """One run: its findings, the gravest first, and what could not be computed."""
    what = summed_up(diagnosis.findings) or "nothing found"
    yield f"{run.target.project}/{run.name} [{run.target.run_id}] {rows} rows: {what}"
    for finding in diagnosis.findings:
        yield from finding_lines(finding)
    if diagnosis.missing:
        yield f"  not computed: {len(diagnosis.missing)} (--json says why)"


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
