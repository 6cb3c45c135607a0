"""A whole run diagnosed: what is said of a step stays, dumps join, nothing logged changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_logsync.columns import STEP
from verl_logsync.diagnostics import (
    DIAGNOSTICS_VERSION,
    DiagnoseOptions,
    Diagnosis,
    described,
    diagnose,
    with_columns,
)
from verl_logsync.reports.diagnostics_page import diagnostics_page
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions, StepReduction
from verl_logsync.testing.simulate import DISEASES, simulate
from verl_logsync.testing.tables import column, table, verl_file

OPTIONS = DiagnoseOptions(device_memory_gb=80.0)


def same_start(whole: Diagnosis, part: Diagnosis) -> None:
    """Every value of the part is that of the whole, and what the part lacks is missing there."""
    rows = part.columns.num_rows
    for name in whole.columns.column_names:
        start = whole.columns.column(name).slice(0, rows)
        if name in part.columns.column_names:
            one, other = start.to_pylist(), part.columns.column(name).to_pylist()
            assert repr(one) == repr(other), name
        else:
            assert start.null_count == rows, name
    assert set(part.columns.column_names) <= set(whole.columns.column_names)
    known = {f.identity: f for f in whole.findings}
    for finding in part.findings:
        later = known[finding.identity]
        assert (later.says, later.evidence) == (finding.says, finding.evidence)
        assert later.last_step >= finding.last_step


@settings(max_examples=25, deadline=None)
@given(
    disease=st.sampled_from(["", *DISEASES]),
    seed=st.integers(0, 1000),
    rows=st.integers(0, 180),
    keys=st.sampled_from(["v1", "async", "0.4"]),
)
def test_later_steps_change_nothing(disease: str, seed: int, rows: int, keys: Any) -> None:
    """A prefix of a run gives the prefix of its columns, bit by bit, and the same findings."""
    run = simulate(disease, steps=180, onset=60, seed=seed, keys=keys, prompts=8, group_size=5)
    whole = diagnose(run.table, run.config, (), OPTIONS)
    same_start(whole, diagnose(run.table.slice(0, rows), run.config, (), OPTIONS))


def test_later_keys_change_nothing(fixture_files: Path) -> None:
    """A run that goes on under another verl: what was said of the steps before stays."""
    old = verl_file(fixture_files / "verl_file/whole_run/qwen_small_grpo.jsonl")
    rows = {
        step: {
            "timing_s/step": 30.0,
            "timing_s/testing": 9.0,
            "timing_s/gen": 20.0,
            "perf/throughput": 1.0,
            "actor/pg_loss": 0.1 * step,
            "response_length/clip_ratio": 0.1,
        }
        for step in range(1, 11)
    }
    config = {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 5}
    first = table(rows)
    later = table(
        {
            **rows,
            11: {
                "actor/loss": 0.5,
                "timing_s/step": 20.0,
                "timing_s/update_weights": 1.0,
                "timing_s/wait_prev_gen": 1.0,
                "training/off_policy/trajectory_spans/mean": 1.0,
            },
        }
    )
    early = diagnose(first, config)
    assert column(early.columns, "trainer/step_per_second")[0] == pytest.approx(1 / 21)
    assert column(early.columns, "rollout/latency_ms")[0] == 500.0
    same_start(diagnose(later, config), early)
    for count in (0, 1, 2, 7, 41):
        same_start(diagnose(old, {}), diagnose(old.slice(0, count), {}))


def test_samples_raise_nothing_above_a_hint(fixture_files: Path) -> None:
    """The whole run, both halves of the resumed one, the demo's, and the fully-async one."""
    names = (
        "verl_file/whole_run/qwen_small_grpo.jsonl",
        "verl_file/crash_resume/session1_steps0-33.jsonl",
        "verl_file/crash_resume/session2_resumed_from_20.jsonl",
        "verl_file/fully_async/fully_async_multi_record_per_step.jsonl",
        "demo/outputs/grpo_arith/qwen_small_grpo.jsonl",
    )
    for name in names:
        found = diagnose(verl_file(fixture_files / name), {}, (), OPTIONS)
        assert found.worst in {None, "hint"}, name


def test_sample_with_bare_nan_names_the_first_bad_step(fixture_files: Path) -> None:
    """The gradient of step 5 is not finite, and that is critical."""
    name = "verl_file/legacy_truncated/legacy_0.6_nan_tokens_truncated_tail.jsonl"
    (first, *_) = diagnose(verl_file(fixture_files / name), {}).findings
    assert (first.code, first.severity, first.first_step) == ("GRADIENT_NON_FINITE", "critical", 5)


def test_dumps_join_their_steps(fixture_files: Path) -> None:
    """Columns of dumps stand in their rows; a dump without a row is named, not added."""
    folder = fixture_files / "rollouts/v0_0.8/grpo_arith/rollout_data"
    reductions = [
        reduce_file(folder / f"{s}.jsonl", ReductionOptions(), "train") for s in (2, 1, 5)
    ]
    rows = table({0: {"val-core/x": 1.0}, 1: {"actor/lr": 1.0}, 2: {"actor/lr": 1.0}})
    found = diagnose(rows, {}, reductions)
    assert column(found.columns, STEP) == [0, 1, 2]
    assert column(found.columns, "grpo/zero_spread_share") == [None, 0.5, 0.0]
    assert column(found.columns, "reward/mean") == [None, 0.25, 0.525]
    assert found.columns.schema.field("reward/group_distribution").type == pa.string()
    assert found.unused_steps == (5,)
    assert found.missing["grpo/format_share"].endswith("(first at step 1)")


def test_training_and_validation_dumps_of_one_step(fixture_files: Path) -> None:
    """Both stand in the same row, under keys of their own."""
    root = fixture_files / "rollouts"
    train = reduce_file(
        root / "v1_0.9/grpo_arith/rollout_data/1.jsonl", ReductionOptions(), "train"
    )
    val = reduce_file(
        root / "val_v1_0.9/grpo_arith/validation_data/10.jsonl", ReductionOptions(), "validation"
    )
    found = diagnose(table({1: {"actor/lr": 1.0}, 10: {"actor/lr": 1.0}}), {}, [val, train]).columns
    assert column(found, "grpo/rows") == [40, None]
    assert column(found, "grpo_val/rows") == [None, val.rows]
    assert column(found, "reward/mean") == [0.25, None]


def dumps(one: float, every: float, groups: int) -> list[StepReduction]:
    """120 steps; from step 61 on pass@1 and pass@4 move to these values."""
    return [
        StepReduction(
            step,
            "dump",
            "train",
            rows=4 * groups,
            group_size=4,
            statistics={"groups": float(groups)},
            pass_at_k=(
                0.5 + (one - 0.5) * (step > 60) + 0.01 * (-1) ** step,
                0.7,
                0.8,
                0.9 + (every - 0.9) * (step > 60) + 0.01 * (-1) ** step,
            ),
        )
        for step in range(1, 121)
    ]


@pytest.mark.parametrize(
    ("one", "every", "groups", "told"),
    [
        (0.6, 0.8, 8, True),
        (0.6, 0.9, 8, False),
        (0.5, 0.8, 8, False),
        (0.4, 0.8, 8, False),
        (0.6, 0.8, 7, False),
    ],
)
def test_exploration_collapse(one: float, every: float, groups: int, told: bool) -> None:
    """pass@1 up and pass@n down is told; one of them alone, both down, or few groups are not."""
    rows = table({step: {"actor/lr": 1.0} for step in range(1, 121)})
    found = diagnose(rows, {}, dumps(one, every, groups))
    assert ("EXPLORATION_COLLAPSE" in {f.code for f in found.findings}) == told


def test_dumps_of_the_fully_async_trainer_are_not_put_to_steps(fixture_files: Path) -> None:
    """Their file names count something else than the log does."""
    folder = fixture_files / "rollouts/v1_0.9/grpo_arith/rollout_data"
    dump = reduce_file(folder / "1.jsonl", ReductionOptions(), "train")
    rows = table({1: {"fully_async/trainer/idle_ratio": 0.1, "timing_s/gen": 1.0}})
    found = diagnose(rows, {}, [dump])
    assert "grpo/rows" not in found.columns.column_names
    assert "fully-async" in found.missing["grpo"]


def test_nothing_logged_changes() -> None:
    """Columns are added; a logged key is filled only in rows that lack it."""
    rows = table({1: {"actor/pg_loss": 0.1}, 2: {"actor/pg_loss": 0.2, "actor/loss": 0.3}})
    joined = with_columns(rows, diagnose(rows, {}).columns)
    assert column(joined, "actor/loss") == [0.1, 0.3]
    assert joined.select(["actor/pg_loss"]).equals(rows.select(["actor/pg_loss"]))


def test_summary_and_version() -> None:
    """The highest level of each rule, the worst, and how many findings there are."""
    run = simulate("nan_gradient", steps=40, onset=27)
    found = diagnose(run.table, run.config)
    assert found.version == DIAGNOSTICS_VERSION
    assert found.summary["health/GRADIENT_NON_FINITE"] == 2
    assert found.summary["health/worst"] == 2
    assert found.summary["health/criticals"] == 1
    assert found.worst == "critical"


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {1: {}},
        {1: {"actor/grad_norm": float("nan")}},
        {0: {"val-core/x/acc/mean@1": 0.5}, 10: {"val-core/x/acc/mean@1": 0.6}},
        {1: {"critic/rewards/mean": 1e308}, 2: {"critic/rewards/mean": -1e308}},
        {5: {"timing_s/gen": 0.0, "timing_s/step": -1.0, "prompt_length/mean": 0.0}},
        {1: {"actor/entropy": "text", "actor/loss": [1, 2], "kl_divergence": None}},
    ],
)
def test_odd_runs_are_judged(rows: dict[int, dict[str, Any]]) -> None:
    """Empty, one row, NaN, validations only, huge numbers, text: a diagnosis, no error."""
    found = diagnose(table(rows), {}, (), OPTIONS)
    assert found.columns.num_rows == len(rows)


def test_every_added_key_is_described(fixture_files: Path) -> None:
    """The documentation lists what can be added; each has a formula."""
    folder = fixture_files / "rollouts/v0_0.8/grpo_arith/rollout_data"
    dump = reduce_file(folder / "1.jsonl", ReductionOptions(), "train")
    run = simulate("kl_explosion", steps=60, onset=30)
    names = diagnose(run.table, run.config, [dump], OPTIONS).columns.column_names
    known = {d.key for d in described()}
    starts = {d.key.partition("{")[0] for d in described() if "{" in d.key}
    for name in names[1:]:
        assert name in known or any(name.startswith(start) for start in starts), name
    page = diagnostics_page()
    assert all(d.formula and f"`{d.key}`" in page for d in described())
