"""Source console: every form in which verl's step lines come down to us."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_logsync.columns import AXES, MISSING, decode
from verl_logsync.discover import discover
from verl_logsync.errors import NotALog
from verl_logsync.hush import suspects
from verl_logsync.model import LogFile, Reading, Skip, SkipReason
from verl_logsync.secrets_mask import mask_text
from verl_logsync.sources.console import Console
from verl_logsync.sources.console import source as source_module

FIXTURES = Path(__file__).parents[2] / "fixtures"
MERGED = FIXTURES / "console/ray_0.9.1_merged/train.log"
COARSE = FIXTURES / "console/ray_0.4_three_decimals/train.log"
SESSIONS = FIXTURES / "console/two_sessions/train.log"
WRAPPED = FIXTURES / "console/terminal_wrapped/paste.txt"
STAMPED = FIXTURES / "console/k8s_stamps/pod.log"
NOCOLOR = FIXTURES / "console/ray_0.7.1_nocolor/train.log"
WORKER = FIXTURES / "console/worker_files/worker-0d3f-01000000-19558.out"
TRUTH = FIXTURES / "verl_file/whole_run/qwen_small_grpo.jsonl"
RAY = "(TaskRunner pid=20276) "
SOURCE = Console()


def truth() -> dict[int, dict[str, Any]]:
    records = map(json.loads, TRUTH.read_text().splitlines())
    return {record["step"]: record["data"] for record in records}


def local(text: str) -> float:
    """The time that a stamp without a zone means on this machine."""
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").timestamp()


def utc(text: str) -> float:
    when = datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f")
    return when.replace(tzinfo=timezone.utc).timestamp()


def verdict(path: Path) -> LogFile | Skip | None:
    found = discover([path], [SOURCE])
    if found.files:
        return found.files[0]
    return None if found.skips[0].detail == "no source knows its content" else found.skips[0]


def recognised(path: Path) -> LogFile:
    file = verdict(path)
    assert isinstance(file, LogFile), file
    return file


def read(path: Path) -> Reading:
    return SOURCE.read(recognised(path))


def rows(reading: Reading) -> list[tuple[int, dict[str, Any]]]:
    """Step and values of every row."""
    columns = {name: decode(reading.rows.column(name)) for name in reading.rows.column_names}
    found = []
    for index, step in enumerate(columns["_step"]):
        values = {k: v[index] for k, v in columns.items() if k not in AXES}
        found.append((step, {k: v for k, v in values.items() if v is not MISSING}))
    return found


Log = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Write lines (or text as it is) to a file that looks like a log."""

    def write(*lines: str, name: str = "train.log", end: str = "\n") -> Path:
        path = tmp_path / name
        path.write_bytes(("\n".join(lines) + end).encode(errors="surrogateescape"))
        return path

    return write


# -- what the samples say ------------------------------------------------------------------


@pytest.mark.parametrize("path", [MERGED, WORKER], ids=["merged", "worker"])
def test_agrees_with_the_file_logger_bit_for_bit(path: Path) -> None:
    """The console of 0.9.1 and its JSONL hold the same values of the same types."""
    expected = truth()
    for step, values in rows(read(path)):
        assert values == expected[step], step
        assert {k: type(v) for k, v in values.items()} == {
            k: type(v) for k, v in expected[step].items()
        }


def test_merged_log_is_complete() -> None:
    """Verl case E35: 41 records, each once, the two decoys ignored, nothing left out."""
    reading = read(MERGED)
    assert [step for step, _ in rows(reading)] == list(range(41))
    assert reading.skips == ()
    assert reading.restarts == ()
    assert (reading.rounding, reading.below_precision) == (0.0, ())


def test_three_decimals_are_within_half_a_digit() -> None:
    """Verl case E37: verl up to 0.4.1 rounds; values agree within 5e-4, the reading says so."""
    expected, reading = truth(), read(COARSE)
    compared = 0
    for step, values in rows(reading):
        for key in values.keys() & expected[step].keys():
            assert abs(values[key] - expected[step][key]) <= 5e-4, (step, key)
            compared += 1
    assert compared > 2000
    assert reading.rounding == 0.0005


def test_what_vanished_in_three_decimals_is_marked() -> None:
    """Verl case E37: a rate of 1e-06 is printed as 0.000: below precision, not zero."""
    reading = read(COARSE)
    assert "actor/lr" in reading.below_precision
    assert "response_length/mean" not in reading.below_precision


def test_plain_floats_of_numpy_1() -> None:
    """Values of 0.7 without numpy's clothes and without colours are read alike."""
    reading = read(NOCOLOR)
    assert [step for step, _ in rows(reading)] == [0, 1, 2, 3, 40]
    assert rows(reading)[1][1]["actor/lr"] == 1e-06


def test_two_sessions_in_one_file() -> None:
    """The second session is a restart before its first row, with the time of its start."""
    reading = read(SESSIONS)
    steps = [step for step, _ in rows(reading)]
    assert steps == [*range(3), *range(18, 34), *range(20, 25), 39, 40]
    (restart,) = reading.restarts
    assert restart.row == 19
    assert restart.started_at == local("2026-12-01 03:35:21.926")
    assert reading.started_at == local("2026-12-01 03:33:35.479")


def test_two_sessions_hold_the_values_of_both() -> None:
    """Each session's rows are those of its own JSONL."""
    folder = FIXTURES / "verl_file/crash_resume"
    found = rows(read(SESSIONS))
    for name, part in (
        ("session1_steps0-33.jsonl", found[:19]),
        ("session2_resumed_from_20.jsonl", found[19:]),
    ):
        records = map(json.loads, (folder / name).read_text().splitlines())
        expected = {record["step"]: record["data"] for record in records}
        assert all(values == expected[step] for step, values in part)


def test_a_terminals_paste_gives_the_same_values() -> None:
    """Keys and numbers broken at 160 columns are joined again, to the last digit."""
    expected = dict(rows(read(STAMPED)))
    reading = read(WRAPPED)
    assert reading.skips == ()
    assert [step for step, _ in rows(reading)] == list(range(7))
    for step, values in rows(reading):
        assert values == expected[step]


def test_container_stamps_become_timestamps() -> None:
    """RFC 3339 stamps with nanoseconds and zone give every row its time in UTC."""
    times = read(STAMPED).rows.column("_timestamp").to_pylist()
    start = utc("2026-08-17 09:00:00.0")
    assert times[0] == pytest.approx(start + 7.055433861, abs=1e-6)
    assert times == sorted(times)
    assert "_timestamp" not in read(MERGED).rows.column_names


def test_worker_files_are_a_pair() -> None:
    """Ray's .out holds the records; its .err only progress bars, which is said without alarm."""
    assert isinstance(verdict(WORKER), LogFile)
    skip = verdict(WORKER.with_suffix(".err"))
    assert isinstance(skip, Skip)
    assert skip.reason is SkipReason.NOT_RECOGNISED
    assert WORKER.name in skip.detail


# -- facts ---------------------------------------------------------------------------------


def test_facts_of_a_log() -> None:
    """Project, name and config come from the printed config; steps from head and tail."""
    facts = recognised(MERGED).facts
    assert (facts.project, facts.name) == ("verl_examples", "gsm8k")
    assert (facts.first_step, facts.last_step, facts.opens_with_validation) == (0, 40, True)
    assert facts.config["algorithm.adv_estimator"] == '"gae"'
    assert "trainer.project_name" not in facts.config


def test_digests_ignore_decoration() -> None:
    """The same records in another wrapping have the same digests; other values have others."""
    merged, session = recognised(MERGED).facts, recognised(SESSIONS).facts
    worker, coarse = recognised(WORKER).facts, recognised(COARSE).facts
    assert merged.head_digest == session.head_digest == worker.head_digest
    assert merged.training_digest == session.training_digest == worker.training_digest
    assert recognised(WRAPPED).facts.head_digest == recognised(STAMPED).facts.head_digest
    assert coarse.training_digest != merged.training_digest


def test_names_from_the_file_logger_line(log: Log) -> None:
    """Without a config the line of the file logger names project and experiment."""
    path = log(
        RAY + "Creating file logger at ./grpo_arith/qwen_small.jsonl", RAY + "step:1 - actor/lr:0.5"
    )
    facts = recognised(path).facts
    assert (facts.project, facts.name, facts.run_id) == ("grpo_arith", "qwen_small", "")


def test_names_from_wandb_lines(log: Log) -> None:
    """W&B's own lines give entity, project, name and run id, colours or not."""
    path = log(
        "\x1b[34m\x1b[1mwandb\x1b[0m: Syncing run \x1b[33mqwen small\x1b[0m",
        "wandb: View run qwen small at: https://wandb.ai/team/grpo_arith/runs/ab12cd34",
        "step:1 - actor/lr:0.5",
    )
    facts = recognised(path).facts
    assert (facts.entity, facts.project, facts.name) == ("team", "grpo_arith", "qwen small")
    assert facts.run_id == "ab12cd34"


def test_no_names_are_no_guess(log: Log) -> None:
    """What the file does not say stays empty."""
    facts = recognised(log("step:1 - actor/lr:0.5")).facts
    assert (facts.entity, facts.project, facts.name, facts.run_id) == ("", "", "", "")
    assert facts.started_at is None


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("2026-08-17T09:00:00Z", utc("2026-08-17 09:00:00.0")),
        ("2026-08-17T17:00:00.5+08:00", utc("2026-08-17 09:00:00.5")),
        ("[2026-08-17 09:00:00]", local("2026-08-17 09:00:00.0")),
        ("2026-08-17 09:00:00,250", local("2026-08-17 09:00:00.25")),
    ],
)
def test_stamps(stamp: str, expected: float, log: Log) -> None:
    """Stamps count with their offset; one without is local time."""
    path = log(f"{stamp} {RAY}step:1 - actor/lr:0.5")
    assert recognised(path).facts.started_at == expected
    assert read(path).rows.column("_timestamp").to_pylist() == [expected]


def test_an_impossible_stamp_is_no_time(log: Log) -> None:
    """A stamp that no calendar knows is dropped from the line and gives no time."""
    path = log("2026-13-45T99:00:00Z step:1 - actor/lr:0.5")
    assert rows(read(path)) == [(1, {"actor/lr": 0.5})]
    assert "_timestamp" not in read(path).rows.column_names


# -- forms of a line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "front",
    [
        "",
        RAY,
        "(main_task pid=1) ",
        "(FullyAsyncTaskRunner pid=7, ip=10.0.3.17) ",
        "\x1b[36m(TaskRunnerV1 pid=20276)\x1b[0m ",
        "\x1b[38;5;208m(TaskRunnerV1 pid=20276)\x1b[0m ",
        "(head, rank=0, pid=12) (TaskRunner pid=3) ",
        "0: ",
        " 3: (TaskRunner pid=3) ",
        "09:00:01 ",
        "[09:00:01.123] ",
        "Aug 17 09:00:01 node-7 train[311]: ",
        "2026-08-17T09:00:01+0000 node-7 train.service[311]: ",
        "2026-08-17T09:00:01.1Z stdout F ",
        "[rank0]: ",
        "[default0]:",
        "[pod/grpo-0/trainer] ",
        "trainer-1  | ",
        "some launcher nobody knows > ",
        "\rTraining Progress:   5%|5 | 2/40 [00:00<00:04,  7.94it/s]\r",
        "Epoch 1/2:   5%|5 | 2/40 [00:00<00:04,  7.94it/s]",
        "\0\0\0",
    ],
)
def test_what_stands_in_front(front: str, log: Log) -> None:
    """Ray, schedulers, containers, terminals and progress bars may put text before a record."""
    path = log("noise", front + "step:3 - actor/lr:1e-06 - perf/x:2", "noise")
    assert rows(read(path)) == [(3, {"actor/lr": 1e-06, "perf/x": 2})]


@pytest.mark.parametrize(
    "behind",
    [
        "\r",
        " \x1b[32m [repeated 3x across cluster]\x1b[0m",
        " [repeated 2x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 "
        "to disable log deduplication, or see https://docs.ray.io/x for more options.)",
        "   ",
    ],
)
def test_what_stands_behind(behind: str, log: Log) -> None:
    """CRLF, Ray's repetition marks and trailing spaces are no part of the last value."""
    reading = read(log(RAY + "step:3 - actor/lr:1e-06 - perf/x:2" + behind))
    assert rows(reading) == [(3, {"actor/lr": 1e-06, "perf/x": 2})]
    assert reading.skips == ()


@pytest.mark.parametrize(
    "decoy",
    [
        "[notice] step:abc - not a metric line",
        "ratio step: 12 - still/not:a metric",
        "step:12",
        "step:12 - not a metric line",
        "global_step:12 - actor/lr:0.5",
        "laststep:12 - actor/lr:0.5 - actor/x:1",
        "see step:12 - actor/lr:0.5 and more",
        "see step:12 - actor/lr:0.5",
        "as in step:12 - actor/lr:0.5 - actor/x:1 - and more",
        "('step:12 - x')",
    ],
)
def test_decoys_are_ignored(decoy: str, log: Log) -> None:
    """Text that looks a little like a record is neither a row nor an alarm."""
    reading = read(log(RAY + "step:1 - a/b:0.5", RAY + decoy, decoy, RAY + "step:2 - a/b:0.7"))
    assert [step for step, _ in rows(reading)] == [1, 2]
    assert reading.skips == ()


def test_c7_numpy_and_other_values(log: Log) -> None:
    """C7, verl case C23: numpy's clothes, NaN, infinities, booleans, large integers."""
    line = (
        "step:3 - a:np.float64(0.5) - b:np.int64(3) - c:nan - d:True - e:np.float32(0.1) - f:-inf"
        " - g:np.float64(nan) - h:5e-324 - i:1e+16 - j:-0.0 - k:18014398509481985 - l:False"
        " - m:np.longdouble('0.25') - n:inf"
    )
    ((step, values),) = rows(read(log(line)))
    assert step == 3
    assert [values[k] for k in "abe"] == [0.5, 3, 0.1]
    assert type(values["b"]) is int
    assert math.isnan(values["c"])
    assert math.isnan(values["g"])
    assert values["d"] is True
    assert values["l"] is False
    assert [values[k] for k in "fhikmn"] == [
        -math.inf,
        5e-324,
        1e16,
        18014398509481985,
        0.25,
        math.inf,
    ]
    assert math.copysign(1, values["j"]) == -1


def test_keys_are_unchanged(log: Log) -> None:
    """Keys with brackets, at signs, spaces and unicode are kept; the last colon divides."""
    line = (
        "step:1 - timing(s)/gen:1.5 - val/x/mean@1:2 - a key:3 - 奖励/均值:4 - math:algebra/acc:5"
    )
    ((_, values),) = rows(read(log(line)))
    assert list(values) == [
        "timing(s)/gen",
        "val/x/mean@1",
        "a key",
        "奖励/均值",
        "math:algebra/acc",
    ]


def test_lines_end_at_line_feeds_only(log: Log) -> None:
    """U+2028, U+0085 and form feeds inside noise do not cut lines."""
    reading = read(log("a\u2028step:9 - a/b:1", "b\x85c\x0cd", "step:1 - a/b:1"))
    assert tuple(reading.extra.console) == (
        "a\u2028step:9 - a/b:1",
        "b\x85c\x0cd",
        "step:1 - a/b:1",
    )


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    """A file from Windows is read like any other."""
    path = tmp_path / "train.log"
    path.write_bytes(b"\xef\xbb\xbfstep:1 - a/b:1\r\nstep:2 - a/b:2\r\n")
    reading = read(path)
    assert [step for step, _ in rows(reading)] == [1, 2]
    assert tuple(reading.extra.console) == ("step:1 - a/b:1", "step:2 - a/b:2")


def test_containerd_pieces_are_joined(log: Log) -> None:
    """A line that the container runtime cut in pieces (flag P) is one record."""
    reading = read(
        log(
            "2026-08-17T09:00:01Z stdout P (TaskRunner pid=3) step:1 - actor/l",
            "2026-08-17T09:00:01Z stdout P r:0.2",
            "2026-08-17T09:00:01Z stdout F 5 - perf/x:2",
            "2026-08-17T09:00:02Z stdout F noise",
        )
    )
    assert rows(reading) == [(1, {"actor/lr": 0.25, "perf/x": 2})]


# -- broken lines --------------------------------------------------------------------------


def test_c3_broken_inside_a_key(log: Log) -> None:
    """C3: the second half of a key comes without prefix in the next line, and is joined."""
    reading = read(
        log(
            "(TaskRunner pid=4072644) step:1 - critic/score/mean:0.5 - response_length/me",
            "an:330.4 - response_length/max:512.0",
        )
    )
    assert rows(reading) == [
        (
            1,
            {
                "critic/score/mean": 0.5,
                "response_length/mean": 330.4,
                "response_length/max": 512.0,
            },
        )
    ]
    assert reading.skips == ()


def test_c3_when_not_sure_the_pair_is_dropped(log: Log) -> None:
    """C3: a half that fits nowhere costs its pair, which is counted, and never makes a key."""
    reading = read(
        log(RAY + "step:1 - critic/score/mean:0.5 - response_length/me", RAY + "an:330.4")
    )
    assert rows(reading) == [(1, {"critic/score/mean": 0.5})]
    (skip,) = reading.skips
    assert skip.reason is SkipReason.MALFORMED
    assert "response_length/me" in skip.detail
    assert ":1 (byte 0)" in skip.place


def test_c3_a_number_that_may_go_on_is_dropped(log: Log) -> None:
    """C3: after `...:0.97` a bare `8` may be the rest of it: the pair is dropped and said."""
    reading = read(log("step:1 - a/b:0.5 - a/c:0.97", "8", "more"))
    assert rows(reading) == [(1, {"a/b": 0.5})]
    assert "may go on" in reading.skips[0].detail


def test_a_number_after_a_line_that_was_not_broken(log: Log) -> None:
    """Where longer lines show that nothing was broken, a number behind a record is no part of it."""
    reading = read(log("x" * 200, "step:1 - a/b:0.5 - a/c:0.97", "8", "more"))
    assert rows(reading) == [(1, {"a/b": 0.5, "a/c": 0.97})]
    assert reading.skips == ()


def wrapped(text: str, width: int, *, strip: bool) -> Iterator[str]:
    """A line as a terminal of that width breaks it; copying may strip the trailing space."""
    for start in range(0, len(text), width):
        piece = text[start : start + width]
        yield piece.rstrip(" ") if strip else piece


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("width", [80, 81, 82, 83, 84, 100, 120, 159, 211])
def test_any_width(width: int, strip: bool, log: Log) -> None:
    """Wherever a terminal breaks the lines, no value is wrong; what is dropped is counted."""
    expected = dict(rows(read(STAMPED)))
    lines: list[str] = []
    for line in NOCOLOR.read_text().split("\n"):
        if " step:" in line:
            lines += wrapped(line, width, strip=strip)
            lines.append("Training Progress:  18%|#8 | 7/40 [00:01<00:07,  4.22it/s]")
    reading = read(log(*lines, name="paste.txt"))
    found = rows(reading)
    assert [step for step, _ in found] == [0, 1, 2, 3, 40]
    missing = 0
    for step, values in found[:-1]:
        missing += len(expected[step].keys() - values.keys())
        assert values.items() <= expected[step].items()
    assert missing == 0 or reading.skips
    assert missing <= 3


def test_records_that_lost_their_line_end(log: Log) -> None:
    """Two records in one line: the first is believed, the second is counted as lost."""
    reading = read(log("step:1 - a/b:0.5 - a/c:1.0step:2 - a/b:0.6 - a/c:2.0", "step:3 - a/b:0.7"))
    assert rows(reading) == [(1, {"a/b": 0.5}), (3, {"a/b": 0.7})]
    assert sum(skip.records for skip in reading.skips) == 1


def test_a_carriage_return_inside_a_record(log: Log) -> None:
    """What a carriage return hides of a record is named, and the rest is kept."""
    reading = read(log("step:1 - a/b:0.5 - a/c:1.0 - a\r/d:2.0"))
    assert rows(reading) == [(1, {"a/b": 0.5, "a/c": 1.0})]
    assert any("carriage return" in skip.detail for skip in reading.skips)


@pytest.mark.parametrize("left", ["", "^[", "\ufffd", "\u241b"])
def test_colours_that_lost_their_escape_character(log: Log, left: str) -> None:
    """Text copied from a web page or shown by `cat -v` keeps `[36m`: config and blocks are read."""
    text = MERGED.read_text()
    assert "\x1b[36m(" in text
    faded, whole = (read(log(*t.split("\n"))) for t in (text.replace("\x1b", left), text))
    assert rows(faded) == rows(whole)
    assert faded.config == whole.config != {}
    assert not faded.skips


QUOTED = """
    step:0 - timing/gen:21.470 - critic/lr(1e-4):0.100 - actor/entropy_loss:0.433
    - actor/pg_loss:-0.005 - actor/pg_clipfrac:0.000 - actor/grad_norm:1.992 - critic/score/mean:0.004 - critic/score/max:1.000
    - prompt_length/min:68.000
    step:1 - timing/gen:23.020 - critic/lr(1e-4):0.100 - actor/entropy_loss:0.440
    - actor/pg_loss:0.000 - actor/pg_clipfrac:0.002
    - prompt_length/min:70.000
"""


@pytest.mark.parametrize(
    "text",
    [
        QUOTED,
        QUOTED.replace("\n    -", " \n    -"),
        QUOTED.replace("    ", ""),
        re.sub(r" ?\n    - ", " -\n    ", QUOTED),
        re.sub(r" ?\n    - ", " - \n", QUOTED),
        QUOTED.replace("    - prompt", "  - prompt") + "    - a list of something: 5\n",
    ],
)
def test_records_as_documents_quote_them(log: Log, text: str) -> None:
    """A record that was broken at its dashes, by hand and not by a terminal, is one record."""
    reading = read(log(*text.split("\n")))
    first, second = (row for _, row in rows(reading))
    assert list(first)[-3:] == ["critic/score/mean", "critic/score/max", "prompt_length/min"]
    assert (len(first), len(second)) == (9, 6)
    assert (first["prompt_length/min"], second["prompt_length/min"]) == (68.0, 70.0)
    assert not reading.skips


def test_a_list_is_no_rest_of_a_record(log: Log) -> None:
    """What begins with a dash and holds no pairs of a metric is left alone."""
    lines = ["step:1 - a/b:1.0", "- see: 5", "- note - a:1", "step:2 - a/b:2.0 -", "that was all"]
    reading = read(log(*lines))
    assert [(step, row["a/b"]) for step, row in rows(reading)] == [(1, 1.0), (2, 2.0)]
    assert all(set(row) == {"a/b"} for _, row in rows(reading))


def test_a_paste_that_ends_inside_a_record(log: Log) -> None:
    """Where a paste ends at the terminal's width, its last record may go on: it is not read yet."""
    line = "(TaskRunner pid=1) step:{} - critic/score/mean:0.12345678 - critic/score/max:0.87654321"
    one, two = (list(wrapped(line.format(n), 60, strip=False)) for n in (1, 2))
    reading = read(log(*one, two[0]))
    assert [step for step, _ in rows(reading)] == [1]
    assert [skip.reason for skip in reading.skips] == [SkipReason.PARTIAL_LINE]
    assert [step for step, _ in rows(read(log(*one, *two)))] == [1, 2]


def test_a_record_without_its_head_is_counted(log: Log) -> None:
    """Values whose `step:` was lost are a lost record, not noise."""
    reading = read(log("step:1 - actor/a:1", "st - actor/a:1 - actor/b:2 - actor/c:3"))
    assert [step for step, _ in rows(reading)] == [1]
    (skip,) = reading.skips
    assert (skip.reason, skip.records) == (SkipReason.NO_STEP, 1)


def test_c2_cut_last_line(log: Log) -> None:
    """The unfinished last line is noted, no record lost, and read when its writer completes it."""
    path = log("step:1 - a/b:0.5", "step:2 - a/b:0.6", end="")
    reading = read(path)
    assert [step for step, _ in rows(reading)] == [1]
    (skip,) = reading.skips
    assert (skip.reason, skip.records) == (SkipReason.PARTIAL_LINE, 0)
    assert f"{path}:2 (byte 17)" in skip.place
    assert reading.extra.unfinished == "step:2 - a/b:0.6"
    assert tuple(reading.extra.console) == ("step:1 - a/b:0.5",)
    with path.open("a") as stream:
        stream.write("5\n")
    assert rows(read(path)) == [(1, {"a/b": 0.5}), (2, {"a/b": 0.65})]


def test_many_bad_lines_are_counted(log: Log) -> None:
    """Of a file full of damage the first hundred are named, and all are counted."""
    bad = [f"x{n} - actor/a:1 - actor/b:2 - actor/c:3\nnoise" for n in range(150)]
    reading = read(log("step:1 - actor/a:1", *bad))
    assert sum(skip.records for skip in reading.skips) == 150
    assert len(reading.skips) == 101


def test_an_endless_line_is_not_held(log: Log, tmp_path: Path) -> None:
    """A line over 10 MB costs itself; progress bars in one endless line cost nothing."""
    path = tmp_path / "train.log"
    bars = b"\rTraining Progress:  18%|#8 | 7/40 [00:01<00:07,  4.22it/s]" * 250_000
    path.write_bytes(b"step:1 - a/b:1\n" + b"x" * (11 << 20) + b"\n" + bars + b"\nstep:2 - a/b:2\n")
    reading = read(path)
    assert [step for step, _ in rows(reading)] == [1, 2]
    (skip,) = reading.skips
    assert skip.reason is SkipReason.TOO_LONG


# -- validation blocks ---------------------------------------------------------------------


def block(kind: str, *pieces: str, prefix: str = RAY) -> list[str]:
    """A validation block as pprint breaks it."""
    texts = [f'"{kind} validation metrics: {{{pieces[0]}"', *(f'"{p}"' for p in pieces[1:-1])]
    texts.append(f'"{pieces[-1]}}}"')
    lines = ["(" + texts[0], *(" " + t for t in texts[1:])]
    lines[-1] += ")"
    return [prefix + line for line in lines]


INITIAL = block("Initial", "'val-core/x/acc/mean@4': ", "np.float64(0.25), ", "'val-aux/n': 2")
FINAL = block("Final", "'val-core/x/acc/mean@4': ", "np.float64(0.75), ", "'val-aux/n': 3")


def test_b5_final_validation_is_added_to_the_last_step(log: Log) -> None:
    """B5, verl case A4: values that only the final block shows belong to the last step."""
    reading = read(log(RAY + "step:99 - actor/a:1", RAY + "step:100 - actor/a:2", *FINAL))
    assert rows(reading) == [
        (99, {"actor/a": 1}),
        (100, {"actor/a": 2, "val-core/x/acc/mean@4": 0.75, "val-aux/n": 3}),
    ]
    assert reading.ending is not None
    assert reading.ending.exit_code == 0


def test_blocks_add_nothing_to_what_the_step_line_says(log: Log) -> None:
    """Where the record is there its own values stay, and no step comes twice."""
    line = RAY + "step:100 - actor/a:2 - val-core/x/acc/mean@4:0.5 - val-aux/n:7"
    reading = read(log(line, *FINAL))
    assert rows(reading) == [
        (100, {"actor/a": 2, "val-core/x/acc/mean@4": 0.5, "val-aux/n": 7}),
    ]


def test_blocks_are_joined_although_others_speak(log: Log) -> None:
    """Verl case E34: lines of other workers and other streams may stand in a block."""
    first, second, third = FINAL
    noise = ["(WorkerDict pid=5) hello", RAY + "INFO:2026-12-01 03:33:38,568:Saved", "driver"]
    reading = read(log(RAY + "step:4 - actor/a:1", first, *noise, second, *noise, third))
    assert rows(reading)[0][1]["val-core/x/acc/mean@4"] == 0.75


def test_b6_initial_validation_belongs_to_step_0(log: Log) -> None:
    """B6: a step 0 with validation keys only, then step 1 with all: two rows."""
    reading = read(
        log(
            *INITIAL,
            RAY + "step:0 - val-core/x/acc/mean@4:0.25 - val-aux/n:2",
            RAY + "step:1 - actor/a:1",
        )
    )
    assert rows(reading) == [
        (0, {"val-core/x/acc/mean@4": 0.25, "val-aux/n": 2}),
        (1, {"actor/a": 1}),
    ]


@pytest.mark.parametrize(
    ("sign", "first", "start"),
    [
        ("Training from scratch", 1, 0),
        ("Setting global step to 20", 21, 20),
        (
            "INFO:2026-12-01 03:35:26,691:Resuming from /c/global_step_20, setting global step to 20",
            21,
            20,
        ),
        ("nothing said", 21, 20),
    ],
)
def test_initial_validation_without_a_record(sign: str, first: int, start: int, log: Log) -> None:
    """Without a record of its own the initial validation is that of the step training starts at."""
    reading = read(log(RAY + sign, *INITIAL, RAY + f"step:{first} - actor/a:1"))
    assert rows(reading) == [
        (start, {"val-core/x/acc/mean@4": 0.25, "val-aux/n": 2}),
        (first, {"actor/a": 1}),
    ]


def test_0_2_logs_the_final_validation_at_its_own_step(log: Log) -> None:
    """verl 0.2 prints the final block before a validation-only record: that record is meant."""
    reading = read(
        log(RAY + "step:9 - actor/a:1", *FINAL, RAY + "step:10 - val-core/x/acc/mean@4:0.75")
    )
    assert rows(reading) == [
        (9, {"actor/a": 1}),
        (10, {"val-core/x/acc/mean@4": 0.75, "val-aux/n": 3}),
    ]


def test_a_short_block_is_one_quoted_line(log: Log) -> None:
    """pprint leaves a short text in one line, quoted; print leaves it bare."""
    lines = [
        RAY + "step:5 - actor/a:1",
        RAY + "\"Final validation metrics: {'val/x': 0.5, 'val/y': nan}\"",
        RAY + "Final validation metrics: {'val/z': np.float64(0.25)}",
    ]
    values = rows(read(log(*lines)))[0][1]
    assert values["val/z"] == 0.25


def test_a_block_that_is_cut_is_said(log: Log) -> None:
    """Half a block gives no values and is named."""
    reading = read(log(RAY + "step:5 - actor/a:1", *FINAL[:-1]))
    assert rows(reading) == [(5, {"actor/a": 1})]
    assert [skip.reason for skip in reading.skips] == [SkipReason.PARTIAL_LINE]


# -- config --------------------------------------------------------------------------------


def test_the_printed_config_is_read() -> None:
    """The config is the dict that the trainer printed, whatever stood between its lines."""
    config = read(COARSE).config
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-06
    assert config["trainer"]["project_name"] == "verl_examples"
    assert config["data"]["seed"] is None


def config_lines(*extra: str) -> list[str]:
    return [
        RAY + "{'data': {'train_batch_size': 8},",
        *(RAY + f" {line}" for line in extra),
        RAY + " 'trainer': {'experiment_name': 'e',",
        RAY + "             'project_name': 'p',",
        RAY + "             'total_training_steps': 2}}",
    ]


def test_no_secret_is_in_the_console(log: Log) -> None:
    """Secrets of the printed config and of other lines are masked in the console text."""
    secrets = ["verysecretone", "topsecrettwo", "hf_" + "a1" * 15, "pw1234567", "anothersecret"]
    path = log(
        *config_lines(
            f"'judge': {{'api_key': '{secrets[0]}',",
            f"           'api_keys': ['{secrets[1]}',",
            f"                        '{secrets[4]}']}},",
        ),
        f"(WorkerDict pid=3) loading with token={secrets[2]}",
        f"proxy https://user:{secrets[3]}@proxy:8080/ used, {secrets[0]} again",
        "step:1 - actor/a:1",
        f"api_key: {secrets[0]}",
        end="",
    )
    reading = read(path)
    assert reading.config["judge"]["api_key"] == secrets[0]
    shown = "\n".join((*reading.extra.console, reading.extra.unfinished))
    for secret in secrets:
        assert secret not in shown, secret
    assert "https://***@proxy:8080/" in shown


def test_no_secret_of_a_cut_config_is_in_the_console(log: Log) -> None:
    """A config that was cut cannot be read; its secrets are masked all the same."""
    lines = config_lines("'judge': {'api_keys': ['topsecrettwo',", "  'anothersecret'],")[:-1]
    path = log(*lines, "step:1 - actor/a:1")
    reading = read(path)
    assert reading.config == {}
    shown = "\n".join(reading.extra.console)
    assert "topsecrettwo" not in shown
    assert "anothersecret" not in shown


@pytest.mark.parametrize(
    "line",
    [
        "(W pid=1) {'judge': {'api_key': 'verysecretone'}}",
        "(W pid=1) {'judge': {'api_keys': ['a', 'verysecretone']}}",
        "export OPENAI_API_KEY=verysecretone",
        "x" * 3000 + " token: verysecretone " + "y" * 3000,
        "a." * 50_000 + "://u:verysecretone@host",
        "$ wandb login --relogin --host https://wandb.corp verysecretone0123456789abcdef",
        "export TOKEN_HF=verysecretone",
        "hf_token_value: verysecretone",
        "key " + "gsk_" + "verysecretone0123456789",
        "-----BEGIN RSA PRIVATE KEY-----verysecretone",
        "-----BEGIN PRIVATE KEY-----\nMIIverysecretone\nMIIverysecretone\n-----END PRIVATE KEY-----",
    ],
)
def test_secrets_in_other_lines(line: str, log: Log) -> None:
    """Secrets in printed dicts, assignments and long lines are masked, in the last line too."""
    reading = read(log("step:1 - actor/a:1", line, line, end=""))
    assert "verysecretone" not in "\n".join(reading.extra.console)
    assert "verysecretone" not in reading.extra.unfinished


@pytest.mark.parametrize(
    "line",
    [
        "actor/" + "a" * 1_000_000,
        "Creating file logger at " + "a" * 1_000_000,
        "Resuming from " * 100_000,
        "key" * 400_000,
        "Training Progress: 1%|" * 50_000,
        "\x1b]" + "a" * 1_000_000,
        "{'a': " * 100_000,
        "(pid=" * 200_000,
        "a." * 500_000 + " api_key=x",
    ],
    ids=lambda line: line[:12],
)
def test_long_hostile_lines_are_read(line: str, log: Log) -> None:
    """No line of a megabyte, whatever it holds, keeps the reader busy for long."""
    reading = read(log("step:1 - actor/a:1", line, "step:2 - actor/a:1"))
    assert [step for step, _ in rows(reading)] == [1, 2]
    assert len(reading.extra.console) == 3


def test_validation_metrics_behind_an_unknown_prefix_are_named(log: Log) -> None:
    """A block behind words that do not stand in front of the step lines is left out and said,
    never in silence; a line of source code in a traceback is none."""
    lines = [
        "evaluator > (\"Initial validation metrics: {'val-core/x/acc/mean@1': 0.5}\")",
        "train-0 trainer > step:1 - actor/a:1 - actor/b:2",
        '    pprint(f"Initial validation metrics: {val_metrics}")',
    ]
    reading = read(log(*lines))
    assert [step for step, _ in rows(reading)] == [1]
    (skip,) = reading.skips
    assert "behind a prefix of no known form" in skip.detail
    assert ":1 (byte 0)" in skip.place


# -- prefixes of no known form -------------------------------------------------------------

FRONTS = [
    "train-0 trainer > ",
    "[worker-3] ",
    "2025/04/05T{hour:02}:{n:02}:{n:02}.{n:03} host | ",
    "Sat Apr {hour:2} {hour:2}:{n:02}:00 2025 job(7)> ",
    "\x1b[32m<{n}>\x1b[0m ",
    "W0405 {n:07} gang.cc:12] ",
]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("source", [MERGED, COARSE, SESSIONS, NOCOLOR], ids=lambda p: p.parent.name)
def test_what_stands_in_front_of_all_lines_is_learnt(source: Path, front: str, log: Log) -> None:
    """Behind a prefix of no known form, constant but for numbers and dates, a console says what it
    says without one: rows, validation blocks, config, names, starts and its end."""
    lines = source.read_bytes().decode().splitlines()
    plain = log(*lines)
    expected, known = read(plain), recognised(plain).facts
    path = log(*(front.format(n=n % 60, hour=n % 24) + line for n, line in enumerate(lines)))
    reading, facts = read(path), recognised(path).facts
    assert rows(reading) == rows(expected)
    assert reading.config == expected.config
    assert reading.config
    assert (reading.ending, len(reading.restarts)) == (expected.ending, len(expected.restarts))
    assert [skip.detail for skip in reading.skips] == [skip.detail for skip in expected.skips]
    assert (facts.project, facts.name, facts.config) == (known.project, known.name, known.config)
    assert (facts.last_step, facts.head_digest) == (known.last_step, known.head_digest)


def test_times_and_owners_behind_a_learnt_prefix_are_read(log: Log) -> None:
    """What has a known form behind the unknown part still tells when, and by which process."""
    lines = [
        f"job-7 > 2025-04-05T14:23:1{n}Z (TaskRunner pid={n // 2}) step:{n % 2 + 1} - actor/a:{n}"
        " - actor/b:2"
        for n in range(4)
    ]
    reading = read(log(*lines))
    assert reading.rows.column("_timestamp").to_pylist() == [
        utc(f"2025-04-05 14:23:1{n}.0") for n in range(4)
    ]
    assert [restart.row for restart in reading.restarts] == [2]


def test_a_cut_config_behind_a_learnt_prefix_is_masked(log: Log) -> None:
    """No secret of a printed config goes out, also where its end is missing."""
    front = "train-0 trainer > "
    config = ["{'trainer': {'project_name': 'p',", "  'api_key':", "  'hunter2hunter2',"]
    reading = read(log(*(front + line for line in config), front + "step:1 - actor/a:1 - b/c:2"))
    assert "hunter2" not in "".join(reading.extra.console)


def test_a_prefix_is_learnt_from_the_first_step_line(log: Log) -> None:
    """A live console says the same names with its first step line as with all of them, so that its
    run stays the same one."""
    front = "train-0 trainer > "
    config = "{'actor_rollout_ref': {}, 'trainer': {'project_name': 'p', 'experiment_name': 'e'}}"
    path = log(front + config, front + "step:1 - actor/a:1 - actor/b:2")
    facts = recognised(path).facts
    assert (facts.project, facts.name) == ("p", "e")


@pytest.mark.parametrize(
    "fronts",
    [
        ["a > ", "b > "],
        ["x" * 201 + " "],
        ["Training Progress:  2%|# | ", "Training Progress:  5%|##| "],
    ],
    ids=["differ", "too long", "progress bars"],
)
def test_what_is_no_prefix_is_not_cut_off(fronts: list[str], log: Log) -> None:
    """What differs between step lines, or is longer than any prefix, stays; the blocks behind it
    are said to be left out."""
    steps = [f"{front}step:{n} - actor/a:1 - actor/b:2" for n, front in enumerate(fronts * 3)]
    block = fronts[0] + "(\"Final validation metrics: {'val-core/x/acc/mean@1': 0.5}\")"
    reading = read(log(*steps, block))
    assert [step for step, _ in rows(reading)] == list(range(len(steps)))
    (skip,) = reading.skips
    assert "behind a prefix of no known form" in skip.detail


@pytest.mark.parametrize(
    "front", ["1 " * 99, " " * 199 + ":", "Jan " * 50, "a1b" * 66 + " ", "(((" * 66 + " "]
)
def test_hostile_prefixes_are_tried_once_a_line(front: str, log: Log) -> None:
    """However a prefix is built, lines that nearly have it are read in one go."""
    near = front[: len(front) - 1] + "!"
    lines = [front + f"step:{n} - actor/a:1 - actor/b:2" for n in range(20)]
    opened = "(\"Final validation metrics: {'val-core/x/acc/mean@1': 0.5,\""
    reading = read(log(*lines, front + opened, *[near * 50] * 2000))
    assert [step for step, _ in rows(reading)] == list(range(20))


def test_many_lines_that_may_end_a_block(log: Log) -> None:
    """A printed dict that never ends is given up after a while."""
    lines = [RAY + "{'data': {'a': 1},", *[RAY + " 'b': {}"] * 20_000]
    reading = read(log(*lines, "step:1 - actor/a:1"))
    assert [step for step, _ in rows(reading)] == [1]


def test_numbers_and_harmless_words_are_not_masked(log: Log) -> None:
    """Metrics and settings with `token` and `key` in their names are no secrets."""
    lines = [
        "step:1 - perf/total_num_tokens:10428 - rollout_corr/chi2_token:0.0017",
        "(W pid=1) {'prompt_key': 'prompt', 'max_tokens': 512}",
        "(W pid=1) Avg prompt throughput: 123.4 tokens/s",
    ]
    assert tuple(read(log(*lines)).extra.console) == tuple(lines)


_HARMLESS = "api_key token = : ' \" x Bearer 5 secret password -- . / my_token access-key \t"
_SECRETS = [
    "npm_" + "e" * 20,
    "ya29." + "f" * 20,
    "wandb login " + "0a" * 20,
    "hf_" + "a" * 20,
    "sk-" + "b" * 20,
    "AKIA" + "C" * 16,
    "wandb_v1_" + "d" * 20,
]
_WORDS = [*_HARMLESS.split(" "), " ", "https://", "user:pw@", "hooks.slack.com/z", *_SECRETS]


# A metric's value, or what is left of one without its digits: no secret, though masked when it is
# looked at closely.
_NUMBER = re.compile(r"(?<=token):-?[\d.]*(?= - |$)")


@given(st.lists(st.sampled_from(_WORDS), max_size=12).map("".join))
@example("token:.")
@example("token:5.5 - my_token:secret")
@settings(max_examples=400)
def test_the_fast_look_for_secrets_misses_none(line: str) -> None:
    """Whatever masking would change in a line is seen by its form; only numbers are no secrets."""
    form = line.encode().translate(None, b"0123456789")
    without_numbers = _NUMBER.sub("", line)
    if mask_text(without_numbers) != without_numbers:
        assert set(suspects([form])) == {form}


# -- restarts ------------------------------------------------------------------------------


def test_a_new_process_that_continues_is_a_restart(log: Log) -> None:
    """A resume exactly where the first job ended shows by its new process id."""
    reading = read(
        log(
            "(TaskRunner pid=1) step:19 - actor/a:1",
            "(TaskRunner pid=1) step:20 - actor/a:1",
            "(TaskRunner pid=2) step:21 - actor/a:1",
        )
    )
    assert [restart.row for restart in reading.restarts] == [2]


def test_the_same_process_id_in_a_new_container(log: Log) -> None:
    """Containers count their processes alike: a printed config shows the restart."""
    one = [*config_lines(), RAY + "step:1 - actor/a:1", RAY + "step:2 - actor/a:1"]
    two = [*config_lines(), RAY + "step:3 - actor/a:1"]
    assert [restart.row for restart in read(log(*one, *two)).restarts] == [2]


def test_training_the_same_steps_again_is_a_restart(log: Log) -> None:
    """Without any sign, keys that were logged at later steps before show it."""
    lines = [f"step:{n} - actor/a:{n}" for n in (1, 2, 3, 2, 3, 4)]
    assert [restart.row for restart in read(log(*lines)).restarts] == [3]


def test_the_last_step_again_is_a_restart(log: Log) -> None:
    """A crash one step behind the checkpoint repeats one step, with other values."""
    lines = ["step:1 - actor/a:1", "step:2 - actor/a:2", "step:2 - actor/a:2.5"]
    assert [restart.row for restart in read(log(*lines)).restarts] == [2]


@pytest.mark.parametrize(
    "late",
    [
        RAY + "step:2 - val-core/x:0.5",
        RAY + "step:2 - fully_async/count/x:7",
        RAY + "step:3 - timing_s/param_sync:1.5",
    ],
)
def test_a_late_record_is_no_restart(late: str, log: Log) -> None:
    """Fully asynchronous trainers log validation and aggregates late, and in several records."""
    lines = [RAY + f"step:{n} - actor/a:{n}" for n in (1, 2, 3)]
    assert read(log(*lines, late, RAY + "step:4 - actor/a:4")).restarts == ()


def test_an_echo_is_no_restart(log: Log) -> None:
    """Two ranks that print the same record are one attempt."""
    lines = ["0: step:1 - actor/a:1", "1: step:1 - actor/a:1", "0: step:2 - actor/a:1"]
    assert read(log(*lines)).restarts == ()


def test_late_signs_belong_to_the_session_that_runs(log: Log) -> None:
    """stderr overtakes stdout: `Training from scratch` behind step 0 is no restart."""
    reading = read(
        log(
            RAY + "step:0 - val-core/x:0.5",
            RAY + "INFO:2026-12-01 03:33:38,568:Total training steps: 40",
            RAY + "INFO:2026-12-01 03:33:38,569:Training from scratch",
            RAY + "step:1 - actor/a:1",
        )
    )
    assert reading.restarts == ()


# -- how it ended --------------------------------------------------------------------------


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "main_ppo.py", line 3, in main',
    "ray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run() (pid=20276)",
    "ValueError: no such reward",
]


def ending(reading: Reading) -> int | None:
    return None if reading.ending is None else reading.ending.exit_code


def test_a_traceback_at_the_end_is_a_failure(log: Log) -> None:
    """The driver's traceback ends the attempt; its exception is named."""
    reading = read(log(RAY + "step:1 - actor/a:1", *TRACEBACK, "srun: error: exit code 1"))
    assert reading.ending is not None
    assert reading.ending.exit_code == 1
    assert "ValueError" in reading.ending.because


def test_a_survived_traceback_is_none(log: Log) -> None:
    """Training that went on after a traceback did not fail by it."""
    assert ending(read(log(*TRACEBACK, RAY + "step:1 - actor/a:1"))) is None


def test_another_workers_traceback_is_none(log: Log) -> None:
    """What a reward worker survives is no end of the trainer."""
    lines = [f"(RewardWorker pid=9) {line}" for line in TRACEBACK]
    assert ending(read(log(RAY + "step:1 - actor/a:1", *lines))) is None


@pytest.mark.parametrize(
    "done",
    [
        [RAY + "Total training steps: 2", RAY + "step:2 - actor/a:1"],
        [RAY + "step:2 - actor/a:1", "Training Progress: 100%|##| 2/2 [00:09<00:00,  3.99it/s]"],
        [RAY + "step:2 - actor/a:1", *FINAL],
        [*config_lines(), RAY + "step:2 - actor/a:1"],
    ],
    ids=["total", "bar", "final", "config"],
)
def test_training_that_ended_by_itself(done: list[str], log: Log) -> None:
    """The final validation, the last step or a full progress bar end a run, teardown or not."""
    assert ending(read(log(*done))) == 0
    assert ending(read(log(*done, *TRACEBACK))) == 0


def test_a_log_that_goes_on_has_no_ending(log: Log) -> None:
    """Before its last step nothing is said about the end."""
    lines = [RAY + "Total training steps: 9", RAY + "step:2 - actor/a:1"]
    assert (
        ending(read(log(*lines, "Training Progress:  22%|# | 2/9 [00:01<00:07, 4.2it/s]"))) is None
    )


def test_a_new_start_after_the_end_is_not_ended(log: Log) -> None:
    """A job that was started again, and has logged nothing yet, has no end."""
    reading = read(log(RAY + "step:2 - actor/a:1", *FINAL, *config_lines()))
    assert reading.ending is None


# -- which files ---------------------------------------------------------------------------


def test_c15_a_long_opening(tmp_path: Path) -> None:
    """C15: 12 MB of noise before the first step do not hide a console."""
    path = tmp_path / "slurm-311.out"
    noise = b"(WorkerDict pid=5) loading shard 17 of 4096 ... done in 0.3 s\n" * 200_000
    assert len(noise) > 12_000_000
    path.write_bytes(noise + b"step:1 - actor/a:1\n" + noise + b"step:2 - actor/a:2\n" + noise)
    facts = recognised(path).facts
    assert (facts.first_step, facts.last_step) == (1, 2)


@pytest.mark.parametrize("name", ["nohup.out", "train.log.1", "console.txt", "job.err", "output"])
def test_any_given_text_file_is_looked_at(name: str, log: Log) -> None:
    """Names do not matter for a path that is given; those that look like logs are found."""
    assert isinstance(verdict(log("step:1 - actor/a:1", name=name)), LogFile)


def test_other_text_is_not_ours(log: Log) -> None:
    """A text without steps or a trainer's words is left to others."""
    assert verdict(log("hello", "INFO - started")) is None


def test_binary_is_not_ours(tmp_path: Path) -> None:
    """A binary file that happens to hold the words is left alone."""
    path = tmp_path / "x.log"
    path.write_bytes(bytes(range(32)) * 200 + b"\nstep:1 - actor/a:1\n")
    assert verdict(path) is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([RAY + "Total training steps: 40"], SkipReason.NOTHING_YET),
        (config_lines(), None),
        ([RAY + "{'actor_rollout_ref': {'actor': {}},"], SkipReason.NOTHING_YET),
        (
            ["Training Progress:   5%|# | 2/40 [00:00<00:04,  7.94it/s]"],
            SkipReason.NO_HISTORY,
        ),
        ([RAY + "step:1 - actor/a:1 - cut in the mid"], SkipReason.NOTHING_YET),
    ],
)
def test_a_trainers_console_without_steps(
    lines: list[str], reason: SkipReason | None, log: Log
) -> None:
    """No step yet, or no standard output: said with a hint, read again next time."""
    path = log(RAY + "Size of train dataloader: 14, Size of val dataloader: 1", *lines, end="")
    skip = verdict(path)
    assert isinstance(skip, Skip)
    assert skip.reason is (reason or SkipReason.NOTHING_YET)
    assert skip.hint


def test_a_file_that_loses_its_steps_is_an_input_error(log: Log) -> None:
    """A file replaced by one without records between look and read is refused, not empty."""
    path = log("step:1 - actor/a:1")
    file = recognised(path)
    path.write_text("nothing\n")
    with pytest.raises(NotALog):
        SOURCE.read(file)


# -- compressed ----------------------------------------------------------------------------


def test_gzip_is_read_like_the_plain_file() -> None:
    """A compressed log has the facts and rows of the plain one."""
    packed = FIXTURES / "console/compressed/pod.log.gz"
    assert recognised(packed).facts == recognised(STAMPED).facts
    assert rows(read(packed)) == rows(read(STAMPED))


def test_appended_gzip_members(tmp_path: Path) -> None:
    """Several members in one file are one text; zeros behind them are padding."""
    path = tmp_path / "train.log.gz"
    parts = [f"step:{n} - actor/a:{n}\n".encode() for n in (1, 2, 3)]
    path.write_bytes(b"".join(map(gzip.compress, parts)) + b"\0" * 512)
    reading = read(path)
    assert [step for step, _ in rows(reading)] == [1, 2, 3]
    assert reading.skips == ()


def test_a_cut_gzip_gives_what_is_there(tmp_path: Path) -> None:
    """A truncated file gives its beginning, and says that its tail is missing."""
    path = tmp_path / "pod.log.gz"
    data = (FIXTURES / "console/compressed/pod.log.gz").read_bytes()
    path.write_bytes(data[: len(data) // 2])
    reading = read(path)
    steps = [step for step, _ in rows(reading)]
    assert steps == list(range(len(steps)))
    assert 3 < len(steps) < 14
    assert SkipReason.TORN_TAIL in {skip.reason for skip in reading.skips}


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    """Behind damage nothing that gzip unpacks can be trusted: the file is named, not read."""
    path = tmp_path / "pod.log.gz"
    data = bytearray((FIXTURES / "console/compressed/pod.log.gz").read_bytes())
    data[-8] ^= 0xFF  # the checksum
    path.write_bytes(data)
    skip = verdict(path)
    assert isinstance(skip, Skip)
    assert skip.reason is SkipReason.CORRUPT
    assert "gzip -dc" in skip.hint


def test_zstd_is_read_where_python_can(tmp_path: Path) -> None:
    """With a zstd module a `.zst` is read like the plain file, also when it is cut."""
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "pod.log.zst"
    packed = zstandard.ZstdCompressor().compress(STAMPED.read_bytes())
    path.write_bytes(packed + zstandard.ZstdCompressor().compress(b"step:14 - actor/a:1\n"))
    assert [step for step, _ in rows(read(path))] == list(range(15))
    path.write_bytes(packed + packed[:-100])
    assert SkipReason.TORN_TAIL in {skip.reason for skip in read(path).skips}


def test_zstd_without_a_module_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can unpack it, a `.log.zst` is a skip that names the package."""
    for name in ("compression", "compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "pod.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 40)
    skip = verdict(path)
    assert isinstance(skip, Skip)
    assert skip.reason is SkipReason.UNREADABLE
    assert "pip install zstandard" in skip.hint


def test_other_archives_are_left_alone(tmp_path: Path) -> None:
    """A compressed file that is no text is not ours."""
    path = tmp_path / "model.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 1000))
    assert verdict(path) is None


# -- Docker's json-file log ----------------------------------------------------------------


def docker(text: str, *, time: object = "2025-04-05T14:23:11.5Z", end: str = "\n") -> str:
    entry = {"log": text + end, "stream": "stdout", "time": time}
    return json.dumps(entry, separators=(",", ":"))


def test_docker_json_is_read_like_the_same_lines_of_containerd(log: Log) -> None:
    """Docker's own log gives the rows, times and console lines that containerd's gives."""
    texts = ["\x1b[36m(T pid=1)\x1b[0m step:1 - a/b:0.5", "plain", "(T pid=1) step:2 - a/b:nan"]
    wrapped = read(log(*map(docker, texts)))
    plain = read(log(*(f"2025-04-05T14:23:11.5Z stdout F {text}" for text in texts)))
    assert repr(wrapped.rows.to_pylist()) == repr(plain.rows.to_pylist())
    assert wrapped.rows.column("_timestamp").to_pylist() == [1743862991.5] * 2
    assert tuple(wrapped.extra.console) == tuple(plain.extra.console)
    assert not wrapped.skips


def test_docker_json_joins_a_long_line(log: Log) -> None:
    """Docker cuts lines at 16 KiB; a piece without a line end goes on in the next one."""
    path = log(docker("step:1 - a/b:0.5 - a/c:0.", end=""), docker("25"), docker("step:2 - a/b:1"))
    assert read(path).rows.column("a/c").to_pylist() == [0.25, None]


def test_docker_json_keeps_places(log: Log) -> None:
    """Line and byte of what is left out are those of the file, not of the text in it."""
    first = docker('a line with "quotes" and a \t tab')
    path = log(first, docker("step:1 - a/b:0.5 - a/c:0x"), docker("step:2 - a/b:1"))
    (skip,) = read(path).skips
    assert skip.place == f"{path}:2 (byte {len(first) + 1})"


@pytest.mark.parametrize("time", [None, "yesterday", 5])
def test_docker_json_without_a_time(log: Log, time: object) -> None:
    """A line whose time is none is read without it."""
    reading = read(log(docker("step:1 - a/b:0.5", time=time)))
    assert reading.rows.to_pylist() == [{"_step": 1, "a/b": 0.5}]


def test_docker_json_that_is_damaged_gives_no_value(log: Log) -> None:
    """A line that was cut inside a number is counted and named; none of it is taken for a value."""
    whole = docker("step:2 - a/b:0.125")
    cut = whole[: whole.index("25")]
    reading = read(log(docker("step:1 - a/b:0.5"), cut, docker("step:3 - a/b:1")))
    assert reading.rows.column("_step").to_pylist() == [1, 3]
    assert [(skip.records, ":2 (" in skip.place) for skip in reading.skips] == [(1, True)]
    path = log(docker("step:1 - a/b:0.5"))
    path.write_text(path.read_text() + cut)
    reading = read(path)
    assert reading.rows.column("_step").to_pylist() == [1]
    assert [skip.reason for skip in reading.skips] == [SkipReason.PARTIAL_LINE]


def test_docker_json_hides_secrets(log: Log) -> None:
    """What is masked in a plain console is masked in a wrapped one, quotes and all."""
    reading = read(log(docker('{"api_key": "verysecretone"}'), docker("step:1 - a/b:1")))
    assert "verysecretone" not in "\n".join(reading.extra.console)


# -- console text --------------------------------------------------------------------------


def test_console_text_is_what_a_terminal_shows(log: Log) -> None:
    """All lines in order: no colours, of progress bars the last state."""
    path = log(
        "\x1b[36m(W pid=1)\x1b[0m hello",
        "",
        "(W pid=1) \rTraining Progress:   5%|# | 2/40\rTraining Progress:   8%|# | 3/40",
        "step:1 - actor/a:1",
    )
    assert tuple(read(path).extra.console) == (
        "(W pid=1) hello",
        "",
        "Training Progress:   8%|# | 3/40",
        "step:1 - actor/a:1",
    )


def test_every_line_is_kept() -> None:
    """The console has as many lines as the file."""
    for path in (MERGED, SESSIONS, WRAPPED, COARSE):
        lines = path.read_bytes().count(b"\n")
        assert len(read(path).extra.console) == lines, path


def test_a_copy_is_read_the_same(tmp_path: Path) -> None:
    """What is read depends on the content alone."""
    copy = tmp_path / "elsewhere.txt"
    shutil.copy(MERGED, copy)
    assert rows(read(copy)) == rows(read(MERGED))
    assert recognised(copy).facts == recognised(MERGED).facts
    assert source_module.SEARCHED >= 64 << 20
