"""How old samples are and how many are dropped: computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_logsync.diagnostics import diagnose
from verl_logsync.testing.tables import column, table, verl_file

V1 = {"training/off_policy/trajectory_staleness/mean": 0.5, "critic/score/mean": 0.5}
EVICTED = "training/off_policy/evicted_samples"
FAILED = "training/rollout_failure/evicted_samples"
FILTERED = "training/filter_groups/evicted_samples"


def derived(
    rows: dict[int, dict[str, Any]], key: str, config: dict[str, Any] | None = None
) -> list[float | None] | str:
    """The values of a key, or why it has none."""
    found = diagnose(table(rows), config or {})
    if key in found.columns.column_names:
        return column(found.columns, key)
    return found.missing[key]


def test_dropped_groups_of_v1() -> None:
    """8 dropped beside a batch of 24 are a quarter; a step of v1 that does not log it dropped
    nothing; a step that is no training has no share."""
    rows = {
        0: {"val-core/x": 1.0},
        1: V1,
        2: {**V1, EVICTED: 8.0, FAILED: 1.0},
        3: {**V1, EVICTED: 0.0},
    }
    config = {"data.train_batch_size": 24}
    assert derived(rows, "off_policy/evicted_share", config) == [None, 0.0, 0.25, 0.0]
    assert derived(rows, "off_policy/failed_share", config) == [None, 0.0, 0.04, 0.0]


def test_dropped_groups_are_not_guessed() -> None:
    """Another trainer, and an unknown batch: missing, with why."""
    config = {"data.train_batch_size": 24}
    assert "v1" in derived({1: {"actor/lr": 1.0}}, "off_policy/evicted_share", config)
    assert "train_batch_size" in derived({1: {**V1, EVICTED: 8.0}}, "off_policy/evicted_share")


def test_filtered_groups_of_v1() -> None:
    """A batch of 8 of which 24 were dropped kept a quarter; without a filter there is no ratio."""
    key, config = "grpo/effective_prompt_ratio_at_most", {"data.train_batch_size": 8}
    rows = {1: V1, 2: {**V1, FILTERED: 24.0}, 3: V1}
    assert derived(rows, key, config) == [None, 0.25, 1.0]
    assert derived(rows, key, {**config, "algorithm.filter_groups.enable": True}) == [1, 0.25, 1]
    assert "no groups are filtered" in derived({1: V1}, key, config)


def asynchronous(counts: dict[int, float], tokens: float = 10_000.0) -> dict[int, dict[str, Any]]:
    """40 trajectories of 250 tokens a step, and the running count of stale ones."""
    return {
        step: {
            "fully_async/count/stale_trajectory_processed": count,
            "perf/total_num_tokens": tokens,
            "prompt_length/mean": 50.0,
            "response_length/mean": 200.0,
        }
        for step, count in counts.items()
    }


def test_stale_share_of_the_fully_async_trainer() -> None:
    """Of 40 trajectories 10, then 20 more are stale; after a step that is not there nothing is
    known; a restart counts from 0 again."""
    rows = asynchronous({1: 10.0, 2: 30.0, 4: 50.0, 5: 60.0, 6: 4.0})
    assert derived(rows, "off_policy/stale_share") == [0.25, 0.5, None, 0.25, 0.1]
    assert derived(asynchronous({7: 90.0, 8: 91.0}), "off_policy/stale_share") == [None, 0.025]


def test_stale_share_by_the_configuration() -> None:
    """Without token counts the sizes of the configuration say how many: 2 * 2 * 2 * 5 = 40; more
    stale ones than trajectories mean that something else was counted."""
    rows = {1: {"fully_async/count/stale_trajectory_processed": 10.0}}
    config = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "async_training.require_batches": 2,
        "async_training.trigger_parameter_sync_step": 2,
        "actor_rollout_ref.rollout.n": 5,
    }
    assert derived(rows, "off_policy/stale_share", config) == [0.25]
    assert "not known" in derived(rows, "off_policy/stale_share")
    assert "not known" in derived(asynchronous({1: 80.0}), "off_policy/stale_share")
    assert "fully-async" in derived({1: {"actor/lr": 1.0}}, "off_policy/stale_share")


def test_stale_share_of_the_sample(fixture_files: Path) -> None:
    """The fully-async sample has 11 more stale ones of 40 in each step."""
    log = fixture_files / "verl_file/fully_async/fully_async_multi_record_per_step.jsonl"
    rows: dict[int, dict[str, Any]] = {}
    whole = verl_file(log)
    for name in whole.column_names[1:]:
        for step, value in zip(column(whole, "_step"), column(whole, name), strict=True):
            if value is not None:
                rows.setdefault(step, {})[name] = value
    expected: list[Any] = [pytest.approx(11 / 40)] * 8
    assert derived(rows, "off_policy/stale_share") == expected


@pytest.mark.parametrize(
    ("late", "code"),
    [
        ({EVICTED: 12.0}, "SAMPLES_EVICTED"),
        ({FAILED: 3.0}, "ROLLOUTS_FAIL"),
        ({"training/off_policy/trajectory_spans/max": 9.0}, "LONG_SPANS"),
    ],
)
def test_what_v1_drops_is_told(late: dict[str, float], code: str) -> None:
    """A third of the groups dropped, a tenth failed, spans of nine versions: told, and not before."""
    config = {"data.train_batch_size": 24}
    rows = {step: {**V1, **(late if step > 20 else {})} for step in range(1, 31)}
    found = {f.code: f.first_step for f in diagnose(table(rows), config).findings}
    assert found == {code: 23}


def test_stale_trajectories_are_told() -> None:
    """From a tenth to four fifths of the trajectories: a rise, and a high level."""
    counts, total = {}, 0.0
    for step in range(1, 61):
        total += (4.0 if step <= 40 else 32.0) + step % 2
        counts[step] = total
    found = {f.code: f.first_step for f in diagnose(table(asynchronous(counts)), {}).findings}
    assert found == {"STALE_SHARE_RISES": 45, "STALE_TRAJECTORIES": 45}
