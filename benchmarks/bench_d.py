"""(d) `upload` again when nothing is new, and how long the command takes to start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.generate import verl_files
from benchmarks.measure import Line, Server, Session, environment, in_turn, run, server

#: The width of rows does not matter here: none is read.
METRICS = 30
AIM_SECONDS = 2.0


def bench(session: Session) -> list[Line]:
    """200 runs of 1,000 rows that the ledger knows."""
    runs, rows = (20, 100) if session.quick else (200, 1_000)
    logs = session.made(f"d-{runs}x{rows}", lambda p: verl_files(p, runs, rows, metrics=METRICS))
    with server() as there:
        work = session.fresh("d-work")
        # The watch must see what there is to see, or its zeros below would prove nothing.
        first = len(set(_watched(there, logs, work)["opened"]))
        there.must_hold(runs, rows)
        name = f"{runs} runs of {rows:,} rows"
        return [
            Line("d", f"first upload, {name}, log files opened (the watch works)", f"{first}"),
            *_again(session, there, logs, work, f"again, {name}"),
        ]


def _again(session: Session, there: Server, logs: Path, work: Path, name: str) -> list[Line]:
    def on_nothing() -> float:
        place = session.fresh("d-nothing")
        (place / "empty").mkdir()
        return _upload(there, place / "empty", place)

    before = there.state()
    times = in_turn(
        {"again": lambda: _upload(there, logs, work), "start-up": on_nothing},
        3 if session.quick else 9,
    )
    seen = _watched(there, logs, work)
    after = there.state()
    extra = median(a - b for a, b in zip(times["again"], times["start-up"], strict=True))
    sent = after["lines_received"] - before["lines_received"]
    requests = _requests(after) - _requests(before)
    return [
        Line(
            "d",
            f"{name}, after start-up",
            f"{extra:.2f} s ({median(times['again']):.2f} s : {median(times['start-up']):.2f} s)",
            f"under {AIM_SECONDS:g} s",
            extra < AIM_SECONDS,
        ),
        Line("d", f"{name}, log files opened", f"{len(seen['opened'])}", "0", not seen["opened"]),
        Line("d", f"{name}, history lines sent", f"{sent}", "0", sent == 0),
        Line("d", f"{name}, uploaders started", f"{len(seen['children'])}"),
        Line("d", f"{name}, requests to the server (all uploads together)", f"{requests}"),
    ]


def _requests(state: Mapping[str, Any]) -> int:
    """How often the server was asked by others than this bench."""
    return sum(count for what, count in state["requests"].items() if what != "/__state__")


def _upload(there: Server, logs: Path, work: Path) -> float:
    env = environment(**there.env, VERL_LOGSYNC_STATE_DIR=str(work / "state"))
    return run(["-m", "verl_logsync", "upload", str(logs)], env, work).seconds


def _watched(there: Server, logs: Path, work: Path) -> dict[str, list[str]]:
    env = environment(**there.env, VERL_LOGSYNC_STATE_DIR=str(work / "state"))
    report = work / "watched.json"
    run(["-m", "benchmarks.watched", str(report), str(logs), "upload", str(logs)], env, work)
    seen: dict[str, list[str]] = json.loads(report.read_text())
    return seen


def start_up(session: Session) -> list[Line]:
    """`verl-logsync --help` against a Python that does nothing."""
    place = session.fresh("start")
    env = environment()
    times = in_turn(
        {
            "help": lambda: run(["-m", "verl_logsync", "--help"], env, place).seconds,
            "python": lambda: run(["-c", "pass"], env, place).seconds,
        },
        5 if session.quick else 15,
    )
    ours, bare = median(times["help"]), median(times["python"])
    return [
        Line(
            "start",
            "verl-logsync --help",
            f"{1000 * ours:.0f} ms (python alone {1000 * bare:.0f} ms)",
        )
    ]
