"""What the groups of a step come to. Each function is one definition.

The functions take a `Step`: the rows that count, sorted by group. `scored` is the part of it
that has scores. A number that does not exist (nothing to average, no spread, overflow) is a
`Missing` with the reason, never a guess. Nothing depends on the order of rows or groups, and
repeating all groups changes no share, mean, correlation or moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

# So many values are turned into Python's numbers at once.
_PART: Final = 1 << 14

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]

#: verl adds this to a group's standard deviation before it divides by it.
EPSILON: Final = 1e-6


class Missing(str):
    """Why a statistic does not exist."""

    __slots__ = ()


Number = float | Missing

NO_GROUPS: Final = Missing("no group has two rows with scores")
NO_SCORES: Final = Missing("no row has a score")
NO_SUCCESS: Final = Missing(
    "the scores are not just 0/1 or -1/1: say from which score on a row is solved"
)


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of a step: group g has the rows `starts[g]` to `starts[g] + sizes[g]`.

    `scores` and `lengths` (characters of the output) have one item a row; `outputs` are hashes.
    Within a group rows ascend by score and then by length (see `arranged`): numbers are added in
    that order, so that the order in the file does not matter to the last bit.
    """

    scores: _Floats
    lengths: _Floats
    outputs: _Ints
    starts: _Ints
    sizes: _Ints

    @property
    def which(self) -> _Ints:
        """The group of each row."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def take(self, groups: _Flags) -> Step:
        """The step with some of its groups only; the same where it is all of them."""
        if groups.all():
            return self
        rows = np.repeat(groups, self.sizes)
        sizes = self.sizes[groups]
        starts = np.cumsum(sizes) - sizes
        return Step(self.scores[rows], self.lengths[rows], self.outputs[rows], starts, sizes)

    @property
    def scored(self) -> Step:
        """The groups of which all rows have a finite score.

        One row without a score leaves its whole group without: verl's advantages of that group
        would all be NaN.
        """
        return self.take(_all(self, np.isfinite(self.scores)))

    @property
    def compared(self) -> Step:
        """The groups of at least two rows: only among them something can be compared."""
        return self.take(self.sizes >= 2)


def arranged(scores: _Floats, lengths: _Floats, sizes: _Ints) -> _Ints:
    """Where the rows of a `Step` stand among rows that are only sorted by group."""
    which = np.repeat(np.arange(len(sizes)), sizes)
    order: _Ints = np.lexsort((lengths, scores, which))
    return order


def _all(step: Step, flags: _Flags) -> _Flags:
    if not len(step.sizes):
        return np.empty(0, dtype=bool)
    return np.logical_and.reduceat(flags, step.starts)


def _sums(step: Step, values: _Floats) -> _Floats:
    """Per group; `values` depend on a row's score and length only."""
    if not len(step.sizes):
        return np.empty(0)
    return np.add.reduceat(values, step.starts)


def _extent(step: Step) -> tuple[_Floats, _Floats]:
    """Lowest and highest score of each group."""
    if not len(step.sizes):
        return np.empty(0), np.empty(0)
    return step.scores[step.starts], step.scores[step.starts + step.sizes - 1]


def mean(values: _Floats, why_not: Missing = NO_GROUPS) -> Number:
    """The arithmetic mean, correctly rounded and so independent of order."""
    if not len(values):
        return why_not
    try:
        return _finite(math.fsum(_listed(values)) / len(values))
    except (OverflowError, ValueError):
        return Missing("the values are too large")


def _listed(values: _Floats) -> Iterable[float]:
    """The values as Python's floats, never all of them at once."""
    parts = (values[start : start + _PART].tolist() for start in range(0, len(values), _PART))
    return chain.from_iterable(parts)


def _finite(value: float) -> Number:
    return (
        float(value) if math.isfinite(value) else Missing("the values are too large or too close")
    )


def share(flags: _Flags, why_not: Missing = NO_GROUPS) -> Number:
    """How many of the flags are set, from 0 to 1."""
    return float(flags.sum() / len(flags)) if len(flags) else why_not


# -- groups --------------------------------------------------------------------------------


def group_means(step: Step) -> _Floats:
    """Mean score of each group."""
    lowest, highest = _extent(step)
    with np.errstate(over="ignore", invalid="ignore"):
        means = _sums(step, step.scores) / step.sizes
    return np.where(lowest == highest, lowest, means)


def group_spreads(step: Step) -> _Floats:
    """Standard deviation of each group's scores, division by n - 1 as in verl's advantages.

    Exactly 0 where all scores are equal; NaN for a group of one.
    """
    lowest, highest = _extent(step)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        around = step.scores - np.repeat(group_means(step), step.sizes)
        spreads = np.sqrt(_sums(step, around**2) / (step.sizes - 1))
    spreads = np.where(lowest == highest, 0.0, spreads)
    return np.where(step.sizes < 2, np.nan, spreads)


def zero_spread(step: Step) -> _Flags:
    """Of each group: whether its highest score equals its lowest, so that no row gets an
    advantage.
    """
    lowest, highest = _extent(step)
    equal: _Flags = lowest == highest
    return equal


def solved_rows(step: Step, success: float) -> _Ints:
    """How many rows of each group have a score of at least `success`."""
    if not len(step.sizes):
        return np.empty(0, dtype=np.int64)
    return np.add.reduceat((step.scores >= success).astype(np.int64), step.starts)


def success_of(scores: _Floats) -> Number:
    """The threshold of success where the scores leave no doubt: 1 for scores of 0/1 or -1/1.

    Scores of 0 and -1 alone are in doubt: 0 may be the best.
    """
    seen = set(np.unique(scores).tolist()) if len(scores) else set()
    if not seen:
        return NO_SCORES
    return NO_SUCCESS if not seen <= {-1.0, 0.0, 1.0} or seen == {-1.0, 0.0} else 1.0


def solved_histogram(step: Step, success: float, expected: int) -> tuple[int, ...]:
    """How many whole groups (of `expected` rows) have 0, 1, ..., `expected` solved rows."""
    whole = step.take(step.sizes == expected)
    counts = np.bincount(solved_rows(whole, success), minlength=expected + 1)
    return tuple(int(count) for count in counts)


def pass_at_k(step: Step, success: float, expected: int) -> tuple[float, ...]:
    """For k = 1 to `expected`: the mean over groups of at least k rows of
    1 - C(n - c, k) / C(n, k), with n rows of which c are solved.

    That is the unbiased estimate of the probability that one of k answers is right; verl's
    `best@k` draws with replacement and is lower. Ends at the first k that no group reaches.
    """
    kinds, counts = np.unique(
        np.stack((step.sizes, solved_rows(step, success))), axis=1, return_counts=True
    )
    estimates: list[float] = []
    failing = np.ones(kinds.shape[1])  # C(n - c, k) / C(n, k), built up factor by factor
    for k in range(1, expected + 1):
        size, solved = kinds
        reached = size >= k
        if not reached.any():
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.maximum(0, size - solved - k + 1) / (size - k + 1)
        failing = failing * factor
        total = math.fsum((counts[reached] * (1 - failing[reached])).tolist())
        estimates.append(total / int(counts[reached].sum()))
    return tuple(estimates)


# -- advantages ----------------------------------------------------------------------------


def advantages(step: Step) -> _Floats:
    """Of each row: (score - mean) / (standard deviation + 1e-6) of its group, as verl's GRPO
    with `norm_adv_by_std_in_grpo`; exactly 0 in groups without spread.
    """
    means, spreads = group_means(step), group_spreads(step)
    with np.errstate(over="ignore", invalid="ignore"):
        around = step.scores - np.repeat(means, step.sizes)
        return np.where(
            np.repeat(zero_spread(step), step.sizes),
            0.0,
            around / (np.repeat(spreads, step.sizes) + EPSILON),
        )


def advantage_bound(size: int) -> Number:
    """(n - 1) / sqrt(n): no advantage of a group of n rows is larger (Samuelson)."""
    return (size - 1) / math.sqrt(size) if size >= 2 else NO_GROUPS


# -- texts ---------------------------------------------------------------------------------


def distinct_shares(step: Step, hashes: _Ints) -> _Floats:
    """Of each group: how many different hashes it has, divided by its rows."""
    if not len(step.sizes):
        return np.empty(0)
    which = step.which
    order = np.lexsort((hashes, which))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (hashes[order][1:] != hashes[order][:-1]) | (which[1:] != which[:-1])
    return np.add.reduceat(fresh.astype(np.int64), step.starts) / step.sizes


def modal_shares(step: Step, answers: _Ints) -> _Floats:
    """Of each group: how many rows give its most frequent answer, divided by its rows.

    A hash of 0 is no answer: such rows agree with none, but they are rows.
    """
    if not len(step.sizes):
        return np.empty(0)
    which = step.which
    order = np.lexsort((answers, which))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (answers[order][1:] != answers[order][:-1]) | (which[1:] != which[:-1])
    runs = np.flatnonzero(begins)
    counts = np.diff(runs, append=len(order))
    counts = np.where(answers[order][runs] == 0, 0, counts)
    best = np.zeros(len(step.sizes), dtype=np.int64)
    np.maximum.at(best, which[runs], counts)
    return best / step.sizes


# -- length --------------------------------------------------------------------------------


def correlation(one: _Floats, other: _Floats) -> Number:
    """Pearson's correlation of two columns."""
    if len(one) < 3:
        return Missing("fewer than three rows")
    if one.min() == one.max() or other.min() == other.max():
        return Missing("all scores or all lengths are equal")
    order = np.lexsort((one, other))
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = _unit(one[order]), _unit(other[order])
        found = float((a * b).sum()) / math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return _finite(max(-1.0, min(1.0, found)) if math.isfinite(found) else found)


def _unit(values: _Floats) -> _Floats:
    """Values that are not all equal, minus their mean, scaled so that the largest is 1: squares
    neither overflow nor vanish. NaN where even that cannot be computed.
    """
    scaled = values / np.abs(values).max()
    around = scaled - math.fsum(_listed(scaled)) / len(scaled)
    peak = np.abs(around).max()
    return around / peak if peak > 0 else np.full(len(values), np.nan)


def correlations_within(step: Step) -> _Floats:
    """The correlation of length and score of every group in which both have spread and that has
    at least three rows.
    """
    if not len(step.sizes):
        return np.empty(0)
    shortest = np.minimum.reduceat(step.lengths, step.starts)
    longest = np.maximum.reduceat(step.lengths, step.starts)
    both = step.take((step.sizes >= 3) & ~zero_spread(step) & (shortest < longest))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        a = _around(both, both.scores)
        b = _around(both, both.lengths)
        scale = np.sqrt(_sums(both, a * a) * _sums(both, b * b))
        found = _sums(both, a * b) / scale
    return np.clip(found[np.isfinite(found)], -1.0, 1.0)


def _around(step: Step, values: _Floats) -> _Floats:
    return values - np.repeat(_sums(step, values) / step.sizes, step.sizes)


def wrong_minus_right(step: Step, success: float) -> Number:
    """Mean length of rows that are not solved minus that of rows that are, in characters."""
    right = step.scores >= success
    if right.all() or not right.any():
        return Missing("all rows are solved, or none")
    wrong_mean, right_mean = mean(step.lengths[~right]), mean(step.lengths[right])
    if isinstance(wrong_mean, Missing) or isinstance(right_mean, Missing):
        return Missing("the values are too large")
    return wrong_mean - right_mean


# -- moments -------------------------------------------------------------------------------


def moments(values: _Floats) -> tuple[Number, Number]:
    """Skewness m3 / m2^1.5 and excess kurtosis m4 / m2^2 - 3, with the population's moments
    m_k = mean of (x - mean)^k. Both are 0 for a normal distribution.
    """
    if len(values) < 2 or values.min() == values.max():
        no_spread = Missing("the values have no spread")
        return no_spread, no_spread
    if not np.isfinite(values).all():
        too_large = Missing("the values are too large")
        return too_large, too_large
    around = _unit(np.sort(values))  # the ratios of moments do not depend on the scale
    second, third, fourth = (float((around**k).mean()) for k in (2, 3, 4))
    return _finite(third / second**1.5), _finite(fourth / second**2 - 3)


def around_group_means(step: Step) -> _Floats:
    """Each score minus the mean of its group."""
    with np.errstate(over="ignore", invalid="ignore"):
        return step.scores - np.repeat(group_means(step), step.sizes)


# -- prompts -------------------------------------------------------------------------------


def prompt_repetition(prompts: _Ints, sizes: _Ints, expected: int | None, by_uid: bool) -> Number:
    """The share of a step's uses of prompts that repeat one of the same step:
    1 - different prompts / uses.

    A group is one use where the dump names its groups; else a group of k times the expected size
    is k uses.
    """
    if not len(prompts):
        return Missing("no rows")
    uses = len(sizes)
    if not by_uid and expected:
        multiple = sizes % expected == 0
        uses += int((sizes[multiple] // expected - 1).sum())
    return float(1 - len(np.unique(prompts)) / uses)


def agreement(scores: _Floats, acc: _Floats, success: Number) -> Number:
    """The share of rows in which a solved score goes with an `acc` of at least 0.5, or neither
    does; over the rows that have both. DAPO may write `acc` into other rows than its own.
    """
    if isinstance(success, Missing):
        return success
    both = np.isfinite(scores) & np.isfinite(acc)
    agreeing: _Flags = (scores >= success) == (acc >= 0.5)
    return share(agreeing[both], Missing("no row has both score and acc"))
