"""Which rows of a live run may be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_logsync.assemble import Surroundings
from verl_logsync.columns import STEP, TIMESTAMP
from verl_logsync.model import History, PassThrough
from verl_logsync.readiness import NO_DUMP_YET, Patience, Readiness, judge
from verl_logsync.testing.tables import table

NOW = 10_000.0


def judged(ages: dict[int, float], dumped_to: int | None, **more: Any) -> Readiness:
    """A live run of steps whose rows were logged so many seconds ago; step 0 is a validation."""
    rows: dict[int, dict[str, Any]] = {
        step: {"val-core/x": 1.0, "grpo_val/rows": 8.0} if step == 0 else {"actor/lr": 1.0}
        for step in ages
    }
    columns = table(rows)
    if more.get("clock", True):
        times = np.array([NOW - age for age in ages.values()])
        columns = columns.append_column(TIMESTAMP, [times])
    assert columns.column_names[0] == STEP
    history = History(columns, np.zeros(len(ages), np.int64), added=frozenset({"grpo_val/rows"}))
    around = Surroundings({}, PassThrough(), (), None, None)
    return judge(history, around, NOW - 5, NOW, Patience(settle=60), dumped_to)


@pytest.mark.parametrize(
    ("dumped_to", "ready"), [(None, 4), (NO_DUMP_YET, 1), (1, 2), (2, 3), (3, 4), (9, 4)]
)
def test_rows_up_to_the_last_dump_are_ready(dumped_to: int | None, ready: int) -> None:
    """Where dumps are to come, a training step waits for its own; the newest step waits anyway,
    and a validation has none."""
    assert judged({0: 50, 1: 40, 2: 30, 3: 20, 4: 5}, dumped_to).rows == ready


def test_a_dump_is_not_waited_for_for_ever() -> None:
    """A row that was logged longer ago than --settle is sent without its dump; without a clock
    rows wait as long as the files change."""
    ages = {1: 90.0, 2: 70.0, 3: 50.0, 4: 5.0}
    assert judged(ages, NO_DUMP_YET).rows == 2
    assert judged(ages, NO_DUMP_YET, clock=False).rows == 0


def test_all_steps_that_wait_are_named() -> None:
    """One step or several, and whether a dump is what they wait for."""
    ages = {1: 30.0, 2: 20.0, 3: 5.0}
    (one,) = judged(ages, None).notes
    assert one.startswith("step 3 is held back: its files changed 5 s ago")
    assert "dump" not in one
    (several,) = judged(ages, 1).notes
    assert several.startswith("steps 2-3 are held back")
    assert "the rollout dump of step 2 is not there yet" in several
