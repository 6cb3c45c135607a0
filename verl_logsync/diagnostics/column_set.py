"""Which columns a version of the diagnostics had: a run keeps to the set that it began with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verl_logsync.diagnostics.groups import VALIDATION, Described
from verl_logsync.diagnostics.rules import Rule


@dataclass(frozen=True)
class ColumnSet:
    """The columns and rules of one version, empty for that of this program."""

    version: str
    described: tuple[Described, ...]

    @cached_property
    def _number(self) -> int | None:
        return int(self.version) if self.version.isdecimal() else None

    @cached_property
    def _later(self) -> Mapping[str, int]:
        """Keys, or what comes before a `{name}` in them, that version 1 did not have."""
        return {d.key.partition("{")[0]: d.since for d in self.described if d.since > 1}

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(d.key.partition("{")[0] for d in self.described if "{" in d.key)

    def has(self, key: str) -> bool:
        """Whether a derived column belongs to it."""
        if self._number is None:
            return True
        family, slash, rest = key.partition("/")
        name = f"{_TRAINING.get(family, family)}{slash}{rest}"
        start = next((s for s in self._starts if name.startswith(s)), name)
        return self._later.get(name, self._later.get(start, 1)) <= self._number

    def rules(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """The rules that it has."""
        return tuple(r for r in rules if self._number is None or r.since <= self._number)

    def lacking(self, keys: Iterable[str]) -> dict[str, str]:
        """Why keys are left out, by key."""
        why = f"came after version {self.version}, whose columns this run has: --recompute adds it"
        return {key: why for key in keys if not self.has(key)}


_TRAINING = {family: training for training, family in VALIDATION.items()}
