"""The main job on resumed training runs, checked on the server's own records."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from verl_logsync.testing import Fault, LoopbackServer

STEPS = list(range(41))
LOSS, ACC = "actor/pg_loss", "val-core/openai/gsm8k/acc/mean@4"


@pytest.fixture
def sessions(fixture_files):
    """The lines of both sessions by step, as the trainer wrote them."""
    import json

    folder = fixture_files / "verl_file" / "crash_resume"

    def lines(name):
        records = map(json.loads, (folder / name).read_text().splitlines())
        return {record["step"]: record["data"] for record in records}

    return lines("session1_steps0-33.jsonl"), lines("session2_resumed_from_20.jsonl")


@pytest.fixture
def place(fixture_files, outputs, age):
    """Put the sessions where verl would have left them."""
    folder = fixture_files / "verl_file" / "crash_resume"

    def put(first="", second=""):
        target = outputs / "grpo_arith"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        if first:
            age(Path(shutil.copy(folder / "session1_steps0-33.jsonl", target / first)), 5 * 3600)
        if second:
            age(Path(shutil.copy(folder / "session2_resumed_from_20.jsonl", target / second)))
        return outputs

    return put


def values(row, run):
    """What was logged of a row; what diagnostics added is not compared."""
    added = run.config["verl_logsync"]["added"]
    return {k: v for k, v in row.items() if not k.startswith("_") and k not in added}


def assert_merged(run, sessions):
    """Steps 0..40 once each; 0..20 of the first session, 21..40 of the second."""
    first, second = sessions
    rows = run.rows
    assert [row["_step"] for row in rows] == STEPS
    for row in rows[:20]:
        assert values(row, run) == first[row["_step"]]
    assert values(rows[20], run) == {**first[20], **second[20]}
    for row in rows[21:]:
        assert values(row, run) == second[row["_step"]]
    assert run.gaps == []
    assert run.overwrites == []
    assert run.summary["_step"] == 40
    times = [row["_timestamp"] for row in rows]
    assert times == sorted(times)


def test_two_sessions_of_one_experiment_become_one_run(place, upload, one_run, sessions):
    """`EXP.jsonl.1` and `EXP.jsonl` are one run of 41 rows, of which 13 were superseded."""
    result = upload(place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl"))
    assert result.code == 0
    run = one_run()
    assert (run.name, run.project, run.state) == ("qwen_small_grpo", "grpo_arith", "finished")
    assert_merged(run, sessions)
    assert LOSS in run.rows[20]
    account = result.only["account"]
    assert account["superseded"] == 13
    assert account["seen"] == account["kept"] + account["merged"] + 13 + account["skipped"]
    assert account["kept"] == 41


def test_again_is_free(place, upload, one_run, server):
    """A second upload sends no row, and neither does one without any local memory."""
    files = place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl")
    first = upload.here(files)
    assert first.rows_sent == 41
    lines, before = server.lines_received, one_run().lines
    assert (upload(files).code, server.lines_received) == (0, lines)
    upload.from_another_machine()
    third = upload(files)
    assert (third.code, third.rows_sent) == (0, 0)
    assert third.only["run_id"] == first.only["run_id"]
    assert server.lines_received == lines == 41
    assert one_run().lines == before


def test_unrelated_names_stay_two_runs_and_the_hint_merges_them(place, upload, server, sessions):
    """Logs with unrelated names are two runs, and the printed flags make them one."""
    files = place("session1_steps0-33.jsonl", "session2_resumed_from_20.jsonl")
    code, text = upload.text(files)
    assert code == 0
    steps = {run.name: [row["_step"] for row in run.rows] for run in server.runs}
    assert steps == {
        "session1_steps0-33": list(range(34)),
        "session2_resumed_from_20": list(range(20, 41)),
    }
    hints = [line for line in text.splitlines() if "--run" in line]
    assert hints, text
    assert "session1_steps0-33" in hints[0]
    assert "resumed attempt" in hints[0]
    assert "--run" in upload.text(files, verb="scan")[1]

    import shlex

    words = shlex.split(hints[0][hints[0].index("--run") :])
    upload.from_another_machine()
    merged = upload(files, *words)
    (run,) = [r for r in server.runs if len(r.rows) == 41]
    assert merged.code == 0
    assert len(merged.runs) == 1
    assert_merged(run, sessions)


def test_superseded_rows_are_rewound(place, upload, one_run, sessions):
    """Uploaded to step 33, then superseded from 21: the server ends with the same 41 rows."""
    upload.here(place("qwen_small_grpo.jsonl"))
    assert [row["_step"] for row in one_run().rows] == list(range(34))
    result = upload(place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl"), "--verify", "full")
    assert result.code == 0
    assert result.only["action"] == "rewind"
    assert result.only["verified"] is True
    run = one_run()
    assert_merged(run, sessions)
    assert len(run.rewinds) == 1
    assert upload.here(place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl")).rows_sent == 0


def test_verl_truncated_its_log_at_the_restart(place, upload, one_run, sessions):
    """When the first session's file is gone, its rows on the server stay below the resume."""
    upload.here(place("qwen_small_grpo.jsonl"))
    result = upload.here(place(second="qwen_small_grpo.jsonl"))
    assert result.code == 0
    assert_merged(one_run(), sessions)
    assert upload.here(place(second="qwen_small_grpo.jsonl")).rows_sent == 0
    upload.from_another_machine()
    assert upload.here(place(second="qwen_small_grpo.jsonl")).rows_sent == 0
    assert_merged(one_run(), sessions)


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_killed_between_the_rewind_and_its_first_row(
    memory, place, upload, server, one_run, sessions, kill_group
):
    """A program killed after the rewind, before any row of it arrived, mends it the next time."""
    upload.here(place("qwen_small_grpo.jsonl"))
    files = place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl")
    running: list[Any] = []
    fault = server.faults.add(
        Fault("file_stream", callback=lambda _: kill_group(running[0]), drop="before", times=None)
    )
    running.append(upload.start(files))
    running[0].communicate(timeout=60)
    assert running[0].returncode == -9
    time.sleep(1.0)  # the uploader dies with its parent
    hits = fault.hits
    server.faults.clear()
    time.sleep(0.5)
    assert fault.hits == hits
    run = one_run()
    assert [row["_step"] for row in run.rows] == list(range(21))
    assert len(run.rewinds) == 1
    if memory == "lost":
        upload.from_another_machine()
    result = upload(files)
    assert (result.code, result.only["verified"]) == (0, True)
    assert_merged(one_run(), sessions)
    assert upload.here(files).rows_sent == 0


def test_killed_before_the_rewind(place, upload, server, one_run, sessions, kill_group):
    """A program killed when it asks for the rewind has changed nothing, and rewinds next time."""
    upload.here(place("qwen_small_grpo.jsonl"))
    files = place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl")
    running: list[Any] = []
    server.faults.add(Fault("rewindRun", callback=lambda _: kill_group(running[0]), drop="before"))
    running.append(upload.start(files))
    running[0].communicate(timeout=60)
    time.sleep(1.0)
    assert [row["_step"] for row in one_run().rows] == list(range(34))
    assert upload(files).code == 0
    assert_merged(one_run(), sessions)


def test_a_server_that_cannot_rewind(place, uploader_for, sessions):
    """Without rewind the old rows stay, only newer steps are sent, and all of it is said."""
    first, second = sessions
    with LoopbackServer(rewind=False) as server:
        upload = uploader_for(server)
        upload.here(place("qwen_small_grpo.jsonl"))
        files = place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl")
        code, text = upload.text(files)
        (run,) = server.runs
        assert code == 3
        assert "OLD ROWS KEPT" in text
        assert "21-33" in text
        assert "--run" in text
        rows = run.rows
        assert [row["_step"] for row in rows] == STEPS
        assert [values(row, run) for row in rows[:34]] == [first[step] for step in range(34)]
        assert [values(row, run) for row in rows[34:]] == [second[step] for step in range(34, 41)]
        assert run.overwrites == []
        assert run.gaps == []
        for _ in ("with memory", "without"):
            lines = server.lines_received
            again = upload(files)
            assert (again.code, again.rows_sent, server.lines_received) == (3, 0, lines)
            assert any("OLD ROWS KEPT" in note for note in again.only["notes"])
            upload.from_another_machine()
        assert len(server.runs) == 1


def test_a_server_that_refuses_the_rewind_it_offers(place, upload, server, one_run):
    """A rewind that is offered and then refused ends like one that is not offered."""
    upload.here(place("qwen_small_grpo.jsonl"))
    server.faults.add(Fault("rewindRun", status=400, times=None))
    result = upload(place("qwen_small_grpo.jsonl.1", "qwen_small_grpo.jsonl"))
    assert result.code == 3
    assert [row["_step"] for row in one_run().rows] == STEPS
    assert any("OLD ROWS KEPT" in note for note in result.only["notes"])


# -- two offline folders of one id ---------------------------------------------------------


def assert_clock_of_two_attempts(rows, first, second, resumed_at):
    """`_timestamp` as logged; `_runtime` as logged within an attempt, idle time left out."""
    logged = [*first[:resumed_at], *second]
    assert [row["_timestamp"] for row in rows] == [row["_timestamp"] for row in logged]
    runtime = [row["_runtime"] for row in rows]
    assert runtime[:resumed_at] == [row["_runtime"] for row in first[:resumed_at]]
    mine = [b - a for a, b in itertools.pairwise(runtime[resumed_at:])]
    theirs = [b["_runtime"] - a["_runtime"] for a, b in itertools.pairwise(second)]
    assert mine == pytest.approx(theirs, abs=1e-6)
    assert all(b > a for a, b in itertools.pairwise(runtime))
    active = first[-1]["_runtime"]
    # The second attempt starts where the first one ended: a day of idling is not run time.
    assert runtime[resumed_at] == pytest.approx(active + second[0]["_runtime"], abs=5.0)


def rows_of(folder: Path):
    from verl_logsync.transaction_log import Entry, history_row, read_records

    (log,) = folder.glob("*.wandb")
    entries = [e for e in read_records(log) if isinstance(e, Entry) and e.kind == "history"]
    return [history_row(e.record)[1] for e in entries]


@pytest.mark.parametrize("second_name", ["second_20_49", "second_allow_20_49"])
def test_two_offline_folders_of_one_id(second_name, offline_run, upload, outputs, one_run):
    """Folders 0..29 and 20..49 of one id end as 50 rows on the true clock, with resume= or not."""
    first, second = offline_run("first_0_29"), offline_run(second_name)
    result = upload(outputs)
    assert result.code == 0
    run = one_run()
    rows = run.rows
    assert run.id == "resumed1"
    assert run.state == "finished"
    assert [row["_step"] for row in rows] == list(range(50))
    assert [row["attempt"] for row in rows] == [1] * 20 + [2] * 30
    assert_clock_of_two_attempts(rows, rows_of(first), rows_of(second), 20)
    assert (upload.here(outputs).rows_sent, len(one_run().rows)) == (0, 50)


def test_two_offline_folders_uploaded_one_after_the_other(offline_run, upload, outputs, one_run):
    """The same rows and the same clock when the second folder comes after the first's upload."""
    first = offline_run("first_0_29")
    upload.here(outputs)
    second = offline_run("second_20_49")
    assert upload.here(outputs).code == 0
    rows = one_run().rows
    assert [row["_step"] for row in rows] == list(range(50))
    assert [row["attempt"] for row in rows] == [1] * 20 + [2] * 30
    assert_clock_of_two_attempts(rows, rows_of(first), rows_of(second), 20)
