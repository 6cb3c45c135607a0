"""When every step happened: what was recorded goes first, the rest is rebuilt and marked."""

from __future__ import annotations

import time
from datetime import datetime, timezone

import numpy as np
import pytest

import verl_logsync
from verl_logsync import StepLogger, api
from verl_logsync.pipeline.loading import Loaded
from verl_logsync.settings import load_settings
from verl_logsync.testing.builders import write_verl_log
from verl_logsync.verl_keys import beside_step_time

#: 2025-06-15T15:06:40Z
START = 1_750_000_000.0
SECONDS = [20.0 + step for step in range(31)]


def data(step, value=1.0, **more):
    return {"actor/loss": step / 7 + value, "timing_s/step": SECONDS[step], **more}


def rows(first, last, value=1.0):
    return [(s, data(s, value)) for s in range(first, last + 1)]


def stamped(first, last, start, value=1.0, zone="Z"):
    """A container's console; a step's line comes when the step is done."""
    lines, now = [], start
    for step in range(first, last + 1):
        now += SECONDS[step]
        text = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
        values = " - ".join(f"{k}:{v}" for k, v in data(step, value).items())
        lines.append(f"{text}{zone} step:{step} - {values}\n")
    return "".join(lines)


def ends(start, first=0, last=30):
    return [start + s for s in np.cumsum(SECONDS[first : last + 1])]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "grpo/exp.jsonl"


def loaded(folder, **settings):
    ((run, result),) = api.scan([folder], load_settings(settings))[1]
    assert isinstance(result, Loaded)
    frame = verl_logsync.load(folder, **settings)[0].history()
    return result, frame


def test_recorded_times_go_before_estimated_ones(log, tmp_path, age):
    """A JSONL without times and a console with stamps: the stamps are the times, although the
    files were copied long after."""
    write_verl_log(log, rows(0, 30))
    (tmp_path / "pod.log").write_text(stamped(0, 30, START))
    age(tmp_path, 50)
    result, frame = loaded(tmp_path)
    assert result.history.clock == "recorded"
    assert frame["_timestamp"].tolist() == pytest.approx(ends(START), abs=1e-3)


def test_one_recorded_time_pins_the_others(log, tmp_path, age):
    """Steps that the stamped console lacks continue its clock; that these are estimated is said."""
    write_verl_log(log, rows(0, 30))
    (tmp_path / "pod.log").write_text(stamped(0, 10, START))
    age(tmp_path, 50)
    result, frame = loaded(tmp_path)
    assert result.history.clock == "estimated"
    assert frame["_timestamp"].tolist() == pytest.approx(ends(START), abs=1e-3)


def test_h4_jsonl_alone(log, tmp_path, age):
    """H4: a JSONL has no time: its end is when it was last written, and this is marked."""
    write_verl_log(log, rows(0, 30))
    age(tmp_path, 86_400)
    result, frame = loaded(tmp_path)
    assert result.history.clock == "estimated"
    end = log.stat().st_mtime
    assert frame["_timestamp"].tolist() == pytest.approx(
        [end - sum(SECONDS) + s for s in np.cumsum(SECONDS)], abs=1e-3
    )
    assert frame["_runtime"].tolist() == pytest.approx(list(np.cumsum(SECONDS)))


def test_h4_without_any_duration(log, tmp_path):
    """H4: without step times nothing is invented: no times, and that is said."""
    write_verl_log(log, [(s, {"actor/loss": 1.0}) for s in range(5)])
    result, frame = loaded(tmp_path)
    assert result.history.clock == "unknown"
    assert "_timestamp" not in frame


@pytest.mark.parametrize("last", [31, 32])
def test_one_step_without_any_time_is_said(log, tmp_path, last):
    """A console without durations: its steps have the JSONL's times, a step beyond it has none."""
    write_verl_log(log, rows(0, 30))
    console = tmp_path / "job.log"
    console.write_text("".join(f"step:{s} - actor/other:0.5\n" for s in range(last)))
    result, frame = loaded(tmp_path, runs=((log.stem, "*.jsonl"), (log.stem, "*.log")))
    assert len(frame) == last
    assert result.history.clock == ("estimated" if last == 31 else "unknown")


def test_a_clock_that_is_wrong_by_a_constant_is_set(tmp_path):
    """The stamps of a console whose machine's clock disagrees with the step log: corrected, said."""
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows(0, 30))
    (tmp_path / "grpo/exp.log").write_text(stamped(0, 30, START))
    folder = tmp_path / "steps"
    with StepLogger("grpo", "exp", directory=folder, rank=0, world_size=1) as logger:
        for step in range(29):
            logger.log(data(step), step)
    result, frame = loaded(tmp_path)
    # The step log recorded its times: the console is set by it, although that has more rows.
    assert time.time() - frame["_timestamp"][0] < 60
    (note,) = [n for n in result.account.notes if "differs by" in n]
    assert "exp.log" in note


def test_small_differences_are_no_skew(tmp_path):
    """A line that is written a second late is no other clock."""
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows(0, 30))
    (tmp_path / "pod.log").write_text(stamped(0, 30, START))
    result, _ = loaded(tmp_path)
    assert not any("differs" in note for note in result.account.notes)


@pytest.fixture
def two_attempts(tmp_path):
    """Steps 0..20 and, a day later, 11..30."""
    console = tmp_path / "pod.log"
    console.write_text(stamped(0, 20, START) + stamped(11, 30, START + 86_400, 2.0))
    return tmp_path


def test_runtime_leaves_out_idle_time(two_attempts):
    """`_runtime` counts on from where the first attempt stopped, superseded steps included."""
    _, frame = loaded(two_attempts)
    first = sum(SECONDS[1:21])  # from its first line on: nothing tells when it started
    assert frame["_runtime"][10] == pytest.approx(sum(SECONDS[1:11]), abs=1e-3)
    assert frame["_runtime"][30] - frame["_runtime"][11] == pytest.approx(
        sum(SECONDS[12:31]), abs=1e-3
    )
    assert first <= frame["_runtime"][11] <= first + SECONDS[11]
    assert frame["_timestamp"][11] == pytest.approx(START + 86_400 + SECONDS[11], abs=1e-3)


def test_runtime_of_the_wall(two_attempts):
    """`--runtime wall` keeps the idle time: `_runtime` is the time since the first start."""
    _, frame = loaded(two_attempts, runtime="wall")
    runtimes = frame["_timestamp"] - frame["_timestamp"][0]
    assert (frame["_runtime"] - runtimes).abs().max() < 1e-3
    assert frame["_runtime"][30] > 86_400


def test_an_attempt_ends_before_the_next_begins(tmp_path, age):
    """Estimated times of an earlier attempt do not reach into a later, recorded one."""
    first = write_verl_log(tmp_path / "grpo/exp.jsonl.1", rows(0, 20))
    (tmp_path / "grpo/exp.log").write_text(stamped(11, 30, START, 2.0))
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows(11, 30, 2.0))
    age(tmp_path, 10)  # copied lately: the first log's modification time says nothing
    assert first.stat().st_mtime > START
    _, frame = loaded(tmp_path)
    assert frame["_timestamp"].is_monotonic_increasing
    assert frame["_timestamp"][10] <= START + SECONDS[11] + 1


@pytest.mark.parametrize("stamps_first", [False, True])
def test_one_start_of_a_console_without_stamps(stamps_first, tmp_path, age):
    """A console of which only one start was stamped: the other's times are estimated, and none of
    its steps is without a time."""
    plain = "".join(
        f"step:{step} - " + " - ".join(f"{k}:{v}" for k, v in values.items()) + "\n"
        for step, values in (rows(0, 9) if not stamps_first else rows(6, 14, value=2.0))
    )
    known = stamped(0, 9, START) if stamps_first else stamped(6, 14, START, value=2.0)
    console = tmp_path / "train.log"
    console.write_text(known + plain if stamps_first else plain + known)
    age(console, 600)
    result, frame = loaded(tmp_path)
    assert result.history.clock == "estimated"
    times = frame["_timestamp"].astype(float)
    assert list(frame.index) == list(range(15))
    assert times.is_monotonic_increasing and times.notna().all()
    assert frame["_runtime"].astype(float).is_monotonic_increasing
    sure = range(6) if stamps_first else range(6, 15)
    assert times[list(sure)].tolist() == pytest.approx(
        ends(START, 0, 9)[:6] if stamps_first else ends(START, 6, 14), abs=1e-5
    )


def test_a_log_whose_steps_all_have_times_elsewhere(tmp_path):
    """A JSONL that the console covers wholly adds no time, no start and no warning."""
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows(11, 30, 2.0))
    (tmp_path / "pod.log").write_text(stamped(0, 20, START) + stamped(11, 30, START + 9e4, 2.0))
    result, frame = loaded(tmp_path)
    assert result.history.clock == "recorded"
    assert np.isfinite(frame["_runtime"].astype(float)).all()
    assert frame["_timestamp"][30] == pytest.approx(START + 9e4 + sum(SECONDS[11:31]), abs=1e-3)


@pytest.mark.parametrize(
    ("keys", "beside"),
    [
        (["mfu/actor", "timing_s/step"], []),
        (["perf/mfu/actor", "actor/entropy_loss"], []),
        (["perf/mfu/actor", "actor/entropy"], []),
        (["response/aborted_ratio", "perf/mfu/actor"], ["testing", "save_checkpoint"]),
        (["response_length_non_aborted/mean", "actor/entropy"], ["testing", "save_checkpoint"]),
        (["timing_s/update_weights", "response/aborted_ratio"], ["testing"]),
        (["actor/perf/max_memory_allocated_gb", "response/aborted_ratio"], ["testing"]),
        (["actor/loss"], ["testing"]),
    ],
    ids=["0.2", "0.4", "0.5", "0.6", "0.7.0", "0.7.1", "0.8", "unknown"],
)
def test_what_a_step_time_does_not_contain(keys, beside):
    """Validation and saving are inside `timing_s/step` up to 0.5, outside in 0.6.0-0.7.0, and from
    0.7.1 on only validation is."""
    assert beside_step_time(keys) == tuple(f"timing_s/{name}" for name in beside)


@pytest.mark.parametrize(("mark", "extra"), [("mfu/actor", 0), ("response/aborted_ratio", 16)])
def test_validation_and_saving_take_time(mark, extra, log, tmp_path):
    """What lies beside the step times is added, by the version that the keys tell."""
    write_verl_log(
        log,
        [
            (1, data(1, **{mark: 0.1})),
            (2, data(2, **{mark: 0.1, "timing_s/testing": 14.0, "timing_s/save_checkpoint": 2.0})),
        ],
    )
    _, frame = loaded(tmp_path)
    assert frame["_timestamp"][2] - frame["_timestamp"][1] == pytest.approx(SECONDS[2] + extra)
