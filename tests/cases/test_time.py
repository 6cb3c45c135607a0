"""Cases from public reports: time."""

from __future__ import annotations

import itertools
import time

import pytest

from verl_logsync.testing.builders import write_verl_log


def test_h1_five_hour_run_uploaded_next_day(killed_run, outputs, age, upload, one_run):
    """H1: a 5-hour run without exit record, uploaded the next day, ran for 5 hours yesterday."""
    killed_run("killed_five_hours")
    age(outputs, 86_400)
    assert upload.here(outputs).code == 0
    run = one_run()
    rows = run.rows
    assert [r["_step"] for r in rows] == list(range(1, 301))
    start = rows[0]["_timestamp"] - 60
    assert time.time() - start > 86_400
    assert [r["_runtime"] for r in rows] == [60 * n for n in range(1, 301)]
    assert [r["_timestamp"] for r in rows] == pytest.approx([start + 60 * n for n in range(1, 301)])
    assert run.summary["_runtime"] == 5 * 3600
    assert run.summary["_timestamp"] == pytest.approx(start + 5 * 3600)
    assert run.summary["_wandb"]["runtime"] == 5 * 3600
    assert run.state == "failed"
    assert upload.here(outputs).rows_sent == 0


def test_h1_jsonl_uploaded_next_day(outputs, age, upload, one_run):
    """H1: a JSONL log has no time: it is rebuilt from step times up to the file's last change."""
    seconds = [50.0 + s for s in range(20)]
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [(s, {"actor/loss": s / 7, "timing_s/step": seconds[s]}) for s in range(20)],
    )
    age(outputs, 86_400)
    ended = (outputs / "grpo" / "qwen.jsonl").stat().st_mtime
    assert upload.here(outputs).code == 0
    rows = one_run().rows
    assert rows[-1]["_timestamp"] == pytest.approx(ended, abs=1)
    steps = [b["_timestamp"] - a["_timestamp"] for a, b in itertools.pairwise(rows)]
    assert steps == pytest.approx(seconds[1:])
    assert rows[-1]["_runtime"] == pytest.approx(sum(seconds), abs=1)
    assert "estimated" in upload.text(outputs, verb="scan")[1]
