"""How old samples are, and how many were dropped for it, as far as each trainer says."""

from __future__ import annotations

from typing import Final

import numpy as np

from verl_logsync.diagnostics import configuration as cf
from verl_logsync.diagnostics.canonical import from_tokens, is_fully_async
from verl_logsync.diagnostics.derived import Asked, Candidate, Made, choose, divided
from verl_logsync.diagnostics.series import Frame, Series, nothing, plain

EVICTED: Final = "off_policy/evicted_share"
FAILED: Final = "off_policy/failed_share"
STALE: Final = "off_policy/stale_share"

#: v1 logs these in every training step from 0.9.0 on; its counts of what was dropped only in
#: steps where something was.
_EVERY_STEP: Final = "training/off_policy/trajectory_staleness/mean"
_DROPPED: Final = {
    EVICTED: "training/off_policy/evicted_samples",
    FAILED: "training/rollout_failure/evicted_samples",
}
_STALE_COUNT: Final = "fully_async/count/stale_trajectory_processed"
#: Counts of trajectories are rounded.
_SLACK: Final = 1.05


def staleness(asked: Asked) -> list[Made]:
    """14: all of them; those that cannot be computed say why."""
    return [*dropped_shares(asked), stale_share(asked)]


def dropped_shares(asked: Asked) -> list[Made]:
    """v1: groups that were dropped, as too old or since they failed, by all that were generated."""
    frame, batch = asked.frame, asked.config.count(cf.BATCH_SIZE)
    every = frame.logged(_EVERY_STEP)
    made = []
    for key, counted in _DROPPED.items():
        logged = frame.logged(counted)
        count = np.where(logged.finite, np.maximum(logged.values, 0.0), 0.0)
        share = plain(count / (count + (batch or 1)), (every.there | logged.finite) & bool(batch))
        candidate = Candidate(
            share,
            counted,
            f"{counted} / ({counted} + {cf.BATCH_SIZE}), counted in groups; 0 where it is not"
            " logged",
        )
        why_not = f"{_EVERY_STEP} is not logged: not the v1 trainer of verl 0.9 or later"
        if every.there.any():
            why_not = f"{cf.BATCH_SIZE} is not known"
        made.append(choose(asked, key, [candidate], why_not))
    return made


def stale_share(asked: Asked) -> Made:
    """Fully-async: what part of a step's trajectories an older policy has generated."""
    frame = asked.frame
    candidates = [
        Candidate(
            _at_most_one(divided(_increase(frame, _STALE_COUNT), trajectories)),
            _STALE_COUNT,
            f"increase of {_STALE_COUNT} / trajectories; {how}",
            ("verl 0.8.0 logs it one sync late (PR 6796)",),
        )
        for trajectories, how in _trajectories(asked)
    ]
    why_not = f"{_STALE_COUNT} is not logged: not the fully-async trainer"
    if is_fully_async(frame).any():
        why_not = "the steps before, or how many trajectories a step has, are not known"
    return choose(asked, STALE, candidates, why_not)


def _trajectories(asked: Asked) -> list[tuple[Series, str]]:
    """How many trajectories a step has, that is one sync of the weights."""
    counted = from_tokens(asked.frame)
    size, batch = asked.config.count(cf.GROUP_SIZE), asked.config.count(cf.MINI_BATCH)
    found = [(counted.series, counted.formula)]
    parts = [asked.config.count(key) for key in (cf.REQUIRED_BATCHES, cf.SYNC_EVERY)]
    if size and batch and all(parts):
        planned = float(size * batch * np.prod([part or 1 for part in parts]))
        names = f"{cf.MINI_BATCH} * {cf.REQUIRED_BATCHES} * {cf.SYNC_EVERY} * {cf.GROUP_SIZE}"
        rows = len(asked.frame)
        found.append((plain(np.full(rows, planned), np.ones(rows, dtype=bool)), names))
    return found


def _increase(frame: Frame, key: str) -> Series:
    """By how much a count grew since the step before; a count that fell began again at 0."""
    counted = frame.logged(key)
    rows = np.flatnonzero(counted.finite)
    if not len(rows):
        return nothing(len(frame))
    values, steps = counted.values[rows], frame.steps[rows]
    grown = np.diff(values, prepend=0.0)
    grown = np.where(grown < 0, values, grown)
    known = np.diff(steps, prepend=steps[0] - 1) == 1
    known[0] = steps[0] <= 1
    series, there = np.full(len(frame), np.nan), np.zeros(len(frame), dtype=bool)
    series[rows], there[rows] = grown, known & (grown >= 0)
    return plain(series, there)


def _at_most_one(share: Series) -> Series:
    with np.errstate(invalid="ignore"):
        there = share.there & (share.values <= _SLACK)
    return plain(np.minimum(share.values, 1.0), there)
