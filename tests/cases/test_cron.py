"""Cases from public reports: started by cron, without a terminal, a home or a full path."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from verl_logsync.testing import Fault
from verl_logsync.testing.builders import OfflineRun, make_offline_runs, write_verl_log

LONG = 140


@pytest.fixture
def two_logs(outputs, age):
    """Two runs of eight rows."""
    for name in ("qwen", "llama"):
        write_verl_log(
            outputs / "grpo" / f"{name}.jsonl",
            [(s, {"actor/loss": s / 7, "timing_s/step": 1.0}) for s in range(8)],
        )
    age(outputs)
    return outputs


@pytest.fixture
def from_cron(upload):
    """The command line as cron starts it: hardly any environment, and no standard input."""

    def run(*arguments, **streams):
        needed = ("WANDB_BASE_URL", "WANDB_API_KEY", "PYTHONPATH", "HOME")
        closing = f'exec "$@" {streams.get("closed", "<&-")}'
        return subprocess.run(
            ["/bin/sh", "-c", closing, "sh", *upload.command(*arguments)],
            env={"PATH": "/usr/bin:/bin", **{k: upload.env()[k] for k in needed}},
            cwd=upload.home,
            capture_output=True,
            timeout=120,
            check=False,
        )

    return run


def test_i9_nothing_is_asked_and_nothing_coloured(two_logs, from_cron, server):
    """I9: without a terminal there is no question, no escape code, and one line a run."""
    done = from_cron(two_logs)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", printed)
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("ok ")]
    assert len(lines) == 2
    assert sorted(len(run.rows) for run in server.runs) == [8, 8]


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_i9_streams_may_be_closed(closed, two_logs, from_cron, server):
    """I9: a program without standard streams works all the same."""
    assert from_cron(two_logs, closed=closed).returncode == 0
    assert sorted(len(run.rows) for run in server.runs) == [8, 8]
    assert from_cron(two_logs / "nothing here", closed=closed).returncode == 2


@pytest.mark.parametrize("variable", ["--state-dir", "VERL_LOGSYNC_STATE_DIR", "XDG_STATE_HOME"])
def test_i9_paths_from_where_it_was_started(variable, two_logs, upload, server):
    """I9: relative paths, of logs and of the state, count from the folder cron started it in."""
    logs = os.path.relpath(two_logs, upload.home)
    option = [variable, "state"] if variable.startswith("--") else []
    env = upload.env(**({} if option else {variable: "state"}))
    if variable != "VERL_LOGSYNC_STATE_DIR":
        del env["VERL_LOGSYNC_STATE_DIR"]
    for sent in (16, 0):
        done = subprocess.run(
            upload.command(logs, *option),
            env=env,
            cwd=upload.home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert f"2 runs, {sent} rows sent" in done.stdout
    assert sorted(len(run.rows) for run in server.runs) == [8, 8]
    assert (upload.home / "state").is_dir()


def test_e3_the_server_has_had_enough(two_logs, upload, server):
    """E3: a run that is answered 429 until the uploader gives up is named, and only it goes then."""
    refused = upload.here(two_logs, dry_run=True).runs[0]["run_id"]
    server.faults.add(Fault("UpsertBucket", status=429, times=None, run=refused))
    first = upload(two_logs)
    assert first.code != 0
    by_id = {run["run_id"]: run for run in first.runs}
    assert [run.id for run in server.runs] == [i for i in by_id if i != refused]
    assert not by_id[refused]["verified"]
    server.faults.clear()
    second = upload(two_logs)
    assert (second.code, second.rows_sent) == (0, 8)
    assert sorted(len(run.rows) for run in server.runs) == [8, 8]


def test_g4_long_names_and_a_large_config(outputs, age, upload, server):
    """G4: names beyond W&B's limits are cut, which is said, and a config of 16 MB arrives."""
    write_verl_log(
        outputs / "grpo" / ("n" * LONG + ".jsonl"), [(s, {"x": s / 7}) for s in range(5)]
    )
    make_offline_runs(
        [OfflineRun(outputs, "bigone", range(5), name="m" * LONG, config={"big": "x" * (16 << 20)})]
    )
    age(outputs)
    result = upload.here(outputs, verify="full")
    assert result.code == 0
    by_id = {run.id: run for run in server.runs}
    assert len(by_id["bigone"].config["big"]) == 16 << 20
    assert {run.name for run in server.runs} == {"n" * 128, "m" * 128}
    for run in result.runs:
        assert any("W&B takes 128, the rest is cut" in note for note in run["notes"])
    assert upload.here(outputs).rows_sent == 0
