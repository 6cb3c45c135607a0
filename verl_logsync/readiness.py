"""Which rows are final enough to send, and in which state that leaves the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from verl_logsync.assemble import Surroundings
from verl_logsync.columns import TIMESTAMP, as_numbers
from verl_logsync.model import History, RunState
from verl_logsync.verl_keys import training_rows

_Ints = np.ndarray[Any, np.dtype[np.int64]]

#: No step has its rollout dump yet, and there will be some.
NO_DUMP_YET: Final = -1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for more, in seconds.

    `settle`: files changed more recently may still complete their newest step. `stale_after`:
    a run whose files are older is over. `final`: everything is complete now.
    """

    settle: float = 60.0
    stale_after: float = 3600.0
    final: bool = False


@dataclass(frozen=True, slots=True)
class Readiness:
    """`rows` rows may be sent; `recheck_at` is when time alone changes that (None: never)."""

    rows: int
    state: RunState
    exit_code: int
    recheck_at: float | None
    notes: tuple[str, ...] = ()


def judge(
    history: History,
    around: Surroundings,
    changed_at: float,
    now: float,
    patience: Patience,
    dumped_to: int | None = None,
) -> Readiness:
    """Judge a run by its end, its age and the user's patience.

    Args:
        dumped_to: the last step whose rollout dump is there (`NO_DUMP_YET`: of none); None when
            no dump is to be waited for.
        changed_at: latest modification of its files, seconds since 1970.
        now: seconds since 1970.
    """
    rows = len(history)
    end = _recorded_end(history, around)
    if end is not None:
        return Readiness(rows, *end)
    if patience.final:
        return Readiness(rows, "finished", 0, None, ("finished because of --final",))
    age = now - changed_at
    if age < patience.settle:
        settled_at = changed_at + patience.settle
        waiting = _without_dump(history, dumped_to, now - patience.settle)
        ready = int(min([max(rows - 1, 0), *waiting[:1]]))
        note = _held_back(history, ready, age, bool(len(waiting))) if rows else ()
        return Readiness(ready, "running", 0, settled_at, note)
    if age < patience.stale_after:
        return Readiness(rows, "running", 0, changed_at + patience.stale_after)
    offline = around.offline_last_step
    if offline is not None and history.last_step is not None and history.last_step > offline:
        note = (f"interrupted: its W&B log ends at step {offline} without an exit record",)
        return Readiness(rows, "running", 0, None, note)
    if offline is not None:
        note = ("failed: its log has no exit record and is no longer written",)
        return Readiness(rows, "failed", 1, None, note)
    return Readiness(rows, "finished", 0, None, ("assumed finished: its files stopped changing",))


def _recorded_end(
    history: History, around: Surroundings
) -> tuple[RunState, int, float | None, tuple[str, ...]] | None:
    if around.ending is not None:
        code = around.ending.exit_code
        return ("finished" if code == 0 else "failed"), code, None, ()
    total = total_steps(around.config)
    if total is not None and history.last_step is not None and history.last_step >= total:
        return "finished", 0, None, (f"finished: step {total} of {total} is reached",)
    return None


def _without_dump(history: History, dumped_to: int | None, since: float) -> _Ints:
    """The rows of training steps that still wait for their dump, which is written before the row.

    A row that was logged before `since` waits no longer: its dump may lie where nobody looks.
    """
    if dumped_to is None or not len(history):
        return np.empty(0, dtype=np.int64)
    logged = history.table.drop_columns(sorted(history.added & set(history.table.schema.names)))
    waiting = training_rows(logged) & (history.steps > dumped_to)
    if TIMESTAMP in history.table.schema.names:
        times = as_numbers(history.table.column(TIMESTAMP))
        with np.errstate(invalid="ignore"):
            waiting &= ~(times < since)
    return np.flatnonzero(waiting)


def _held_back(history: History, ready: int, age: float, waits: bool) -> tuple[str, ...]:
    first, last = int(history.steps[ready]), history.last_step
    changed = f"files changed {max(age, 0):.0f} s ago"
    if first == last:
        dump = ", or bring its rollout dump," if waits else ""
        return (
            f"step {last} is held back: its {changed} and may still complete it{dump} (--final "
            "sends it now)",
        )
    return (
        f"steps {first}-{last} are held back: their {changed}, and the rollout dump of step "
        f"{first} is not there yet (--final sends them now)",
    )


def total_steps(config: Mapping[str, Any]) -> int | None:
    """`trainer.total_training_steps`, when the config states it."""
    trainer = config.get("trainer")
    total = trainer.get("total_training_steps") if isinstance(trainer, Mapping) else None
    return total if isinstance(total, int) and not isinstance(total, bool) and total > 0 else None
