"""The log files of one run -> its attempts, in the order in which they were started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

from verl_logsync.model import Attempt, LogFile
from verl_logsync.verl_keys import LATEST_START

# EXP.jsonl.2 is older than EXP.jsonl.1, EXP.attempt1.jsonl and EXP.20250405_142311.jsonl than later
# ones, and all of them than EXP.jsonl.
_ROTATED: Final = re.compile(r"\.(?:jsonl|log|out|txt)\.(\d{1,6})(?:\.\w+)?$", re.IGNORECASE)
_COPY: Final = re.compile(r"[._-]attempt[_-]?(\d{1,6})\b|\.(\d{8}[_-]?\d{6})\b", re.IGNORECASE)


def at_the_beginning(file: LogFile) -> bool:
    """Whether a log starts at the beginning of training.

    A validation-only record at step 1 was made by a job that resumed from checkpoint 1.
    """
    first, validates = file.facts.first_step, file.facts.opens_with_validation
    return first == 0 or (first == LATEST_START and not validates)


def log_of(file: LogFile) -> tuple[str, int | None]:
    """One job writes one log of a format, or one a rank."""
    return file.source, file.facts.rank


def start_order(file: LogFile) -> tuple[float, int, float, str]:
    """Sorts files by their recorded start; those without one last, by their first step."""
    facts = file.facts
    started = facts.started_at if facts.started_at is not None else float("inf")
    first = facts.first_step if facts.first_step is not None else 0
    return started, first, file.stamp.mtime, file.place


def content_order(file: LogFile) -> tuple[int, bool, tuple[int, int], float, str]:
    """Sorts files by what they hold; by name and modification time only where that is equal."""
    facts = file.facts
    first = facts.first_step if facts.first_step is not None else 0
    resumed = first > LATEST_START and facts.opens_with_validation
    # Copying a file may change its modification time, and hardly ever its name.
    return first, resumed, _age(file), file.stamp.mtime, file.place


def attempts_of(files: Sequence[LogFile]) -> tuple[Attempt, ...]:
    """The attempts of one run: files of several formats and ranks that one start wrote together."""
    logs: dict[tuple[str, int], list[LogFile]] = {}
    for file in files:
        logs.setdefault((file.source, file.facts.rank or 0), []).append(file)
    # The format that recorded its starts leads; the others join the attempts it knows.
    lead = max(logs, key=lambda log: (_recorded(logs[log]), len(logs[log]), log))
    groups = [[file] for file in _ordered(logs.pop(lead))]
    for log in sorted(logs):
        for file in _ordered(logs[log]):
            _join_attempt(groups, file)
    return tuple(_attempt(group, groups) for group in groups)


def _recorded(files: Sequence[LogFile]) -> bool:
    return all(file.facts.started_at is not None for file in files)


def _ordered(files: Sequence[LogFile]) -> list[LogFile]:
    return sorted(files, key=start_order if _recorded(files) else content_order)


def _join_attempt(groups: list[list[LogFile]], file: LogFile) -> None:
    first = file.facts.first_step
    for group in reversed(groups):
        known = group[0].facts.first_step
        together = (
            known is None
            or first is None
            or known == first
            or (at_the_beginning(group[0]) and at_the_beginning(file))
        )
        if together and all(log_of(other) != log_of(file) for other in group):
            group.append(file)
            return
    later = [i for i, group in enumerate(groups) if (group[0].facts.first_step or 0) > (first or 0)]
    groups.insert(later[0] if later else len(groups), [file])


def _age(file: LogFile) -> tuple[int, int]:
    """What a name says of its file's age: lower is older."""
    if rotated := _ROTATED.search(file.path.name):
        return 0, -int(rotated[1])
    if copy := _COPY.search(file.path.name):
        return 0, int(re.sub(r"\D", "", copy[1] or copy[2]))
    return 1, 0


def _attempt(group: Sequence[LogFile], groups: Sequence[Sequence[LogFile]]) -> Attempt:
    starts = [f.facts.started_at for f in group if f.facts.started_at is not None]
    how: Literal["recorded start", "content", "guess"] = "recorded start" if starts else "content"
    alone = len(groups) == 1
    twins = [g for g in groups if g[0].facts.first_step == group[0].facts.first_step]
    if not starts and not alone and (len(twins) > 1 or _names_disagree(groups)):
        how = "guess"
    return Attempt(tuple(group), min(starts, default=None), how)


def _names_disagree(groups: Sequence[Sequence[LogFile]]) -> bool:
    """Whether the names of kept copies tell another order of the attempts than their content."""
    ages = [_age(g[0]) for g in groups if g[0].source == "verl_file"]
    return any(age < (1, 0) for age in ages) and ages != sorted(ages)
