"""Cases from public reports: resumed attempts."""

from __future__ import annotations

import itertools

import pytest

import verl_logsync
from verl_logsync.errors import OverlapRefused
from verl_logsync.testing.builders import write_verl_log

# (first attempt, second attempt, the step from which rows are the second's)
LENGTHS = [("first_0_29", "second_20_49", 20), ("first_0_39", "second_30_49", 30)]


def row(step, /, **more):
    return step, {"actor/loss": step / 10, "timing_s/step": 10.0, **more}


@pytest.mark.parametrize(("first", "second", "resumed_at"), LENGTHS)
@pytest.mark.parametrize("order", ["together", "first comes first", "second comes first"])
def test_a1_overlapping_fragments(
    first, second, resumed_at, order, offline_run, upload, outputs, one_run
):
    """A1: two overlapping offline runs of one id are 50 rows, in whatever order they arrive."""
    names = [second, first] if order == "second comes first" else [first, second]
    if order != "together":
        offline_run(names.pop(0))
        assert upload.here(outputs).code == 0
    for name in names:
        offline_run(name)
    assert upload.here(outputs, verify="full").code == 0
    rows = one_run().rows
    assert [r["_step"] for r in rows] == list(range(50))
    assert [r["attempt"] for r in rows] == [1] * resumed_at + [2] * (50 - resumed_at)
    assert all(b["_runtime"] > a["_runtime"] for a, b in itertools.pairwise(rows))
    assert upload.here(outputs).rows_sent == 0


def test_a2_four_fragments_in_random_order(offline_run, upload, outputs, one_run):
    """A2: four fragments in four folders, named in any order, are one run ordered by start."""
    quarters = [
        offline_run(f"quarter_{n}", outputs / name / "wandb")
        for n, name in enumerate(("c", "a", "d", "b"))
    ]
    shuffled = [quarters[n].parent.parent for n in (2, 0, 3, 1)]
    result = upload(*shuffled)
    assert result.code == 0
    rows = one_run().rows
    assert [r["_step"] for r in rows] == list(range(40))
    assert [r["attempt"] for r in rows] == [n for n in (1, 2, 3, 4) for _ in range(10)]
    assert all(b["_runtime"] > a["_runtime"] for a, b in itertools.pairwise(rows))
    assert all(b["_timestamp"] > a["_timestamp"] for a, b in itertools.pairwise(rows))


def test_a5_resumed_with_allow(offline_run, upload, outputs, one_run, server):
    """A5: `_step` is the training step in every row, and the second fragment again adds nothing."""
    offline_run("first_0_29")
    second = offline_run("second_allow_20_49")
    upload.here(outputs)
    lines = server.lines_received
    for _ in ("with memory", "without"):
        again = upload.here(second)
        assert (again.code, again.rows_sent, server.lines_received) == (0, 0, lines)
        upload.from_another_machine()
    rows = one_run().rows
    assert [r["_step"] for r in rows] == list(range(50))
    assert all(r["training/global_step"] == r["_step"] for r in rows)


@pytest.fixture
def went_back(outputs, age):
    """A6's file: steps 0,1,2,3,4,3,4,5; `n` numbers the records."""
    steps = [0, 1, 2, 3, 4, 3, 4, 5]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(s, n=n) for n, s in enumerate(steps)])
    age(outputs)
    return outputs


def test_a6_steps_go_back_inside_a_file(went_back, upload, one_run):
    """A6: a file that trains steps 3 and 4 twice keeps 6 rows and reports the 2 superseded."""
    code, text = upload.text(went_back)
    assert code == 0
    assert "2 rows superseded at steps 3-4" in text
    assert [(r["_step"], r["n"]) for r in one_run().rows] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 5),
        (4, 6),
        (5, 7),
    ]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("last", [0, 1, 2, 5, 6, 7]), ("first", [0, 1, 2, 3, 4, 7]), ("both", [0, 1, 2, 5, 6, 7])],
)
def test_a6_policies(policy, kept, went_back):
    """A6: `--on-overlap` says whose row stays; with both the other one stays beside it."""
    (run,) = verl_logsync.load(went_back, on_overlap=policy)
    frame = run.history()
    assert frame.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert frame["n"].tolist() == kept
    account = run.account
    assert account.balanced
    assert (account.seen, account.kept, account.superseded) == (8, 6, 2)
    others = [name for name in frame.columns if name.startswith("attempt1/")]
    assert bool(others) == (policy == "both")
    if policy == "both":
        assert frame["attempt1/n"].dropna().tolist() == [3, 4]


def test_a6_policy_error(went_back, upload, server):
    """A6: `--on-overlap error` refuses the run, names the steps, and sends nothing."""
    with pytest.raises(OverlapRefused, match="3-4"):
        verl_logsync.load(went_back, on_overlap="error")
    result = upload.here(went_back, on_overlap="error")
    assert result.code == 3
    assert "3-4" in result.only["error"]["message"]
    assert server.lines_received == 0


@pytest.fixture
def rolled_back(outputs, age):
    """A12's file: steps 0..20, then 11..15 and no more."""
    rows = [row(s, attempt=1) for s in range(21)] + [row(s, attempt=2) for s in range(11, 16)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    age(outputs)
    return outputs


def test_a12_rolled_back_tail_is_dropped(rolled_back, upload, one_run):
    """A12: rows beyond the end of the last attempt are a rolled-back tail, dropped and counted."""
    result = upload.here(rolled_back)
    assert result.code == 0
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 1 if s < 11 else 2) for s in range(16)
    ]
    account = result.only["account"]
    assert account["superseded_steps"] == list(range(11, 21))
    assert (account["seen"], account["kept"], account["superseded"]) == (26, 16, 10)


def test_a12_the_tail_is_marked(rolled_back, upload):
    """A12: the report names the rolled-back tail 16-20 and the option that keeps it."""
    _, text = upload.text(rolled_back, "--dry-run")
    assert "16-20" in text, text
    assert "--keep-tail" in text, text


def test_a12_keep_tail(rolled_back, upload, one_run):
    """A12: with `--keep-tail` the rolled-back rows stay."""
    assert upload(rolled_back, "--keep-tail").code == 0
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 2 if 11 <= s <= 15 else 1) for s in range(21)
    ]


@pytest.mark.parametrize(("policy", "accuracy"), [("last", 0.41), ("first", 0.4)])
def test_a14_validation_before_training_on_resume(policy, accuracy, outputs, age, upload, one_run):
    """A14: a validation-only record at the resume step erases nothing of that step."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl.1",
        [row(s) for s in range(1, 20)] + [(20, {"actor/loss": 1, "val-core/x": 0.4})],
    )
    write_verl_log(outputs / "grpo" / "qwen.jsonl", [(20, {"val-core/x": 0.41}), row(21), row(22)])
    age(outputs)
    assert upload.here(outputs, on_overlap=policy).code == 0
    rows = one_run().rows
    assert [r["_step"] for r in rows] == list(range(1, 23))
    assert (rows[19]["actor/loss"], rows[19]["val-core/x"]) == (1, accuracy)
