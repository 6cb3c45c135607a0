"""The source `step_log` gives everything that is in the logs of `StepLogger`, and says the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_logsync import StepLogger
from verl_logsync.discover import discover
from verl_logsync.errors import InputError, NotALog
from verl_logsync.model import LogFile, Reading, Skip, SkipReason
from verl_logsync.sources import SOURCES
from verl_logsync.sources.step_log import StepLog
from verl_logsync.steplog.layout import METADATA_KEY

FIXTURES = Path(__file__).parents[2] / "fixtures" / "step_log"
SOURCE = StepLog()


@pytest.fixture(autouse=True)
def _no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)


def look(path: Path) -> tuple[tuple[LogFile, ...], tuple[Skip, ...]]:
    """What all sources together make of a path."""
    found = discover([path], SOURCES)
    return found.files, found.skips


def read(path: Path) -> Reading:
    (file,) = look(path)[0]
    assert file.source == "step_log"
    return SOURCE.read(file)


def steps(reading: Reading) -> list[int]:
    return list(reading.rows.column("_step").to_pylist())


def write(folder: Path, count: int = 5, **options: Any) -> Path:
    with StepLogger("p", "e", directory=folder, **options) as logger:
        for step in range(1, count + 1):
            logger.log({"actor/pg_loss": step / 8}, step)
    return Path(logger.path)


@pytest.mark.parametrize("case", ["two_attempts", "rotated", "parquet"])
def test_fixtures_are_read_whole(case: str) -> None:
    """Both attempts of each rank: rows, restart, masked config, run id, start and end."""
    files, skips = look(FIXTURES / case)
    assert all(skip.reason is SkipReason.DUPLICATE for skip in skips)
    assert [f.facts.rank for f in files] == ([0] if case == "rotated" else [0, 1])
    for file in files:
        facts = file.facts
        assert (facts.project, facts.name, facts.run_id) == ("grpo_arith", "toy", "toyrun01")
        assert (facts.first_step, facts.last_step, facts.attempt_id) == (0, 15, "first")
        assert facts.config["data.train_batch_size"] == "8"
        reading = SOURCE.read(file)
        assert steps(reading) == [*range(12), *range(8, 16)]
        assert [(r.row, r.attempt_id) for r in reading.restarts] == [(12, "second")]
        assert reading.config["judge_api_key"] == "***"
        assert reading.started_at == facts.started_at
        assert reading.ending is not None
        assert reading.skips == ()
        times = reading.rows.column("_timestamp").to_pylist()
        assert times == sorted(times)
        assert times[0] >= facts.started_at
        assert "_runtime" not in reading.rows.column_names


def test_values_keep_their_kinds() -> None:
    """Null, NaN, text, histograms in W&B's form, tables as the text of their columns and rows."""
    reading = read(FIXTURES / "rotated")
    odd = reading.rows.column("odd").to_pylist()
    assert odd[:5] == ['"text"', "null", "null", "null", '"text"']
    norms = reading.rows.column("actor/grad_norm").to_pylist()
    assert norms[5] != norms[5]
    first = json.loads(reading.rows.column("lengths")[0].as_py())
    assert set(first) == {"_type", "bins", "values"}
    assert (first["_type"], sum(first["values"])) == ("histogram", 64)
    table = json.loads(json.loads(reading.rows.column("samples")[0].as_py()))
    assert table == {"columns": ["input", "score"], "data": [["1+1=", 1.0]]}


def test_a_log_goes_before_verls_own_format(tmp_path: Path) -> None:
    """A log under any JSONL name is known by its content, and is not taken for verl's."""
    renamed = tmp_path / "metrics.jsonl"
    write(tmp_path / "logs").rename(renamed)
    files, _ = look(renamed)
    assert [f.source for f in files] == ["step_log"]


def test_a_log_without_its_header_is_read(tmp_path: Path) -> None:
    """When the head is lost names come from the folders, and the rows are all there."""
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    ((file,), _) = look(tmp_path)
    assert (file.facts.project, file.facts.name) == ("p", "e")
    assert file.facts.head_digest
    assert steps(SOURCE.read(file)) == [1, 2, 3, 4, 5]


def test_malformed_records_are_counted_with_file_and_line(tmp_path: Path) -> None:
    """Each bad line is a Skip that names it, and counts a record when it was one."""
    path = write(tmp_path, 2)
    with path.open("ab") as stream:
        stream.write(b'{"step":3,"time":1.0,"mono":1.0,"data":{"a":\n')
        stream.write(b'{"step":-3,"time":1.0,"mono":1.0,"data":{}}\n')
        stream.write(b'{"step":"x"}\n[]\nnonsense\n\0\0\0\n')
        stream.write(b'{"step_log":1,"broken\n{"step_log":9,"future":true}\n')
        stream.write(b'{"step":4,"time":1.0,"mono":1.0,"data":{"a":1}}\n')
        stream.write(b'{"step":5,"time":1.0')
    reading = read(tmp_path)
    assert steps(reading) == [1, 2, 4]
    said = [
        (s.reason, int(s.place.rpartition(":")[2].split()[0]), s.records) for s in reading.skips
    ]
    assert said == [
        (SkipReason.MALFORMED, 5, 1),
        (SkipReason.NO_STEP, 6, 1),
        (SkipReason.NO_STEP, 7, 1),
        (SkipReason.NO_STEP, 8, 1),
        (SkipReason.MALFORMED, 9, 1),
        (SkipReason.MALFORMED, 11, 0),
        (SkipReason.MALFORMED, 12, 0),
        (SkipReason.PARTIAL_LINE, 14, 0),
    ]
    assert all(str(path) in s.hint for s in reading.skips)


def test_thousands_of_bad_lines_are_counted_not_listed(tmp_path: Path) -> None:
    """Of a file full of junk some lines are named and all are counted."""
    path = write(tmp_path, 1)
    with path.open("ab") as stream:
        stream.write(b"junk\n" * 5000)
    reading = read(tmp_path)
    assert sum(skip.records for skip in reading.skips) == 5000
    assert len(reading.skips) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"project": 3, "experiment": None, "run_id": ["x"]},
        {"rank": "zero", "world_size": -1, "file": True, "started": "now"},
        {"log": "text", "previous": "../../etc/passwd", "config": [1]},
        {"log": {"id": 1, "first_step": "x", "started_at": 1e300}},
        {"started": {"time": float("nan")}, "previous": "a\0b"},
    ],
    ids=str,
)
def test_hostile_headers_do_no_harm(change: dict[str, Any], tmp_path: Path) -> None:
    """A header with anything in its fields costs those fields, never the rows."""
    path = write(tmp_path)
    head, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(
        json.dumps({**json.loads(head), **change}).encode().replace(b'"step_log": ', b'"step_log":')
        + b"\n"
        + rest
    )
    reading = read(tmp_path)
    assert steps(reading) == [1, 2, 3, 4, 5]


def test_a_newer_format_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A log of a later version is not guessed at."""
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'{"step_log":1,', b'{"step_log":2,'))
    files, (skip,) = look(tmp_path)
    assert files == ()
    assert "newer" in skip.detail
    assert "pip install" in skip.hint


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nothing_yet_is_not_a_failure(kind: Any, tmp_path: Path) -> None:
    """A job that has not logged a step yet, and an empty file of that name, are read later."""
    logger = StepLogger("p", "e", directory=tmp_path, format=kind)
    (Path(logger.path).parent / "rank-0001.steps.jsonl").touch()
    files, skips = look(tmp_path)
    logger.finish()
    assert files == ()
    assert {skip.reason for skip in skips} == {SkipReason.NOTHING_YET}


def test_starts_without_a_step_are_no_attempts(tmp_path: Path) -> None:
    """A job that died before its first step leaves a note, not an attempt without rows."""
    for attempt, count in (("a", 0), ("b", 3), ("c", 0), ("d", 2)):
        write(tmp_path, count, attempt_id=attempt)
    ((file,), _) = look(tmp_path)
    assert file.facts.attempt_id == "b"
    reading = SOURCE.read(file)
    assert [(r.row, r.attempt_id) for r in reading.restarts] == [(3, "d")]
    assert reading.notes == ("starts of the job that logged no step: 2",)


def test_a_missing_earlier_file_is_said(tmp_path: Path) -> None:
    """Where the first of several files is gone the others are read, and the gap is named."""
    shutil.copytree(FIXTURES / "rotated", tmp_path / "log")
    gone = tmp_path / "log/grpo_arith/toy/rank-0000.steps.1.jsonl"
    gone.unlink()
    ((file,), _) = look(tmp_path)
    reading = SOURCE.read(file)
    assert 0 < reading.rows.num_rows < 20
    (skip,) = reading.skips
    assert (skip.reason, skip.place) == (SkipReason.FILE_GONE, str(gone))


def test_a_copied_sealed_file_is_a_log_of_its_own(tmp_path: Path) -> None:
    """A sealed file whose follower is not there stands for the log; with it, it does not."""
    shutil.copytree(FIXTURES / "rotated", tmp_path / "log")
    folder = tmp_path / "log/grpo_arith/toy"
    (folder / "rank-0000.steps.jsonl").unlink()
    ((file,), (skip,)) = look(tmp_path)
    assert file.path.name == "rank-0000.steps.2.jsonl"
    assert skip.reason is SkipReason.DUPLICATE
    assert steps(SOURCE.read(file))[0] == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_strangers_file_of_that_name_is_not_followed(number: int, tmp_path: Path) -> None:
    """The files of a log belong together by content: another log's file is not read with it."""
    shutil.copytree(FIXTURES / "rotated", tmp_path / "log")
    folder = tmp_path / "log/grpo_arith/toy"
    other = write(tmp_path / "other", 1)
    other.replace(folder / f"rank-0000.steps.{number}.jsonl")
    files, _ = look(tmp_path / "log")
    assert len(files) == (2 if number == 1 else 3)
    for file in files:
        reading = SOURCE.read(file)
        assert reading.rows.num_rows < 20
        assert ("actor/grad_norm" in reading.rows.column_names) != (reading.rows.num_rows == 1)
    live = next(file for file in files if file.path.name == "rank-0000.steps.jsonl")
    assert [skip.reason for skip in SOURCE.read(live).skips] == [SkipReason.FILE_GONE]


def test_only_the_last_start_tells_how_it_ended(tmp_path: Path) -> None:
    """A start that ended well says nothing about the next one, which was killed."""
    path = write(tmp_path, attempt_id="a")
    whole = path.read_bytes()
    assert read(tmp_path).ending is not None
    write(tmp_path, attempt_id="b")
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:-2]) + b"\n")
    assert path.read_bytes().startswith(whole)
    assert read(tmp_path).ending is None


def test_a_histogram_is_given_in_wandbs_form(tmp_path: Path) -> None:
    """Numbers that are not finite are in no bin; they are noted, not passed on."""
    with StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log({}, 1, histograms={"h": [1.0, float("nan"), float("inf")]})
    reading = read(tmp_path)
    assert set(json.loads(reading.rows.column("h")[0].as_py())) == {"_type", "bins", "values"}
    assert reading.notes == ("histograms of h leave out numbers that are not finite: 2",)


@pytest.mark.parametrize(
    ("time", "kept"),
    [
        ("1700000000.5", 1700000000.5),
        ("1700000000", None),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("true", None),
        ("null", None),
        ('"1"', None),
        ("[1.5]", None),
    ],
)
def test_odd_times(time: str, kept: float | None, tmp_path: Path) -> None:
    """A time counts if JSON's usual parser takes it as a float, wherever in the log it stands."""
    path = tmp_path / "rank-0000.steps.jsonl"
    usual = '{"step":%d,"time":1.5,"mono":1.5,"data":{"a":0.5}}'
    lines = [usual % step for step in range(30)]
    for place in (1, 25):
        odd = lines[place].replace('"time":1.5', f'"time":{time}')
        path.write_text("\n".join([*lines[:place], odd, *lines[place + 1 :], ""]))
        reading = read(path)
        assert reading.rows.column("_timestamp").to_pylist()[place] == kept
        assert reading.rows.num_rows == 30


def test_a_jump_of_the_clock_is_noted(tmp_path: Path) -> None:
    """A wall clock that was set while the job ran shows against the monotonic one."""
    path = write(tmp_path)
    text = path.read_text().split("\n")
    record = json.loads(text[3])
    record["time"] += 3600.0
    text[3] = json.dumps(record, separators=(",", ":"))
    path.write_text("\n".join(text))
    assert "clock was set" in read(tmp_path).notes[0]


def test_a_log_that_begins_with_a_validation_says_so(tmp_path: Path) -> None:
    """After a resume the first record may hold validation results only."""
    for kind in ("jsonl", "parquet"):
        folder = tmp_path / kind
        with StepLogger("p", "e", directory=folder, format=kind) as logger:
            logger.log({"val-core/x/acc/mean@1": 0.5}, 20)
            logger.log({"actor/pg_loss": 0.5}, 21)
        ((file,), _) = look(folder)
        assert file.facts.opens_with_validation
        assert (file.facts.first_step, file.facts.last_step) == (20, 21)


# -- Parquet -------------------------------------------------------------------------------


def test_parquet_without_footer_is_one_refusal(tmp_path: Path) -> None:
    """A cut file, which StepLogger never leaves, is refused with a hint."""
    path = write(tmp_path, format="parquet")
    path.write_bytes(path.read_bytes()[:-20])
    files, (skip,) = look(tmp_path)
    assert files == ()
    assert skip.reason is SkipReason.NOT_A_LOG
    assert "footer" in skip.detail
    assert skip.hint


def test_a_file_that_is_cut_after_it_was_found_is_refused(tmp_path: Path) -> None:
    """Between the look and the reading a file may break; that is an input error."""
    path = write(tmp_path, format="parquet")
    ((file,), _) = look(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(NotALog) as raised:
        SOURCE.read(file)
    assert raised.value.place == str(path)
    path.unlink()
    with pytest.raises(InputError):
        SOURCE.read(file)


def test_a_damaged_row_group_costs_its_rows(tmp_path: Path) -> None:
    """A few wrong bytes in the numbers are found by checksums; the other row groups are read."""
    rng = np.random.default_rng(0)
    with StepLogger("p", "e", directory=tmp_path, format="parquet", flush_records=10) as logger:
        for step in range(40):
            logger.log({"x": rng.random()}, step)
    path = Path(logger.path)
    column = pq.read_metadata(path).row_group(1).column(3)
    start = column.dictionary_page_offset or column.data_page_offset
    middle = start + column.total_compressed_size // 2
    data = bytearray(path.read_bytes())
    data[middle] ^= 0x55
    path.write_bytes(data)
    reading = read(tmp_path)
    assert steps(reading) == [*range(10), *range(20, 40)]
    (skip,) = reading.skips
    assert (skip.reason, skip.records) == (SkipReason.CORRUPT, 10)


def test_a_footer_that_names_other_columns_is_refused(tmp_path: Path) -> None:
    """Names and types of the columns are covered by a digest, since nothing else protects them."""
    path = write(tmp_path, format="parquet")
    table = pq.read_table(path)
    metadata = table.schema.metadata
    names = [name.replace("pg_loss", "pg_lots") for name in table.column_names]
    pq.write_table(table.rename_columns(names).replace_schema_metadata(metadata), path)
    files, (skip,) = look(tmp_path)
    assert files == ()
    assert skip.reason is SkipReason.NOT_A_LOG


def test_other_parquet_files_are_left_alone(tmp_path: Path) -> None:
    """A Parquet file of anybody else is not claimed, whatever columns it has."""
    pq.write_table(pa.table({"_step": [1], "a": [0.5]}), tmp_path / "data.parquet")
    files, (skip,) = look(tmp_path)
    assert files == ()
    assert skip.reason is SkipReason.NOT_RECOGNISED


def test_hostile_parquet_values_are_counted(tmp_path: Path) -> None:
    """Steps that are none and text that is no JSON cost their row, with a place."""
    path = write(tmp_path, 3, format="parquet")
    header = (pq.read_schema(path).metadata or {})[METADATA_KEY]
    table = pa.table({"_step": [1, -1, None, 4], "a": ['"x"', "1", "2", "{broken"]})
    from verl_logsync.steplog.layout import SCHEMA_KEY
    from verl_logsync.steplog.parquet_file import schema_digest

    table = table.replace_schema_metadata(
        {METADATA_KEY: header, SCHEMA_KEY: schema_digest(table.schema)}
    )
    pq.write_table(table, path)
    reading = read(tmp_path)
    assert steps(reading) == [1]
    assert [(s.reason, s.records) for s in reading.skips] == [
        (SkipReason.NO_STEP, 1),
        (SkipReason.NO_STEP, 1),
        (SkipReason.MALFORMED, 1),
    ]


def test_what_a_killed_writer_left_unfinished_is_no_log(tmp_path: Path) -> None:
    """Hidden files beside a log (a flush that was killed, a copy by rsync) are not read twice."""
    with StepLogger("p", "e", directory=tmp_path, format="parquet") as logger:
        for step in range(3):
            logger.log({"a": 1}, step)
    log = Path(logger.path)
    hidden = log.with_name(f".{log.name}.17841")
    hidden.write_bytes(log.read_bytes())
    found = discover([tmp_path], SOURCES)
    assert [file.path for file in found.files] == [log]
    assert [skip.place for skip in found.skips] == [str(hidden)]
    assert discover([hidden], SOURCES).files
