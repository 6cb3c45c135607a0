"""Reward against entropy, training against validation, where the time goes: computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from verl_logsync.diagnostics import diagnose
from verl_logsync.testing.tables import column, table


def last(rows: dict[int, dict[str, Any]], config: dict[str, Any] | None = None) -> dict[str, Any]:
    found = diagnose(table(rows), config or {})
    names = found.columns.column_names
    return {name: column(found.columns, name)[-1] for name in names} | {"?": found.missing}


# -- reward against entropy ------------------------------------------------------------------


def falling(count: int, a: float = 0.5, b: float = 1.2) -> dict[int, dict[str, Any]]:
    """H from 0.8 down by 0.01 a step, and R = -a e^H + b exactly."""
    entropies = {step: 0.8 - 0.01 * step for step in range(1, count + 1)}
    return {
        step: {"actor/entropy": h, "critic/rewards/mean": -a * math.exp(h) + b}
        for step, h in entropies.items()
    }


def test_the_fit_finds_what_made_the_rewards() -> None:
    """R = -0.5 e^H + 1.2 gives a = 0.5, b = 1.2, a ceiling of 0.7, and explains everything; the
    row before the fiftieth has no fit yet."""
    rows = falling(60)
    found = last(rows)
    assert found["entropy_fit/a"] == pytest.approx(0.5, rel=1e-6)
    assert found["entropy_fit/b"] == pytest.approx(1.2, rel=1e-6)
    assert found["entropy_fit/ceiling"] == pytest.approx(0.7, rel=1e-6)
    assert found["entropy_fit/explained"] == pytest.approx(1.0)
    given = column(diagnose(table(rows), {}).columns, "entropy_fit/a")
    assert [value is None for value in given] == [step < 50 for step in rows]


def test_the_fit_is_that_of_least_squares() -> None:
    """With noise it is the line that numpy fits to all rows so far."""
    rng = np.random.default_rng(1)
    rows = falling(70)
    for row in rows.values():
        row["critic/rewards/mean"] += rng.normal(0, 0.02)
    for count in (55, 70):
        part = dict(list(rows.items())[:count])
        x = [math.exp(row["actor/entropy"]) for row in part.values()]
        slope, base = np.polyfit(x, [row["critic/rewards/mean"] for row in part.values()], 1)
        found = last(part)
        assert found["entropy_fit/a"] == pytest.approx(-slope, rel=1e-9)
        assert found["entropy_fit/ceiling"] == pytest.approx(base + slope, rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (falling(49), "fewer than 50 rows"),
        (falling(60, a=-0.5), "does not follow"),
        ({s: {**r, "actor/entropy": 0.5} for s, r in falling(60).items()}, "does not follow"),
        ({s: {"critic/rewards/mean": 0.5} for s in range(1, 61)}, "no entropy"),
        (
            {s: {**r, "critic/rewards/mean": 0.1 * (s % 2)} for s, r in falling(60).items()},
            "explains less",
        ),
    ],
)
def test_without_evidence_there_is_no_fit(rows: dict[int, dict[str, Any]], why: str) -> None:
    """Few rows, a reward that falls with the entropy, no movement, noise: missing, with why."""
    found = last(rows)
    assert found.get("entropy_fit/ceiling") is None
    assert why in found["?"]["entropy_fit/ceiling"]


# -- training against validation -------------------------------------------------------------


def test_gap_of_training_and_validation() -> None:
    """Scores 0.5 and 0.7 in turn average 0.6 over ten rows; the validation says 0.45: 0.15. The
    accuracy is not taken for the reward, and of mean@1 and mean@4 the latter counts."""
    rows: dict[int, dict[str, Any]] = {
        step: {"critic/score/mean": 0.5 + 0.2 * (step % 2)} for step in range(1, 21)
    }
    rows[0] = {"val-aux/openai/gsm8k/reward/mean@4": 0.1}
    rows[20] |= {
        "val-core/openai/gsm8k/acc/mean@4": 0.9,
        "val-aux/openai/gsm8k/reward/mean@4": 0.45,
        "val-aux/openai/gsm8k/reward/mean@1": 0.4,
    }
    found = last(dict(sorted(rows.items())))
    assert found["val_gap/openai/gsm8k"] == pytest.approx(0.15)
    assert "val_gap/openai/gsm8k" not in found["?"]


def test_what_was_said_of_a_gap_stays() -> None:
    """A validation of more samples that is logged later changes nothing before it."""
    rows: dict[int, dict[str, Any]] = {
        step: {"critic/score/mean": 0.5, "val-core/x/reward/mean@4": 0.25} for step in range(1, 8)
    }
    later = {**rows, 8: {"critic/score/mean": 0.5, "val-core/x/reward/mean@8": 0.125}}
    before, after = (column(diagnose(table(r), {}).columns, "val_gap/x") for r in (rows, later))
    assert after[:7] == before
    assert (before[-1], after[-1]) == (0.25, 0.375)


def test_gap_needs_a_reward_and_rows_before() -> None:
    """Only accuracies, or a validation before any training: missing, with why."""
    accuracy = {s: {"critic/score/mean": 1.0, "val-core/x/acc/mean@1": 0.5} for s in range(1, 9)}
    assert "reward" in last(accuracy)["?"]["val_gap"]
    first = {0: {"val-core/x/reward/mean@1": 0.5}, 1: {"critic/score/mean": 1.0}}
    assert "rows" in last(first)["?"]["val_gap/x"]


# -- time ------------------------------------------------------------------------------------

STEP = {
    "timing_s/step": 40.0,
    "timing_s/gen": 20.0,
    "timing_s/reward": 2.0,
    "timing_s/old_log_prob": 3.0,
    "timing_s/update_actor": 8.0,
    "timing_s/testing": 4.0,
    "timing_s/save_checkpoint": 2.0,
    "timing_s/generate_sequences": 18.0,
    "timing_s/agent_loop/generate_sequences/max": 17.0,
}


@pytest.mark.parametrize(
    ("marks", "total", "rest"),
    [
        # 0.2 - 0.5: all within the step: 40 - 33 - 4 - 2 = 1
        ({"perf/throughput": 1.0, "mfu/actor": 0.4}, 40.0, 1.0),
        # 0.6.0 - 0.7.0: validation and saving beside it: 40 - 33 = 7
        ({"response/aborted_ratio": 0.0}, 46.0, 7.0),
        # from 0.7.1: saving and the sending of weights within it: 40 - 33 - 2 - 1 = 4
        ({"timing_s/update_weights": 1.0}, 44.0, 4.0),
    ],
)
def test_where_the_time_goes(marks: dict[str, Any], total: float, rest: float) -> None:
    """Phases by the whole time of the step, by what the version counts in; parts of generation are
    never added."""
    found = last({1: {**STEP, **marks}})
    assert found["timing_share/gen"] == pytest.approx(20 / total)
    assert found["timing_share/testing"] == pytest.approx(4 / total)
    assert found["timing_share/rest"] == pytest.approx(rest / total)
    assert "timing_share/generate_sequences" not in found


def test_phases_that_overlap_have_no_shares() -> None:
    """Asynchronous trainers, and phases that take longer than the step."""
    longer = last({1: {**STEP, "timing_s/gen": 39.0}})
    assert longer.get("timing_share/rest") is None
    assert "overlap" in longer["?"]["timing_share/rest"]
    asynchronous = last({1: {**STEP, "timing_s/wait_prev_gen": 1.0}})
    assert asynchronous.get("timing_share/gen") is None
    assert "beside" in asynchronous["?"]["timing_share/gen"]
    assert "not logged" in last({1: {"actor/lr": 1.0}})["?"]["timing_share/rest"]


def test_tokens_a_second() -> None:
    """0.5 ms a token are 2,000 tokens a second; else 8 * 5 answers of 100 tokens in 20 s are 200
    a second; not where generation is only waited for, or groups are dropped."""
    config = {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 5}
    key = "rollout/tokens_per_second"
    assert last({1: {"timing_per_token_ms/gen": 0.5, "timing_s/gen": 20.0}})[key] == 2000.0
    row = {"timing_s/gen": 20.0, "response_length/mean": 100.0}
    assert last({1: row}, config)[key] == pytest.approx(200.0)
    assert "not how many" in last({1: row})["?"][key]
    assert "beside" in last({1: {**row, "timing_s/wait_prev_gen": 1.0}}, config)["?"][key]
    assert "dropped" in last({1: {**row, "train/num_gen_batches": 2.0}}, config)["?"][key]


@pytest.mark.parametrize(("logged", "given"), [(0.4, 0.4), (0.0, None), (3.0, None)])
def test_flops_share_of_the_first_verl(logged: float, given: float | None) -> None:
    """verl 0.2 called it mfu/actor; 0 and more than 1 mean that it could not be computed."""
    found = last({1: {"mfu/actor": logged, "actor/lr": 1.0}})
    assert found.get("perf/mfu/actor") == given
    assert ("perf/mfu/actor" in found["?"]) == (given is None)


def test_a_gap_that_widens_is_told() -> None:
    """Training goes on to rise while the validation stands still: a hint; side by side: none."""

    def codes(validated: float) -> set[str]:
        rows: dict[int, dict[str, Any]] = {
            s: {"critic/score/mean": 0.3 + 0.002 * s + 0.01 * (-1) ** s} for s in range(1, 301)
        }
        for step in range(10, 301, 10):
            reward = 0.3 + validated * step + 0.01 * (-1) ** (step // 10)
            rows[step]["val-aux/x/reward/mean@4"] = reward
        return {f.code for f in diagnose(table(rows), {}).findings}

    assert "VALIDATION_GAP" in codes(0.0)
    assert "VALIDATION_GAP" not in codes(0.002)


def test_slow_tokens_and_a_step_that_waits_are_told() -> None:
    """Half the tokens a second for five steps, and a fifth of each step in no phase: hints."""
    rows: dict[int, dict[str, Any]] = {
        s: {
            "timing_per_token_ms/gen": (0.5 if s < 60 else 1.5) * (1 + 0.01 * (-1) ** s),
            "timing_s/gen": 20.0,
            "timing_s/step": 20.5 if s < 30 else 26.0,
        }
        for s in range(1, 81)
    }
    found = {f.code: f.first_step for f in diagnose(table(rows), {}).findings}
    assert found["SLOW_TOKENS"] == 64
    assert 39 <= found["STEP_REST"] <= 45
