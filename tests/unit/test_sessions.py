"""Pieces of files -> starts of the job, by what was recorded or by the values themselves."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_logsync
from verl_logsync.align import Policy, align
from verl_logsync.columns import STEP
from verl_logsync.model import Attempt, AttemptReading, Facts, LogFile, Reading, Restart, Stamp
from verl_logsync.sessions import sort_out
from verl_logsync.table_builder import TableBuilder
from verl_logsync.testing.builders import write_verl_log

PRECISIONS = {"offline_run": 30, "verl_file": 20, "console": 10}


def values(step: int, start: int) -> dict[str, float]:
    """What the start-th start of a job logs: never the same at two starts."""
    rng = random.Random(1000 * start + step)
    return {"actor/loss": rng.random(), "critic/score/mean": rng.random(), "start": float(start)}


def table(rows):
    """An Arrow table of (step, values) pairs."""
    builder = TableBuilder()
    for _, data in rows:
        builder.add(data)
    steps = pa.array([step for step, _ in rows], type=pa.int64())
    return pa.table({STEP: steps, **builder.columns()})


def reading(rows, **more) -> Reading:
    return Reading(table(rows), **more)


def file(name: str, source: str, rows) -> LogFile:
    facts = Facts(head_digest=name, first_step=rows[0][0], last_step=rows[-1][0])
    return LogFile(Path(name), source, Stamp(1, 1, 1, 1), facts)


def attempt(*logs) -> AttemptReading:
    """An attempt of (file name, source, rows, more) logs, as the catalog makes them."""
    pairs = tuple((file(n, s, rows), reading(rows, **more)) for n, s, rows, more in logs)
    return AttemptReading(Attempt(tuple(f for f, _ in pairs), None, "content"), pairs)


def rows_of(start: int, first: int, last: int):
    return [(step, values(step, start)) for step in range(first, last + 1)]


def told(attempts) -> list[list[tuple[str, int, int]]]:
    """By attempt: file, first step, last step."""
    found = []
    for one in attempts:
        logs = []
        for log, said in one.readings:
            steps = said.rows.column(STEP).to_pylist()
            logs.append((log.path.name, steps[0], steps[-1]))
        found.append(sorted(logs))
    return found


def test_a_file_is_cut_where_the_job_started_again():
    """Steps that are trained again are another attempt; the validation before them belongs to it."""
    rows = [*rows_of(0, 0, 9), (5, {"val-core/x": 0.5}), *rows_of(1, 6, 12)]
    done = sort_out([attempt(("a", "console", rows, {}))])
    assert told(done) == [[("a", 0, 9)], [("a", 5, 12)]]


def test_a_late_record_is_no_restart():
    """A validation or an aggregate that comes late, with keys of its own, cuts nothing."""
    rows = [*rows_of(0, 0, 9), (8, {"val-core/x": 0.5}), (7, {"fully_async/count": 3.0})]
    done = sort_out([attempt(("a", "console", rows, {}))])
    assert told(done) == [[("a", 0, 7)]]


def test_recorded_restarts_are_believed():
    """A file that records its starts is cut there, also where no step comes twice."""
    rows = rows_of(0, 0, 12)
    done = sort_out([attempt(("a", "console", rows, {"restarts": (Restart(5, 1e9, "second"),)}))])
    assert told(done) == [[("a", 0, 4)], [("a", 5, 12)]]
    assert done[1].attempt.started_at == 1e9


def test_starts_without_rows_are_none():
    """A start that logged nothing before the next one is no attempt."""
    restarts = (Restart(5), Restart(5), Restart(13))
    done = sort_out([attempt(("a", "console", rows_of(0, 0, 12), {"restarts": restarts}))])
    assert told(done) == [[("a", 0, 4)], [("a", 5, 12)]]


def test_pieces_find_their_start_by_values():
    """The log of the second start belongs to the second piece of the console, which it agrees with,
    although it begins like the first."""
    console = [*rows_of(0, 0, 9), *rows_of(1, 0, 12)]
    done = sort_out(
        [attempt(("con", "console", console, {}), ("log", "verl_file", console[10:], {}))]
    )
    assert told(done) == [[("con", 0, 9)], [("con", 0, 12), ("log", 0, 12)]]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_log_of_any_start(start):
    """Of three starts in one console a log finds its own."""
    spans = [(0, 9), (5, 14), (10, 19)]
    console = [row for n, span in enumerate(spans) for row in rows_of(n, *span)]
    log = rows_of(start, *spans[start])
    done = sort_out([attempt(("con", "console", console, {}), ("log", "verl_file", log, {}))])
    expected = [[("con", *span)] for span in spans]
    expected[start].append(("log", *spans[start]))
    assert told(done) == expected


def test_a_console_without_its_beginning():
    """Two attempts for the catalog, since they begin at different steps; the same values show one,
    and what is printed with three decimals replaces nothing."""
    rows = rows_of(0, 0, 20)
    rounded = [(s, {k: round(v, 3) for k, v in data.items()}) for s, data in rows[5:]]
    found = [
        attempt(("log", "verl_file", rows, {})),
        attempt(("con", "console", rounded, {"rounding": 5e-4})),
    ]
    done = sort_out(found)
    assert told(done) == [[("con", 5, 20), ("log", 0, 20)]]
    history, account = align(done, PRECISIONS, Policy())
    assert history.table.column("actor/loss").to_pylist() == [d["actor/loss"] for _, d in rows]
    assert (account.superseded, account.merged, account.balanced) == (0, 16, True)


def test_a_second_start_of_another_format():
    """A console that begins inside the log and says something else is a later start."""
    found = [
        attempt(("log", "verl_file", rows_of(0, 0, 20), {})),
        attempt(("con", "console", rows_of(1, 11, 30), {})),
    ]
    assert told(sort_out(found)) == [[("log", 0, 20)], [("con", 11, 30)]]


def test_half_a_start_in_each_file():
    """Two consoles of one start (a log that was rotated) continue one another under one log."""
    rows = rows_of(0, 0, 20)
    found = [
        attempt(("log", "verl_file", rows, {}), ("con1", "console", rows[:11], {})),
        attempt(("con2", "console", rows[11:], {})),
    ]
    history, account = align(sort_out(found), PRECISIONS, Policy())
    assert len(history) == 21
    assert (account.superseded, account.balanced) == (0, True)


def test_values_count_more_than_first_steps_when_two_starts_resume_at_one_checkpoint():
    """Two starts from one checkpoint have one first step, so the catalog may give the console of
    the one to the log of the other: values that differ part them, in the order of their files.
    """
    third, fourth = rows_of(2, 13, 18), rows_of(3, 13, 19)
    swapped = [
        attempt(("third", "verl_file", third, {}), ("run4", "console", fourth, {})),
        attempt(("fourth", "verl_file", fourth, {}), ("run3", "console", third, {})),
    ]
    starts = [
        [("run3", 13, 18), ("third", 13, 18)],
        [("fourth", 13, 19), ("run4", 13, 19)],
    ]
    assert told(sort_out(swapped)) == starts


def test_a_console_older_than_the_log_of_its_first_step_is_the_earlier_start():
    """Where only the newest JSONL is left, the console of a start before from the same checkpoint
    is placed in front of it by its modification time."""
    old, new = rows_of(2, 7, 16), rows_of(3, 7, 17)
    (one,) = [attempt(("exp", "verl_file", new, {}), ("run3", "console", old, {}))]
    aged = [
        (replace(f, stamp=Stamp(1, 0, 1, 1)) if f.path.name == "run3" else f, r)
        for f, r in one.readings
    ]
    attempts = [
        AttemptReading(one.attempt, tuple(aged)),
        attempt(("run4", "console", new, {})),
    ]
    assert told(sort_out(attempts)) == [[("run3", 7, 16)], [("exp", 7, 17), ("run4", 7, 17)]]


def test_rows_only_the_console_has_stay_in_the_first_attempt():
    """What the log of the first start lost (its last steps) comes from the console's first piece."""
    console = [*rows_of(0, 0, 14), *rows_of(1, 11, 20)]
    found = [
        attempt(("con", "console", console, {}), ("log1", "verl_file", rows_of(0, 0, 8), {})),
        attempt(("log2", "verl_file", rows_of(1, 11, 20), {})),
    ]
    done = sort_out(found)
    assert told(done) == [
        [("con", 0, 14), ("log1", 0, 8)],
        [("con", 11, 20), ("log2", 11, 20)],
    ]
    history, _ = align(done, PRECISIONS, Policy())
    assert history.table.column("start").to_pylist() == [0.0] * 11 + [1.0] * 10


# -- laws ------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Spans of the starts of a job: each resumes from a checkpoint of the one before it."""
    spans = [(0, draw(st.integers(4, 15)))]
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(max(2, spans[-1][0]), spans[-1][1] + 1))
        spans.append((first, draw(st.integers(first + 2, first + 12))))
    return spans


def expected(spans) -> list[float]:
    starts: dict[int, float] = {}
    for number, (first, last) in enumerate(spans):
        starts = {s: n for s, n in starts.items() if s < first}
        starts |= dict.fromkeys(range(first, last + 1), float(number))
    return [starts[step] for step in sorted(starts)]


@settings(deadline=None, max_examples=25)
@given(jobs(), st.randoms(use_true_random=False))
def test_any_job_from_console_and_logs(tmp_path_factory, spans, rng):
    """Whatever logs of whatever starts lie beside the console of all, in any order: every step is
    that of the last start that computed it, no value differs, and the account balances."""
    folder = tmp_path_factory.mktemp("job")
    console = "".join(
        f"(TaskRunner pid={n + 100}) step:{step} - "
        + " - ".join(f"{k}:{v!r}" for k, v in data.items())
        + "\n"
        for n, span in enumerate(spans)
        for step, data in rows_of(n, *span)
    )
    paths = [folder / "train.log"]
    paths[0].write_text(console)
    for n, span in enumerate(spans):
        if rng.random() < 0.6 or n == len(spans) - 1:
            name = "exp.jsonl" if n == len(spans) - 1 else f"exp.attempt{n}.jsonl"
            paths.append(write_verl_log(folder / "grpo" / name, rows_of(n, *span)))
    rng.shuffle(paths)
    (run,) = verl_logsync.load(paths)
    frame = run.history()
    assert frame["start"].tolist() == expected(spans)
    for step in frame.index:
        assert frame["actor/loss"][step] == values(step, int(frame["start"][step]))["actor/loss"]
    assert run.account.balanced
    assert run.account.conflict_count == 0


@settings(deadline=None, max_examples=60)
@given(jobs(), st.randoms(use_true_random=False), st.data())
def test_order_of_files_does_not_matter(spans, rng, data):
    """The readings of an attempt in another order are the same attempts and the same history."""
    console: list[Any] = []
    restarts: list[Restart] = []
    for number, span in enumerate(spans):
        restarts.append(Restart(len(console)))
        console.extend(rows_of(number, *span))
    logs = [("con", "console", console, {"restarts": tuple(restarts[1:])})]
    number = data.draw(st.integers(0, len(spans) - 1))
    logs.append(("log", "verl_file", rows_of(number, *spans[number]), {}))
    logs.append(("off", "offline_run", rows_of(0, *spans[0]), {}))
    results = []
    for order in itertools.permutations(logs):
        done = sort_out([attempt(*order)])
        history, account = align(done, PRECISIONS, Policy())
        columns = sorted(history.table.column_names)
        results.append((told(done), history.table.select(columns).to_pylist(), account.superseded))
        assert account.balanced
    assert all(result == results[0] for result in results)
    assert [row["start"] for row in results[0][1]] == expected(spans)
