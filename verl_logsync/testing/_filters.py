"""The MongoDB-like run filters of the W&B API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_logsync.testing._store import StoredRun

_MISSING: Any = object()


def matches(run: StoredRun, condition: Mapping[str, Any]) -> bool:
    """Tell whether a run satisfies a filter."""
    for name, wanted in condition.items():
        if name in _LOGIC:
            if not _LOGIC[name](run, wanted):
                return False
        elif not _holds(_lookup(run, name), wanted):
            return False
    return True


_LOGIC: dict[str, Callable[[StoredRun, Any], bool]] = {
    "$and": lambda run, parts: all(matches(run, part) for part in parts),
    "$or": lambda run, parts: any(matches(run, part) for part in parts),
    "$nor": lambda run, parts: not any(matches(run, part) for part in parts),
    "$not": lambda run, part: not matches(run, part),
}


def _holds(value: object, wanted: object) -> bool:
    if isinstance(wanted, dict) and any(str(key).startswith("$") for key in wanted):
        return all(_OPERATORS[operator](value, operand) for operator, operand in wanted.items())
    return _equal(value, wanted)


def _equal(value: object, wanted: object) -> bool:
    if value is _MISSING:
        return wanted is None
    if isinstance(value, list) and not isinstance(wanted, list):
        return wanted in value
    return value == wanted


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def test(value: object, wanted: object) -> bool:
        try:
            return value is not _MISSING and compare(value, wanted)
        except TypeError:
            return False

    return test


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": _equal,
    "$ne": lambda value, wanted: not _equal(value, wanted),
    "$in": lambda value, wanted: any(_equal(value, item) for item in wanted),
    "$nin": lambda value, wanted: not any(_equal(value, item) for item in wanted),
    "$exists": lambda value, wanted: (value is not _MISSING) == bool(wanted),
    "$regex": lambda value, wanted: isinstance(value, str) and bool(re.search(wanted, value)),
    "$not": lambda value, wanted: not _holds(value, wanted),
    "$gt": _ordered(lambda value, wanted: value > wanted),
    "$gte": _ordered(lambda value, wanted: value >= wanted),
    "$lt": _ordered(lambda value, wanted: value < wanted),
    "$lte": _ordered(lambda value, wanted: value <= wanted),
}

_ATTRIBUTES: dict[str, Callable[[StoredRun], object]] = {
    "name": lambda run: run.id,
    "display_name": lambda run: run.name,
    "displayName": lambda run: run.name,
    "state": lambda run: run.state,
    "group": lambda run: run.group,
    "tags": lambda run: run.tags,
    "notes": lambda run: run.notes,
    "jobType": lambda run: run.job_type,
    "job_type": lambda run: run.job_type,
    "createdAt": lambda run: run.created_at,
    "created_at": lambda run: run.created_at,
    "heartbeatAt": lambda run: run.heartbeat_at,
    "heartbeat_at": lambda run: run.heartbeat_at,
}


def _lookup(run: StoredRun, name: str) -> object:
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name](run)
    area, _, path = name.partition(".")
    if area == "config":
        return _in_config(run.raw_config, path.split("."))
    if area in {"summary_metrics", "summaryMetrics"}:
        return _descend(run.summary, path.split("."))
    return _MISSING


def _in_config(config: Mapping[str, Any], path: list[str]) -> object:
    # A config key may itself hold dots, so the longest key that exists wins.
    for length in range(len(path), 0, -1):
        item = config.get(".".join(path[:length]), _MISSING)
        if item is _MISSING:
            continue
        rest = path[length:]
        if rest[:1] == ["value"]:
            rest = rest[1:]
        return _descend(item.get("value") if isinstance(item, dict) else item, rest)
    return _MISSING


def _descend(value: object, path: list[str]) -> object:
    for at in range(len(path)):
        if not isinstance(value, dict):
            return _MISSING
        dotted = ".".join(path[at:])
        if dotted in value:
            return value[dotted]
        value = value.get(path[at], _MISSING)
    return value
