"""Rules over series: which conditions hold at which step, and what to say about it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import STEP
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.findings import LEVELS, SEVERITIES, Finding, Severity, in_order
from verl_logsync.diagnostics.parts import CONFIG, KINDS, Condition, Judged, Values
from verl_logsync.diagnostics.series import Flags, Floats, Frame, Ints, either
from verl_logsync.errors import UsageError

PREFIX: Final = "health/"
WORST: Final = "health/worst"


@dataclass(frozen=True, slots=True)
class Rule:
    """All `conditions` at one step make a finding; with those of `critical` a critical one.

    The first condition is the one that is reported. Findings with at most `merge` judged rows
    between them are one. `since` is the version of the diagnostics that has the rule first.
    """

    code: str
    title: str
    severity: Severity
    advice: str
    source: str
    conditions: tuple[Condition, ...]
    critical: tuple[Condition, ...] = ()
    merge: int = 10
    since: int = 1

    @property
    def has_column(self) -> bool:
        """Whether it can say more than a hint, so that `health/CODE` says something."""
        return self.severity != "hint" or bool(self.critical)


@dataclass(frozen=True, slots=True)
class Health:
    """`columns` has `_step`, `health/CODE` (0, 1 warning, 2 critical; an Arrow null in rows that
    lack the series) of every rule that had data, and `health/worst`, the highest of them.
    """

    columns: pa.Table
    findings: tuple[Finding, ...]


# -- the file of rules -----------------------------------------------------------------------


def shipped() -> Mapping[str, Any]:
    """The content of `rules.toml` that comes with the package."""
    return _parsed(
        resources.files("verl_logsync.diagnostics").joinpath("rules.toml").read_text("utf-8"),
        "rules.toml",
    )


@lru_cache(maxsize=16)
def load_rules(text: str = "", place: str = "rules") -> tuple[Rule, ...]:
    """The shipped rules, changed and extended by the text of a user's TOML file.

    Tables are merged key by key, so a file with one number in it changes that number only;
    `off = true` takes a rule away.

    Raises:
        UsageError: not TOML, or something in it means nothing.
    """
    merged = _merged(shipped(), _parsed(text, place) if text else {})
    unknown = set(merged) - {"rules"}
    if unknown:
        raise UsageError(
            f"unknown table {min(unknown)!r}", place=place, hint="Rules are [rules.CODE]"
        )
    tables = merged.get("rules", {})
    if not isinstance(tables, Mapping):
        raise UsageError("rules must be tables", place=place, hint="Write [rules.CODE]")
    return tuple(_rule(code, table, place) for code, table in tables.items() if not _is_off(table))


def _is_off(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("off") is True


def _parsed(text: str, place: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a TOML file: {error}", place=place) from None


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return result


_RULE_KEYS: Final = frozenset(
    {"title", "severity", "advice", "source", "parts", "critical", "merge", "since", "off"}
)


def _rule(code: str, table: Any, place: str) -> Rule:
    where = f"{place}: [rules.{code}]"
    if not isinstance(table, Mapping):
        raise UsageError("not a table", place=where)
    unknown = set(table) - _RULE_KEYS
    if unknown:
        known = ", ".join(sorted(_RULE_KEYS))
        raise UsageError(f"unknown key {min(unknown)!r}", place=where, hint=f"Known: {known}")
    severity = table.get("severity", "warning")
    if severity not in SEVERITIES:
        raise UsageError(f"severity must be one of {', '.join(SEVERITIES)}", place=where)
    parts = table.get("parts")
    if not isinstance(parts, Mapping) or not parts:
        raise UsageError("a rule needs parts", place=where, hint="parts.NAME = { kind = ... }")
    more = table.get("critical", {})
    conditions = tuple(_condition(part, f"{where} parts.{name}") for name, part in parts.items())
    return Rule(
        code,
        str(table.get("title", code)),
        severity,
        str(table.get("advice", "")),
        str(table.get("source", "")),
        conditions,
        _critical(parts, more, where) if more else (),
        _whole(table.get("merge", 10), f"{where} merge"),
        _whole(table.get("since", 1), f"{where} since"),
    )


def _critical(parts: Mapping[str, Any], more: Any, where: str) -> tuple[Condition, ...]:
    if not isinstance(more, Mapping) or set(more) - set(parts):
        raise UsageError(
            "critical must name parts of the rule", place=where, hint="critical.NAME = { ... }"
        )
    merged = _merged(parts, more)
    return tuple(_condition(part, f"{where} critical.{name}") for name, part in merged.items())


_KINDS: Final[Mapping[str, str]] = {f.name: str(f.type) for f in fields(Condition)}


def _condition(part: Any, where: str) -> Condition:
    if not isinstance(part, Mapping):
        raise UsageError("not a table", place=where)
    values = {key: _value(key, value, f"{where}.{key}") for key, value in part.items()}
    kind = values.get("kind")
    if kind not in KINDS and kind != CONFIG:
        known = ", ".join((*KINDS, CONFIG))
        raise UsageError(f"unknown kind {kind!r}", place=where, hint=f"Known: {known}")
    if kind == CONFIG and not values.get("config"):
        raise UsageError("which key of the configuration?", place=where)
    if kind != CONFIG and not values.get("series"):
        raise UsageError("which series?", place=where)
    condition = Condition(**values)
    limits = (condition.above, condition.below, condition.within)
    if kind not in {"non_finite", "jump"} and limits == (None, None, None):
        raise UsageError("needs above, below or within", place=where)
    return condition


def _value(key: str, value: Any, where: str) -> Any:
    kind = _KINDS.get(key)
    if kind is None:
        raise UsageError("no such key", place=where, hint=f"Known: {', '.join(_KINDS)}")
    if key == "series":
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError("must be a name or a list of names", place=where)
        return tuple(names)
    if key == "within":
        if not isinstance(value, list) or len(value) != 2:
            raise UsageError("must be two numbers", place=where)
        low, high = (_number(item, where) for item in value)
        return low, high
    if kind == "str":
        if not isinstance(value, str):
            raise UsageError("must be text", place=where)
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise UsageError("must be true or false", place=where)
        return value
    return _whole(value, where) if kind == "int" else _number(value, where)


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise UsageError(f"must be a number, not {str(value)[:40]!r}", place=where)
    return number


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_ROWS:
        raise UsageError(f"must be a whole number from 0 to {_MOST_ROWS}", place=where)
    return value


#: Windows are looked at all at once: a wider one would cost gigabytes.
_MOST_ROWS: Final = 10_000


# -- judging ---------------------------------------------------------------------------------


def judge(frame: Frame, config: Configuration, rules: Sequence[Rule]) -> Health:
    """Judge a run by rules. What is said of a step depends on rows up to it only."""
    court = _Court(frame, config)
    columns: dict[str, pa.Array] = {}
    findings: list[Finding] = []
    worst, any_had = np.zeros(len(frame), np.int64), np.zeros(len(frame), dtype=bool)
    for rule in rules:
        levels, had = np.zeros(len(frame), np.int64), np.zeros(len(frame), dtype=bool)
        for verdict in court.verdicts(rule):
            levels = np.maximum(levels, verdict.levels)
            had |= verdict.had
            findings += _findings(frame.steps, rule, verdict)
        if rule.has_column and had.any():
            columns[f"{PREFIX}{rule.code}"] = pa.array(levels, mask=~had)
            worst, any_had = np.maximum(worst, levels), any_had | had
    if any_had.any():
        columns[WORST] = pa.array(worst, mask=~any_had)
    table = pa.table({STEP: pa.array(frame.steps, type=pa.int64()), **columns})
    return Health(table, in_order(findings))


@dataclass(frozen=True, slots=True)
class _Seen:
    """A condition judged, brought to the rows of the run. `had`: rows with a value of its own."""

    key: str
    had: Flags
    holds: Flags
    measured: Floats
    reference: Floats


@dataclass(frozen=True, slots=True)
class _Verdict:
    key: str
    had: Flags
    holds: Flags
    grave: Flags
    levels: Ints
    seen: tuple[_Seen, ...]
    seen_grave: tuple[_Seen, ...]


@dataclass(frozen=True)
class _Court:
    frame: Frame
    config: Configuration
    known: dict[tuple[Any, ...], tuple[Ints, Values]] = field(default_factory=dict)

    def verdicts(self, rule: Rule) -> Iterator[_Verdict]:
        """One for each series that the rule's first condition is about."""
        for key in self._keys(rule.conditions[0]):
            seen = self._all(rule.conditions, key)
            if seen is None or not seen[0].had.any():
                continue
            holds = _and(seen)
            grave_seen = self._all(rule.critical, key) if rule.critical else None
            grave = _and(grave_seen) if grave_seen else np.zeros(len(self.frame), dtype=bool)
            if rule.severity == "critical":
                grave, holds = holds, np.zeros_like(holds)
                grave_seen = seen
            base = LEVELS[rule.severity]
            levels = np.where(grave, LEVELS["critical"], np.where(holds, base, 0))
            yield _Verdict(
                key, seen[0].had, holds & ~grave, grave, levels, seen, grave_seen or seen
            )

    def _keys(self, condition: Condition) -> list[str]:
        """The series of a condition; a pattern stands for every key that matches."""
        (first, *_) = condition.series or ("",)
        if "*" not in first:
            return [first]
        patterns = condition.series
        return [n for n in self.frame.names if any(fnmatchcase(n, p) for p in patterns)]

    def _all(self, conditions: Iterable[Condition], key: str) -> tuple[_Seen, ...] | None:
        """All conditions judged; None if one of them can never hold."""
        seen = []
        for place, condition in enumerate(conditions):
            if condition.kind == CONFIG:
                if not self._configured(condition):
                    return None
                continue
            pattern = place == 0 and "*" in condition.series[0]
            one = replace(condition, series=(key,)) if pattern else condition
            seen.append(self._judged(one))
        return tuple(seen)

    def _configured(self, condition: Condition) -> bool:
        value = self.config.number(condition.config)
        if value is None:
            flag = self.config.flag(condition.config)
            value = None if flag is None else float(flag)
        if value is None:
            return False
        above, below = condition.above, condition.below
        inside = condition.within is None or condition.within[0] <= value <= condition.within[1]
        return inside and (above is None or value > above) and (below is None or value < below)

    def _judged(self, condition: Condition) -> _Seen:
        rows, values = self._values(condition)
        judged = KINDS[condition.kind](values, condition)
        return _spread_out(len(self.frame), self._name(condition), rows, judged)

    def _name(self, condition: Condition) -> str:
        named = next(
            (n for n in condition.series if self.frame.series(n).there.any()), condition.series[0]
        )
        named = f"({named} - {condition.minus})" if condition.minus else named
        return f"{named} / {condition.over}" if condition.over else named

    def _values(self, condition: Condition) -> tuple[Ints, Values]:
        """The rows in which the series is a number that the kind looks at, and the numbers."""
        all_values = condition.kind == "non_finite"
        key = (
            *(condition.series, condition.minus, condition.over, condition.against),
            all_values,
        )
        if key not in self.known:
            series = self.frame.series(condition.series[0])
            for name in condition.series[1:]:
                series = either(series, self.frame.series(name))
            numbers, there = series.values, series.there if all_values else series.finite
            if condition.minus:
                less = self.frame.series(condition.minus)
                there = there & less.finite
                numbers = numbers - less.values
            if condition.over:
                below = self.frame.series(condition.over)
                there = there & below.finite & (below.values != 0)
                numbers = numbers / np.where(there, below.values, 1.0)
            other = np.empty(0)
            if condition.against:
                against = self.frame.series(condition.against)
                there = there & against.finite
                other = against.values[there]
            self.known[key] = (np.flatnonzero(there), Values(numbers[there], other))
        return self.known[key]


def _spread_out(count: int, key: str, rows: Ints, judged: Judged) -> _Seen:
    """From the values of a series to the rows of the run; in between the last one stands."""
    had = np.zeros(count, dtype=bool)
    had[rows] = True
    latest = np.cumsum(had) - 1
    known = latest >= 0

    def carried(values: Any, empty: Any) -> Any:
        if not len(rows):
            return np.full(count, empty)
        return np.where(known, values[np.maximum(latest, 0)], empty)

    return _Seen(
        key,
        had,
        carried(judged.holds, empty=False).astype(bool),
        carried(judged.measured, np.nan),
        carried(judged.reference, np.nan),
    )


def _and(seen: Sequence[_Seen]) -> Flags:
    """Rows in which all hold and the first has a value of its own."""
    holds: Flags = seen[0].had.copy()
    for one in seen:
        holds &= one.holds
    return holds


# -- findings --------------------------------------------------------------------------------


def _findings(steps: Ints, rule: Rule, verdict: _Verdict) -> Iterator[Finding]:
    for severity, flags, seen, conditions in (
        (rule.severity, verdict.holds, verdict.seen, rule.conditions),
        ("critical", verdict.grave, verdict.seen_grave, rule.critical or rule.conditions),
    ):
        judged = np.flatnonzero(verdict.had)
        for first, last in _intervals(flags[judged], rule.merge):
            row = int(judged[first])
            asked = [c for c in conditions if c.kind != CONFIG]
            yield Finding(
                rule.code,
                severity,
                verdict.seen[0].key,
                int(steps[row]),
                int(steps[judged[last]]),
                _says(rule, asked, seen, row),
                rule.advice,
                _evidence(asked, seen, row),
                rule.source,
            )


def _intervals(flags: Flags, merge: int) -> list[tuple[int, int]]:
    """First and last place of each stretch of flags; gaps of up to `merge` places are bridged."""
    places = np.flatnonzero(flags)
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > merge + 1)
    firsts = places[np.concatenate([[0], breaks + 1])]
    lasts = places[np.concatenate([breaks, [len(places) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _evidence(
    conditions: Sequence[Condition], seen: Sequence[_Seen], row: int
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for condition, one in zip(conditions, seen, strict=True):
        name = one.key if one.key not in found else f"{one.key} ({condition.kind})"
        found[name] = _shown(one.measured[row])
        if math.isfinite(one.reference[row]):
            found[f"{name}: before"] = _shown(one.reference[row])
        for limit in ("above", "below"):
            value = getattr(condition, limit)
            if value is not None:
                found[f"{name}: {limit}"] = value
    return found


def _shown(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return float(f"{number:.6g}")
    return "not a finite number"


def _says(rule: Rule, conditions: Sequence[Condition], seen: Sequence[_Seen], row: int) -> str:
    parts = [
        _sentence(condition, one, row) for condition, one in zip(conditions, seen, strict=True)
    ]
    return f"{rule.title}: {', and '.join(parts)}."


def _sentence(condition: Condition, one: _Seen, row: int) -> str:
    value, before = _text(one.measured[row]), _text(one.reference[row])
    limit = _limit(condition)
    lasting = f" for {condition.rows} rows" if condition.rows > 1 else ""
    if condition.kind == "non_finite":
        return f"{one.key} is not a finite number{lasting}"
    if condition.kind == "jump":
        return (
            f"{one.key} is {value}{lasting}, {before} before (median of up to"
            f" {condition.window} rows{limit and f'; alarm {limit} times that'})"
        )
    if condition.kind == "start":
        return (
            f"{one.key} is {value}, {before} in its first {condition.start} rows (alarm {limit}"
            " times that)"
        )
    if condition.kind in {"trend", "slope"}:
        share = f"{100 * float(one.measured[row]):+.3g} %" if condition.relative else value
        return f"{one.key} changed by {share} within {condition.window} rows"
    if condition.kind == "ratio":
        return (
            f"{one.key} changed {value} times as much{' (relative)' if condition.relative else ''}"
            f" as {condition.against}, which changed by {before} within {condition.window} rows"
        )
    if condition.kind == "oscillation":
        return f"{one.key} swings by {value} to and fro, by {before} at its start"
    return f"{one.key} is {value} (alarm {limit}{lasting})"


def _limit(condition: Condition) -> str:
    if condition.above is not None:
        return f"above {condition.above:g}"
    if condition.below is not None:
        return f"below {condition.below:g}"
    return f"within {condition.within[0]:g} to {condition.within[1]:g}" if condition.within else ""


def _text(value: float) -> str:
    return f"{float(value):.4g}"
