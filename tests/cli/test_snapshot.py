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


@pytest.mark.parametrize("how", ["option", "settings"])
def test_logs_that_count_by_another_key(how, upload, tmp_path):
    """JSON lines that need --step-key are copied with it, and read back together with their log;
    the settings file says it as well as the option."""
    log = tmp_path / "outputs" / "sft" / "metrics.json"
    log.parent.mkdir(parents=True)
    copies = tmp_path / "copies"
    given = ["--step-key", "iter"]
    if how == "settings":
        (upload.home / "verl-logsync.toml").write_text('step_key = "iter"\n')
        given = []
    for first, last in ((0, 30), (21, 40)):
        lines = (f'{{"iter": {s}, "loss": {first + s / 10}}}\n' for s in range(first, last + 1))
        log.write_text("".join(lines))
        code, text = upload.text(log.parent, "--into", copies, *given, verb="snapshot")
        assert code == 0, text
        assert "new" in text
    (run,) = verl_logsync.load([log.parent, copies], step_key="iter")
    history = run.history()
    assert history.index.tolist() == list(range(41))
    assert history["loss"].tolist() == [s / 10 + (21 if s > 20 else 0) for s in range(41)]


def test_other_json_lines_are_no_logs_without_their_key(upload, tmp_path):
    """Without --step-key nothing of them is copied: they may be data."""
    log = tmp_path / "outputs" / "sft" / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"iter": 1, "loss": 0.5}\n')
    code, text = upload.text(log.parent, "--into", tmp_path / "copies", verb="snapshot")
    assert (code, text) == (0, "")
