"""Promise 3: whatever the server lacks, the verdict says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from verl_logsync.assemble import Surroundings
from verl_logsync.errors import ExitCode, LogsyncError
from verl_logsync.held import NOTHING_HELD, held_after
from verl_logsync.model import (
    Attempt,
    Catalog,
    Facts,
    History,
    LogFile,
    Outcome,
    PassThrough,
    RemoteState,
    Report,
    RunSources,
    Stamp,
    Target,
    UploadPlan,
)
from verl_logsync.plan import Situation, make_plan
from verl_logsync.readiness import Readiness
from verl_logsync.verify import verify_counts, verify_rows

TARGET = Target("", "p", "r")


def _plan() -> UploadPlan:
    table = pa.table({"_step": [0, 1, 2], "a": [0.5, 1.5, 2.5], "b": [1.0, None, 2.0]})
    history = History(table, np.zeros(3, dtype=np.int64))
    file = LogFile(Path("e.jsonl"), "verl_file", Stamp(1, 1, 1, 1), Facts(head_digest="h"))
    run = RunSources(TARGET, "e", "", "derived", (Attempt((file,), None, "content"),))
    extra = PassThrough(events=(b"x",), console=("line",))
    around = Surroundings({}, extra, (("h", extra),), None, None)
    ready = Readiness(3, "finished", 0, None)
    situation = Situation(
        run, history, around, ready, {}, None, None, NOTHING_HELD, can_rewind=True
    )
    return make_plan(situation)


def _arrived() -> RemoteState:
    return RemoteState(
        state="finished",
        lines=3,
        events=1,
        logs=1,
        last_step=2,
        summary={"_step": 2, "a": 2.5, "b": 2},
        key_counts={"_step": 3, "a": 3, "b": 2},
    )


def test_all_arrived() -> None:
    """What arrived as it was meant is verified."""
    assert verify_counts(_plan(), _arrived()).agrees


@pytest.mark.parametrize(
    "change",
    [
        {"lines": 2},
        {"lines": 4},
        {"events": 0},
        {"events": 2},
        {"logs": 0},
        {"last_step": 1},
        {"state": "running"},
        {"summary": {"_step": 2, "a": 2.5}},
        {"summary": {"_step": 2, "a": 2.4, "b": 2}},
        {"key_counts": {"a": 3, "b": 1}},
        {"key_counts": {"a": 3}},
    ],
    ids=str,
)
def test_every_difference_counts(change: Mapping[str, Any]) -> None:
    """A difference in any one count, the summary or the state is no agreement."""
    verdict = verify_counts(_plan(), replace(_arrived(), **change))
    assert not verdict.agrees
    assert verdict.differences


def test_a_missing_run_is_no_agreement() -> None:
    """A run that is not there was not uploaded."""
    assert not verify_counts(_plan(), None).agrees


ROWS = [{"_step": 0, "a": 0.5, "b": 1}, {"_step": 1, "a": 1.5}, {"_step": 2, "a": 2.5, "b": 2}]


@pytest.mark.parametrize(
    ("rows", "agrees"),
    [
        (ROWS, True),
        (ROWS[:2], False),
        ([], False),
        ([*ROWS, {"_step": 3, "a": 1}], False),
        ([ROWS[0], {"_step": 1, "a": 1.6}, ROWS[2]], False),
        ([ROWS[0], {"_step": 1, "a": 1.5, "b": None}, ROWS[2]], False),
        ([ROWS[1], ROWS[0], ROWS[2]], False),
    ],
)
def test_every_value_is_compared(rows: list[dict[str, Any]], agrees: bool) -> None:
    """With --verify full one wrong, missing, extra or displaced value is no agreement."""
    plan = _plan()
    assert verify_rows(plan, held_after(plan, NOTHING_HELD), rows).agrees is agrees


def test_a_failed_run_is_never_a_success() -> None:
    """Whatever prevented a run, the exit code of the whole is not 0."""
    target = Target("", "grpo", "exp")
    kinds: list[type[LogsyncError]] = [LogsyncError, *_all_below(LogsyncError)]
    for kind in kinds:
        outcome = Outcome(target, "exp", None, error=kind("no"))
        assert Report((outcome,), (), Catalog((), ())).exit_code is not ExitCode.OK, kind


def _all_below(kind: type[LogsyncError]) -> list[type[LogsyncError]]:
    return [found for sub in kind.__subclasses__() for found in (sub, *_all_below(sub))]
