"""Canonical series: preference orders, formulas and the traps of each version of verl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from verl_logsync.columns import STEP
from verl_logsync.diagnostics.canonical import canonical_series, version_hint
from verl_logsync.diagnostics.derived import Derived, Given
from verl_logsync.testing.tables import column, series, table, verl_file

NOTHING = Given()
GRPO = {
    "data": {"train_batch_size": 8, "max_response_length": 512, "gen_batch_size": 12},
    "actor_rollout_ref": {"rollout": {"n": 5}, "actor": {"kl_loss_type": "low_var_kl"}},
}


def derive(
    rows: dict[int, dict[str, Any]], config: dict[str, Any] | None = None, given: Given = NOTHING
) -> Derived:
    return canonical_series(table(rows), config or {}, given)


def one(key: str, row: dict[str, Any], config: dict[str, Any] | None = None) -> float | None:
    """The value of a key for a single row."""
    found = derive({1: row}, config).columns
    value: float | None = column(found, key)[0] if key in found.column_names else None
    return value


def test_loss_is_policy_plus_divergence() -> None:
    """-0.5 + 0.1 * 2 = -0.3 where the terms are logged and the total is not."""
    row = {"actor/pg_loss": -0.5, "actor/kl_loss": 2.0, "actor/kl_coef": 0.1}
    assert one("actor/loss", row) == pytest.approx(-0.3)


def test_loss_takes_entropy_off_when_its_weight_is_known() -> None:
    """-0.5 + 0.1 * 2 - 0.01 * 3 = -0.33; the entropy of the update goes before the rollout's."""
    row = {
        "actor/pg_loss": -0.5,
        "actor/kl_loss": 2.0,
        "actor/kl_coef": 0.1,
        "actor/entropy": 3.0,
    }
    config = {"actor_rollout_ref": {"actor": {"entropy_coeff": 0.01}}}
    assert one("actor/loss", row, config) == pytest.approx(-0.33)
    assert one("actor/loss", {**row, "actor/entropy_loss": 5.0}, config) == pytest.approx(-0.35)


def test_loss_without_the_entropy_it_needs_is_missing() -> None:
    """A weight that is not 0 and no entropy: no guess, and the reason."""
    config = {"actor_rollout_ref": {"actor": {"entropy_coeff": 0.01}}}
    found = derive({1: {"actor/pg_loss": -0.5}}, config)
    assert "actor/loss" not in found.columns.column_names
    assert "entropy" in found.missing["actor/loss"]


def test_loss_is_labelled_when_it_is_the_policy_loss_alone() -> None:
    """pg_loss stands in, and the provenance says so."""
    found = derive({1: {"actor/pg_loss": 0.25}})
    assert column(found.columns, "actor/loss") == [0.25]
    assert "alone" in found.provenance["actor/loss"]["formula"]


def test_supervised_training_has_its_own_loss_and_rate() -> None:
    """train/loss is the loss, and train/lr(1e-3) is a thousandfold learning rate."""
    row = {"train/loss": 1.5, "train/lr(1e-3)": 0.01, "train/time(s)": 4.0}
    found = derive({1: row}).columns
    assert column(found, "actor/loss") == [1.5]
    assert column(found, "train/lr") == [pytest.approx(1e-5)]
    assert column(found, "trainer/step_per_second") == [0.25]


@pytest.mark.parametrize("key", ["actor/loss", "reward/mean", "kl_divergence"])
def test_what_is_logged_is_left_alone(key: str) -> None:
    """A key that the trainer logs is not computed."""
    row = {
        key: 7.0,
        "actor/pg_loss": 1.0,
        "critic/rewards/mean": 0.5,
        "actor/kl_loss": 1.0,
        "actor/kl_coef": 0.1,
    }
    assert key not in derive({1: row}).columns.column_names


def test_a_key_logged_later_is_computed_before_only() -> None:
    """What was said of early steps stays when a later verl logs the key itself."""
    rows = {1: {"actor/pg_loss": 0.1}, 2: {"actor/pg_loss": 0.2}}
    later = {**rows, 3: {"actor/pg_loss": 0.3, "actor/loss": 0.35}, 4: {"actor/pg_loss": 0.4}}
    assert column(derive(later).columns, "actor/loss") == [0.1, 0.2, None, None]
    assert column(derive(rows).columns, "actor/loss") == [0.1, 0.2]


def test_reward_prefers_rewards_then_scores_then_the_dump() -> None:
    """Row by row, each with its own source."""
    rows: dict[int, dict[str, Any]] = {
        1: {"critic/rewards/mean": 0.4, "critic/score/mean": 0.5},
        2: {"critic/score/mean": 0.6},
        3: {"actor/lr": 1e-6},
        4: {"actor/lr": 1e-6},
    }
    found = derive(rows, given=Given(dump_scores={1: 0.9, 3: 0.7}))
    assert column(found.columns, "reward/mean") == [0.4, 0.6, 0.7, None]
    facts = found.provenance["reward/mean"]
    assert [facts["from"], *(other["from"] for other in facts["other_rows"])] == [
        "critic/rewards/mean",
        "critic/score/mean",
        "rollout dump",
    ]


def test_divergence_of_0_without_coefficient_is_not_believed() -> None:
    """verl 0.7 logs actor/kl_loss 0.0 although there is no reference model."""
    found = derive({1: {"actor/kl_loss": 0.0, "actor/pg_loss": 0.1}})
    assert "kl_divergence" not in found.columns.column_names
    assert "kl_coef" in found.missing["kl_divergence"]


def test_divergence_from_the_reward_in_old_and_new_spelling() -> None:
    """actor/reward_kl_penalty, up to 0.3 critic/kl; never actor/ppo_kl."""
    assert one("kl_divergence", {"actor/reward_kl_penalty": 0.2, "critic/kl": 0.3}) == 0.2
    assert one("kl_divergence", {"critic/kl": 0.3}) == 0.3
    assert one("kl_divergence", {"actor/ppo_kl": 0.3, "rollout_corr/kl": 0.1}) is None


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [("low_var_kl", "k3"), ("kl", "k1"), ("mse", "k2"), ("abs", "|k1|"), ("full", "unknown")],
)
def test_estimator_is_named(kind: str, estimator: str) -> None:
    """By kl_loss_type; without it, unknown."""
    row = {"actor/kl_loss": 1.0, "actor/kl_coef": 0.1}
    found = derive({1: row}, {"actor_rollout_ref.actor.kl_loss_type": kind})
    assert found.provenance["kl_divergence"]["estimator"] == estimator
    assert derive({1: row}).provenance["kl_divergence"]["estimator"] == "unknown"


def test_entropy_of_old_versions_gets_the_new_name() -> None:
    """actor/entropy_loss alone becomes actor/entropy; with both nothing is added."""
    assert one("actor/entropy", {"actor/entropy_loss": 0.5}) == 0.5
    assert one("actor/entropy", {"actor/entropy_loss": 0.5, "actor/entropy": 0.4}) is None


def test_latency_by_the_configuration() -> None:
    """1000 * 20 s / (8 * 5) = 500 ms a sequence."""
    assert one("rollout/latency_ms", {"timing_s/gen": 20.0}, GRPO) == 500.0


def test_latency_by_the_dump_then_by_tokens_then_by_token_time() -> None:
    """Each gives N = 40 here, when the ones before it are not known."""
    gen = {"timing_s/gen": 20.0}
    dumped = derive({1: gen}, given=Given(dump_rows={1: 40})).columns
    assert column(dumped, "rollout/latency_ms") == [500.0]
    tokens = {
        "perf/total_num_tokens": 8004,
        "prompt_length/mean": 80.0,
        "response_length/mean": 120.0,
    }
    assert one("rollout/latency_ms", {**gen, **tokens}) == 500.0
    per_token = {"timing_per_token_ms/gen": 4.0, "response_length/mean": 125.0}
    assert one("rollout/latency_ms", {**gen, **per_token}) == 500.0
    assert one("rollout/latency_ms", gen) is None


@pytest.mark.parametrize(
    "mark",
    ["fully_async/trainer/idle_ratio", "timing_s/wait_prev_gen", "timing_s/switch_to_trainer"],
)
def test_latency_of_asynchronous_trainers_is_missing(mark: str) -> None:
    """Their timing_s/gen is only the wait."""
    found = derive({1: {"timing_s/gen": 20.0, mark: 1.0}}, GRPO)
    assert "rollout/latency_ms" not in found.columns.column_names
    assert "wait" in found.missing["rollout/latency_ms"]
    mode = {**GRPO, "trainer": {"v1": {"trainer_mode": "colocate_async"}}}
    assert one("rollout/latency_ms", {"timing_s/gen": 20.0}, mode) is None


def test_latency_of_dapo_counts_all_generation_batches() -> None:
    """1000 * 60 s / (2 * 12 * 5) = 500 ms; without gen_batch_size it is missing."""
    row = {"timing_s/gen": 60.0, "train/num_gen_batches": 2}
    assert one("rollout/latency_ms", row, GRPO) == 500.0
    assert one("rollout/latency_ms", row, {"data": {"train_batch_size": 8}}) is None


def test_latency_of_a_sequence_is_another_series() -> None:
    """Seconds of a trajectory, in milliseconds."""
    assert (
        one("rollout/sequence_latency_ms", {"timing_s/agent_loop/generate_sequences/mean": 3.5})
        == 3500.0
    )
    assert one("rollout/sequence_latency_ms", {"fully_async/processing_time/avg": 2.0}) == 2000.0


@pytest.mark.parametrize(
    ("marks", "seconds"),
    [
        # 0.5 counts all of them in, 0.6.0-0.7.0 only the dump, 0.7.1 and later only the saving.
        ({"actor/entropy_loss": 1.0}, 100.0 - 14 - 6 - 2),
        ({"response/aborted_ratio": 0.0}, 100.0 - 2),
        ({"timing_s/update_weights": 1.0}, 100.0 - 6),
        ({"actor/perf/max_memory_reserved_gb": 1.0, "response/aborted_ratio": 0.0}, 100.0 - 6),
    ],
)
def test_step_rate_leaves_out_what_the_version_counts_in(
    marks: dict[str, float], seconds: float
) -> None:
    """Training alone: the same pace with and without a validation."""
    row = {
        "timing_s/step": 100.0,
        "timing_s/testing": 14.0,
        "timing_s/save_checkpoint": 6.0,
        "timing_s/dump_rollout_generations": 2.0,
        **marks,
    }
    assert one("trainer/step_per_second", row) == pytest.approx(1 / seconds)


def test_step_rate_of_nothing_is_missing() -> None:
    """A time of 0 and rows of validations only give no rate."""
    rows: dict[int, dict[str, Any]] = {
        0: {"val-core/x/acc/mean@1": 0.5, "timing_s/testing": 14.0},
        1: {"timing_s/step": 0.0},
        2: {"timing_s/step": math.nan},
        3: {"perf/time_per_step": 4.0},
    }
    assert column(derive(rows).columns, "trainer/step_per_second") == [None, None, None, 0.25]


@pytest.mark.parametrize("prefix", ["perf", "actor/perf"])
def test_memory_in_both_spellings(prefix: str) -> None:
    """The same series from 0.3 to 0.9: 60 of 80 GiB reserved, 40 allocated."""
    row = {f"{prefix}/max_memory_reserved_gb": 60.0, f"{prefix}/max_memory_allocated_gb": 40.0}
    found = derive({1: row}, given=Given(device_memory_gb=80.0)).columns
    assert column(found, "hybrid_engine/gpu_mem_util") == [0.75]
    assert column(found, "hybrid_engine/gpu_mem_allocated_gb") == [40.0]


def test_memory_share_needs_the_size_of_the_device() -> None:
    """It is nowhere in the logs; a size that cannot be true gives nothing either."""
    row = {"perf/max_memory_reserved_gb": 60.0}
    assert "--device-memory-gb" in derive({1: row}).missing["hybrid_engine/gpu_mem_util"]
    small = derive({1: row}, given=Given(device_memory_gb=40.0))
    assert "hybrid_engine/gpu_mem_util" not in small.columns.column_names


def test_memory_share_from_records_of_the_gpu() -> None:
    """Percent of an offline run's system metrics, by step."""
    rows: dict[int, dict[str, Any]] = {1: {"actor/lr": 1.0}, 2: {"actor/lr": 1.0}}
    found = derive(rows, given=Given(gpu_memory_percent={2: 85.0})).columns
    assert column(found, "hybrid_engine/gpu_mem_util") == [None, 0.85]


def test_truncation_of_v1_is_believed_at_the_limit_only() -> None:
    """v1 compares with the longest answer: 0 below the limit, unknown without one."""
    row = {
        "response_length/clip_ratio": 0.025,
        "response_length/max": 374.0,
        "training/off_policy/trajectory_spans/mean": 1.0,
    }
    assert one("rollout/truncation_ratio", row, GRPO) == 0.0
    assert one("rollout/truncation_ratio", {**row, "response_length/max": 512.0}, GRPO) == 0.025
    assert one("rollout/truncation_ratio", row) is None
    v0 = {"response_length/clip_ratio": 0.1, "response_length/max": 512.0}
    assert one("rollout/truncation_ratio", v0) == 0.1


def test_nan_stays_nan_and_missing_stays_missing() -> None:
    """A loss that is NaN gives a NaN, a row without gives nothing, null gives NaN."""
    found = canonical_series(series("actor/pg_loss", [0.1, math.nan, None]), {}, NOTHING).columns
    first, second, third = column(found, "actor/loss")
    assert first == 0.1
    assert math.isnan(second)
    assert third is None
    null = table({1: {"critic/rewards/mean": None}, 2: {"critic/rewards/mean": 0.5}})
    value, _ = column(canonical_series(null, {}, NOTHING).columns, "reward/mean")
    assert math.isnan(value)


def test_empty_and_hostile_tables() -> None:
    """No row, no key, text where numbers belong: nothing is computed, nothing breaks."""
    empty = pa.table({STEP: pa.array([], type=pa.int64())})
    assert canonical_series(empty, {}, NOTHING).columns.num_rows == 0
    odd: dict[int, dict[str, Any]] = {
        1: {"actor/pg_loss": "x", "timing_s/step": [1, 2], "critic/rewards/mean": {"a": 1}}
    }
    config = {"data": 3, "actor_rollout_ref": {"rollout": {"n": "${x}"}}}
    assert derive(odd, config).columns.column_names == [STEP]


def test_version_hint() -> None:
    """What the keys tell."""
    assert version_hint(frozenset({"mfu/actor"})) == "0.2"
    assert version_hint(frozenset({"mismatch/kl"})) == "0.6.0"
    assert version_hint(frozenset({"training/off_policy/x"})).startswith("0.9")
    assert version_hint(frozenset()) == ""


def test_samples_have_their_series(fixture_files: Path) -> None:
    """The simulated sample of 0.9.1: 18 s for 40 sequences, 51.75 GiB of 80."""
    rows = verl_file(fixture_files / "verl_file/whole_run/qwen_small_grpo.jsonl")
    found = canonical_series(rows, {}, Given(device_memory_gb=80.0)).columns
    assert found.num_rows == 41
    assert column(found, "rollout/latency_ms")[1] == pytest.approx(17.43 / 40 * 1000, rel=1e-3)
    assert column(found, "hybrid_engine/gpu_mem_util")[40] == 51.75 / 80
    assert column(found, "reward/mean")[:2] == [None, 0.25]
    assert "actor/loss" not in found.column_names
