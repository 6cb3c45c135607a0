"""Cases from public reports: speed, hanging, concurrency."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from verl_logsync.testing import Fault
from verl_logsync.testing.builders import write_verl_log


def rows(count, **more):
    return [(s, {"actor/loss": s / 7, "timing_s/step": 1.0, **more}) for s in range(count)]


class InFlight:
    """How many runs have rows under way at the same time."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.most = 0

    def __call__(self, _):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self.lock:
            self.now -= 1


def test_f2_many_small_runs(outputs, age, upload, server):
    """F2: 200 small runs arrive whole and in order, never more at a time than --jobs allows."""
    for n in range(200):
        write_verl_log(outputs / "grpo" / f"run{n:03}.jsonl", rows(3 + n % 3, n=n))
    age(outputs)
    in_flight = InFlight()
    server.faults.add(Fault("file_stream", times=None, callback=in_flight))
    result = upload(outputs, "--jobs", 3)
    assert (result.code, len(result.runs)) == (0, 200)
    assert all(run["verified"] for run in result.runs)
    assert 1 <= in_flight.most <= 3
    assert len(server.runs) == 200
    for run in server.runs:
        n = int(run.name.removeprefix("run"))
        assert [(r["_step"], r["n"]) for r in run.rows] == [(s, n) for s in range(3 + n % 3)]
        assert run.overwrites == []
        assert run.gaps == []
    assert upload.here(outputs).rows_sent == 0


def test_f5_deleted_run_id(outputs, age, upload, server):
    """F5: an id that was deleted on the server is reported at once with the cure; others go on."""
    for n in range(3):
        write_verl_log(outputs / "grpo" / f"run{n}.jsonl", rows(5, n=n))
    age(outputs)
    upload.here(outputs)
    (deleted,) = [run.id for run in server.runs if run.name == "run1"]
    server.delete_run(deleted)
    write_verl_log(outputs / "grpo" / "run2.jsonl", rows(8, n=2))
    write_verl_log(outputs / "grpo" / "run1.jsonl", rows(8, n=1))
    write_verl_log(outputs / "grpo" / "run3.jsonl", rows(5, n=3))
    age(outputs)
    began = time.monotonic()
    code, text = upload.text(outputs)
    assert time.monotonic() - began < 30
    assert code == 3
    assert deleted in text
    assert "deleted" in text
    assert "--run" in text
    assert {run.name: len(run.rows) for run in server.runs} == {"run0": 5, "run2": 8, "run3": 5}


def test_f5_conflict_for_a_new_run(offline_run, outputs, upload, server):
    """F5: a 409 for one new id costs that run alone."""
    offline_run("first_0_29")
    offline_run("other_0_9")
    server.faults.add(Fault("UpsertBucket", run="otherrun", status=409, times=None))
    began = time.monotonic()
    result = upload(outputs)
    assert time.monotonic() - began < 30
    assert result.code == 3
    by_id = {run["run_id"]: run for run in result.runs}
    assert by_id["resumed1"]["verified"] is True
    assert by_id["otherrun"]["error"]["kind"] == "RunDeleted"
    assert "--run" in by_id["otherrun"]["error"]["hint"]
    assert {run.id: len(run.rows) for run in server.runs if run.rows} == {"resumed1": 30}


@pytest.fixture
def small(outputs, age):
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows(5))
    age(outputs)
    return outputs


def files_of(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("trouble", ["closed port", "never answers", "answers no rows"])
def test_f6_server_away(trouble, small, upload, server, one_run):
    """F6: a dead or silent server ends the upload within --timeout, exit 6; later all is sent."""
    if trouble == "closed port":
        server.go_down()
    elif trouble == "never answers":
        server.hang()
    else:
        server.faults.add(Fault("file_stream", delay_seconds=30, times=None))
    began = time.monotonic()
    code, text = upload.text(small, "--timeout", 5, seconds=60)
    assert time.monotonic() - began < 25
    assert code == 6, text
    assert "Traceback" not in text
    assert "qwen" not in upload.text(verb="status")[1]
    server.faults.clear()
    if trouble != "answers no rows":
        server.come_back()
    else:
        time.sleep(1)
    later = upload.here(small)
    assert later.code == 0
    assert [r["_step"] for r in one_run().rows] == list(range(5))


def test_f6_a_port_that_accepts_and_is_silent(small, upload, server):
    """F6: a listener that is no server at all is given up on within --timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        elsewhere = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        began = time.monotonic()
        process = upload.start(small, "--timeout", 4, **elsewhere)
        output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 6, output
    assert "Traceback" not in output
