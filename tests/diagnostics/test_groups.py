"""Reductions as columns, and the description of every key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from verl_logsync.columns import decode
from verl_logsync.diagnostics.groups import DESCRIBED, grpo_columns
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import (
    ExtraStatistics,
    Histogram,
    ReductionOptions,
    StepReduction,
)

RICH = ReductionOptions(answer_pattern=r"#### (.+)", format_pattern="####")


@pytest.fixture
def steps(fixture_files: Path) -> list[StepReduction]:
    folder = fixture_files / "rollouts/v0_0.8/grpo_arith/rollout_data"
    return [reduce_file(folder / f"{step}.jsonl", RICH, "train") for step in range(1, 6)]


def test_one_row_a_step(steps: list[StepReduction]) -> None:
    """Steps are int64, statistics float64, in the order given."""
    table = grpo_columns(steps)
    assert table.column("_step").to_pylist() == [1, 2, 3, 4, 5]
    assert table.schema.field("_step").type == pa.int64()
    shares = table.column("grpo/zero_spread_share").to_pylist()
    assert shares == [r.statistics["zero_spread_share"] for r in steps]
    assert shares[:2] == [0.5, 0]
    assert table.column("rollout_extra/acc/mean").to_pylist()[0] == 0.25
    assert table.column("rollout_extra/format_ok/std").to_pylist()[0] == 0


def test_histograms_are_objects_of_wandb(steps: list[StepReduction]) -> None:
    """Every histogram has `_type`, one bin edge more than values, and counts what there is."""
    table = grpo_columns(steps)
    for key, count in (
        ("reward/group_distribution", 40),
        ("grpo/group_means", 8),
        ("grpo/group_spread", 8),
        ("grpo/solved", 8),
    ):
        for drawn in decode(table.column(key)):
            assert drawn["_type"] == "histogram"
            assert len(drawn["bins"]) == len(drawn["values"]) + 1 <= 513
            assert sum(drawn["values"]) == count
    (solved, *_) = decode(table.column("grpo/solved"))
    assert solved["bins"] == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert solved["values"] == [4, 1, 1, 1, 1, 0]


def test_pass_at_k_for_powers_of_two_and_n(steps: list[StepReduction]) -> None:
    """n = 5: k = 1, 2, 4 and 5, and the last under one name for all sizes. Where no group has n
    rows there is none of that name."""
    table = grpo_columns(steps)
    names = [n for n in table.column_names if n.startswith("grpo/pass@")]
    assert names == ["grpo/pass@1", "grpo/pass@2", "grpo/pass@4", "grpo/pass@5", "grpo/pass@n"]
    assert table.column("grpo/pass@n").equals(table.column("grpo/pass@5"))
    short = StepReduction(1, "1.jsonl", rows=4, group_size=4, pass_at_k=(0.25, 0.5))
    assert "grpo/pass@n" not in grpo_columns([short]).column_names


def test_solved_of_large_groups_fits_wandb() -> None:
    """1025 numbers of solved rows share 512 bins or fewer."""
    step = StepReduction(1, "1.jsonl", rows=1024, solved=tuple(range(1025)))
    (drawn,) = decode(grpo_columns([step]).column("grpo/solved"))
    assert len(drawn["values"]) <= 512
    assert len(drawn["bins"]) == len(drawn["values"]) + 1
    assert sum(drawn["values"]) == sum(range(1025))


def test_what_is_missing_has_no_value(steps: list[StepReduction]) -> None:
    """A statistic that one step lacks is null there, not 0; empty dumps give no row."""
    poor = StepReduction(6, "6.jsonl", rows=3, statistics={"score_mean": 0.5})
    table = grpo_columns([*steps, poor, StepReduction(7, "7.jsonl")])
    assert table.column("_step").to_pylist() == [1, 2, 3, 4, 5, 6]
    assert table.column("grpo/zero_spread_share").to_pylist()[-1] is None
    assert table.column("grpo/score_mean").to_pylist()[-1] == 0.5


def test_validation_has_keys_of_its_own(fixture_files: Path) -> None:
    """The keys of a validation never meet those of the training step of the same number."""
    path = fixture_files / "rollouts/val_v0_0.6/grpo_arith/validation_data/10.jsonl"
    table = grpo_columns([reduce_file(path, RICH, "validation")])
    families = {name.split("/")[0] for name in table.column_names}
    assert families == {"_step", "grpo_val", "reward_val", "rollout_extra_val"}
    assert table.column("grpo_val/pass@4").to_pylist()[0] > 0
    assert "grpo_val/advantage_max" not in table.column_names


def test_every_key_is_described(steps: list[StepReduction]) -> None:
    """Keys and descriptions are the same set: none without formula and needs, none invented."""
    names = set(grpo_columns(steps).column_names) - {"_step"}
    patterns = [
        re.compile(re.escape(d.key).replace(r"\{k\}", r"\d+").replace(r"\{KEY\}", ".+"))
        for d in DESCRIBED
    ]
    for name in names:
        assert sum(bool(p.fullmatch(name)) for p in patterns) == 1, name
    for described, pattern in zip(DESCRIBED, patterns, strict=True):
        assert any(pattern.fullmatch(name) for name in names), described.key
        assert described.formula
        assert described.needs
        assert described.unit
    assert len({d.key for d in DESCRIBED}) == len(DESCRIBED)


def test_no_steps() -> None:
    """Nothing to tell is a table with steps and no rows."""
    assert grpo_columns([]).column_names == ["_step"]


def test_an_extra_may_have_any_name() -> None:
    """Names with slashes and blanks stay as they are."""
    step = StepReduction(
        1,
        "1.jsonl",
        rows=1,
        extras={"a/b c": ExtraStatistics(1.0, 0.0, 1)},
        histograms={"scores": Histogram((0, 1), (1,))},
    )
    table = grpo_columns([step])
    assert table.column("rollout_extra/a/b c/mean").to_pylist() == [1]
    text = table.column("reward/group_distribution").to_pylist()[0]
    assert json.loads(text) == {"_type": "histogram", "bins": [0, 1], "values": [1]}
