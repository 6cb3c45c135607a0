"""Cases from public reports: resumed attempts."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import verl_logsync
from verl_logsync.errors import OverlapRefused, RestartRefused
from verl_logsync.settings import parse_offset
from verl_logsync.testing.builders import OfflineRun, make_offline_runs, write_verl_log

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


# -- A7, A8: what the user decides -----------------------------------------------------------


def config(rollouts: int) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": {"n": rollouts}, "actor": {"optim": {"lr": 1e-6}}}}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A7's offline runs, with equal configs and with one that differs."""
    folder = tmp_path_factory.mktemp("a7")
    parts = [(range(41), "part0001"), (range(30, 71), "part0002"), (range(60, 101), "part0003")]
    make_offline_runs(
        [
            OfflineRun(
                folder / case / str(number),
                run_id,
                steps,
                number + 1,
                start=1.75e9 + number * 86_400,
                config=config(8 if case == "differ" and number == 1 else 5),
            )
            for case in ("agree", "differ")
            for number, (steps, run_id) in enumerate(parts)
        ]
    )
    return folder


def test_a7_new_ids_at_each_restart(three, upload, one_run):
    """A7: three offline runs with ids of their own, one name and one config are one run: the first."""
    assert upload.here(three / "agree").code == 0
    run = one_run()
    assert run.id == "part0001"
    assert [(r["_step"], r["attempt"]) for r in run.rows] == [
        (s, 1 if s < 30 else 2 if s < 60 else 3) for s in range(101)
    ]
    upload.from_another_machine()
    assert upload.here(three / "agree").rows_sent == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a7_in_any_order(three, order):
    """A7: the same history in whatever order the folders are given."""
    (run,) = verl_logsync.load([three / "agree" / str(number) for number in order])
    assert run.history()["attempt"].tolist() == [1] * 30 + [2] * 30 + [3] * 41
    assert run.account.superseded == 22
    assert "22 rows superseded at steps 30-40, 60-70" in run.notes


def test_a7_configs_differ(three):
    """A7: where a config differs the runs stay apart, and the differing key is named, with the
    option that joins them."""
    runs = verl_logsync.load(three / "differ")
    assert [run.run_id for run in runs] == ["part0001", "part0002", "part0003"]
    for run in runs:
        (note,) = [n for n in run.notes if "configs differ" in n]
        assert "actor_rollout_ref.rollout.n" in note
        assert "--merge" in note


def test_a7_merge(three, upload, one_run):
    """A7: --merge makes one run of starts whose configs differ."""
    code, text = upload.text(three / "differ", "--merge")
    assert code == 0, text
    assert len(one_run().rows) == 101
    assert one_run().rows[65]["attempt"] == 3


def test_a7_no_merge(three, upload):
    """A7: --no-merge keeps starts apart that would be one run, and says so."""
    code, text = upload.text(three / "agree", "--no-merge", verb="scan")
    assert code == 0, text
    assert "3 runs" in text
    assert text.count("--no-merge keeps them apart") == 3


def starts_over(folder: Path) -> tuple[Path, Path]:
    """A8's files, as kept copies of one experiment."""
    first = write_verl_log(folder / "grpo/exp.jsonl.1", [row(s, attempt=1) for s in range(301)])
    second = write_verl_log(folder / "grpo/exp.jsonl", [row(s, attempt=2) for s in range(121)])
    return first, second


def test_a8_offset(outputs, age, upload, one_run):
    """A8: a log that counted from 0 again has its place with --offset: steps 0..420."""
    _, second = starts_over(outputs)
    age(outputs)
    code, text = upload.text(outputs, "--offset", f"{second}=300")
    assert code == 0, text
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 1 if s < 300 else 2) for s in range(421)
    ]
    assert upload.here(outputs, offsets=((str(second), 300),)).rows_sent == 0


def test_a8_is_refused_with_the_choices(outputs, age, upload, server):
    """A8: in one run such a log is refused, exit not 0; each choice that is named works."""
    _, second = starts_over(outputs)
    age(outputs)
    code, text = upload.text(outputs, "--merge")
    assert code == 3
    assert server.lines_received == 0
    assert str(second) in text
    assert f"--offset {second}=300" in text
    assert "Traceback" not in text
    for choice in ("--on-restart replace", "--no-merge", "--run"):
        assert choice in text
    merged = {"merge": "always"}
    (run,) = verl_logsync.load(outputs, offsets=((str(second), 300),), **merged)
    assert len(run.history()) == 421
    (run,) = verl_logsync.load(outputs, on_restart="replace", **merged)
    assert run.history()["attempt"].tolist() == [2] * 121
    assert (run.account.superseded, run.account.balanced) == (301, True)
    assert len(verl_logsync.load(outputs, merge="never")) == 2
    assert len(verl_logsync.load(outputs, runs=(("other", str(second)),))) == 2


def test_a8_two_runs_name_the_choices(outputs, age):
    """A8: unasked, two starts from the beginning are two runs, each with a note what else they
    may be."""
    starts_over(outputs)
    age(outputs)
    runs = verl_logsync.load(outputs)
    assert sorted(len(run.history()) for run in runs) == [121, 301]
    for run in runs:
        assert any("--offset" in n and "--merge --on-restart replace" in n for n in run.notes)


def starts(*lasts: int, prefix: str = "") -> str:
    """A console that counts from 0 again and again."""
    return "".join(
        f"{prefix}step:{s} - actor/loss:{s + n / 10} - attempt:{n}\n"
        for n, last in enumerate(lasts, 1)
        for s in range(last + 1)
    )


def pasted(hint: str) -> tuple[tuple[str, int], ...]:
    """The offsets that a hint proposes, as a shell and the command line read them."""
    words = shlex.split(hint.removeprefix("If it continues: ").partition(";")[0])
    assert words[::2] == ["--offset"] * (len(words) // 2)
    return tuple(map(parse_offset, words[1::2]))


@pytest.mark.parametrize("lasts", [(30, 12), (30, 12, 5), (30, 1, 1)])
def test_a8_in_one_file(outputs, age, lasts):
    """A8: a file that counts from 0 again is refused; the offsets that the message names count
    from there on, each for its start, and make it one run in which no step is lost."""
    log = outputs / "it's = a log" / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text(starts(*lasts))
    age(outputs)
    with pytest.raises(RestartRefused, match="starts again at step 0") as refused:
        verl_logsync.load(outputs)
    offsets = pasted(refused.value.hint)
    ends = list(itertools.accumulate(lasts))
    assert offsets == tuple((str(log), end) for end in ends[:-1])
    (run,) = verl_logsync.load(outputs, offsets=offsets)
    frame = run.history()
    assert frame.index.tolist() == list(range(ends[-1] + 1))
    last_of = [n for n, last in enumerate(lasts, 1) for _ in range(last)]
    assert frame["attempt"].tolist()[1:] == [
        n + 1 if s in ends[:-1] else n for s, n in enumerate(last_of, 1)
    ]
    assert run.account.balanced


def test_a8_in_one_file_replaced(outputs, age):
    """A8: the same file, when it started from scratch, holds only its last start."""
    (outputs / "train.log").write_text(starts(30, 12))
    age(outputs)
    (run,) = verl_logsync.load(outputs, on_restart="replace")
    assert run.history()["attempt"].tolist() == [2] * 13


def test_a8_in_one_file_and_in_another(outputs, age, upload, one_run):
    """A8: a console holds both starts, verl's own log the second only: the message names an offset
    for each, and what is uploaded then is one run, twice the same."""
    (outputs / "train.log").write_text(starts(30, 12))
    rows = [(s, {"actor/loss": s + 0.2, "attempt": 2}) for s in range(13)]
    write_verl_log(outputs / "grpo" / "exp.jsonl", rows)
    age(outputs)
    refused = upload(outputs)
    offsets = pasted(refused.only["error"]["hint"])
    assert sorted(steps for _, steps in offsets) == [30, 30]
    words = [word for path, steps in offsets for word in ("--offset", f"{path}={steps}")]
    assert upload(outputs, *words).rows_sent == 43
    assert [r["_step"] for r in one_run().rows] == list(range(43))
    assert upload(outputs, *words).rows_sent == 0


def printed(**trainer: Any) -> str:
    """A config as verl prints it."""
    named = {"project_name": "grpo", "experiment_name": "exp", **trainer}
    return f"{ {'actor_rollout_ref': {}, 'trainer': named} }\n"


@pytest.mark.parametrize(
    ("trainer", "reached", "why"),
    [
        ({"save_freq": -1}, 30, "save_freq: -1"),
        ({"save_freq": 0}, 30, "save_freq: 0"),
        ({"save_freq": 20}, 18, "save_freq: 20 no checkpoint was saved up to step 18"),
        ({"save_freq": 5, "resume_mode": "disable"}, 30, "resume_mode: disable"),
    ],
)
def test_a8_without_a_checkpoint_it_begins_again(
    outputs, age, upload, one_run, trainer, reached, why
):
    """A8: where the config says that there was nothing to resume, a later start from the beginning
    replaces the earlier one, and that is said with the reason; what the user says still counts."""
    log = outputs / "train.log"
    log.write_text(printed(**trainer) + starts(reached, 12))
    age(outputs)
    code, text = upload.text(outputs)
    assert code == 0, text
    assert f"{log} starts again at step 0: by trainer." in text
    assert why in text
    assert "superseded at steps" in text
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [(s, 2) for s in range(13)]
    (run,) = verl_logsync.load(outputs, offsets=((str(log), reached),))
    assert run.history().index.tolist() == list(range(reached + 13))


@pytest.mark.parametrize(
    "configs",
    [
        [{"save_freq": 20}],  # the checkpoint of step 20 is saved before that step is logged
        [{"save_freq": 5}],
        [{"save_freq": 40, "total_training_steps": 20}],  # the last step is saved in any case
        [{"save_freq": "after_each_epoch"}],
        [{"save_freq": 5}, {"save_freq": -1}],
        [{"resume_mode": "auto"}, {"resume_mode": "disable"}],
        [{}],
    ],
)
def test_a8_a_checkpoint_may_have_been_there(outputs, age, configs):
    """A8: where a config of one of the starts allows for a checkpoint, the choice is the user's."""
    text = "".join(
        printed(**trainer) + f"step:1 - actor/loss:{n}\nstep:19 - actor/loss:{n}\n"
        for n, trainer in enumerate(configs if len(configs) > 1 else configs * 2)
    )
    (outputs / "train.log").write_text(text)
    age(outputs)
    with pytest.raises(RestartRefused, match="starts again at step 1"):
        verl_logsync.load(outputs)


@pytest.mark.parametrize(
    ("trainer", "saved", "refused"),
    [
        ({"save_freq": -1}, 40, True),
        ({"save_freq": 20}, 10, True),
        ({"resume_mode": "disable"}, 10, True),
        ({"save_freq": 20}, 20, False),  # saved by the later start: the earlier did not get so far
    ],
)
def test_a8_a_checkpoint_that_is_there_refutes_the_config(outputs, age, trainer, saved, refused):
    """A8: a checkpoint that the earlier start may have saved says more than a config; one that
    only the later start can have saved says nothing."""
    (outputs / "train.log").write_text(printed(**trainer) + starts(15, 42))
    folder = outputs / "checkpoints" / "grpo" / "exp" / f"global_step_{saved}"
    (folder / "actor").mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"x")
    age(outputs)
    if refused:
        with pytest.raises(RestartRefused):
            verl_logsync.load(outputs)
    else:
        (run,) = verl_logsync.load(outputs)
        assert run.history()["attempt"].tolist() == [2] * 43


def test_a8_hydra_says_that_nothing_is_saved(outputs, age):
    """A8: Hydra's config of the run tells it too, for logs that hold no config."""
    starts_over(outputs)
    hydra = outputs / "2026-12-01" / "03-31-12" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(
        "trainer: {project_name: grpo, experiment_name: exp, save_freq: -1}\n"
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs, merge="always")
    assert run.history()["attempt"].tolist() == [2] * 121
    assert (run.account.superseded, run.account.balanced) == (301, True)
    assert any("trainer.save_freq: -1" in note for note in run.notes)


def test_a8_an_offset_counts_for_a_resume_after_the_restart(outputs, age):
    """A8: what was resumed inside the second start counts as that start does."""
    text = starts(30, 12) + "".join(
        f"step:{s} - actor/loss:{s} - attempt:3\n" for s in range(9, 20)
    )
    (outputs / "train.log").write_text(text)
    age(outputs)
    (run,) = verl_logsync.load(outputs, offsets=((str(outputs / "train.log"), 30),))
    frame = run.history()
    assert frame.index.tolist() == list(range(50))
    assert frame["attempt"].tolist()[28:] == [1, 1, *[2] * 9, *[3] * 11]


def test_a8_a_resumed_file_is_shifted_as_a_whole(outputs, age):
    """A8: going back to a checkpoint is not counting from 0 again: all of the file is shifted."""
    text = starts(30) + "".join(f"step:{s} - actor/loss:{s} - attempt:2\n" for s in range(21, 41))
    (outputs / "train.log").write_text(text)
    age(outputs)
    (run,) = verl_logsync.load(outputs, offsets=((str(outputs / "train.log"), 100),))
    assert run.history().index.tolist() == list(range(100, 141))


def test_a8_patterns_of_offsets(outputs, age):
    """A8: an offset's pattern may name a folder; files that it does not match stay as they are."""
    write_verl_log(outputs / "a/grpo/exp.jsonl", [row(s) for s in range(11)])
    write_verl_log(outputs / "b/grpo/exp.jsonl", [row(s) for s in range(1, 6)])
    age(outputs)
    (run,) = verl_logsync.load(outputs, offsets=((str(outputs / "b"), 10),))
    assert run.history().index.tolist() == list(range(16))
    assert run.account.superseded == 0


def test_a9_part_of_the_run_again(outputs, age, upload, one_run):
    """A9: after 0..100 a second attempt of 60..80 replaces these; what it did not reach is gone
    from the server too, and said."""
    first = write_verl_log(outputs / "grpo/exp.jsonl.1", [row(s, attempt=1) for s in range(101)])
    age(outputs)
    assert upload.here(outputs).code == 0
    write_verl_log(outputs / "grpo/exp.jsonl", [row(s, attempt=2) for s in range(60, 81)])
    age(outputs)
    result = upload.here(outputs, keep_tail=True)
    assert first.exists()
    assert (result.code, result.rows_sent > 0) == (0, True)
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 2 if 60 <= s <= 80 else 1) for s in range(101)
    ]


def test_a9_where_rows_cannot_be_replaced(outputs, age, upload, one_run):
    """A9: with --on-rewrite keep the old rows stay, and the upload is not called complete."""
    write_verl_log(outputs / "grpo/exp.jsonl.1", [row(s, attempt=1) for s in range(101)])
    age(outputs)
    upload.here(outputs)
    write_verl_log(outputs / "grpo/exp.jsonl", [row(s, attempt=2) for s in range(60, 81)])
    age(outputs)
    result = upload.here(outputs, on_rewrite="keep")
    assert result.code == 3
    assert {r["attempt"] for r in one_run().rows} == {1}
    assert any("60" in note for note in result.only["notes"]), result.only


def test_a10_no_offset_unless_asked(offline_run, outputs, upload, one_run):
    """A10: a resumed attempt keeps its own steps: nothing is added to them unasked."""
    offline_run("first_0_29")
    offline_run("second_allow_20_49")
    assert upload.here(outputs).code == 0
    assert all(r["training/global_step"] == r["_step"] for r in one_run().rows)
    assert one_run().rows[-1]["_step"] == 49


def test_v1_crash_and_resume(fixture_files, outputs, age):
    """Verl case 1: 21..33 come from the second start, 0..20 from the first, and the validation at
    20 erases none of step 20's training metrics."""
    (outputs / "grpo").mkdir()
    for source, name in (
        ("session1_steps0-33", "exp.jsonl.1"),
        ("session2_resumed_from_20", "exp.jsonl"),
    ):
        (path,) = (fixture_files / "verl_file").rglob(f"{source}.jsonl")
        shutil.copy(path, outputs / "grpo" / name)
    first, second = (
        {r["step"]: r["data"] for r in map(json.loads, (outputs / "grpo" / n).open())}
        for n in ("exp.jsonl.1", "exp.jsonl")
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    frame = run.history()
    assert frame.index.tolist() == list(range(41))
    assert run.account.superseded == 13
    assert "13 rows superseded at steps 21-33" in run.notes
    for step in range(1, 41):
        data = first[step] if step <= 20 else second[step]
        assert frame["actor/pg_loss"][step] == data["actor/pg_loss"]
    validated = next(key for key in second[20] if key.startswith("val-core/"))
    assert frame[validated][20] == second[20][validated]
