"""What is sent, given what the server holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from verl_logsync.assemble import Surroundings
from verl_logsync.digests import row_digests
from verl_logsync.held import Held
from verl_logsync.model import (
    Action,
    Attempt,
    Facts,
    History,
    LogFile,
    PassThrough,
    RemoteState,
    RunSources,
    Stamp,
    Target,
    UploadPlan,
)
from verl_logsync.plan import Situation, make_plan
from verl_logsync.readiness import Readiness

TARGET = Target("", "p", "r")


def _history(steps: range) -> History:
    table = pa.table({"_step": pa.array(steps, pa.int64()), "a": [s + 0.5 for s in steps]})
    return History(table, np.zeros(len(steps), dtype=np.int64))


def _planned(history: History, held: list[int], **more: Any) -> UploadPlan:
    """The plan for a history of which the server holds the steps `held`, in that order."""
    digests = dict(zip(history.steps.tolist(), row_digests(history).tolist(), strict=True))
    hashes = np.array([digests[step] for step in held], dtype=np.uint64)
    file = LogFile(Path("e.jsonl"), "verl_file", Stamp(1, 1, 1, 1), Facts(head_digest="h"))
    run = RunSources(TARGET, "e", "", "derived", (Attempt((file,), None, "content"),))
    remote = RemoteState("running", len(held), 0, 0, held[-1], {"_step": max(held)}, {})
    situation = Situation(
        run,
        history,
        Surroundings({}, PassThrough(), (), None, None),
        Readiness(len(history), "running", 0, None),
        {},
        None,
        remote,
        Held(np.array(held, dtype=np.int64), hashes),
        **{"can_rewind": True, **more},
    )
    return make_plan(situation)


TWICE = [*range(11), 5, *range(6, 11)]


def test_rows_held_twice_are_rewound() -> None:
    """The run goes back to before the first repeated step, and everything after it goes again."""
    plan = _planned(_history(range(14)), TWICE)
    assert plan.action is Action.REWIND
    assert plan.branch_step == 4
    assert plan.history.steps[plan.first_row] == 5


def test_rows_that_only_the_server_has_are_not_rewound() -> None:
    """They stay as they are, twice: a rewind that fails half-way would lose them for good."""
    plan = _planned(_history(range(14)), TWICE, only_there=8)
    assert plan.action is Action.KEPT_OLD
    assert plan.branch_step is None
    assert "put the earlier logs beside these" in plan.notes[0]


@pytest.mark.parametrize("last", [14, 17, 30])
def test_rows_that_the_client_would_renumber_are_not_sent(last: int) -> None:
    """With 17 lines on the server the client makes step 11 into 17, so steps up to 16 wait."""
    plan = _planned(_history(range(last)), TWICE, can_rewind=False)
    assert plan.action is Action.KEPT_OLD
    assert all(plan.history.steps[plan.first_row :] >= len(TWICE))
    assert plan.rows_to_send == max(0, last - len(TWICE))
    assert "only steps above 16 are sent" in plan.notes[0]


def test_the_way_out_can_be_pasted() -> None:
    """Old rows that stay name the flags that upload these logs as another run."""
    plan = _planned(_history(range(14)), TWICE, can_rewind=False)
    assert "--run e-2=e.jsonl" in plan.notes[0]
