"""Jobs of many processes that write step logs, die, and come back."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import verl_logsync

RANKS = 8

_JOB = """
import sys, time
from verl_logsync import StepLogger

folder, attempt, first, last, pause = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6])
dying = int(sys.argv[6]) if len(sys.argv) > 6 else None
loggers = [
    StepLogger("grpo", "ranks", directory=folder, rank=rank, world_size=8, attempt_id=attempt)
    for rank in range(8)
]
print("ready", flush=True)
for step in range(int(first), int(last) + 1):
    for rank, logger in enumerate(loggers):
        if rank == 5 and dying is not None and step >= dying:
            continue
        data = {"actor/loss": step + rank / 8, "perf/max_mem": float(rank), "training/token_count": 2}
        logger.log(data | {"attempt": float(attempt.rpartition("-")[2])}, step)
    time.sleep(pause)
for logger in loggers:
    logger.finish(0)
"""


def _start(folder: Path, attempt: int, *numbers: float) -> subprocess.Popen[str]:
    words = [str(folder), f"job-{attempt}", *map(str, numbers)]
    return subprocess.Popen([sys.executable, "-c", _JOB, *words], stdout=subprocess.PIPE, text=True)


def _records(folder: Path) -> dict[tuple[int, int, int], dict[str, float]]:
    """What the files say by (attempt, rank, step), read by a reader that knows nothing of us."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for path in folder.rglob("*.jsonl"):
        rank = attempt = -1  # a header comes first
        for line in path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if "step_log" in record:
                rank, attempt = record["rank"], int(record["attempt_id"].rpartition("-")[2])
            elif "step" in record:
                found[attempt, rank, record["step"]] = record["data"]
    return found


def _expected(folder: Path) -> dict[int, tuple[int, float]]:
    """By step: the attempt that has the last word, and the mean loss over its ranks."""
    losses: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (attempt, _, step), data in _records(folder).items():
        losses[attempt, step].append(data["actor/loss"])
    firsts = {a: min(s for b, s in losses if b == a) for a, _ in losses}
    history: dict[int, tuple[int, float]] = {}
    for attempt in sorted(firsts):
        history = {s: v for s, v in history.items() if s < firsts[attempt]}
        own = {s: float(np.mean(v)) for (a, s), v in losses.items() if a == attempt}
        history |= {step: (attempt, value) for step, value in own.items()}
    return history


def test_a_rank_dies_and_the_job_resumes(tmp_path, upload, one_run):
    """Rank 5 dies at step 60, the job stops at 70 and resumes from 50: 100 steps, each once,
    reduced over the ranks that tell of it, and it is said that a rank was missing."""
    folder = tmp_path / "logs"
    assert _start(folder, 1, 1, 70, 0, 60).wait(60) == 0
    assert _start(folder, 2, 51, 100, 0).wait(60) == 0
    (run,) = verl_logsync.load(folder)
    history = run.history()
    assert history.index.tolist() == list(range(1, 101))
    assert history["actor/loss"].tolist() == [step + 3.5 / 8 for step in range(1, 101)]
    assert set(history["perf/max_mem"]) == {7.0}
    assert set(history["training/token_count"]) == {16}
    assert history["attempt"].tolist() == [1.0] * 50 + [2.0] * 50
    assert run.account.balanced
    assert run.account.superseded == 20
    assert any("rank 5" in note for note in run.account.notes), run.account.notes
    result = upload.here(folder, final=True, verify="full")
    assert result.code == 0, result
    assert [row["_step"] for row in one_run().rows] == list(range(1, 101))


def test_ranks_kept_apart_on_request(tmp_path):
    """--per-rank keeps each rank's series, --rank-spread adds what they differ by."""
    folder = tmp_path / "logs"
    assert _start(folder, 1, 1, 3, 0).wait(60) == 0
    (run,) = verl_logsync.load(folder, per_rank=("perf/*",), rank_spread=("actor/*",))
    history = run.history()
    assert [history[f"rank{r}/perf/max_mem"].tolist() for r in range(8)] == [
        [r] * 3 for r in range(8)
    ]
    assert history["actor/loss/spread"].tolist() == [7 / 8] * 3


@pytest.mark.parametrize("seed", [1])
def test_killed_twenty_times(tmp_path, seed):
    """A job of 8 ranks that is killed 20 times at random, and resumes from its checkpoints, has
    every step once, from the start that has the last word."""
    rng = random.Random(seed)
    folder = tmp_path / "logs"
    first = 1
    for attempt in range(20):
        job = _start(folder, attempt, first, 10_000, 0.003)
        assert job.stdout is not None
        job.stdout.readline()
        # A start after one that had no checkpoint yet begins anew, which is another case.
        while attempt == 0 and max((s for _, _, s in _records(folder)), default=0) < 10:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.25))
        job.send_signal(signal.SIGKILL)
        job.communicate()
        steps = [step for _, _, step in _records(folder)]
        first = max(steps, default=0) // 10 * 10 + 1  # a checkpoint every ten steps
    (run,) = verl_logsync.load(folder)
    expected = _expected(folder)
    history = run.history()
    assert history.index.tolist() == sorted(expected)
    assert history["attempt"].tolist() == [expected[s][0] for s in sorted(expected)]
    np.testing.assert_allclose(history["actor/loss"], [expected[s][1] for s in sorted(expected)])
    assert run.account.balanced
