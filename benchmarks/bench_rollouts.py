"""(rollouts) One dump file reduced to statistics of its groups, against parsing alone."""

from __future__ import annotations

from pathlib import Path

import orjson

from benchmarks.generate import rollout_dump
from benchmarks.measure import Line, Session, compared, environment, in_turn, run, timed
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions

PATTERNS = ReductionOptions(answer_pattern=r"#### (.+)", format_pattern="^The |^Then ")
MEGABYTE = 1 << 20
#: Answers of up to so many characters: rows of about 1.6 kB, in which each row's share counts.
SHORT = 1300
MOST_MEMORY = 400

_PEAK = """
import re, sys
from pathlib import Path
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions
reduce_file(Path(sys.argv[1]), ReductionOptions(answer_pattern="#### (.+)"))
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def bench(session: Session) -> list[Line]:
    """One dump; a large one besides where the session asks for it."""
    if session.quick:
        return _one_size(session, 10, 2) + _one_size(session, 10, 5, SHORT)
    lines = _one_size(session, 200, 5) + _one_size(session, 100, 5, SHORT)
    return lines + (_one_size(session, 2048, 1) if session.large else [])


def _one_size(session: Session, megabytes: int, repeats: int, characters: int = 4000) -> list[Line]:
    folder = session.made(
        f"rollouts-{megabytes}-{characters}",
        lambda place: rollout_dump(place / "1.jsonl", megabytes * MEGABYTE, characters=characters),
    )
    path = folder / "1.jsonl"
    rows = reduce_file(path).rows
    times = in_turn(
        {
            "bare": lambda: timed(lambda: _bare_loop(path)),
            "ours": lambda: timed(lambda: _must_hold(path, rows, ReductionOptions())),
            "patterns": lambda: timed(lambda: _must_hold(path, rows, PATTERNS)),
        },
        repeats,
    )
    name = f"reduce a dump of {megabytes:,} MB ({rows:,} rows)"
    bare = "against bare orjson.loads"
    return [
        compared("rollouts", f"{name}, {bare}", times["ours"], times["bare"], at_most=2.0),
        compared(
            "rollouts",
            f"{name} with two text patterns, {bare}",
            times["patterns"],
            times["bare"],
            at_most=3.0,
        ),
        _peak(path, name),
    ]


def _must_hold(path: Path, rows: int, options: ReductionOptions) -> None:
    assert reduce_file(path, options).rows == rows


def _bare_loop(path: Path) -> None:
    """The least that anybody reading the file must do; results are thrown away."""
    loads = orjson.loads
    with path.open("rb") as stream:
        for line in stream:
            loads(line)


def _peak(path: Path, name: str) -> Line:
    """Peak memory of a process that does nothing else (`getrusage` would count its parent's)."""
    done = run(["-c", _PEAK, str(path)], environment(), path.parent)
    megabytes = int(done.output) / 1024
    return Line(
        "rollouts",
        f"{name}, peak memory of the process",
        f"{megabytes:.0f} MB",
        f"under {MOST_MEMORY} MB",
        megabytes < MOST_MEMORY,
    )
