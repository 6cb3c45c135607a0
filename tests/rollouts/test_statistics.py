"""Each statistic, against an example that was computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from verl_logsync.rollouts import statistics as st
from verl_logsync.rollouts.histograms import histogram
from verl_logsync.rollouts.statistics import Missing, Step, arranged
from verl_logsync.rollouts.values import Histogram


def made(
    groups: Sequence[Sequence[float]],
    lengths: Sequence[float] | None = None,
    outputs: Sequence[int] | None = None,
) -> Step:
    scores = np.array([score for group in groups for score in group], dtype=np.float64)
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    of_length = np.array(lengths if lengths is not None else np.arange(len(scores)) + 1.0)
    hashes = np.array(outputs if outputs is not None else np.arange(len(scores)))
    order = arranged(scores, of_length, sizes)
    starts = np.cumsum(sizes) - sizes
    return Step(scores[order], of_length[order], hashes[order], starts, sizes)


EMPTY = made([])


def test_group_means() -> None:
    """The mean of 0, 0, 1 is 1/3, and a constant group's is exactly its score."""
    assert st.group_means(made([[0, 0, 1], [0.1] * 3])).tolist() == [pytest.approx(1 / 3), 0.1]


def test_group_spreads_divide_by_n_minus_1() -> None:
    """0, 0, 1, 1: sqrt(4 * 0.25 / 3); equal scores: exactly 0; a group of one has none."""
    spreads = st.group_spreads(made([[0, 1, 0, 1], [0.1, 0.1, 0.1], [1]]))
    assert spreads[0] == pytest.approx(math.sqrt(1 / 3))
    assert spreads[1] == 0
    assert math.isnan(spreads[2])


def test_zero_spread() -> None:
    """A group has no spread when its highest score is its lowest; floats are not rounded."""
    step = made([[1, 1], [0, 0], [0, 1], [0.1 + 0.2, 0.3]])
    assert st.zero_spread(step).tolist() == [True, True, False, False]


def test_a_row_without_score_leaves_its_group_without() -> None:
    """NaN and infinity are no scores: of three groups one is scored."""
    scored = made([[0, 1], [1, math.nan], [math.inf, 0]]).scored
    assert scored.sizes.tolist() == [2]
    assert scored.scores.tolist() == [0, 1]


def test_groups_of_one_are_not_compared() -> None:
    """Only groups of two rows or more can have spread."""
    assert made([[1], [0, 1]]).compared.sizes.tolist() == [2]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0, 1, 1], 1.0),
        ([-1, 1], 1.0),
        ([-1, 0, 1], 1.0),
        ([0, 0], 1.0),
        ([-1, 0], st.NO_SUCCESS),
        ([0, 0.5, 1], st.NO_SUCCESS),
        ([], st.NO_SCORES),
    ],
)
def test_success_is_assumed_only_without_doubt(scores: list[float], expected: object) -> None:
    """1 is success where scores are 0/1 or -1/1; of 0 and -1 either may be the best."""
    assert st.success_of(np.array(scores, dtype=np.float64)) == expected


def test_solved_histogram() -> None:
    """Solved rows of whole groups are counted from 0 to n; a smaller group is in no bin."""
    step = made([[0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1]])
    assert st.solved_histogram(step, 1.0, 3) == (2, 0, 1, 1)
    assert st.solved_histogram(EMPTY, 1.0, 3) == (0, 0, 0, 0)


def test_pass_at_k() -> None:
    """5 rows, 2 solved: 2/5, 1 - 3/10, 1 - 1/10, 1, 1. Averaged with a group that never is."""
    estimates = st.pass_at_k(made([[1, 1, 0, 0, 0]]), 1.0, 5)
    assert estimates == pytest.approx((0.4, 0.7, 0.9, 1, 1))
    halves = st.pass_at_k(made([[1, 1, 0, 0, 0], [0] * 5]), 1.0, 5)
    assert halves == pytest.approx((0.2, 0.35, 0.45, 0.5, 0.5))


def test_pass_at_k_of_unequal_groups() -> None:
    """A group of 3 is in pass@1 to pass@3 only; no group of 5 means no pass@5."""
    step = made([[1, 0, 0], [0, 0, 0, 0]])
    assert st.pass_at_k(step, 1.0, 5) == pytest.approx(((1 / 3) / 2, (2 / 3) / 2, 1 / 2, 0))


def test_pass_at_k_equals_the_formula_with_binomials() -> None:
    """1 - C(n - c, k) / C(n, k) for every n, c and k up to 9."""
    for n in range(1, 10):
        for c in range(n + 1):
            found = st.pass_at_k(made([[1] * c + [0] * (n - c)]), 1.0, n)
            wanted = [1 - math.comb(n - c, k) / math.comb(n, k) for k in range(1, n + 1)]
            assert found == pytest.approx(wanted), (n, c)


def test_advantages() -> None:
    """1, 0, 0, 0: mean 1/4, deviation 1/2, so 3/2 and -1/2 up to verl's 1e-6."""
    values = st.advantages(made([[1, 0, 0, 0], [0.1, 0.1, 0.1]]))
    assert values == pytest.approx([-0.5] * 3 + [1.5] + [0] * 3, rel=1e-5)
    assert values[-1] == 0, "exactly 0 without spread"
    assert values.max() < st.advantage_bound(4) == 1.5


@pytest.mark.parametrize(("size", "bound"), [(5, 1.789), (8, 2.475), (16, 3.75)])
def test_advantage_bound(size: int, bound: float) -> None:
    """(n - 1) / sqrt(n), as public logs show it."""
    assert st.advantage_bound(size) == pytest.approx(bound, abs=5e-4)
    assert isinstance(st.advantage_bound(1), Missing)


def test_distinct_shares() -> None:
    """Two different outputs of four are 1/2; equal outputs of other groups do not count."""
    step = made([[0] * 4, [0] * 2], outputs=[7, 7, 8, 8, 7, 9])
    assert st.distinct_shares(step, step.outputs).tolist() == [0.5, 1]


def test_modal_shares() -> None:
    """The most frequent answer of 1, 1, 2, none has 2 of 4 rows; no answers agree on nothing."""
    step = made([[0] * 4, [0] * 2, [0] * 3])
    answers = np.array([1, 1, 2, 0, 0, 0, 5, 5, 5])
    assert st.modal_shares(step, answers).tolist() == [0.5, 0, 1]


def test_correlation() -> None:
    """Scores 0, 1, 1 with lengths 3, 2, 1: -1 / (sqrt(2/3) * sqrt(2))."""
    step = made([[0, 1, 1]], lengths=[3, 2, 1])
    assert st.correlation(step.lengths, step.scores) == pytest.approx(-math.sqrt(3) / 2)


@pytest.mark.parametrize(
    ("lengths", "scores"), [([1, 2], [0, 1]), ([1, 2, 3], [1, 1, 1]), ([2, 2, 2], [0, 1, 1])]
)
def test_no_correlation_without_spread(lengths: list[float], scores: list[float]) -> None:
    """Two rows, equal scores or equal lengths have none."""
    assert isinstance(st.correlation(np.array(lengths), np.array(scores)), Missing)


def test_correlations_within() -> None:
    """One for each group of three rows in which both have spread: here +1 and -1."""
    step = made(
        [[0, 0.5, 1], [1, 0.5, 0], [1, 1, 1], [0, 1, 0], [0, 1]],
        lengths=[1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4, 4, 1, 2],
    )
    assert st.correlations_within(step) == pytest.approx([1, -1])
    assert len(st.correlations_within(EMPTY)) == 0


def test_wrong_minus_right() -> None:
    """Wrong answers of 30 and 50 characters, right ones of 10: 30 more."""
    step = made([[0, 0, 1]], lengths=[30, 50, 10])
    assert st.wrong_minus_right(step, 1.0) == 30
    assert isinstance(st.wrong_minus_right(made([[1, 1]]), 1.0), Missing)
    assert isinstance(st.wrong_minus_right(made([[0, 0]]), 1.0), Missing)


def test_moments() -> None:
    """0, 0, 0, 1: m2 = 0.1875, m3 = 0.09375, m4 = 0.08203125."""
    skewness, kurtosis = st.moments(np.array([0.0, 0, 0, 1]))
    assert skewness == pytest.approx(0.09375 / 0.1875**1.5)
    assert kurtosis == pytest.approx(0.08203125 / 0.1875**2 - 3)
    assert all(isinstance(m, Missing) for m in st.moments(np.array([2.0, 2.0])))


def test_moments_of_huge_values() -> None:
    """The scale does not matter, also where powers of the values would be infinite."""
    skewness, kurtosis = st.moments(np.array([0.0, 0, 0, 1e300]))
    assert skewness == pytest.approx(0.09375 / 0.1875**1.5)
    assert kurtosis == pytest.approx(0.08203125 / 0.1875**2 - 3)


def test_around_group_means() -> None:
    """Scores minus the mean of their group."""
    assert st.around_group_means(made([[0, 1], [2, 4]])).tolist() == [-0.5, 0.5, -1, 1]


def test_prompt_repetition() -> None:
    """Three groups of two prompts: 1 - 2/3. Without uid a group of twice the size is two uses."""
    prompts, sizes = np.array([1, 2, 1]), np.array([2, 2, 2])
    assert st.prompt_repetition(prompts, sizes, 2, by_uid=True) == pytest.approx(1 / 3)
    merged = st.prompt_repetition(np.array([1, 2]), np.array([4, 2]), 2, by_uid=False)
    assert merged == pytest.approx(1 / 3)
    assert st.prompt_repetition(np.array([1, 2]), np.array([4, 2]), 2, by_uid=True) == 0


def test_agreement() -> None:
    """Of four rows with both values three agree; a row without acc is not counted."""
    scores, acc = np.array([1, 0, 1, 0, 1.0]), np.array([1, 0, 0, 0, math.nan])
    assert st.agreement(scores, acc, 1.0) == 0.75


def test_histogram_has_one_edge_more_than_bins() -> None:
    """Values of 0..1 have the same bins at every step; the last includes its upper edge."""
    assert histogram(np.array([0.0, 0.5, 1.0]), 2) == Histogram((0, 0.5, 1), (1, 2))
    assert histogram(np.array([0.2, 0.7]), 2) == Histogram((0, 0.5, 1), (1, 1))
    assert histogram(np.array([-0.5, 0.0]), 2) == Histogram((-1, 0, 1), (1, 1))
    assert histogram(np.array([-1.0, 1.0]), 2) == Histogram((-1, 0, 1), (1, 1))
    assert histogram(np.array([0.0, 3.0]), 3) == Histogram((0, 1, 2, 3), (1, 0, 1))
    assert histogram(np.array([7.0, 7.0]), 2) == Histogram((6.5, 7, 7.5), (0, 2))


@pytest.mark.parametrize("values", [[], [-1.7e308, 1.7e308], [5e15, 5e15 + 1]])
def test_histogram_that_cannot_be_drawn(values: list[float]) -> None:
    """No values, or values too large or too close, have no histogram of 512 bins."""
    drawn = histogram(np.array(values, dtype=np.float64), 512)
    assert isinstance(drawn, Missing)


def test_mean_says_when_there_is_none() -> None:
    """No values and infinite sums have no mean."""
    assert st.mean(np.array([1.0, 2.0])) == 1.5
    assert st.mean(np.empty(0), Missing("none")) == "none"
    assert isinstance(st.mean(np.array([1e308] * 3)), Missing)


def test_everything_of_nothing() -> None:
    """No function fails without rows."""
    assert st.advantages(EMPTY).tolist() == st.group_spreads(EMPTY).tolist() == []
    assert st.distinct_shares(EMPTY, EMPTY.outputs).tolist() == []
    assert isinstance(st.share(st.zero_spread(EMPTY)), Missing)
    assert isinstance(st.correlation(EMPTY.lengths, EMPTY.scores), Missing)
