"""Console text that was caught in several places."""

from __future__ import annotations

import gzip
from pathlib import Path

import verl_logsync


def _line(step: int, prefix: str = "") -> str:
    return f"{prefix}step:{step} - actor/loss:{step + 0.25} - timing_s/step:{10 + step / 7}\n"


def _write(path: Path, steps: range, prefix: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_line(step, prefix) for step in steps))


def test_the_same_text_caught_twice_is_one_run(tmp_path):
    """Ray's worker file and the driver's output hold the same records: one run, from the longer."""
    _write(tmp_path / "driver.log", range(1, 9), "(TaskRunner pid=7) ")
    _write(tmp_path / "worker.out", range(1, 6))
    (tmp_path / "old.log.gz").write_bytes(gzip.compress(_line(1).encode() + _line(2).encode()))
    (run,) = verl_logsync.load(tmp_path)
    assert run.history().index.tolist() == list(range(1, 9))
    assert run.name == "driver"


def test_another_end_is_another_job(tmp_path):
    """Two jobs that begin alike and end otherwise are two runs."""
    for name, last in (("one", 8), ("two", 80)):
        _write(tmp_path / f"{name}.log", range(1, 8))
        with (tmp_path / f"{name}.log").open("a") as log:
            log.write(f"step:8 - actor/loss:{last} - timing_s/step:3.5\n")
    assert sorted(run.name for run in verl_logsync.load(tmp_path)) == ["one", "two"]
