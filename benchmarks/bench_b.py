"""(b) Writing fragments: encoding, framing, checksums and fsync."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median

from wandb.proto import wandb_internal_pb2 as pb

from benchmarks.generate import read_rows, verl_files
from benchmarks.measure import Line, Session, faster, in_turn, timed
from verl_logsync import pipeline
from verl_logsync.columns import to_json
from verl_logsync.held import NOTHING_HELD
from verl_logsync.model import UploadPlan
from verl_logsync.plan import Situation, make_plan
from verl_logsync.readiness import Readiness
from verl_logsync.settings import Settings
from verl_logsync.sources import SOURCES
from verl_logsync.transaction_log.fragment import write_fragment
from verl_logsync.transaction_log.writer import TransactionLogWriter

METRICS = 80
AIM = 15_000


def bench(session: Session) -> list[Line]:
    """One long run, and many runs of 1,000 rows (an fsync each)."""
    shapes = ((1, 2_000), (2, 1_000)) if session.quick else ((1, 20_000), (20, 1_000))
    return [line for runs, rows in shapes for line in _one_shape(session, runs, rows)]


def _one_shape(session: Session, runs: int, rows: int) -> list[Line]:
    folder = session.made(
        f"b-{runs}x{rows}", lambda place: verl_files(place, runs, rows, metrics=METRICS)
    )
    plans = [_plan(run) for run in _loaded(folder)]
    sample = list(itertools.islice(read_rows(folder / "grpo" / "exp-000.jsonl"), 1_000))
    number = itertools.count()

    def ours() -> None:
        parent = session.fresh(f"b-out-{next(number) % 2}")
        for plan in plans:
            write_fragment(plan, parent, entity="bench", use="send")

    def with_objects() -> None:
        with TransactionLogWriter(session.fresh("b-objects") / "run-x.wandb") as log:
            for step, values in sample:
                log.write_payload(_as_object(step, values))

    count = runs * rows
    times = in_turn(
        {"ours": lambda: timed(ours), "objects": lambda: timed(with_objects)},
        3 if session.quick else 7,
    )
    speed = median(count / seconds for seconds in times["ours"])
    scaled = [seconds * count / len(sample) for seconds in times["objects"]]
    name = f"write {runs} fragment{'s' * (runs > 1)} of {rows:,} rows x {METRICS}"
    return [
        Line("b", name, f"{speed:,.0f} rows/s", f"at least {AIM:,} rows/s", speed >= AIM),
        faster(
            "b", f"{name}, against protobuf objects (1,000 rows, scaled)", times["ours"], scaled
        ),
    ]


def _loaded(folder: Path) -> list[pipeline.Loaded]:
    engine = pipeline.Engine(Settings(), SOURCES)
    return [pipeline.load(engine, run) for run in pipeline.survey(engine, [folder]).runs]


def _plan(loaded: pipeline.Loaded) -> UploadPlan:
    """The plan of a first upload of a finished run."""
    return make_plan(
        Situation(
            run=loaded.run,
            history=loaded.history,
            around=loaded.around,
            ready=Readiness(len(loaded.history), "finished", 0, None),
            pins=loaded.pins,
            started_at=loaded.started_at,
            remote=None,
            held=NOTHING_HELD,
            can_rewind=False,
        )
    )


def _as_object(step: int, values: dict[str, object]) -> bytes:
    record = pb.Record()
    for key, value in values.items():
        record.history.item.add(nested_key=[key], value_json=to_json(value))
    record.history.item.add(nested_key=["_step"], value_json=str(step))
    record.history.step.num = step
    payload: bytes = record.SerializeToString()
    return payload
