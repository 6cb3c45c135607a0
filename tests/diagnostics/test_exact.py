"""What logged metrics say exactly about groups, computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_logsync.diagnostics import diagnose
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.derived import Asked, Derived, gathered
from verl_logsync.diagnostics.exact import exact
from verl_logsync.diagnostics.series import Frame
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions
from verl_logsync.testing.tables import column, table, verl_file

GRPO: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True},
    "actor_rollout_ref": {"rollout": {"n": 4}},
}


def derive(row: dict[str, Any], config: dict[str, Any]) -> Derived:
    frame = Frame(table({1: row}), {})
    return gathered(frame, exact(Asked(frame, Configuration(config))))


def groups(scores: list[list[float]], lengths: list[list[float]]) -> dict[str, float]:
    """The metrics that verl logs of these groups."""
    r, n = np.array(scores), np.array(lengths)
    a = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    return {
        "critic/advantages/mean": float((a * n).sum() / n.sum()),
        "critic/advantages/max": float(a.max()),
        "critic/advantages/min": float(a.min()),
        "critic/returns/mean": float((a * n).sum() / n.sum()),
        "critic/returns/max": float(a.max()),
        "critic/returns/min": float(a.min()),
        "response_length/mean": float(n.mean()),
        "variance_proxy/expected_a_squared": float((a**2).mean()),
        "covariance": float((a * n).mean()),
    }


SCORES: list[list[float]] = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]
LENGTHS: list[list[float]] = [[10, 20, 30, 40], [5, 5, 5, 5], [8, 8, 8, 8], [10, 20, 10, 40]]


def test_zero_spread_share_from_the_square() -> None:
    """Two of four groups have no spread: mean A^2 = 0.5 * 3/4, so 1 - 0.375 * 4/3 = 0.5."""
    found = derive(groups(SCORES, LENGTHS), GRPO)
    assert column(found.columns, "grpo/zero_spread_share_exact") == [pytest.approx(0.5, abs=1e-5)]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**GRPO, "algorithm": {"adv_estimator": "gae"}},
        {**GRPO, "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}},
        {**GRPO, "actor_rollout_ref": {"rollout": {"n": 1}}},
        {**GRPO, "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True}}},
    ],
)
def test_zero_spread_share_needs_its_conditions(config: dict[str, Any]) -> None:
    """Another estimator, no normalisation, n unknown or 1, filtered groups: missing, with why."""
    found = derive({"variance_proxy/expected_a_squared": 0.375}, config)
    assert "grpo/zero_spread_share_exact" not in found.columns.column_names
    assert found.missing["grpo/zero_spread_share_exact"]


def test_a_square_that_does_not_fit_is_refused() -> None:
    """Above (n - 1) / n no group of n can be: it is another n."""
    found = derive({"variance_proxy/expected_a_squared": 0.9}, GRPO)
    assert "n = 4" in found.missing["grpo/zero_spread_share_exact"]


def test_covariance_identity() -> None:
    """Mean advantage over tokens times mean length = mean of A * L over sequences."""
    metrics = groups(SCORES, LENGTHS)
    found = derive(metrics, GRPO)
    (value,) = column(found.columns, "grpo/length_advantage_covariance")
    assert value == pytest.approx(metrics["covariance"], rel=1e-9)
    assert value < 0


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({}, {**GRPO, "algorithm": {"adv_estimator": "rloo"}}),
        ({}, {**GRPO, "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}}),
        ({"num_turns/mean": 3.5}, GRPO),
        ({"rollout_corr/rollout_rs_masked_fraction": 0.1}, GRPO),
        ({"train/num_gen_batches": 2.0}, GRPO),
        ({"critic/vf_loss": 0.1}, {}),
        ({"critic/returns/mean": 5.0}, {}),
    ],
)
def test_covariance_needs_its_conditions(more: dict[str, float], config: dict[str, Any]) -> None:
    """Where advantages need not add up to 0 in a group it is missing, with why."""
    found = derive({**groups(SCORES, LENGTHS), **more}, config)
    assert "grpo/length_advantage_covariance" not in found.columns.column_names
    assert found.missing["grpo/length_advantage_covariance"]


def test_no_advantage_at_all() -> None:
    """1 where highest and lowest are 0, 0 where not, nothing where they are not logged."""
    same = groups([[1, 1, 1, 1]], [[5, 6, 7, 8]])
    assert column(derive(same, {}).columns, "grpo/no_advantage") == [1.0]
    assert column(derive(groups(SCORES, LENGTHS), {}).columns, "grpo/no_advantage") == [0.0]
    assert "grpo/no_advantage" in derive({"actor/lr": 1.0}, {}).missing


def test_advantage_extremes() -> None:
    """One success of four has (n - 1) / sqrt(n) = 1.5, the bound; the lowest is -0.866."""
    found = derive(groups(SCORES, LENGTHS), GRPO).columns
    assert column(found, "grpo/advantage_max_to_bound") == [pytest.approx(1.0, abs=1e-5)]
    assert column(found, "grpo/advantage_min_to_bound") == [
        pytest.approx(math.sqrt(3) / 2 / 1.5, abs=1e-5)
    ]
    assert column(found, "grpo/advantage_asymmetry") == [
        pytest.approx(1.5 - math.sqrt(3) / 2, abs=1e-5)
    ]


def test_effective_prompt_ratio() -> None:
    """8 kept of 2 * 12 generated: a third at most."""
    config = {"data": {"train_batch_size": 8, "gen_batch_size": 12}}
    found = derive({"train/num_gen_batches": 2}, config).columns
    assert column(found, "grpo/effective_prompt_ratio_at_most") == [pytest.approx(1 / 3)]


def test_sample_truths(fixture_files: Path) -> None:
    """The sample's covariance is that of its dumps' rows, and its advantages hit n = 5's bound."""
    rows = verl_file(fixture_files / "verl_file/whole_run/qwen_small_grpo.jsonl")
    folder = fixture_files / "rollouts/v1_0.9/grpo_arith/rollout_data"
    reductions = [reduce_file(folder / f"{s}.jsonl", ReductionOptions(), "train") for s in (1, 2)]
    config = {**GRPO, "actor_rollout_ref": {"rollout": {"n": 5}}}
    found = diagnose(rows, config, reductions).columns
    assert column(found, "grpo/zero_spread_share")[1:3] == [0.5, 0.0]
    assert column(found, "grpo/score_mean")[1] == 0.25
    assert column(found, "reward/mean")[1] == 0.25
    assert column(found, "grpo/advantage_max_to_bound")[1] == pytest.approx(1.0, abs=1e-5)
    logged = (-0.07069744914770126) * 176.6
    assert column(found, "grpo/length_advantage_covariance")[1] == pytest.approx(logged, rel=1e-6)
