"""Every source on its way to the server, and runs that have several."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from verl_logsync import StepLogger
from verl_logsync.testing.builders import write_verl_log

FIXTURES = Path(__file__).parents[2] / "fixtures"
RANKS = 3


def rows(first, last, attempt=1):
    return [
        (s, {"actor/loss": s / 7 + attempt, "attempt": attempt, "timing_s/step": 10.0})
        for s in range(first, last + 1)
    ]


def console(first, last, attempt=1, prefix=""):
    return "".join(
        prefix + f"step:{s} - " + " - ".join(f"{k}:{v}" for k, v in data.items()) + "\n"
        for s, data in rows(first, last, attempt)
    )


def sent_again(upload, *paths, **settings):
    """Rows that a second upload sends, with memory and from another machine."""
    once = upload.here(*paths, **settings)
    upload.from_another_machine()
    other = upload.here(*paths, **settings)
    return once.rows_sent, other.rows_sent


def test_compressed_console(outputs, upload, one_run):
    """A console log that is compressed arrives like the plain one, under its names, once."""
    text = (FIXTURES / "console/k8s_stamps/pod.log").read_bytes()
    (outputs / "pod.log.gz").write_bytes(gzip.compress(text))
    assert upload.here(outputs, final=True, verify="full").code == 0
    run = one_run()
    assert [r["_step"] for r in run.rows] == list(range(14))
    assert len(run.logs) == text.count(b"\n")
    assert sent_again(upload, outputs, final=True) == (0, 0)


def test_tensorboard_folder(outputs, upload, one_run):
    """Two event files of one folder arrive as one run of two attempts, once."""
    pytest.importorskip("tensorboard")
    shutil.copytree(FIXTURES / "tensorboard/restarted/tensorboard_log", outputs / "tensorboard_log")
    assert upload.here(outputs, final=True, verify="full").code == 0
    run = one_run()
    assert [r["_step"] for r in run.rows] == list(range(26))
    times = [r["_timestamp"] for r in run.rows]
    assert times == sorted(times)
    assert sent_again(upload, outputs, final=True) == (0, 0)


def test_parquet_step_logs(outputs, upload, one_run):
    """Parquet step logs of several ranks arrive as one run with the ranks' means, once."""
    for rank in range(RANKS):
        with StepLogger(
            "grpo",
            "exp",
            directory=outputs,
            rank=rank,
            world_size=RANKS,
            attempt_id="job-1",
            format="parquet",
        ) as logger:
            for step in range(1, 21):
                logger.log({"actor/loss": step + rank, "note": f"step {step}"}, step)
    assert upload.here(outputs, final=True, verify="full").code == 0
    run = one_run()
    assert [(r["_step"], r["actor/loss"]) for r in run.rows] == [(s, s + 1) for s in range(1, 21)]
    assert run.rows[4]["note"] == "step 5"
    assert sent_again(upload, outputs, final=True) == (0, 0)


def test_console_text_beside_the_jsonl(outputs, upload, one_run):
    """The console of a JSONL run is its Logs tab: every line once, in order, secrets masked; what
    is added later is added there."""
    write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 9))
    log = outputs / "train.log"
    log.write_text("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567\n" + console(0, 9))
    assert upload.here(outputs, final=True).code == 0
    run = one_run()
    text = "".join(map(str, run.logs))
    assert "0123456789abcdef" not in text
    assert [line for line in map(str, run.logs) if "step:9 " in line]
    assert len(run.logs) == 11
    with log.open("a") as stream:
        stream.write("one more line\n")
    assert upload.here(outputs, final=True).code == 0
    assert len(one_run().logs) == 12
    assert "one more line" in str(one_run().logs[-1])
    assert sent_again(upload, outputs, final=True) == (0, 0)
    assert len(one_run().logs) == 12


@pytest.fixture
def checkpoints(outputs):
    folder = outputs / "checkpoints/grpo/exp"
    (folder / "global_step_20").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return folder


def test_a_bound_checkpoint_says_which_run(outputs, checkpoints, upload, one_run):
    """The run id in the checkpoint folder is the run, whatever its log is derived to be."""
    write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 20))
    (checkpoints / "wandb_run_id").write_text("myrun123\n")
    assert upload.here(outputs, final=True).code == 0
    assert one_run().id == "myrun123"


def test_what_was_bound_by_hand_counts_more_than_memory(outputs, checkpoints, upload, server):
    """A folder that somebody bound after the first upload says which run it is from then on."""
    write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 5))
    assert upload.here(outputs, final=True).code == 0
    (checkpoints / "wandb_run_id").write_text("myrun123\n")
    for sent in (6, 0):
        result = upload.here(outputs, final=True)
        assert (result.code, result.rows_sent) == (0, sent)
    assert "myrun123" in [run.id for run in server.runs]


def test_a_resumed_job_on_another_machine_continues_its_run(
    outputs, checkpoints, upload, one_run, tmp_path
):
    """--bind-checkpoints writes the id beside the checkpoints; with these a resumed job continues
    the run elsewhere, where neither the first log nor our memory is, under another name even."""
    first = write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 33))
    result = upload.here(outputs, final=True, bind_checkpoints=True)
    assert result.code == 0
    assert (checkpoints / "wandb_run_id").read_text().strip() == one_run().id
    assert any("bound" in note for note in result.only["notes"])
    again = upload.here(outputs, final=True, bind_checkpoints=True)
    assert (again.code, again.rows_sent) == (0, 0)
    assert not any("bound" in note for note in again.only["notes"])
    first.unlink()
    elsewhere = tmp_path / "elsewhere"
    outputs.rename(elsewhere)
    upload.from_another_machine()
    write_verl_log(elsewhere / "grpo/exp.jsonl", rows(21, 40, 2))
    assert upload.here(elsewhere, final=True).code == 0
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 1 if s <= 20 else 2) for s in range(41)
    ]


def test_a_step_logger_reads_the_binding(outputs, checkpoints, upload, one_run):
    """A StepLogger that knows the checkpoint folder names its run in the log."""
    (checkpoints / "wandb_run_id").write_text("myrun123\n")
    logs = outputs / "logs"
    with StepLogger("grpo", "other name", directory=logs, checkpoint_dir=checkpoints) as logger:
        logger.log({"actor/loss": 1.0}, 1)
    assert upload.here(logs, final=True).code == 0
    assert one_run().id == "myrun123"


def test_nothing_is_bound_that_was_not_verified(outputs, checkpoints, upload):
    """A dry run, and a run that was refused, bind nothing."""
    write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 20) + rows(0, 5, 2))
    assert upload.here(outputs, final=True, bind_checkpoints=True).code == 3
    write_verl_log(outputs / "grpo/exp.jsonl", rows(0, 20))
    upload.here(outputs, final=True, bind_checkpoints=True, dry_run=True)
    assert not (checkpoints / "wandb_run_id").exists()


# -- heaps ---------------------------------------------------------------------------------


def dumps(folder, steps):
    folder.mkdir(parents=True)
    for step in steps:
        lines = (
            json.dumps({"input": f"p{g}", "output": "o", "score": float(i % 2), "step": step})
            for g in range(2)
            for i in range(4)
        )
        (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def heap(outputs, offline_run, age):
    """One job: an offline run of steps 0..29, the console of 5..35, the JSONL of the second start
    (20..49); with dumps and checkpoints, junk of every kind, and links in circles."""
    offline_run("first_0_29")
    text = "".join(
        f"step:{s} - attempt:1 - critic/score/mean:{1 + s / 1000} - training/global_step:{s}\n"
        for s in range(5, 36)
    )
    (outputs / "train.log").write_text("noise\n\n" + text)
    second = [
        (s, {"attempt": 2, "critic/score/mean": 2 + s / 1000, "training/global_step": s})
        for s in range(20, 50)
    ]
    write_verl_log(outputs / "grpo_arith/qwen_small_grpo.jsonl", second)
    dumps(outputs / "rollout data [1]", range(1, 4))
    (outputs / "rollout data [1]/2.jsonl").write_bytes(b"\0\1garbage")
    checkpoints = outputs / "checkpoints/grpo_arith/qwen_small_grpo/global_step_20/actor"
    checkpoints.mkdir(parents=True)
    for number in range(50):
        (checkpoints / f"model_{number}.pt").write_bytes(b"step:1 - actor/loss:9\n")
    (outputs / "circle").symlink_to(outputs, target_is_directory=True)
    (outputs / "checkpoints/up").symlink_to(outputs.parent, target_is_directory=True)
    rng = random.Random(5)
    for name in ("rank-0003.steps.jsonl", "events.out.tfevents.1.a", "nöise\n.log", "x.parquet"):
        (outputs / name).write_bytes(rng.randbytes(3000))
    os.mkfifo(outputs / "pipe.log")
    age(outputs)
    return outputs


def test_a_heap_is_one_run(heap, upload, one_run):
    """A job of which every log lacks something else, among junk and circles: all its steps once,
    nothing lost, junk named and skipped; again nothing is sent, and sources are unchanged."""
    before = {p: p.lstat().st_mtime_ns for p in heap.rglob("*")}
    result = upload.here(heap, final=True, verify="full")
    assert result.code == 3  # some of it cannot be used
    run = one_run()
    assert [(r["_step"], r["attempt"]) for r in run.rows] == [
        (s, 1 if s < 20 else 2) for s in range(50)
    ]
    account = result.only["account"]
    assert account["seen"] == sum(account[k] for k in ("kept", "merged", "superseded", "skipped"))
    assert account["kept"] == 50
    assert account["merged"] == 15  # steps 5..19 of console and offline run
    assert account["superseded"] == 10 + 16  # 20..29 of the offline run, 20..35 of the console
    assert "events.out.tfevents.1.a" in result.skipped
    assert "pipe.log" not in one_run().files
    assert {p: p.lstat().st_mtime_ns for p in heap.rglob("*")} == before
    assert sent_again(upload, heap, final=True) == (0, 0)


def test_locked_pieces_of_a_heap(heap, upload, one_run, permissions_count):
    """Files and folders that may not be read cost themselves: each is named, the rest arrives, and
    nobody sees a traceback."""
    locked = [
        heap / "train.log",
        heap / "rollout data [1]",
        heap / "checkpoints/grpo_arith/qwen_small_grpo",
        heap / "events.out.tfevents.1.a",
    ]
    for path in locked:
        path.chmod(0)
    result = upload(heap, "--final", powers=False)
    for path in locked:
        path.chmod(0o755)
    assert result.code == 3
    assert [r["_step"] for r in one_run().rows] == list(range(50))
    places = {skip["place"] for skip in result.report["skipped"]}
    assert {str(path) for path in locked} <= places
