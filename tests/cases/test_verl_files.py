"""Cases from public reports: verl's own files."""

from __future__ import annotations

import gzip
import json
import math
import shutil

import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log


def row(step, /, **more):
    return step, {"actor/loss": step / 10, "timing_s/step": 10.0, **more}


@pytest.mark.parametrize(("policy", "theirs"), [("last", 2), ("first", 1)])
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_c1_truncated_and_restarted(policy, theirs, memory, outputs, age, upload, one_run, server):
    """C1: a log replaced at a restart deletes nothing: 0..40 stay, 51..60 come, 41..50 by policy."""
    log = outputs / "grpo" / "qwen.jsonl"
    write_verl_log(log, [row(s, attempt=1) for s in range(51)])
    age(outputs, 5 * 3600)
    upload.here(outputs)
    assert len(one_run().rows) == 51
    if memory == "lost":
        upload.from_another_machine()
    write_verl_log(log, [row(s, attempt=2) for s in range(41, 61)])
    age(outputs)
    result = upload.here(outputs, on_overlap=policy)
    assert result.code == 0
    rows = one_run().rows
    assert [r["_step"] for r in rows] == list(range(61))
    assert [r["attempt"] for r in rows] == [1] * 41 + [theirs] * 10 + [2] * 10
    assert any("restart" in note for note in result.only["notes"])
    lines = server.lines_received
    assert upload.here(outputs, on_overlap=policy).rows_sent == 0
    assert server.lines_received == lines


def test_c2_cut_last_line(outputs, age, upload, one_run):
    """C2: an unfinished last line is noted, no failure, and read when the writer completes it."""
    log = write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(s, a=s / 2) for s in range(7)])
    with log.open("a") as stream:
        stream.write('{"step": 7, "data": {"a": 0.')
    age(outputs, seconds=600)
    code, text = upload.text(outputs)
    assert code == 0
    assert "partial" in text
    assert "line" in text
    assert f"{log}:8" in text
    assert [r["_step"] for r in one_run().rows] == list(range(7))
    with log.open("a") as stream:
        stream.write("5}}\n")
    age(outputs, seconds=500)
    again = upload.here(outputs)
    assert (again.code, again.rows_sent) == (0, 1)
    assert (one_run().rows[7]["_step"], one_run().rows[7]["a"]) == (7, 0.5)


def test_c2_legacy_file(fixture_files, upload, one_run, outputs, age):
    """C2: a file of verl 0.6 with NaN tokens and a cut last line gives all its whole rows."""
    source = fixture_files / "verl_file/legacy_truncated/legacy_0.6_nan_tokens_truncated_tail.jsonl"
    log = outputs / "grpo" / "old.jsonl"
    log.parent.mkdir()
    log.write_bytes(source.read_bytes())
    age(outputs)
    assert upload.here(outputs, verify="full").code == 0
    whole = [json.loads(line) for line in source.read_text().splitlines()[:-1]]
    rows = one_run().rows
    assert [r["_step"] for r in rows] == [record["step"] for record in whole]
    for got, record in zip(rows, whole, strict=True):
        for key, value in record["data"].items():
            assert got[key] == value or (math.isnan(got[key]) and math.isnan(value)), key


def test_c9_stats_without_history(offline_run, upload, outputs):
    """C9: a run with system metrics and no rows says so, exits partial, names other sources."""
    offline_run("rich_without_rows")
    code, text = upload.text(outputs)
    assert code == 3
    assert "no history records in this run" in text
    assert "JSONL" in text
    assert "console" in text
    assert "Traceback" not in text


def test_c10_log_without_exit_and_jsonl_with_more(killed_run, outputs, age, upload, one_run):
    """C10: a killed run's rows and the JSONL's unite; the run is interrupted, not failed."""
    killed_run("killed_0_9")
    write_verl_log(
        outputs / "grpo_arith" / "qwen_small_grpo.jsonl",
        [(s, {"attempt": 1, "actor/loss": s / 10, "timing_s/step": 10.0}) for s in range(12)],
    )
    age(outputs)
    code, text = upload.text(outputs)
    run = one_run()
    assert code == 0
    assert run.id == "killed01"
    assert [r["_step"] for r in run.rows] == list(range(12))
    assert all(r["actor/loss"] == r["_step"] / 10 for r in run.rows)
    assert all("critic/score/mean" in r for r in run.rows[:10])
    assert run.state == "running"
    assert "interrupted" in text
    final = upload.here(outputs, final=True)
    assert final.code == 0, final.only
    assert one_run().state == "finished"


def test_c10_log_without_exit_alone(killed_run, outputs, age, upload, one_run):
    """C10: told by nothing else, a run without exit record that is no longer written failed."""
    killed_run("killed_0_9")
    age(outputs)
    assert upload.here(outputs).code == 0
    assert (len(one_run().rows), one_run().state) == (10, "failed")


@pytest.mark.parametrize(
    "key",
    [
        "timing(s)/gen",
        "val-aux/x/reward/mean@1",
        "a key with spaces",
        "奖励/均值",
        "a.b/c.d",
        "step",
        "data",
        "critic/score/mean ",
    ],
)
def test_c14_keys_are_unchanged(key, outputs, age, upload, one_run):
    """C14: metric names with brackets, spaces, dots or unicode reach W&B unchanged."""
    write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(s, **{key: s + 0.5}) for s in (1, 2)])
    age(outputs)
    result = upload.here(outputs, verify="full")
    assert (result.code, result.only["verified"]) == (0, True)
    assert [r[key] for r in one_run().rows] == [1.5, 2.5]
    assert one_run().summary[key] == 2.5


def test_c16_nested_folders(offline_run, outputs, upload, one_run):
    """C16: runs deep below the path are found, also where links make a circle."""
    folder = offline_run("other_0_9", outputs / "a" / "b" / "c" / "wandb")
    (outputs / "a" / "again").symlink_to(outputs, target_is_directory=True)
    (outputs / "a" / "latest").symlink_to(folder, target_is_directory=True)
    (outputs / "notes.log").write_text("nothing of interest\n")
    code, text = upload.text(outputs, "--dry-run")
    assert code == 0
    assert "otherrun" in text
    assert "10 rows" in text
    assert "notes.log" in text
    assert "not recognised" in text
    assert "duplicate" not in text
    assert "deeper" not in text
    assert upload.server.runs == []
    assert upload.here(outputs).code == 0
    assert [r["_step"] for r in one_run().rows] == list(range(10))


def test_c16_too_deep(outputs, age, upload):
    """C16: folders beyond the depth limit are named, with what to do."""
    folder = outputs.joinpath(*(f"{n}" for n in range(40)))
    write_verl_log(folder / "qwen.jsonl", [row(1), row(2)])
    age(outputs)
    code, text = upload.text(outputs, "--dry-run")
    assert code == 0
    assert "deeper than" in text
    assert "Give this path itself" in text
    assert "2 rows" in upload.text(folder, "--dry-run")[1]


def test_c1_snapshots_keep_what_was_truncated(outputs, age, upload, one_run, tmp_path):
    """C1: with copies that `snapshot` took, a log that was never uploaded before its restart is
    whole; the live log and its growing copy count once."""
    log = outputs / "grpo" / "qwen.jsonl"
    copies = tmp_path / "copies"
    for first, last, attempt in ((0, 50, 1), (41, 45, 2), (41, 60, 2)):
        write_verl_log(log, [row(s, attempt=attempt) for s in range(first, last + 1)])
        assert upload.text(outputs, "--into", copies, verb="snapshot")[0] == 0
    age(outputs)
    age(copies)
    assert upload.here(outputs, copies).code == 0
    assert [(r["_step"], r["attempt"]) for r in one_run().rows] == [
        (s, 1 if s < 41 else 2) for s in range(61)
    ]
    assert upload.here(outputs, copies).rows_sent == 0


def test_c15_console_without_a_wandb_folder(outputs, age, upload, one_run, fixture_files):
    """C15: console logs alone, without any wandb folder, are uploaded; what was looked at in vain
    is printed."""
    shutil.copy(fixture_files / "console/ray_0.7.1_nocolor/train.log", outputs / "train.log")
    (outputs / "2026-01-01").mkdir()
    (outputs / "2026-01-01" / "main_ppo.log").write_text("")
    age(outputs)
    code, text = upload.text(outputs)
    assert code == 0, text
    assert [r["_step"] for r in one_run().rows] == [0, 1, 2, 3, 40]
    assert "main_ppo.log" in text


def test_v5_jsonl_without_a_wandb_folder(outputs, age, upload, one_run, server):
    """Verl case 5: a JSONL is uploaded without any wandb folder; the server holds as many rows as
    the file has records, the last one too."""
    log = write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(s) for s in range(1, 41)])
    age(outputs)
    assert upload.here(log).code == 0
    assert len(one_run().rows) == len(log.read_text().splitlines()) == 40
    assert one_run().rows[-1]["_step"] == 40


def test_v7_hydra_with_an_empty_log(outputs, age, upload):
    """Verl case 7: of a Hydra folder with an empty main_ppo.log the config is taken, and it is said
    that metrics are not in that file, and where they would be."""
    (outputs / "run" / ".hydra").mkdir(parents=True)
    (outputs / "run" / ".hydra" / "config.yaml").write_text(
        "trainer: {project_name: grpo, experiment_name: qwen}\nactor: {lr: 1}\n"
    )
    (outputs / "run" / ".hydra" / "overrides.yaml").write_text("[]\n")
    (outputs / "run" / "main_ppo.log").write_text("")
    age(outputs)
    _, text = upload.text(outputs, verb="scan")
    assert "metrics are not in this file" in text
    assert "EXPERIMENT.jsonl" in text
    assert "config without metrics" in text
    write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(1)])
    (run,) = verl_logsync.load(outputs)
    assert run.config["actor"] == {"lr": 1}


def test_v2_a_log_that_a_type_error_cut(outputs, age, fixture_files, upload):
    """Verl case 2: of the 0.6 log whose last line is cut all whole lines are kept; the cut is
    reported with its byte offset, and no step is invented."""
    (path,) = (fixture_files / "verl_file").rglob("legacy_0.6*.jsonl")
    log = outputs / "grpo" / "qwen.jsonl"
    log.parent.mkdir()
    shutil.copy(path, log)
    age(outputs)
    whole = log.read_bytes().rpartition(b"\n")[0].split(b"\n")
    (run,) = verl_logsync.load(outputs)
    assert run.history().index.tolist() == [json.loads(line)["step"] for line in whole]
    (skip,) = run.account.skips
    assert f"byte {sum(len(line) + 1 for line in whole)}" in skip.place
    assert upload.text(outputs, verb="scan")[0] == 0


def test_a_mark_of_byte_order_is_no_part_of_the_first_record(outputs):
    """An editor on Windows puts three bytes in front; the first record is read all the same."""
    log = write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(s) for s in range(3)])
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes())
    (run,) = verl_logsync.load(outputs)
    assert run.history().index.tolist() == [0, 1, 2]
    assert not run.account.skips


def test_a_packed_log_is_named_with_the_program_that_unpacks_it(outputs, upload):
    """Packed JSON lines are not read; the verdict holds the command, not a hint at bytes."""
    log = write_verl_log(outputs / "grpo" / "qwen.jsonl", [row(1)])
    packed = log.with_name("qwen.jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    log.unlink()
    _, text = upload.text(outputs, verb="scan")
    assert f"gunzip -k {packed}" in text
    assert "xxd" not in text
    write_verl_log(log, [row(1)])
    (run,) = verl_logsync.load(outputs)
    assert len(run.history()) == 1
