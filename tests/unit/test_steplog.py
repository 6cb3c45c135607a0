"""`StepLogger` keeps what it is given, whatever happens to the disk, the process or the values."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_logsync import StepLogger
from verl_logsync.binding import bind_checkpoint
from verl_logsync.columns import decode
from verl_logsync.discover import discover
from verl_logsync.errors import UsageError
from verl_logsync.model import LogFile, Reading
from verl_logsync.sources.step_log import StepLog
from verl_logsync.steplog import histogram, table
from verl_logsync.steplog.identity import find_place, find_start

ROOT = Path(__file__).parents[2]
SOURCE = StepLog()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of a launcher of the test run do not count."""
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_", "VERL_LOGSYNC_", "WANDB_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Warnings are expected here; they are tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def records(path: str | Path) -> list[dict[str, Any]]:
    return [line for line in lines(path) if "step" in line]


def headers(path: str | Path) -> list[dict[str, Any]]:
    return [line for line in lines(path) if "step_log" in line]


def found(folder: Path) -> tuple[LogFile, ...]:
    return discover([folder], [SOURCE]).files


def read(folder: Path) -> Reading:
    (file,) = found(folder)
    return SOURCE.read(file)


def steps(reading: Reading) -> list[int]:
    return list(reading.rows.column("_step").to_pylist())


def run_python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- what is written -----------------------------------------------------------------------


def test_writes_what_it_is_given(tmp_path: Path) -> None:
    """Each record holds its step, both clocks and the data; the header says who wrote it."""
    before = time.time()
    with StepLogger("proj", "exp", directory=tmp_path, config={"lr": 1e-6}, run_id="r1") as logger:
        logger.log(data={"a": 1, "b": 0.5, "c": None, "d": math.nan, "e": -math.inf}, step=3)
    assert logger.path == str(tmp_path / "proj/exp/rank-0000.steps.jsonl")
    header, record, end = lines(logger.path)
    assert (header["project"], header["experiment"], header["run_id"]) == ("proj", "exp", "r1")
    assert (header["step_log"], header["rank"], header["world_size"]) == (1, 0, 1)
    assert header["config"] == {"lr": 1e-6}
    assert before <= header["started"]["time"] <= record["time"] <= time.time()
    assert record["mono"] >= header["started"]["mono"]
    assert record["step"] == 3
    assert '"c":null,"d":NaN,"e":-Infinity' in Path(logger.path).read_text()
    assert end["exit_code"] == 0
    assert end["written"] == 1


def test_takes_numpy_scalars_and_arrays(tmp_path: Path) -> None:
    """Numpy scalars are numbers, an array of one is one, and one of many is a histogram."""
    with StepLogger("p", "e", directory=tmp_path) as logger:
        data = {
            "f32": np.float32(0.1),
            "f64": np.float64(0.1),
            "i": np.int64(7),
            "flag": np.bool_(True),
            "zero_d": np.array(2.5),
            "one": np.array([[3]]),
            "many": np.arange(6.0).reshape(2, 3),
            "nan": np.float32("nan"),
        }
        logger.log(data, np.int32(4))
    record = records(logger.path)[0]
    assert record["step"] == 4
    values = record["data"]
    assert math.isnan(values.pop("nan"))
    many = values.pop("many")
    assert (sum(many["values"]), many["bins"][0], many["bins"][-1]) == (6, 0.0, 5.0)
    assert values == {
        "f32": float(np.float32(0.1)),
        "f64": 0.1,
        "i": 7,
        "flag": True,
        "zero_d": 2.5,
        "one": 3,
    }


class Tensor:
    """Behaves as a tensor of another library does when it is asked for its values."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def tolist(self) -> Any:
        if isinstance(self._values, Exception):
            raise self._values
        return self._values


def test_keeps_histograms_tables_and_texts(tmp_path: Path) -> None:
    """Typed values are written as objects that say what they are; long tables are cut aloud."""
    with unheard(), StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log(
            {"x": 1},
            0,
            histograms={"h": Tensor([1.0, 1.0, 2.0, math.nan])},
            tables={"t": (["a", "b"], [[i, "x"] for i in range(150)])},
            texts={"s": "an\nanswer"},
        )
    data = records(logger.path)[0]["data"]
    assert data["h"]["_type"] == "histogram"
    assert sum(data["h"]["values"]) == 3
    assert len(data["h"]["bins"]) == len(data["h"]["values"]) + 1
    assert data["h"]["not_finite"] == 1
    assert data["t"]["columns"] == ["a", "b"]
    assert (len(data["t"]["data"]), data["t"]["rows"]) == (100, 150)
    assert data["s"] == "an\nanswer"
    assert logger.report.left_out == {"table rows": 50}


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [1e308, -1e308],
        [5e-324, 0.0],
        [1e17, 1e17 + 16],
        [True, False],
        [2**70, 1],
    ],
    ids=str,
)
def test_histograms_count_every_number(values: list[float]) -> None:
    """No number is lost at an edge, however large, small or equal the numbers are."""
    made = histogram(values, bins=7)
    assert sum(made["values"]) == len(values)
    assert len(made["bins"]) == 8
    assert made["bins"] == sorted(made["bins"])
    assert made["bins"][0] <= min(values)
    assert made["bins"][-1] >= max(values)


def test_histogram_agrees_with_numpy() -> None:
    """Numbers away from the edges fall into the bins into which numpy puts them."""
    values = np.random.default_rng(0).normal(size=5000)
    counts, edges = np.histogram(values, bins=64)
    made = histogram(values)
    assert made["values"] == counts.tolist()
    assert np.allclose(made["bins"], edges)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3
        )
    ),
    max_leaves=5,
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda key: not key.startswith("_")
)


def same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other) or one == other


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.dictionaries(KEYS, JSON, max_size=4), min_size=1, max_size=5))
def test_every_value_comes_back(
    kind: Any, rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever JSON can say is read as it was logged: null, NaN and missing stay three things."""
    folder = tmp_path_factory.mktemp("log")
    with StepLogger("p", "e", directory=folder, format=kind) as logger:
        for number, row in enumerate(rows):
            logger.log(row, number)
    assert logger.report.complete
    reading = read(folder)
    assert steps(reading) == list(range(len(rows)))
    for key in {key for row in rows for key in row}:
        for value, row in zip(decode(reading.rows.column(key)), rows, strict=True):
            if key in row:
                assert same(value, row[key]), (key, value, row[key])
            else:
                assert repr(value) == "MISSING"


# -- bad values ----------------------------------------------------------------------------


class Liar(Mapping[str, int]):
    """A mapping that cannot be read."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 1


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "bad",
    [
        1j,
        object(),
        LOOP,
        {(1, 2): 3},
        b"bytes",
        Tensor(RuntimeError("CUDA error")),
        Tensor([]),
        Tensor(LOOP),
        np.array(["a", "b"]),
        float,
        lambda: 0,
        "x" * (9 << 20),
    ],
    ids=[
        "complex",
        "object",
        "loop",
        "tuple key",
        "bytes",
        "CUDA",
        "empty",
        "endless",
        "words",
        "class",
        "function",
        "too large",
    ],
)
def test_a_bad_value_costs_only_itself(bad: Any, tmp_path: Path) -> None:
    """A value that cannot be written is left out, counted and warned of; the others are kept."""
    logger = StepLogger("p", "e", directory=tmp_path)
    with pytest.warns(RuntimeWarning, match="step log"):
        logger.log({"good": 1, "bad": bad, "fine": 2}, 0)
    logger.log({"good": 2}, 1)
    logger.finish()
    assert [r["data"] for r in records(logger.path)] == [{"good": 1, "fine": 2}, {"good": 2}]
    assert sum(logger.report.left_out.values()) == 1
    assert not logger.report.complete
    assert lines(logger.path)[-1]["left_out"] == logger.report.left_out
    (note,) = read(tmp_path).notes
    assert "could not log some values" in note


def test_half_characters_are_mended(tmp_path: Path) -> None:
    """Half of a surrogate pair, which no reader takes, becomes a question mark."""
    with unheard(), StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log({"text": "a\ud800b", "\udc00": 1, "good": "\U0001f600"}, 0)
    assert records(logger.path)[0]["data"] == {"text": "a?b", "?": 1, "good": "\U0001f600"}


@pytest.mark.parametrize("step", [None, "3", -1, 1.5, math.nan, 2**63, np.array([1, 2])], ids=str)
def test_a_bad_step_costs_only_its_record(step: Any, tmp_path: Path) -> None:
    """A record without a usable step is counted as dropped."""
    logger = StepLogger("p", "e", directory=tmp_path)
    with pytest.warns(RuntimeWarning, match="no step"):
        logger.log({"a": 1}, step)
    with unheard():
        logger.finish()
    assert records(logger.path) == []
    assert logger.report.dropped == {"no usable step": 1}


@pytest.mark.parametrize("data", [None, [1], "text", Liar()], ids=["None", "list", "text", "liar"])
def test_bad_data_never_raises(data: Any, tmp_path: Path) -> None:
    """What is no mapping, or one that cannot be read, is counted."""
    logger = StepLogger("p", "e", directory=tmp_path)
    with unheard():
        logger.log(data, 0)
        logger.log(data, 1, texts={"t": "x"})
        logger.finish()
    assert not logger.report.complete


def test_warns_once_a_reason(tmp_path: Path) -> None:
    """A thousand bad values are one warning, and a full count."""
    logger = StepLogger("p", "e", directory=tmp_path)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for number in range(50):
            logger.log({"bad": 1j}, number)
        logger.finish()
    assert len(heard) == 1
    assert sum(logger.report.left_out.values()) == 50


def test_warnings_as_errors_do_not_end_the_training(tmp_path: Path) -> None:
    """Even where every warning is an error `log` and `finish` return."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger = StepLogger("p", "e", directory=tmp_path)
        logger.log({"bad": 1j}, 0)
        logger.log({}, -1)
        logger.finish()
    assert logger.report.dropped


@pytest.mark.parametrize(
    "options",
    [
        {"format": "csv"},
        {"max_bytes": 0},
        {"fsync": "sometimes"},
        {"fsync": -1},
        {"flush_records": 0},
    ],
    ids=str,
)
def test_meaningless_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """A wrong argument is said when the job starts."""
    with pytest.raises(UsageError):
        StepLogger("p", "e", directory=tmp_path, **options)


def test_secrets_in_the_config_are_masked(tmp_path: Path) -> None:
    """No key or password of the config is in the file."""
    config = {"judge": {"api_key": "sk-verysecretverysecret123"}, "url": "https://me:pw@host/x"}
    with StepLogger("p", "e", directory=tmp_path, config=config) as logger:
        logger.log({"a": 1}, 0)
    text = Path(logger.path).read_text()
    assert "verysecret" not in text
    assert "pw@" not in text


def test_odd_configs_never_raise(tmp_path: Path) -> None:
    """A config with objects keeps their text; one that cannot be written is left out aloud."""
    with StepLogger("p", "e1", directory=tmp_path, config={"a": Path("/x"), "b": {1: 2}}) as one:
        pass
    assert headers(one.path)[0]["config"] == {"a": "/x", "b": {"1": 2}}
    with unheard(), StepLogger("p", "e2", directory=tmp_path, config={"a": LOOP}) as two:
        two.log({"a": 1}, 0)
    assert headers(two.path)[0]["config"] == {}
    assert not two.report.complete


@pytest.mark.parametrize("name", ["../../up", "/etc", "a/../../b", "a\0b", ".."])
def test_names_do_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    """Whatever project and experiment are called, the log is below the directory."""
    root = tmp_path / "logs"
    with StepLogger(name, name, directory=root) as logger:
        logger.log({"a": 1}, 0)
    assert root in Path(logger.path).resolve().parents


# -- crashes -------------------------------------------------------------------------------

WRITER = """
    import os, sys
    from verl_logsync import StepLogger
    folder, kind, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logger = StepLogger("p", "e", directory=folder, format=kind, max_bytes=200_000 if
                        kind == "jsonl" else None, flush_records=20, run_id="r")
    for step in range(first, first + 10**6):
        logger.log({f"key{i}": step + i / 7 for i in range(30)}, step)
        os.write(1, b"%d\\n" % step)
"""


def killed_writer(folder: Path, kind: str, first: int, seconds: float) -> int:
    """Run a writer, kill it at some moment, and return the last step it had logged."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), kind, str(first)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.kill()
    said = process.stdout.read().split(b"\n")
    process.wait()
    whole = [int(word) for word in said[:-1]]
    return max(whole, default=first)


@pytest.mark.parametrize(("kind", "kills", "unflushed"), [("jsonl", 20, 0), ("parquet", 4, 20)])
def test_sigkill_loses_nothing_that_was_written(
    kind: str, kills: int, unflushed: int, tmp_path: Path
) -> None:
    """Killed at any moment, again and again: every record is there once, in order."""
    rng = random.Random(1)
    last: dict[int, int] = {}
    for number in range(kills):
        first = number * 10**6
        last[first] = killed_writer(tmp_path, kind, first, rng.uniform(0.0, 0.08))
    reading = read(tmp_path)
    assert all(skip.reason.value == "malformed record" for skip in reading.skips)
    got = steps(reading)
    assert len(got) == len(set(got))
    for first, acknowledged in last.items():
        own = [step for step in got if first <= step < first + 10**6]
        assert own == list(range(first, first + len(own))), "a hole, or out of order"
        assert first + len(own) > acknowledged - unflushed, "a record that was written is gone"
    value = reading.rows.column("key29").to_pylist()
    assert value == [step + 29 / 7 for step in got]
    starts = [restart.row for restart in reading.restarts]
    assert starts == sorted(set(starts))
    assert len(starts) <= kills - 1


def test_a_torn_line_is_closed_not_cut(tmp_path: Path) -> None:
    """A restart leaves every byte of the log as it was and begins on a new line."""
    with StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log({"a": 1}, 0)
    path = Path(logger.path)
    torn = path.read_bytes() + b'{"step":1,"time":17'
    path.write_bytes(torn)
    with StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log({"a": 2}, 1)
    data = path.read_bytes()
    assert data.startswith(torn + b"\n")
    reading = read(tmp_path)
    assert steps(reading) == [0, 1]
    assert [(skip.records, f"{path}:4" in skip.place) for skip in reading.skips] == [(1, True)]


def test_a_restart_is_a_new_attempt(tmp_path: Path) -> None:
    """Each start appends a header, with a number and an id of its own."""
    for attempt in range(3):
        with StepLogger("p", "e", directory=tmp_path, attempt_id="job7") as logger:
            for step in range(attempt * 2, attempt * 2 + 4):
                logger.log({"a": attempt}, step)
        assert logger.attempt_id == ["job7", "job7#2", "job7#3"][attempt]
    said = headers(logger.path)
    assert [h["attempt_number"] for h in said] == [1, 2, 3]
    assert len({h["log"]["id"] for h in said}) == 1
    reading = read(tmp_path)
    assert steps(reading) == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7]
    assert [(r.row, r.attempt_id) for r in reading.restarts] == [(4, "job7#2"), (8, "job7#3")]
    assert all(r.started_at is not None for r in reading.restarts)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_full_disk_costs_records_not_the_training(kind: Any, tmp_path: Path) -> None:
    """Records beyond the disk's end are counted; when there is room again the log goes on."""
    with unheard(), small_disk(tmp_path / "disk", "64k") as disk:
        filler = disk / "filler"
        logger = StepLogger("p", "e", directory=disk, format=kind, flush_records=10)
        filler.write_bytes(b"x" * 20_000)
        for step in range(100):
            logger.log({"a": step, "pad": os.urandom(500).hex()}, step)
        assert kind == "parquet" or logger.report.dropped
        filler.unlink()
        for step in range(100, 105):
            logger.log({"a": step}, step)
        logger.finish()
        lost = sum(logger.report.dropped.values())
        reading = read(disk)
        got = steps(reading)
        assert len(got) == len(set(got)) == logger.report.written
        assert len(got) + lost == 105
        if kind == "jsonl":
            assert got[-5:] == [100, 101, 102, 103, 104]
            assert any("could not log some records" in note for note in reading.notes)


def test_a_file_size_limit_is_like_a_full_disk(tmp_path: Path) -> None:
    """Where the system refuses to let the file grow the process goes on, and says how many."""
    code = """
        import resource, sys, warnings
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        from verl_logsync import StepLogger
        logger = StepLogger("p", "e", directory=sys.argv[1])
        for step in range(100):
            logger.log({"a": step}, step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        logger.log({"a": 100}, 100)
        logger.finish(exit_code=0)
        print(logger.report.written)
    """
    written = int(run_python(code, str(tmp_path)))
    reading = read(tmp_path)
    assert steps(reading) == [*range(written - 1), 100]
    assert reading.ending is not None
    (skip,) = reading.skips
    assert (skip.reason.value, skip.records) == ("malformed record", 1)


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    """The training runs without a log, is told so, and gets one when the way is free."""
    blocker = tmp_path / "p"
    blocker.write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match="cannot be written yet"):
        logger = StepLogger("p", "e", directory=tmp_path)
    with unheard():
        logger.log({"a": 1}, 0)
        blocker.unlink()
        logger.log({"a": 2}, 1)
        logger.finish()
    assert logger.report.written == 1
    assert sum(logger.report.dropped.values()) == 1
    assert [r["step"] for r in records(logger.path)] == [1]
    assert headers(logger.path)


def test_a_deleted_file_is_begun_anew(tmp_path: Path) -> None:
    """What is logged after somebody deleted the file is not written into nowhere."""
    logger = StepLogger("p", "e", directory=tmp_path)
    logger.log({"a": 1}, 0)
    Path(logger.path).unlink()
    logger.log({"a": 2}, 1)
    logger.finish()
    assert [r["step"] for r in records(logger.path)] == [1]
    assert [h["continues"] for h in headers(logger.path)] == [True]


# -- threads, forks, processes -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_threads_do_not_mix_their_records(kind: Any, tmp_path: Path) -> None:
    """Two threads log at once: each record is whole, and all are there."""
    with StepLogger("p", "e", directory=tmp_path, format=kind, flush_records=50) as logger:

        def work(own: int) -> None:
            for number in range(300):
                logger.log({"thread": own, "pad": "x" * 200}, number)

        threads = [threading.Thread(target=work, args=(own,)) for own in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reading = read(tmp_path)
    assert reading.skips == ()
    owners = reading.rows.column("thread").to_pylist()
    pairs = sorted(zip(owners, steps(reading), strict=True))
    assert pairs == [(own, number) for own in range(2) for number in range(300)]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """A child refuses, counts and says so; the parent's log goes on as if it was not there."""
    logger = StepLogger("p", "e", directory=tmp_path)
    logger.log({"a": 0}, 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with unheard():
                logger.log({"a": "child"}, 1)
                logger.finish()
            code = 0 if logger.report.dropped == {"forked child": 1} else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    logger.log({"a": 2}, 2)
    logger.finish()
    assert [r["data"]["a"] for r in records(logger.path)] == [0, 2]


def test_a_child_forked_while_a_thread_logs_does_not_hang(tmp_path: Path) -> None:
    """The lock that another thread held at the fork is not waited for in the child."""
    code = """
        import os, sys, threading, time, warnings
        warnings.simplefilter("ignore")
        from verl_logsync import StepLogger
        logger = StepLogger("p", "e", directory=sys.argv[1], fsync="always")
        done = threading.Event()
        def work():
            step = 0
            while not done.is_set():
                logger.log({"a": 1}, step); step += 1
        thread = threading.Thread(target=work); thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                logger.log({"b": 1}, 0)
                os._exit(0)
            end = time.monotonic() + 20
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, 9); os.waitpid(child, 0); done.set(); thread.join()
                    sys.exit("a child hangs")
                time.sleep(0.001)
        done.set(); thread.join()
        logger.finish()
    """
    run_python(code, str(tmp_path))
    assert "b" not in read(tmp_path).rows.column_names


def test_a_second_process_of_a_rank_gets_its_own_file(tmp_path: Path) -> None:
    """Two processes that both believe to be rank 0 do not write into one file."""
    with StepLogger("p", "e", directory=tmp_path) as one:
        one.log({"a": 1}, 0)
        code = """
            import sys, warnings
            warnings.simplefilter("ignore")
            from verl_logsync import StepLogger
            with StepLogger("p", "e", directory=sys.argv[1]) as logger:
                logger.log({"a": 2}, 0)
            print(logger.path)
        """
        other = run_python(code, str(tmp_path)).strip()
    assert other != one.path
    assert [r["data"]["a"] for r in records(one.path)] == [1]
    assert [r["data"]["a"] for r in records(other)] == [2]
    assert len(found(tmp_path)) == 2


def test_the_end_of_the_process_closes_the_log(tmp_path: Path) -> None:
    """Without `finish` the log is closed at exit, and does not claim to know how it ended."""
    code = """
        import sys
        from verl_logsync import StepLogger
        logger = StepLogger("p", "e", directory=sys.argv[1], format="parquet")
        logger.log({"a": 1}, 0)
    """
    run_python(code, str(tmp_path))
    reading = read(tmp_path)
    assert steps(reading) == [0]
    assert reading.ended_at is not None
    assert reading.ending is None


def test_the_context_manager_tells_how_it_ended(tmp_path: Path) -> None:
    """An exception inside is exit code 1, and goes on."""
    with pytest.raises(ZeroDivisionError), StepLogger("p", "e", directory=tmp_path) as logger:
        logger.log({"a": 1}, 0)
        _ = 1 // 0
    ending = read(tmp_path).ending
    assert ending is not None
    assert ending.exit_code == 1


def test_logging_after_the_end_is_counted(tmp_path: Path) -> None:
    """A record after `finish` is not written, and finishing twice is free."""
    logger = StepLogger("p", "e", directory=tmp_path)
    logger.finish()
    logger.close()
    with pytest.warns(RuntimeWarning, match="closed"):
        logger.log({"a": 1}, 0)
    assert len(lines(logger.path)) == 2


# -- rotation ------------------------------------------------------------------------------


def test_a_large_file_is_continued_in_the_next(tmp_path: Path) -> None:
    """Beyond max_bytes a new file with its own header begins; together they are one log."""
    for _ in range(2):
        with StepLogger("p", "e", directory=tmp_path, max_bytes=2000) as logger:
            for step in range(20):
                logger.log({"a": step, "pad": "x" * 200}, step)
                logger.log({"b": step}, step)
    folder = Path(logger.path).parent
    numbers = sorted(
        (headers(path)[0]["file"], path.name) for path in folder.glob("*.steps*.jsonl")
    )
    assert [number for number, _ in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) > 4
    assert numbers[0][1] == "rank-0000.steps.1.jsonl"
    assert numbers[-1][1] == "rank-0000.steps.jsonl"
    for number, name in numbers[1:]:
        first = headers(folder / name)[0]
        assert first["continues"]
        assert first["previous"] == f"rank-0000.steps.{number - 1}.jsonl"
    reading = read(tmp_path)
    assert steps(reading) == [step for step in range(20) for _ in range(2)] * 2
    assert [restart.row for restart in reading.restarts] == [40]
    assert reading.skips == ()


def test_a_step_is_not_split_over_two_files(tmp_path: Path) -> None:
    """All records of a step are in the same file, even beyond max_bytes."""
    with StepLogger("p", "e", directory=tmp_path, max_bytes=500) as logger:
        for step in range(6):
            for part in range(5):
                logger.log({f"k{part}": "x" * 150}, step)
    where: dict[int, set[str]] = {}
    for path in Path(logger.path).parent.glob("*.jsonl"):
        for record in records(path):
            where.setdefault(record["step"], set()).add(path.name)
    assert len({name for names in where.values() for name in names}) > 3
    assert all(len(names) == 1 for names in where.values())


def test_parquet_has_one_row_group_a_flush(tmp_path: Path) -> None:
    """Each flush is a row group; after twenty the file is sealed, and all files are complete."""
    import pyarrow.parquet as pq

    with StepLogger("p", "e", directory=tmp_path, format="parquet", flush_records=5) as logger:
        for step in range(203):
            logger.log({"a": step, **({"late": 1.5} if step > 100 else {})}, step)
            if step % 50 == 49:
                assert steps(read(tmp_path)) == list(range(step + 1))
    files = sorted(Path(logger.path).parent.iterdir())
    groups = {path.name: pq.ParquetFile(path).metadata.num_row_groups for path in files}
    assert groups == {
        "rank-0000.steps.1.parquet": 20,
        "rank-0000.steps.2.parquet": 20,
        "rank-0000.steps.parquet": 1,
    }
    reading = read(tmp_path)
    assert steps(reading) == list(range(203))
    assert reading.rows.column("late").null_count == 101


# -- who writes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "rank", "world"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 3, 8),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 2, 4),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "7", "SLURM_NTASKS": "9"}, 1, 2),
        ({"RANK": "junk", "WORLD_SIZE": ""}, 0, 1),
        ({"RANK": "5"}, 5, 6),
    ],
    ids=str,
)
def test_the_rank_is_the_launchers(env: dict[str, str], rank: int, world: int) -> None:
    """torchrun's variables, else Slurm's, else 0 of 1."""
    place = find_place(env=env)
    assert (place.rank, place.world_size) == (rank, world)
    given = find_place(7, 16, env)
    assert (given.rank, given.world_size) == (7, 16)


@pytest.mark.parametrize(
    ("env", "attempt"),
    [
        ({"TORCHELASTIC_RUN_ID": "j1", "TORCHELASTIC_RESTART_COUNT": "2"}, "torchelastic-j1-2"),
        ({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}, "slurm-77-batch-1"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}, "slurm-77-0-0"),
        ({"VERL_LOGSYNC_ATTEMPT": "mine", "SLURM_JOB_ID": "77"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77"}, "slurm-77-batch-0"),
    ],
    ids=str,
)
def test_the_attempt_is_the_launchers(env: dict[str, str], attempt: str) -> None:
    """All ranks of one start derive the same attempt id from what the launcher gives them."""
    start = find_start(env=env)
    assert (start.attempt_id, start.shared) == (attempt, True)
    assert find_start("given", env).attempt_id == "given"


def test_an_attempt_without_a_launcher_is_its_own() -> None:
    """torchrun's default run id says nothing, so that the id is made, and marked."""
    for env in ({}, {"TORCHELASTIC_RUN_ID": "none"}):
        start = find_start(env=env)
        assert not start.shared
        assert str(os.getpid()) in start.attempt_id


def test_all_ranks_of_a_start_name_the_log_alike(tmp_path: Path) -> None:
    """The log's id is the same on all ranks where they know a common attempt, else not."""
    for shared in (True, False):
        folder = tmp_path / str(shared)
        for rank in range(2):
            attempt = "job" if shared else None
            with StepLogger("p", "e", directory=folder, rank=rank, world_size=2,
                            attempt_id=attempt) as logger:  # fmt: skip
                logger.log({"a": 1}, 1)
        facts = [file.facts for file in found(folder)]
        assert [f.rank for f in facts] == [0, 1]
        assert [f.world_size for f in facts] == [2, 2]
        assert (facts[0].head_digest == facts[1].head_digest) == shared
        assert (facts[0].attempt_id == facts[1].attempt_id) == shared


def test_a_resumed_job_finds_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run id is the given one, else WANDB_RUN_ID, else that of the checkpoint folder."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()

    def run_id(**options: Any) -> str:
        with StepLogger("p", "e", directory=tmp_path, checkpoint_dir=checkpoints, **options) as one:
            return one.run_id

    assert run_id() == ""
    bind_checkpoint(checkpoints, "bound123")
    bind_checkpoint(checkpoints, "other456", "my_file")
    assert run_id() == "bound123"
    assert run_id(binding_file="my_file") == "other456"
    monkeypatch.setenv("WANDB_RUN_ID", "fromenv1")
    assert run_id() == "fromenv1"
    assert run_id(run_id="given789") == "given789"


def test_a_damaged_binding_is_said(tmp_path: Path) -> None:
    """A binding file with junk in it costs the binding, not the training."""
    (tmp_path / "wandb_run_id").write_text("two words/and a slash")
    with pytest.warns(RuntimeWarning, match="holds no run id"):
        logger = StepLogger("p", "e", directory=tmp_path, checkpoint_dir=tmp_path)
    logger.finish()
    assert logger.run_id == ""


@pytest.mark.parametrize("fsync", ["always", 0.0, 3600.0])
def test_forcing_to_the_disk_changes_nothing_else(fsync: Any, tmp_path: Path) -> None:
    """With any choice of fsync the same records are written."""
    with StepLogger("p", "e", directory=tmp_path, fsync=fsync) as logger:
        for step in range(5):
            logger.log({"a": step}, step)
    assert steps(read(tmp_path)) == list(range(5))
    assert logger.report.unsynced == 0


def test_only_the_standard_library_is_imported(tmp_path: Path) -> None:
    """Importing and using StepLogger loads no other package, and none of ours that is heavy."""
    code = """
        import sys
        before = set(sys.modules)
        from verl_logsync import StepLogger
        with StepLogger("p", "e", directory=sys.argv[1], config={"a": 1}) as logger:
            logger.log({"a": 1.0}, 0, histograms={"h": [1, 2]}, tables={"t": (["c"], [[1]])})
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(*sorted(new - sys.stdlib_module_names))
        print(*sorted(n for n in sys.modules if n.startswith("verl_logsync.")))
        print(*sorted(set(sys.modules) & {"socket", "asyncio", "ssl", "http", "urllib.request"}))
    """
    packages, ours, network = run_python(code, str(tmp_path)).split("\n")[:3]
    assert packages.split() == ["verl_logsync"]
    heavy = {"columns", "model", "sources", "api", "pipeline"}
    assert not {name.split(".")[1] for name in ours.split()} & heavy
    assert network == ""


def test_the_import_loads_next_to_nothing() -> None:
    """Importing StepLogger loads a handful of modules: what the standard library takes its time
    for is loaded when the first log is opened."""
    code = """
        import sys
        before = set(sys.modules)
        from verl_logsync import StepLogger
        print(*sorted(n for n in set(sys.modules) - before if not n.startswith("verl_logsync")))
    """
    loaded = run_python(code).split()
    slow = {"typing", "json", "re", "pathlib", "enum", "collections", "functools", "threading"}
    assert not slow & set(loaded)
    assert len(loaded) < 20


def test_tables_are_cut_to_their_limit() -> None:
    """A table keeps its first rows and says how many there were."""
    made = table(["a"], ([n] for n in range(5)), limit=2)
    assert made == {"_type": "table", "columns": ["a"], "data": [[0], [1]], "rows": 5}
    assert "rows" not in table(["a"], [[1]])
