"""(diagnose) Many runs derived and judged, from tables in memory."""

from __future__ import annotations

from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.measure import Line, Session, in_turn, timed
from verl_logsync.diagnostics import DiagnoseOptions, diagnose
from verl_logsync.testing.simulate import DEVICE_MEMORY_GB, SimulatedRun, simulate

METRICS = 100
OPTIONS = DiagnoseOptions(device_memory_gb=DEVICE_MEMORY_GB)


def bench(session: Session) -> list[Line]:
    """100 runs x 2,000 steps x 100 metrics."""
    runs, steps = (5, 200) if session.quick else (100, 2000)
    # So many different ones are enough: the work on each is the same.
    made = [_widened(simulate(steps=steps, seed=seed)) for seed in range(min(runs, 10))]
    metrics = made[0].table.num_columns - 1

    def judge_all() -> None:
        for number in range(runs):
            run = made[number % len(made)]
            found = diagnose(run.table, run.config, (), OPTIONS)
            assert found.columns.num_rows == steps + 1

    seconds = in_turn({"ours": lambda: timed(judge_all)}, 1 if session.quick else 3)["ours"]
    rows = runs * (steps + 1)
    name = f"diagnose {runs} runs x {steps:,} steps x {metrics} metrics"
    return [
        Line("diagnose", name, f"{rows / median(seconds):,.0f} rows/s ({median(seconds):.2f} s)")
    ]


def _widened(run: SimulatedRun) -> SimulatedRun:
    """The run with metrics that no diagnostic asks for, up to the number a real log has."""
    table = run.table
    numbers = np.random.default_rng(run.seed)
    for place in range(METRICS + 1 - table.num_columns):
        values = pa.array(numbers.normal(size=table.num_rows))
        table = table.append_column(f"other/metric_{place}", values)
    return SimulatedRun(table, run.config, run.disease, run.onset, run.seed, run.keys)
