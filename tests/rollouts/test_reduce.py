"""A dump file as a whole: known truths, hand-made steps, laws, damage, memory."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_logsync.errors import UnreadableInput, UsageError
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.samples import read_samples
from verl_logsync.rollouts.values import (
    Histogram,
    ReductionOptions,
    StepReduction,
    from_json,
)

VARIANTS = ("v1_0.9", "v0_0.8", "v0_0.6", "v0_0.4")
ANSWERS = ReductionOptions(group_size=5, answer_pattern=r"#### (.+)", format_pattern="####")


def dump(fixture_files: Path, case: str, step: int) -> Path:
    kind = "validation_data" if case.startswith("val") else "rollout_data"
    return fixture_files / f"rollouts/{case}/grpo_arith/{kind}/{step}.jsonl"


def comparable(reduction: StepReduction) -> dict[str, Any]:
    """What does not depend on which other keys a dump has."""
    return {
        "statistics": {k: v for k, v in reduction.statistics.items() if k != "score_acc_agreement"},
        "pass": reduction.pass_at_k,
        "solved": reduction.solved,
        "histograms": dict(reduction.histograms),
        "groups": sorted(zip(reduction.groups.sizes, reduction.groups.means, strict=True), key=str),
        "ambiguities": reduction.ambiguities,
    }


# -- known truths --------------------------------------------------------------------------


@pytest.mark.parametrize("case", VARIANTS)
def test_truths_of_the_simulated_run(fixture_files: Path, case: str) -> None:
    """Step 1 has 4 groups of 8 without spread and a mean score of 0.25, step 2 has none."""
    one = reduce_file(dump(fixture_files, case, 1), ANSWERS)
    assert (one.rows, one.group_size, len(one.groups.sizes)) == (40, 5, 8)
    assert one.statistics["score_mean"] == 0.25
    assert one.statistics["zero_spread_share"] == 0.5
    assert one.statistics["effective_prompt_ratio"] == 0.5
    assert one.solved == (4, 1, 1, 1, 1, 0)
    assert one.ambiguities == ()
    two = reduce_file(dump(fixture_files, case, 2), ANSWERS)
    assert two.statistics["zero_spread_share"] == 0


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_four_variants_of_a_step_agree(fixture_files: Path, step: int) -> None:
    """Key set and order of the rows change no group and no statistic, to the last bit."""
    first, *others = (
        comparable(reduce_file(dump(fixture_files, case, step), ANSWERS)) for case in VARIANTS
    )
    for other in others:
        assert other == first


def test_dumps_agree_with_the_logged_metrics(fixture_files: Path) -> None:
    """The log's scores are those of the dumps, and its Cov(length, advantage) has their sign."""
    log = fixture_files / "verl_file/whole_run/qwen_small_grpo.jsonl"
    rows = {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}
    for step in range(1, 6):
        found = reduce_file(dump(fixture_files, "v1_0.9", step), ANSWERS)
        logged = rows[step]
        assert found.statistics["score_mean"] == pytest.approx(logged["critic/score/mean"])
        assert found.statistics["advantage_max"] == pytest.approx(
            logged["critic/advantages/max"], abs=1e-5
        )
        covariance = logged["critic/advantages/mean"] * logged["response_length/mean"]
        assert covariance * found.statistics["length_score_correlation_within"] > 0


def test_edge_dump(fixture_files: Path) -> None:
    """41 rows: 8 groups, one of 3, a prompt twice, an earlier trajectory, two padding rows."""
    found = reduce_file(dump(fixture_files, "v1_0.9_edge", 6), ReductionOptions(group_size=5))
    assert (found.step, found.rows, found.earlier, found.padding) == (6, 38, 1, 2)
    assert sorted(found.groups.sizes) == [3, 5, 5, 5, 5, 5, 5, 5]
    assert [a.kind for a in found.ambiguities] == ["smaller groups"]
    assert len(set(found.groups.prompts)) == 7
    assert found.statistics["prompt_repetition"] == pytest.approx(1 / 8)
    assert found.statistics["score_mean"] == pytest.approx(17 / 38)
    assert found.solved == (1, 2, 2, 0, 1, 1)
    assert found.malformed == 0


@pytest.mark.parametrize("case", ["val_v1_0.9", "val_v0_0.6"])
def test_validation_dump(fixture_files: Path, case: str) -> None:
    """24 prompts of 4; advantages do not exist in a validation."""
    found = reduce_file(dump(fixture_files, case, 10), ReductionOptions(), "validation")
    assert (found.rows, found.group_size, len(found.groups.sizes)) == (96, 4, 24)
    assert "validation" in found.missing["advantage_max"]
    assert found.extras["reward"].mean == found.statistics["score_mean"]


# -- hand-made steps -----------------------------------------------------------------------


def test_a_step_by_hand(write_dump: Any, rows_of: Any) -> None:
    """Three groups of two: one solved, one failed, one split."""
    found = reduce_file(write_dump(rows_of([[1, 1], [0, 0], [1, 0]])))
    wanted = {
        "groups": 3,
        "score_mean": 0.5,
        "score_at_max_share": 0.5,
        "zero_spread_share": 2 / 3,
        "zero_spread_best_share": 1 / 3,
        "zero_spread_worst_share": 1 / 3,
        "within_group_std": math.sqrt(0.5) / 3,
        "effective_prompt_ratio": 1 / 3,
        "solved_share": 0.5,
        "advantage_max": 0.5 / (math.sqrt(0.5) + 1e-6),
        "advantage_bound": 1 / math.sqrt(2),
        "advantage_positive_share": 1 / 6,
        "advantage_negative_share": 1 / 6,
        "output_characters_mean": 3,
        "unique_output_share": 1,
        "prompt_repetition": 0,
        "score_skewness": 0,
        "score_kurtosis": -2,
        "success_threshold": 1,
    }
    assert {k: found.statistics[k] for k in wanted} == pytest.approx(wanted)
    assert found.solved == (1, 1, 1)
    assert found.pass_at_k == pytest.approx((0.5, 2 / 3))
    assert sorted(found.groups.means) == [0, 0.5, 1]
    assert found.histograms["scores"].counts[0] == found.histograms["scores"].counts[-1] == 3


def test_every_statistic_is_there_or_missing(write_dump: Any, rows_of: Any) -> None:
    """The same names come out of a rich, a poor and an empty step, with number or reason."""
    rich = rows_of([[1, 0, 1], [0, 0, 1]], acc=1, pred="7")
    for row in rich:
        row["output"] += "x" * int(10 * row["score"]) + str(id(row))
    steps: list[Any] = [rich, rows_of([[1]]), rows_of([[None, 1]]), []]
    names = []
    for number, rows in enumerate(steps):
        found = reduce_file(write_dump(rows, step=number))
        assert not set(found.statistics) & set(found.missing)
        assert all(map(math.isfinite, found.statistics.values()))
        assert all(found.missing.values())
        named = set(found.statistics) | set(found.missing) | set(found.histograms)
        names.append(named - {"pass_at_k", "solved", "samples", "rollout_extra/pred"})
    assert names[0] == names[1] == names[2] == names[3]


def test_an_empty_file(write_dump: Any) -> None:
    """A dump without rows is a reduction in which everything is missing."""
    found = reduce_file(write_dump([], step=7))
    assert (found.step, found.rows, found.group_size) == (7, 0, None)
    assert set(found.statistics) <= {
        "groups",
        "groups_single",
        "groups_uneven",
        "groups_unscored",
        "rows_unscored",
        "length_score_correlation_groups",
    }
    assert from_json(found.as_json()) == found


def test_groups_of_one(write_dump: Any, rows_of: Any) -> None:
    """With n = 1 nothing can be compared within groups; scores and pass@1 exist."""
    found = reduce_file(write_dump(rows_of([[1], [0]])), ReductionOptions(group_size=1))
    assert found.statistics["groups_single"] == 2
    assert found.pass_at_k == (0.5,)
    assert found.solved == (1, 1)
    for name in ("zero_spread_share", "within_group_std", "advantage_max", "unique_output_share"):
        assert "two rows" in found.missing[name]
    assert found.statistics["effective_prompt_ratio"] == 0


def test_effective_prompts(write_dump: Any, rows_of: Any) -> None:
    """Of four groups one has spread; a group of one row has none, and is a group."""
    found = reduce_file(write_dump(rows_of([[1], [0, 1], [1, 1], [0, 0]])))
    assert found.statistics["effective_prompt_ratio"] == 0.25
    assert found.statistics["zero_spread_share"] == pytest.approx(2 / 3)


def test_a_score_that_is_no_number(write_dump: Any, rows_of: Any) -> None:
    """NaN and null leave their groups out of the statistics of scores, and are counted."""
    rows = rows_of([[1, 0], [1, None], [float("nan"), 1], [0, 0]])
    found = reduce_file(write_dump(rows))
    assert found.statistics["groups_unscored"] == found.statistics["rows_unscored"] == 2
    assert found.statistics["score_mean"] == 0.25
    assert found.statistics["zero_spread_share"] == 0.5
    assert found.statistics["groups"] == 4
    assert sum(map(math.isnan, found.groups.means)) == 2
    assert any("without a finite score" in note for note in found.notes)
    assert from_json(found.as_json()).as_json() == found.as_json()


def test_unequal_groups(write_dump: Any, rows_of: Any) -> None:
    """A group smaller than n counts where its size allows, and is reported."""
    found = reduce_file(write_dump(rows_of([[1, 0, 0], [1, 1, 0], [0, 0]])))
    assert found.group_size == 3
    assert found.statistics["groups_uneven"] == 1
    assert found.solved == (0, 1, 1, 0), "whole groups only"
    assert found.pass_at_k == pytest.approx(((1 / 3 + 2 / 3 + 0) / 3, (2 / 3 + 1 + 0) / 3, 1))
    assert "smaller groups" in [a.kind for a in found.ambiguities]


@pytest.mark.parametrize("scores", [[[0, 0.5], [1, 0.9]], [[-1, 0], [0, 0]]])
def test_success_is_not_guessed(write_dump: Any, rows_of: Any, scores: Any) -> None:
    """Fractional scores, or 0 and -1, need a threshold; with one pass@k exists."""
    path = write_dump(rows_of(scores))
    found = reduce_file(path)
    for name in ("pass_at_k", "solved", "solved_share", "zero_spread_best_share"):
        assert "from which score on" in found.missing[name]
    assert found.pass_at_k == found.solved == ()
    assert reduce_file(path, ReductionOptions(success=0.5)).pass_at_k != ()


def test_kept_groups_only(write_dump: Any, rows_of: Any) -> None:
    """DAPO dumps no group without spread: the share is missing, not 0."""
    path = write_dump(rows_of([[1, 0], [0, 1]]))
    found = reduce_file(path, ReductionOptions(kept_groups_only=True))
    for name in ("zero_spread_share", "zero_spread_worst_share", "effective_prompt_ratio"):
        assert "before it dumped" in found.missing[name]
    assert found.statistics["within_group_std"] > 0


def test_answers_and_form(write_dump: Any, rows_of: Any) -> None:
    """The last match of the answer pattern counts, without blanks; of four rows one has none."""
    rows = rows_of([[1, 1], [0, 0]])
    for row, output in zip(
        rows, ["#### 1\n#### 2", "#### 2 ", "<think> no", "#### 3"], strict=True
    ):
        row["output"] = output
    options = ReductionOptions(answer_pattern=r"#### (\d+)\s*", format_pattern="<think>")
    found = reduce_file(write_dump(rows), options)
    assert found.statistics["answer_agreement"] == (1 + 0.5) / 2
    assert found.statistics["no_answer_share"] == 0.25
    assert found.statistics["format_share"] == 0.25


def test_answers_by_key(write_dump: Any, rows_of: Any) -> None:
    """Without a pattern `pred` says the answers; null and blanks are none."""
    rows = rows_of([[1, 1, 0, 0]])
    for row, pred in zip(rows, ["7", " 7", None, ""], strict=True):
        row["pred"] = pred
    found = reduce_file(write_dump(rows))
    assert found.statistics["answer_agreement"] == 0.5
    assert found.statistics["no_answer_share"] == 0.5


def test_answers_of_later_rows_only(write_dump: Any, rows_of: Any) -> None:
    """Answers stay with their rows when the first rows have no such key."""
    rows = [*rows_of([[1, 1]]), *rows_of([[], [0, 0]], pred="7")]
    rows += rows_of([[], [], [1, 1]])
    found = reduce_file(write_dump(rows))
    assert found.statistics["no_answer_share"] == pytest.approx(4 / 6)
    assert found.statistics["answer_agreement"] == pytest.approx(1 / 3)


def test_equal_outputs(write_dump: Any, rows_of: Any) -> None:
    """Temperature 0: every group has one output, 1/n of its rows."""
    rows = rows_of([[1, 1, 1, 1], [0, 0, 0, 0]])
    for row in rows:
        row["output"] = "same"
    assert reduce_file(write_dump(rows)).statistics["unique_output_share"] == 0.25


def test_extras(write_dump: Any, rows_of: Any) -> None:
    """Numeric extras have mean and population deviation; text has a reason."""
    rows = rows_of([[1, 1, 0, 0]])
    for row, bonus in zip(rows, ["1", "3", None, "nan"], strict=True):
        row.update(bonus=bonus, style="plain", passed=row["score"] > 0)
    found = reduce_file(write_dump(rows))
    assert found.extras["bonus"].mean == 2
    assert found.extras["bonus"].std == 1
    assert found.extras["bonus"].count == 2
    assert found.extras["passed"].mean == 0.5
    assert "text" in found.missing["rollout_extra/style"]
    assert any("bonus" in note for note in found.notes)


def test_extras_of_padding_do_not_count(write_dump: Any) -> None:
    """Rows that are dropped are dropped for extras, too."""
    pad = "pad" + "0" * 32
    rows = [
        {"input": "p", "output": str(i), "score": 1, "step": 1, "uid": uid, "bonus": bonus}
        for i, (uid, bonus) in enumerate([("a_0_0", 9), ("a_0_1", 1), ("a_1_0", 3), (pad, 99)])
    ]
    found = reduce_file(write_dump(rows))
    assert (found.rows, found.earlier, found.padding) == (2, 1, 1)
    assert (found.extras["bonus"].mean, found.extras["bonus"].count) == (2, 2)


def test_mixed_key_sets_in_one_file(fixture_files: Path, tmp_path: Path) -> None:
    """Rows with and without uid in one file are grouped each by its own rule."""
    path = tmp_path / "1.jsonl"
    v0 = dump(fixture_files, "v0_0.6", 1).read_bytes()
    path.write_bytes(v0 + dump(fixture_files, "v1_0.9", 2).read_bytes())
    found = reduce_file(path)
    assert found.groups.sizes == (5,) * 16
    assert found.key_set == "v0 0.6-0.9 + v1 0.9"
    kinds = {a.kind for a in found.ambiguities}
    assert kinds == {"size unknown", "uid missing", "other step"}


def test_samples(write_dump: Any, rows_of: Any) -> None:
    """Best, worst and most split group, their outputs from the best on, texts cut to length."""
    rows = rows_of([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    options = ReductionOptions(sample_outputs=3, sample_characters=4)
    found = reduce_file(write_dump(rows), options)
    assert [(s.why, s.mean) for s in found.samples] == [
        ("best", 1.0),
        ("worst", 0.0),
        ("most split", 0.5),
    ]
    split = found.samples[2]
    assert [o.score for o in split.outputs] == [1, 1, 0]
    assert split.prompt == "prom"
    assert split.prompt_length == len("prompt 2")
    assert from_json(found.as_json()).samples == found.samples


@pytest.mark.parametrize("fresh", ['"output": "longer than ', '"output":"x'])
def test_samples_of_a_file_that_changed(
    write_dump: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch, fresh: str
) -> None:
    """Rows that are no longer what was reduced are no samples, and that is said."""
    path = write_dump(rows_of([[1, 0], [0, 0]]))
    from verl_logsync.rollouts import reduce as module

    def overwritten(*arguments: Any) -> Any:
        path.write_text(path.read_text().replace('"output": "', fresh))
        return original(*arguments)

    original = read_samples
    monkeypatch.setattr(module, "read_samples", overwritten)
    found = reduce_file(path)
    assert found.samples == ()
    assert "changed" in found.missing["samples"]


def test_the_name_says_the_step(write_dump: Any, rows_of: Any) -> None:
    """A row of another step is reported; without a number in the name the rows tell it."""
    path = write_dump(rows_of([[1, 0]]), step=12)
    found = reduce_file(path)
    assert found.step == 12
    assert [a.kind for a in found.ambiguities] == ["size unknown", "other step"]
    renamed = path.rename(path.with_name("copy.jsonl"))
    assert reduce_file(renamed).step == 1


@pytest.mark.parametrize(
    "options",
    [
        {"answer_pattern": "("},
        {"bins": 513},
        {"bins": 0},
        {"group_size": 0},
        {"success": math.nan},
        {"sample_outputs": -1},
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    """They are usage errors before any file is read."""
    with pytest.raises(UsageError):
        ReductionOptions(**options)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """It is an input error that names the file."""
    with pytest.raises(UnreadableInput, match=r"1\.jsonl"):
        reduce_file(tmp_path / "1.jsonl")


# -- laws ----------------------------------------------------------------------------------

GROUPS = st.lists(
    st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from([0, 1, -1, 0.1, 0.7, None]),
                st.floats(-1e6, 1e6, allow_nan=False),
            ),
            st.integers(0, 30),
        ),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=8,
)
LAW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def of_groups(groups: Any, copies: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "input": f"prompt {g} {copy}",
            "output": "é" * length,
            "score": score,
            "step": 1,
            "acc": int(length > 9),
        }
        for copy in range(copies)
        for g, rows in enumerate(groups)
        for score, length in rows
    ]


@LAW
@given(groups=GROUPS, seed=st.integers(0, 99))
def test_order_does_not_matter(groups: Any, seed: int, write_dump: Any) -> None:
    """Rows in another order give the same statistics, to the last bit."""
    rows = of_groups(groups)
    one = reduce_file(write_dump(rows), ReductionOptions(success=0.5))
    random.Random(seed).shuffle(rows)
    two = reduce_file(write_dump(rows), ReductionOptions(success=0.5))
    assert two.statistics == one.statistics
    assert two.groups == one.groups or str(two.groups) == str(one.groups)
    assert (two.pass_at_k, two.solved, two.histograms) == (
        one.pass_at_k,
        one.solved,
        one.histograms,
    )
    assert (two.missing, two.extras, two.ambiguities) == (one.missing, one.extras, one.ambiguities)


@LAW
@given(groups=GROUPS, copies=st.integers(2, 4))
def test_repeated_groups_change_no_ratio(groups: Any, copies: int, write_dump: Any) -> None:
    """The same groups several times (with other prompts) have the same shares and moments."""
    one = reduce_file(write_dump(of_groups(groups)), ReductionOptions(success=0.5))
    many = reduce_file(write_dump(of_groups(groups, copies)), ReductionOptions(success=0.5))
    counts = {k for k in one.statistics if k.endswith("groups") or k.startswith(("groups", "rows"))}
    few_rows = {"length_score_correlation", "score_skewness", "score_kurtosis"}
    for name in set(one.statistics) - counts:
        assert many.statistics[name] == pytest.approx(one.statistics[name], rel=1e-6, abs=1e-6)
    assert set(one.missing) - set(many.missing) <= few_rows
    assert many.pass_at_k == pytest.approx(one.pass_at_k)
    assert many.solved == tuple(copies * count for count in one.solved)


@LAW
@given(groups=GROUPS)
def test_shares_are_shares(groups: Any, write_dump: Any) -> None:
    """Shares lie in 0..1, pass@k ascends with k, histograms count every value once."""
    found = reduce_file(write_dump(of_groups(groups)), ReductionOptions(success=0.5, bins=7))
    for name, value in found.statistics.items():
        if name.endswith(("share", "ratio", "agreement", "repetition")):
            assert 0 <= value <= 1, name
    if len(set(found.groups.sizes)) == 1:
        assert list(found.pass_at_k) == sorted(found.pass_at_k)
    for histogram in found.histograms.values():
        assert isinstance(histogram, Histogram)
        assert len(histogram.edges) == len(histogram.counts) + 1
    scored = [g for g in groups if all(score is not None for score, _ in g)]
    if "scores" in found.histograms:
        assert sum(found.histograms["scores"].counts) == sum(map(len, scored))
    assert from_json(found.as_json()).as_json() == found.as_json()


@LAW
@given(scores=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=9))
def test_no_score_is_too_odd(scores: list[float], write_dump: Any, rows_of: Any) -> None:
    """Whatever the scores are, statistics are finite numbers or missing with a reason."""
    path = write_dump(rows_of([scores, scores[:3]]))
    found = reduce_file(path, ReductionOptions(success=0.5))
    assert all(map(math.isfinite, found.statistics.values()))
    assert from_json(found.as_json()).as_json() == found.as_json()


def test_the_same_in_every_process(fixture_files: Path) -> None:
    """Python hashes text otherwise in every process; the reduction is the same, byte by byte."""
    code = (
        "import sys; from pathlib import Path; from verl_logsync.rollouts.reduce import reduce_file;"
        "sys.stdout.buffer.write(reduce_file(Path(sys.argv[1])).as_json())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code, str(dump(fixture_files, case, step))],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for case, step in [("v1_0.9_edge", 6)]
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


# -- damage and size -----------------------------------------------------------------------


def test_damage_anywhere(fixture_files: Path, tmp_path: Path) -> None:
    """Junk and overwritten bytes cost the rows they touch: every line is accounted for."""
    data = dump(fixture_files, "v1_0.9", 1).read_bytes()
    rng = random.Random(3)
    path = tmp_path / "1.jsonl"
    for _ in range(150):
        place = rng.randrange(len(data) - 4)
        junk = rng.choice([b"\0" * 64, b"\xff\xfe junk\n", b"{", b"\n\n", b"\r", b"[]\n"])
        keep = rng.choice([0, 4])
        path.write_bytes(data[:place] + junk + data[place + keep :])
        found = reduce_file(path)
        lines = sum(bool(line.strip(b"\0\r\t ")) for line in path.read_bytes().split(b"\n"))
        assert found.rows + found.padding + found.earlier + found.malformed + found.partial == lines
        assert found.malformed == sum(skip.records for skip in found.skips)
        assert found.rows >= 38


@pytest.mark.parametrize("uid", [True, False])
def test_memory_does_not_grow_with_the_outputs(uid: bool, tmp_path: Path) -> None:
    """A dump of 24 MB is reduced in a few: texts are not kept."""
    path = tmp_path / "1.jsonl"
    with path.open("w") as stream:
        for index in range(3000):
            row = {
                "input": f"{index // 8} " + "p" * 2000,
                "output": f"{index} " + "x" * 6000,
                "score": index % 2,
                "step": 1,
            }
            stream.write(json.dumps({**row, "uid": f"{index // 8}_{index % 8}_0"} if uid else row))
            stream.write("\n")
    reduce_file(path, ReductionOptions(sample_groups=0))
    tracemalloc.start()
    found = reduce_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.rows == 3000
    assert peak < 4 << 20


def test_a_row_with_other_keys_each_time(tmp_path: Path) -> None:
    """Hostile keys cost neither rows nor silence."""
    path = tmp_path / "1.jsonl"
    with path.open("w") as stream:
        for index in range(2000):
            row = {"input": "p", "output": str(index), "score": 1, f"key{index}": index}
            stream.write(json.dumps(row) + "\n")
    found = reduce_file(path)
    assert found.rows == 2000
    assert "left out" in found.missing["rollout_extra"]
