"""Promise 5: kill the program, the uploader or the server anywhere, run again: the same state."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_logsync.testing import Fault, LoopbackServer

ROWS = 400


def _write(path: Path, rows: range, extra: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"step": s, "data": {f"actor/k{i}": s + i / 7 + extra for i in range(60)}})
        for s in rows
    )
    path.write_text("\n".join(lines) + "\n")
    os.utime(path, (time.time() - 7200, time.time() - 7200))


def _start(server: LoopbackServer, logs: Path, state: Path) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | server.env()
    command = [sys.executable, "-m", "verl_logsync", "upload", str(logs), "--state-dir", str(state)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(server: LoopbackServer, logs: Path, state: Path) -> str:
    child = _start(server, logs, state)
    output = child.communicate(timeout=120)[0].decode()
    assert child.returncode == 0, output
    return output


def _steps(server: LoopbackServer) -> list[list[int]]:
    return [[row["_step"] for row in run.rows] for run in server.runs]


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_points(seed: int, tmp_path: Path) -> None:
    """SIGKILLed again and again, the upload ends with every row once."""
    rng = random.Random(seed)
    logs = tmp_path / "logs"
    for number in range(3):
        _write(logs / "proj" / f"run{number}.jsonl", range(ROWS), extra=number)
    with LoopbackServer() as server:
        # Slow answers spread the moments at which something is half done.
        server.faults.add(Fault(where="file_stream", times=None, delay_seconds=0.15))
        for _ in range(4):
            child = _start(server, logs, tmp_path / "state")
            time.sleep(rng.uniform(0.6, 3.0))
            child.send_signal(signal.SIGKILL)
            child.communicate()
        server.faults.clear()
        _finish(server, logs, tmp_path / "state")
        assert _steps(server) == [list(range(ROWS))] * 3
        assert all(run.gaps == [] for run in server.runs)
        received = server.lines_received
        _finish(server, logs, tmp_path / "state")
        assert server.lines_received == received, "a second upload sent rows"


def test_uploader_killed(tmp_path: Path) -> None:
    """When the uploader process dies half-way, nothing is marked, and the next run completes."""
    logs = tmp_path / "logs"
    _write(logs / "proj" / "run.jsonl", range(ROWS))
    killed: list[int] = []

    def kill_uploader(_: object) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                folder = str((process / "cwd").readlink())
            except OSError:
                continue
            if b"verl_logsync.sinks.wandb_sync.child" in words and str(tmp_path) in folder:
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))

    with LoopbackServer() as server:
        server.faults.add(Fault(where="file_stream", times=1, skip=1, callback=kill_uploader))
        child = _start(server, logs, tmp_path / "state")
        output = child.communicate(timeout=120)[0].decode()
        assert killed
        assert child.returncode in (0, 4), output
        _finish(server, logs, tmp_path / "state")
        assert _steps(server) == [list(range(ROWS))]


def test_server_down_for_a_while(tmp_path: Path) -> None:
    """A server that goes away is an exit code and a word; when it is back everything arrives."""
    logs = tmp_path / "logs"
    _write(logs / "proj" / "run.jsonl", range(ROWS))
    with LoopbackServer() as server:
        server.go_down()
        child = _start(server, logs, tmp_path / "state")
        output = child.communicate(timeout=120)[0].decode()
        assert child.returncode == 6, output
        assert "WANDB_BASE_URL" in output
        assert "Traceback" not in output
        server.come_back()
        _finish(server, logs, tmp_path / "state")
        assert _steps(server) == [list(range(ROWS))]


def test_stored_but_unanswered(tmp_path: Path) -> None:
    """Chunks that were stored although the connection broke are not stored twice."""
    logs = tmp_path / "logs"
    _write(logs / "proj" / "run.jsonl", range(ROWS))
    with LoopbackServer() as server:
        server.faults.add(Fault(where="file_stream", times=2, drop="after"))
        _finish(server, logs, tmp_path / "state")
        assert _steps(server) == [list(range(ROWS))]


def test_killed_between_rewind_and_first_row(tmp_path: Path) -> None:
    """Rewound but rows missing is recognised: the next run sends the missing rows, unshifted."""
    logs, state = tmp_path / "logs", tmp_path / "state"
    first, second = logs / "proj" / "exp.jsonl.1", logs / "proj" / "exp.jsonl"
    with LoopbackServer() as server:
        _write(first, range(34))
        _finish(server, logs, state)
        _write(second, range(21, 41), extra=1000)
        server.faults.add(Fault(where="file_stream", times=None, status=500))
        child = _start(server, logs, state)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not server.runs[0].rewinds:
            time.sleep(0.05)
        time.sleep(0.3)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert [row["_step"] for row in server.runs[0].rows] == list(range(21))
        server.faults.clear()
        _finish(server, logs, state)
        rows = server.runs[0].rows
        assert [row["_step"] for row in rows] == list(range(41))
        assert all((row["actor/k0"] >= 1000) is (row["_step"] >= 21) for row in rows)


def test_uploader_dies_with_the_program(tmp_path: Path) -> None:
    """A sender never outlives a killed program: it would add rows while the next one plans."""
    logs = tmp_path / "logs"
    _write(logs / "proj" / "run.jsonl", range(ROWS))
    reached: list[float] = []

    def stop(_: object) -> None:
        reached.append(time.monotonic())

    with LoopbackServer() as server:
        server.faults.add(Fault(where="file_stream", times=None, delay_seconds=20, callback=stop))
        child = _start(server, logs, tmp_path / "state")
        deadline = time.monotonic() + 60
        while not reached and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _uploaders(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
        time.sleep(1.5)
        assert _uploaders(tmp_path) == []


def _uploaders(folder: Path) -> list[str]:
    """Processes that work below a folder: the uploader and its service."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in str((process / "cwd").readlink()):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
