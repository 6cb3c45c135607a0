"""Source tensorboard: scalars of event files, one row a step."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_logsync import api
from verl_logsync.columns import AXES, MISSING, decode
from verl_logsync.discover import discover
from verl_logsync.errors import NotALog, UnreadableInput
from verl_logsync.model import LogFile, Reading, Skip, SkipReason
from verl_logsync.settings import Settings
from verl_logsync.sources.tensorboard import TensorBoard

pytest.importorskip("tensorboard")

FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDER = FIXTURES / "tensorboard/restarted/tensorboard_log/grpo_arith/qwen_small_grpo"
FIRST = FOLDER / "events.out.tfevents.1786957200.node-7.311.0"
SECOND = FOLDER / "events.out.tfevents.1786960800.node-7.502.0"
TEXT = FOLDER / "events.out.tfevents.1786957201.node-7.311.0"
TENSORS = FIXTURES / "tensorboard/tensors/events.out.tfevents.1786957200.node-7.7.0"
SESSION = FIXTURES / "verl_file/crash_resume/session1_steps0-33.jsonl"
SOURCE = TensorBoard()

Scalar = tuple[int, str, float]
Write = Callable[..., Path]


def verdict(path: Path) -> LogFile | Skip:
    found = discover([path], [SOURCE])
    return found.files[0] if found.files else found.skips[0]


def recognised(path: Path) -> LogFile:
    file = verdict(path)
    assert isinstance(file, LogFile), file
    return file


def read(path: Path) -> Reading:
    return SOURCE.read(recognised(path))


def rows(reading: Reading) -> list[tuple[int, dict[str, Any]]]:
    columns = {name: decode(reading.rows.column(name)) for name in reading.rows.column_names}
    found = []
    for index, step in enumerate(columns["_step"]):
        values = {k: v[index] for k, v in columns.items() if k not in AXES}
        found.append((step, {k: v for k, v in values.items() if v is not MISSING}))
    return found


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write scalars (step, key, value) to an event file, one event each."""

    def make(scalars: Sequence[Scalar], folder: str = "tb", start: float = 1000.0) -> Path:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = tmp_path / folder
        writer = EventFileWriter(str(place))
        for number, (step, key, value) in enumerate(scalars):
            summary = Summary(value=[Summary.Value(tag=key, simple_value=value)])
            writer.add_event(Event(wall_time=start + number, step=step, summary=summary))
        writer.close()
        (path,) = place.iterdir()
        return path

    return make


def test_scalars_of_one_step_are_one_row() -> None:
    """Every step is one row with all its keys, equal to the JSONL within a 32-bit float."""
    records = [json.loads(line) for line in SESSION.read_text().splitlines()[:23]]
    found = rows(read(FIRST))
    assert [step for step, _ in found] == [record["step"] for record in records]
    for (_, values), record in zip(found, records, strict=True):
        assert len(values) == 8
        for key, value in values.items():
            assert np.float32(value) == np.float32(record["data"][key]), key


def test_times_are_those_of_the_events() -> None:
    """A row's time is the wall time of its first scalar; the start that of the first event."""
    reading = read(FIRST)
    start = 1_786_957_200.0
    assert reading.rows.column("_timestamp").to_pylist() == [start + 30 * n for n in range(1, 24)]
    assert reading.started_at == start
    assert recognised(FIRST).facts.started_at == start


def test_values_are_the_shortest_that_are_meant(write: Write) -> None:
    """1e-06 as a 32-bit float is read as 1e-06; NaN and infinities stay what they are."""
    keys = {"lr": 1e-06, "x": 0.1, "big": 16777216.0, "inf": float("inf")}
    ((_, values),) = rows(read(write([(1, key, value) for key, value in keys.items()])))
    assert values == keys
    ((_, values),) = rows(read(write([(1, "nan", float("nan"))], "nan")))
    assert np.isnan(values["nan"])


def test_the_reading_says_how_exact_it_is() -> None:
    """Readers are told that values are 32-bit floats."""
    assert any("32-bit" in note for note in read(FIRST).notes)


def test_every_start_is_a_log_of_its_own() -> None:
    """A restart adds a file: two logs with their own starts, first and last steps."""
    found = discover([FOLDER], [SOURCE])
    facts = [file.facts for file in found.files]
    assert [(f.first_step, f.last_step) for f in facts] == [(0, 22), (20, 25)]
    assert all(f.opens_with_validation for f in facts)
    assert facts[0].started_at is not None
    assert facts[1].started_at == facts[0].started_at + 3600
    assert len({f.head_digest for f in facts} | {f.training_digest for f in facts}) == 4


def test_starts_that_begin_alike_are_told_apart(write: Write) -> None:
    """Two starts with the same first values have other digests: their times differ."""
    one = recognised(write([(1, "actor/a", 1.0)], "one", start=1000.0)).facts
    two = recognised(write([(1, "actor/a", 1.0)], "two", start=2000.0)).facts
    assert one.head_digest != two.head_digest
    assert one.training_digest != two.training_digest


def test_names_come_from_the_folders(write: Write) -> None:
    """`tensorboard_log/PROJECT/EXPERIMENT` names a run; other folders name nothing."""
    assert recognised(FIRST).facts.project == "grpo_arith"
    assert recognised(FIRST).facts.name == "qwen_small_grpo"
    for folder in ("tensorboard_log", "tensorboard_log/only_one", "elsewhere/p/e"):
        facts = recognised(write([(1, "actor/a", 1.0)], folder)).facts
        assert (facts.project, facts.name) == ("", ""), folder


def test_outside_verls_folders_every_folder_is_a_run(write: Write, tmp_path: Path) -> None:
    """Files of one process in several folders are as many runs, named after their folders."""
    first = write([(step, "loss", 1.0) for step in range(51)], "exp1/train")
    second = write([(step, "loss", 2.0) for step in range(40, 60)], "exp1/valid")
    first.rename(first.with_name("events.out.tfevents.1756846967.node.53134.29"))
    second.rename(second.with_name("events.out.tfevents.1756846967.node.53134.30"))
    found, _ = api.scan([tmp_path], Settings())
    assert {run.name for run in found.runs} == {"exp1/train", "exp1/valid"}


def test_generations_are_no_history() -> None:
    """A file that holds text only is said to be no history, without alarm."""
    skip = verdict(TEXT)
    assert isinstance(skip, Skip)
    assert skip.reason is SkipReason.UNKNOWN_KIND
    assert "generations" in skip.detail


def test_text_among_scalars_is_counted(tmp_path: Path) -> None:
    """Text records in a file with scalars are skipped and counted."""
    path = tmp_path / FIRST.name
    path.write_bytes(FIRST.read_bytes() + TEXT.read_bytes())
    (skip,) = read(path).skips
    assert (skip.reason, skip.detail[:2]) == (SkipReason.UNKNOWN_KIND, "2 ")


def test_scalars_kept_as_tensors() -> None:
    """The newer kind of scalar is read as well, several of one event into one row."""
    assert rows(read(TENSORS)) == [
        (n, {"actor/pg_loss": n / 10, "critic/score/mean": n / 10}) for n in range(4)
    ]


def test_a_key_that_comes_again_begins_a_row(write: Write) -> None:
    """Two records of one step with other keys are one row, with the same key they are two."""
    path = write([(1, "a", 1.0), (1, "b", 2.0), (1, "a", 3.0), (2, "a", 4.0), (1, "b", 5.0)])
    assert rows(read(path)) == [
        (1, {"a": 1.0, "b": 2.0}),
        (1, {"a": 3.0}),
        (2, {"a": 4.0}),
        (1, {"b": 5.0}),
    ]


def test_a_cut_file_gives_its_beginning(tmp_path: Path) -> None:
    """A file cut inside a record keeps what is whole and names the byte where it ends."""
    path = tmp_path / FIRST.name
    data = FIRST.read_bytes()
    path.write_bytes(data[:-10])
    reading = read(path)
    assert [step for step, _ in rows(reading)] == list(range(23))
    (skip,) = reading.skips
    assert skip.reason is SkipReason.TORN_TAIL
    assert "(byte " in skip.place


def test_a_damaged_record_ends_the_file(tmp_path: Path) -> None:
    """A record whose checksum fails ends the reading; its place and the loss are named."""
    path = tmp_path / FIRST.name
    data = bytearray(FIRST.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    reading = read(path)
    steps = [step for step, _ in rows(reading)]
    assert steps == list(range(len(steps)))
    assert 1 < len(steps) < 23
    (skip,) = reading.skips
    assert skip.reason is SkipReason.CORRUPT
    assert "not read" in skip.detail


def test_the_last_step_is_found_from_the_end(write: Write) -> None:
    """The last step of a file longer than what is read from its end is that of its last scalar."""
    path = write([(n // 40, f"actor/key_{n % 40}", n / 7) for n in range(24_000)])
    assert path.stat().st_size > 1_100_000
    assert recognised(path).facts.last_step == 599


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", SkipReason.NOTHING_YET),
        (FIRST.read_bytes()[:5], SkipReason.NOTHING_YET),
        (FIRST.read_bytes()[:60], SkipReason.NOTHING_YET),
        (b"this is text, no records\n" * 10, SkipReason.NOT_A_LOG),
    ],
)
def test_files_without_scalars(content: bytes, reason: SkipReason, tmp_path: Path) -> None:
    """An empty or just begun file is nothing yet; what has no records is no log."""
    path = tmp_path / FIRST.name
    path.write_bytes(content)
    skip = verdict(path)
    assert isinstance(skip, Skip)
    assert skip.reason is reason
    assert skip.hint


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensorboard is not installed the file is a skip that says what to type."""
    file = recognised(FIRST)
    loader = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, loader, None)
    skip = verdict(FIRST)
    assert isinstance(skip, Skip)
    assert skip.reason is SkipReason.UNREADABLE
    assert "pip install 'verl-logsync[tensorboard]'" in skip.hint
    with pytest.raises(UnreadableInput):
        SOURCE.read(file)


def test_a_file_that_loses_its_scalars_is_refused(tmp_path: Path) -> None:
    """A file replaced by an empty one between look and read is refused, not an empty run."""
    path = tmp_path / FIRST.name
    shutil.copy(FIRST, path)
    file = recognised(path)
    path.write_bytes(b"")
    with pytest.raises(NotALog):
        SOURCE.read(file)


def test_axes_are_no_metrics(write: Write) -> None:
    """A metric that is called like an axis does not overwrite it."""
    reading = read(write([(3, "_step", 9.0), (3, "actor/a", 1.0), (3, "_timestamp", 5.0)]))
    assert rows(reading) == [(3, {"actor/a": 1.0})]
    assert reading.rows.column("_timestamp").to_pylist() == [1001.0]
