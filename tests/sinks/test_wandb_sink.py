"""The W&B sink beyond what end-to-end tests reach: the official scan, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from verl_logsync.testing import Fault, LoopbackServer


def _write(path: Path, rows: int) -> None:
    path.parent.mkdir(parents=True)
    lines = (json.dumps({"step": s, "data": {"actor/x": s / 3}}) for s in range(rows))
    path.write_text("\n".join(lines) + "\n")


def _command(logs: Path, state: Path, *more: str) -> list[str]:
    words = ["upload", str(logs), "--final", "--state-dir", str(state), *more]
    return [sys.executable, "-m", "verl_logsync", *words]


def _env(server: LoopbackServer, home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return clean | server.env() | {"HOME": str(home), "WANDB_CACHE_DIR": str(home / "c")}


def test_official_scan_steps_in(tmp_path: Path) -> None:
    """When the plain query does not see the rows, W&B's own scan verifies them."""
    _write(tmp_path / "logs" / "p" / "e.jsonl", 50)
    with LoopbackServer() as server:
        nothing = json.dumps({"data": {"project": {"run": {"history": []}}}})
        server.faults.add(Fault(where="VerlLogsyncHistory", times=None, body=nothing, status=200))
        result = subprocess.run(
            _command(tmp_path / "logs", tmp_path / "s", "--verify", "full", "--json"),
            env=_env(server, tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert json.loads(result.stdout)["runs"][0]["verified_by"].startswith("every value")
        assert any(q.operation == "HistoryPage" for q in server.requests)


def test_interrupt_ends_the_uploader(tmp_path: Path) -> None:
    """Ctrl-C while rows are being sent is exit code 130 within seconds, and no process is left."""
    _write(tmp_path / "logs" / "p" / "e.jsonl", 50)
    with LoopbackServer() as server:
        reached: list[float] = []
        server.faults.add(
            Fault(
                where="file_stream",
                times=None,
                delay_seconds=60,
                callback=lambda _: reached.append(time.monotonic()),
            )
        )
        child = subprocess.Popen(
            _command(tmp_path / "logs", tmp_path / "s"),
            env=_env(server, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not reached and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130, errors
        assert "interrupted" in errors
        assert "Traceback" not in errors
        assert time.monotonic() - start < 10
        assert not list((tmp_path / "s").rglob("*.wandb"))
