"""What counts steps beside `_step`: said where it disagrees, never corrected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from verl_logsync.columns import as_numbers
from verl_logsync.errors import quoted
from verl_logsync.model import History

#: Metrics that count training steps in their own way, by their names.
STEP_COUNTERS: Final = (
    *("training/global_step", "global_step", "trainer/global_step", "train/global_step"),
)

_Floats = np.ndarray[Any, np.dtype[np.float64]]


def counter_notes(history: History) -> Iterator[str]:
    """A sentence for every counter that is not the step.

    Fully asynchronous trainers log the parameter version as step and count updates of the weights
    in `training/global_step`; verl 0.8.0 logs its aggregates one such window late.
    """
    for name in STEP_COUNTERS:
        if name not in history.table.schema.names:
            continue
        values = as_numbers(history.table.column(name))
        there = np.isfinite(values)
        steps, values = history.steps[there].astype(np.float64), values[there]
        if len(values) and bool(np.any(values != steps)):
            yield (
                f"{name} is another counter than the step: {_relation(steps, values)}. Both stay "
                f"as logged; to count by it: --step-key {quoted(name)}"
            )


def _relation(steps: _Floats, values: _Floats) -> str:
    """How a counter goes with the steps, in a few words."""
    apart = values - steps
    if bool(np.all(apart == apart[0])):
        return f"always {_number(abs(apart[0]))} {'more' if apart[0] > 0 else 'less'}"
    rate, start = _line(steps, values)
    if rate is None:
        first, last = f"{_number(values[0])} at step {_number(steps[0])}", _number(values[-1])
        return f"{first}, {last} at step {_number(steps[-1])}"
    text = f"{_number(rate)} to a step"
    if start:
        text += f", {_number(abs(start))} {'more' if start > 0 else 'less'}"
    if start == -rate:
        text += " (one step late, as verl 0.8.0 logs what it aggregates)"
    return text


def _line(steps: _Floats, values: _Floats) -> tuple[float | None, float]:
    """Rate and start of a counter that grows evenly; no rate when it does not."""
    if len(steps) < 2 or steps[-1] == steps[0]:
        return None, 0.0
    rate = (values[-1] - values[0]) / (steps[-1] - steps[0])
    start = values[0] - rate * steps[0]
    even = rate == round(rate) and bool(np.all(values == rate * steps + start))
    return (float(rate), float(start)) if even else (None, 0.0)


def _number(value: float) -> str:
    return f"{value:.15g}"
