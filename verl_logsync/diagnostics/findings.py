"""What a rule noticed in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

Severity = Literal["hint", "warning", "critical"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

#: What the columns `health/...` say of a severity: hints are no illness.
LEVELS: Final[Mapping[Severity, int]] = {"hint": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something noticed in the steps `first_step` to `last_step` of a run.

    `key` is the series that showed it. `evidence` are the numbers at `first_step`, `says` one
    sentence with them and `advice` one about what to do, with verl's configuration keys. All but
    `last_step` is settled when the first step is judged, so code, severity and `first_step` name
    a finding for good. `hint` says that the threshold is a rule of thumb, or of one source only.
    """

    code: str
    severity: Severity
    key: str
    first_step: int
    last_step: int
    says: str
    advice: str
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    source: str = ""

    @property
    def hint(self) -> bool:
        return self.severity == "hint"

    @property
    def identity(self) -> tuple[str, str, int]:
        """What stays the same when later steps arrive."""
        return self.code, self.severity, self.first_step

    def as_dict(self) -> dict[str, Any]:
        """The finding for JSON."""
        return {
            "code": self.code,
            "severity": self.severity,
            "key": self.key,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "says": self.says,
            "advice": self.advice,
            "evidence": dict(self.evidence),
            "source": self.source,
        }


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, then as they happened."""
    return tuple(
        sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), f.first_step, f.code, f.key))
    )


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The gravest severity; None without findings."""
    return max((f.severity for f in findings), key=SEVERITIES.index, default=None)
