"""`verl-logsync snapshot`: what verl truncates at a restart is kept."""

from __future__ import annotations

import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log


def rows(first, last, value):
    return [(step, {"actor/loss": value, "x": step}) for step in range(first, last + 1)]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "outputs" / "grpo" / "exp.jsonl"


@pytest.fixture
def snap(upload, log, tmp_path):
    def take():
        code, text = upload.text(log.parents[1], "--into", tmp_path / "copies", verb="snapshot")
        assert code == 0, text
        return text

    return take


def test_a_truncated_log_is_whole_with_its_copies(log, snap, tmp_path):
    """A log that was begun anew twice is one run of all its attempts, with the copies."""
    write_verl_log(log, rows(0, 30, 1.0))
    assert "new" in snap()
    write_verl_log(log, rows(21, 40, 2.0))
    snap()
    write_verl_log(log, rows(21, 45, 2.0))
    assert "grown" in snap()
    write_verl_log(log, rows(41, 60, 3.0))
    snap()
    (run,) = verl_logsync.load([log.parents[1], tmp_path / "copies"])
    history = run.history()
    assert history.index.tolist() == list(range(61))
    assert history["actor/loss"].tolist() == [1.0] * 21 + [2.0] * 20 + [3.0] * 20
    assert len(list((tmp_path / "copies").rglob("*.jsonl"))) == 3


def test_half_a_line_is_not_copied(log, snap, tmp_path):
    """Only whole lines are copied, so that a copy is always the beginning of its log."""
    write_verl_log(log, rows(0, 3, 1.0))
    whole = log.read_bytes()
    log.write_bytes(whole[:-10])
    snap()
    (copy,) = (tmp_path / "copies").rglob("*.jsonl")
    assert copy.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    log.write_bytes(whole)
    assert "grown" in snap()
    assert copy.read_bytes() == whole
    before = copy.stat().st_mtime_ns
    assert "unchanged" in snap()
    assert copy.stat().st_mtime_ns == before


def test_equal_names_in_two_folders(snap, upload, log, tmp_path):
    """Logs of one name in different folders have copies of their own."""
    write_verl_log(log, rows(0, 3, 1.0))
    other = write_verl_log(log.parents[1] / "B" / "grpo" / "exp.jsonl", rows(0, 5, 2.0))
    snap()
    copies = sorted(p.read_bytes() for p in (tmp_path / "copies").rglob("*.jsonl"))
    assert copies == sorted([log.read_bytes(), other.read_bytes()])
