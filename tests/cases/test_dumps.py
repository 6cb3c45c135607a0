"""Cases from public reports: rollout dumps and GRPO groups."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.rollouts.folder import reduce_folder
from verl_logsync.rollouts.values import ReductionOptions
from verl_logsync.sources import SOURCES
from verl_logsync.sources.rollouts import Rollouts

FIVE = ReductionOptions(group_size=5)


def reduced(folder: Path, options: ReductionOptions = FIVE):
    (file,) = discover([folder], SOURCES).files
    return {r.step: r for r in reduce_folder(file, options)}


def rewritten(folder: Path, change, outputs: Path) -> Path:
    """A copy of a folder of dumps in which every row was changed."""
    copy = outputs / folder.name
    copy.mkdir()
    for path in folder.iterdir():
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        lines = [json.dumps(change(row), ensure_ascii=False) + "\n" for row in rows]
        (copy / path.name).write_text("".join(lines), encoding="utf-8")
    return copy


@pytest.fixture
def folder_of(fixture_files: Path):
    def find(case: str) -> Path:
        kind = "validation_data" if case.startswith("val") else "rollout_data"
        return fixture_files / f"rollouts/{case}/grpo_arith/{kind}"

    return find


def test_c11_score_and_acc_disagree(folder_of, outputs):
    """C11: group statistics use score; that acc says otherwise is a number to warn about."""
    whole = reduced(folder_of("v0_0.8"))
    odd = rewritten(folder_of("v0_0.8"), lambda row: {**row, "acc": 1 - row["acc"]}, outputs)
    for step, found in reduced(odd).items():
        assert found.statistics["score_acc_agreement"] == 0
        assert whole[step].statistics["score_acc_agreement"] == 1
        assert found.solved == whole[step].solved
        assert found.statistics["zero_spread_share"] == whole[step].statistics["zero_spread_share"]


def test_c13_v0_v1_and_a_folder_of_both(folder_of, outputs):
    """C13: v1 is grouped by uid, v0 by input, each file by its own rule; sizes are checked."""
    both = outputs / "dumps"
    shutil.copytree(folder_of("v0_0.6"), both)
    for step in (2, 4):
        shutil.copy(folder_of("v1_0.9") / f"{step}.jsonl", both)
    for step, found in reduced(both).items():
        assert found.groups.sizes == (5,) * 8
        assert found.key_set == ("v1 0.9" if step in (2, 4) else "v0 0.6-0.9")
        assert found.ambiguities == ()
    of_eight = reduced(both, ReductionOptions(group_size=8))
    assert {a.kind for a in of_eight[1].ambiguities} == {"other size", "smaller groups"}


def test_c13_short_uid(tmp_path):
    """C13: the group of `s12_3_0` is `s12`."""
    path = tmp_path / "1.jsonl"
    rows = [
        {"input": "p", "output": str(i), "score": i % 2, "step": 1, "uid": f"s{g}_{i}_0"}
        for g in (1, 12)
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = reduced(path, ReductionOptions(group_size=4)).values()
    assert found.groups.sizes == (4, 4)


def test_d26_numbers_and_booleans_as_text(folder_of, outputs):
    """26: "True" and "3" in extras are taken back to numbers with a note; `pred: "17"` is text."""
    found = reduced(folder_of("v0_0.8"))[1]
    assert found.extras["format_ok"].mean == 1
    assert any("format_ok" in note for note in found.notes)
    odd = rewritten(folder_of("v0_0.6"), lambda row: {**row, "turns": "3"}, outputs)
    with_pred = reduced(odd)[1]
    assert with_pred.extras["turns"].mean == 3
    assert "pred" not in with_pred.extras
    assert "text" in with_pred.missing["rollout_extra/pred"]


def test_d28_validation_without_uid_in_any_order(folder_of, outputs):
    """28: a validation dump without uid is grouped by input, wherever the rows stand."""
    in_order = reduced(folder_of("val_v0_0.6"), ReductionOptions())
    shuffled = outputs / "validation"
    shuffled.mkdir()
    for path in folder_of("val_v0_0.6").iterdir():
        lines = path.read_bytes().split(b"\n")[:-1]
        random.Random(4).shuffle(lines)
        (shuffled / path.name).write_bytes(b"\n".join(lines) + b"\n")
    for step, found in reduced(shuffled, ReductionOptions()).items():
        assert found.groups == in_order[step].groups
        assert found.statistics == in_order[step].statistics
        assert found.group_size == 4


def test_d29_v1_without_extras(folder_of):
    """29: a training dump without extras is whole: score is used, nothing is skipped."""
    for found in reduced(folder_of("v1_0.9")).values():
        assert found.extras == {}
        assert found.skips == ()
        assert found.statistics["score_mean"] > 0
        assert "acc" in found.missing["score_acc_agreement"]


def test_d31_balanced_order(folder_of):
    """31: 8 groups of 5 in every version, although hardly any two of a group are neighbours."""
    rows = [
        json.loads(line)
        for line in (folder_of("v0_0.4") / "1.jsonl").read_bytes().split(b"\n")
        if line
    ]
    neighbours = sum(a["input"] == b["input"] for a, b in zip(rows, rows[1:], strict=False))
    assert neighbours < 10
    for case in ("v0_0.4", "v0_0.6", "v0_0.8", "v1_0.9"):
        assert {r.groups.sizes for r in reduced(folder_of(case)).values()} == {(5,) * 8}


def test_d32_reward_components(folder_of, outputs):
    """32: the components of the reward have a mean and a deviation per step."""
    odd = rewritten(
        folder_of("v0_0.6"),
        lambda row: {**row, "format_reward": 0.5, "acc_reward": row["score"] * 2},
        outputs,
    )
    found = reduced(odd)[1]
    assert (found.extras["format_reward"].mean, found.extras["format_reward"].std) == (0.5, 0)
    assert found.extras["acc_reward"].mean == 0.5
    assert found.extras["acc_reward"].std == pytest.approx(2 * (0.25 * 0.75) ** 0.5)


def test_dapo_extras_of_other_rows(folder_of, outputs):
    """DAPO: dumps hold kept groups only (no share of groups without spread), and extras may
    stand in other rows: their agreement with the score shows it.
    """
    rows = iter(range(10**6))
    odd = rewritten(folder_of("v0_0.6"), lambda row: {**row, "acc": float(next(rows) % 2)}, outputs)
    found = reduced(odd, ReductionOptions(group_size=5, kept_groups_only=True))[1]
    assert "zero_spread_share" in found.missing
    assert 0.2 < found.statistics["score_acc_agreement"] < 0.8
    assert found.statistics["score_mean"] == 0.25


def test_a_dump_is_not_taken_for_a_log(folder_of):
    """Folders of dumps are one log each, and none of their files is anything else."""
    root = folder_of("v1_0.9").parents[2]
    found = discover([root], SOURCES)
    assert {file.source for file in found.files} == {"rollouts"}
    assert len(found.files) == 7
    assert not any(skip.place.endswith(".jsonl") for skip in found.skips)
    assert Rollouts().name == "rollouts"
