"""Findings in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from verl_logsync.diagnostics.findings import Finding


def summed_up(findings: Sequence[Finding]) -> str:
    """`1 critical, 2 warnings, 1 hint`; empty without findings."""
    counts = {s: sum(f.severity == s for f in findings) for s in ("critical", "warning", "hint")}
    words = (
        f"{count} {severity}{'s' * (count > 1 and severity != 'critical')}"
        for severity, count in counts.items()
        if count
    )
    return ", ".join(words)
