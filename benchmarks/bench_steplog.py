"""What `StepLogger` costs a trainer a step, and what the merging of ranks costs afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from benchmarks.measure import Line, Session, environment, in_turn, run, timed
from verl_logsync import StepLogger
from verl_logsync.discover import discover
from verl_logsync.ranks import Piece, merge_ranks
from verl_logsync.sources.step_log import StepLog

AIM_MICROSECONDS = 50
AIM_MERGE_SECONDS = 1.0
RANKS = 8


def bench(session: Session) -> list[Line]:
    """All lines of this bench."""
    return [*_calls(session), _import(session), *_ranks(session)]


def _dozen() -> dict[str, Any]:
    """A dozen scalars of the kinds that trainers log."""
    return {
        **{f"actor/metric_{number}": number / 7 for number in range(6)},
        "training/global_step": 17,
        "actor/grad_norm": np.float32(0.3),
        "critic/score/mean": np.float64(0.25),
        "num_turns/max": np.int64(4),
        "flag": np.bool_(True),
        "critic/score/std": np.float64("nan"),
    }


def _calls(session: Session) -> list[Line]:
    count = 2_000 if session.quick else 50_000
    folder = session.fresh("steplog")
    with StepLogger("p", "e", directory=folder) as logger:
        ours = _each(lambda data, step: logger.log(data=data, step=step), count)
    if logger.report.written != count:
        raise RuntimeError(f"records are missing: {logger.report}")
    with (folder / "verl.jsonl").open("wb", buffering=0) as stream:
        theirs = _each(lambda data, step: _as_verl_does(stream.write, data, step), count)
    middle, late = median(ours), sorted(ours)[int(count * 0.99)]
    return [
        Line(
            "steplog",
            f"log a dozen scalars, {count:,} times, median",
            f"{middle:.1f} microseconds (99 % within {late:.1f})",
            f"below {AIM_MICROSECONDS}",
            middle < AIM_MICROSECONDS,
        ),
        Line("steplog", "the same as verl's file logger does it", f"{median(theirs):.1f}"),
    ]


def _each(log: Callable[[Mapping[str, Any], int], object], count: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for step in range(count):
        data = _dozen()
        start = time.perf_counter()
        log(data, step)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _as_verl_does(write: Callable[[bytes], object], data: Mapping[str, Any], step: int) -> None:
    record = {"step": step, "data": data}
    write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def _import(session: Session) -> Line:
    place = session.fresh("steplog-import")
    env = environment()
    times = in_turn(
        {
            "ours": lambda: run(["-c", "from verl_logsync import StepLogger"], env, place).seconds,
            "json": lambda: run(["-c", "import json, pathlib, typing"], env, place).seconds,
        },
        3 if session.quick else 15,
    )
    ours, bare = (1000 * median(times[name]) for name in ("ours", "json"))
    what = "import StepLogger (beside: Python with json, pathlib and typing)"
    return Line("steplog", what, f"{ours:.0f} ms ({bare:.0f} ms)")


def _ranks(session: Session) -> list[Line]:
    count = 200 if session.quick else 2_000
    folder = session.made(f"ranks-{count}", lambda place: _write_ranks(place, count))
    source = StepLog()
    files = discover([folder], [source]).files
    start = time.perf_counter()
    pieces: list[Piece] = [(f.facts.rank or 0, f, source.read(f)) for f in files]
    reading = time.perf_counter() - start
    seconds = median(timed(lambda: merge_ranks(pieces)) for _ in range(5))
    rows = merge_ranks(pieces).reading.rows.num_rows
    if rows != count:
        raise RuntimeError(f"{count} steps were logged, {rows} came out")
    what = f"{RANKS} ranks x {count:,} steps x 100 keys"
    aim = f"under {AIM_MERGE_SECONDS:g} s"
    return [
        Line("steplog", f"read {what}", f"{reading:.2f} s"),
        Line("steplog", f"merge {what}", f"{seconds:.2f} s", aim, seconds < AIM_MERGE_SECONDS),
    ]


def _write_ranks(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    names = [f"group{number % 9}/metric_{number}" for number in range(98)]
    for rank in range(RANKS):
        values = rng.random((count, len(names))).tolist()
        with StepLogger(
            "p", "e", directory=folder, rank=rank, world_size=RANKS, attempt_id="job"
        ) as logger:
            for step, row in enumerate(values, 1):
                logger.log(
                    {"actor/lr": 1e-6, "tokens/max": step, **dict(zip(names, row, strict=True))},
                    step,
                )
