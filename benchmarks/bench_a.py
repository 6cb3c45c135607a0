"""(a) Reading and aligning verl JSONL, against parsing alone and against pandas."""

from __future__ import annotations

from pathlib import Path

import orjson
import pandas as pd

from benchmarks.generate import verl_file
from benchmarks.measure import Line, Session, compared, faster, in_turn, timed
from verl_logsync import pipeline
from verl_logsync.settings import Settings
from verl_logsync.sources import SOURCES

METRICS = 90


def bench(session: Session) -> list[Line]:
    """One long file and one short one."""
    sizes = ((2_000, 5), (1_000, 9)) if session.quick else ((20_000, 7), (1_000, 25))
    return [line for rows, repeats in sizes for line in _one_size(session, rows, repeats)]


def _one_size(session: Session, rows: int, repeats: int) -> list[Line]:
    folder = session.made(
        f"a-{rows}", lambda place: verl_file(place / "grpo" / "exp.jsonl", rows, metrics=METRICS)
    )
    path = folder / "grpo" / "exp.jsonl"
    engine = pipeline.Engine(Settings(), SOURCES)
    (run,) = pipeline.survey(engine, [folder]).runs

    def ours() -> None:
        loaded = pipeline.load(engine, run)
        assert len(loaded.history) == rows

    times = in_turn(
        {
            "bare": lambda: timed(lambda: _bare_loop(path)),
            "ours": lambda: timed(ours),
            "pandas": lambda: timed(lambda: pd.read_json(path, lines=True)),
        },
        repeats,
    )
    name = f"read + align {rows:,} rows x {METRICS}"
    lines = [
        compared(
            "a", f"{name}, against bare orjson.loads", times["ours"], times["bare"], at_most=2.0
        ),
        faster(
            "a", f"{name}, against pandas.read_json", times["ours"], times["pandas"], at_least=5.0
        ),
    ]
    tables = in_turn(
        {"ours": lambda: timed(ours), "pandas": lambda: timed(lambda: _as_table(path))}, 3
    )
    lines.append(
        faster(
            "a",
            f"{name}, against read_json + json_normalize (a table too)",
            tables["ours"],
            tables["pandas"],
        )
    )
    return lines


def _bare_loop(path: Path) -> None:
    """The least that anybody reading the file must do; results are thrown away."""
    loads = orjson.loads
    with path.open("rb") as stream:
        for line in stream:
            loads(line)


def _as_table(path: Path) -> pd.DataFrame:
    frame = pd.read_json(path, lines=True)
    table: pd.DataFrame = pd.json_normalize(frame["data"].tolist())
    by_step: pd.DataFrame = table.set_index(frame["step"])
    return by_step
