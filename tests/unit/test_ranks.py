"""Ranks of one attempt become one row a step, by rules, whatever order they come in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_logsync import StepLogger
from verl_logsync.columns import MISSING, decode
from verl_logsync.discover import discover
from verl_logsync.model import Ending, Facts, LogFile, Reading, Skip, SkipReason, Stamp
from verl_logsync.ranks import Piece, RankRules, merge_ranks
from verl_logsync.sources.step_log import StepLog
from verl_logsync.table_builder import TableBuilder

NAN = math.nan


def piece(
    rank: int,
    rows: dict[int, dict[str, Any]] | list[tuple[int, dict[str, Any]]],
    *,
    world: int = 1,
    times: list[float] | None = None,
    **more: Any,
) -> Piece:
    """What one rank says: step -> values, in the order given."""
    pairs = list(rows.items()) if isinstance(rows, dict) else rows
    builder = TableBuilder()
    for _, values in pairs:
        builder.add(values)
    columns: dict[str, Any] = {"_step": pa.array([step for step, _ in pairs], type=pa.int64())}
    if times is not None:
        columns["_timestamp"] = pa.array(times, type=pa.float64())
    facts = Facts(rank=rank, world_size=world)
    file = LogFile(Path(f"rank-{rank}.jsonl"), "step_log", Stamp(1, 1, 1, 1), facts)
    return rank, file, Reading(pa.table(columns | builder.columns()), **more)


def rows_of(reading: Reading) -> dict[int, dict[str, Any]]:
    """Step -> values that are there, without the axes."""
    names = [n for n in reading.rows.column_names if not n.startswith("_")]
    columns = {name: decode(reading.rows.column(name)) for name in names}
    steps = reading.rows.column("_step").to_pylist()
    assert steps == sorted(set(steps)), "not one row a step"
    return {
        step: {n: column[i] for n, column in columns.items() if column[i] is not MISSING}
        for i, step in enumerate(steps)
    }


def merged(*values: Any, key: str = "x", rules: RankRules | None = None) -> Any:
    """What becomes of one key at one step, a value a rank (MISSING where a rank lacks it)."""
    pieces = [
        piece(rank, {1: {"other": 0.5} | ({} if value is MISSING else {key: value})})
        for rank, value in enumerate(values)
    ]
    return rows_of(merge_ranks(pieces, rules).reading)[1].get(key, MISSING)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("actor/pg_loss", 2.5),
        ("response_length/max", 4),
        ("perf/max_memory_allocated_gb", 4),
        ("perf/cpu_memory_used_gb", 4),
        ("gpu/mem_used", 4),
        ("response_length/min", 1),
        ("perf/total_num_tokens", 5),
        ("samples/count", 5),
        ("critic/discount_factor", 2.5),
        ("timing_s/step", 2.5),
        ("timing_s/agent_loop/generate_sequences/min", 1),
    ],
)
def test_names_tell_the_rule(key: str, expected: float) -> None:
    """Mean by default; maximum, minimum and sum where the name says so."""
    value = merged(1, 4, key=key)
    assert value == expected
    assert isinstance(value, float) == (expected == 2.5)


@pytest.mark.parametrize("rule", ["mean", "max", "min", "sum"])
@pytest.mark.parametrize("others", [(1.0, 2.0), (1, 2)], ids=["floats", "integers"])
def test_nan_of_any_rank_is_nan(rule: Any, others: tuple[float, ...]) -> None:
    """A NaN is never averaged away, whatever the rule."""
    rules = RankRules(patterns=(("x", rule),))
    assert math.isnan(merged(NAN, *others, rules=rules))
    assert math.isnan(merged(*others, NAN, rules=rules))


@pytest.mark.parametrize("rule", ["mean", "max", "min", "sum"])
def test_nan_is_nan_also_where_other_steps_hold_text(rule: Any) -> None:
    """The same holds for a key that is not a number everywhere."""
    rules = RankRules(patterns=(("x", rule),))
    for values in ((NAN, 1.0), (1.0, NAN)):
        pieces = [piece(r, {1: {"x": v}, 2: {"x": "text"}}) for r, v in enumerate(values)]
        rows = rows_of(merge_ranks(pieces, rules).reading)
        assert math.isnan(rows[1]["x"])
        assert rows[2]["x"] == "text"


@pytest.mark.parametrize("rule", ["mean", "max", "min", "sum"])
def test_null_of_any_rank_is_null(rule: Any) -> None:
    """Null stands for a number that is not known, so that the result is not known either."""
    assert merged(1.0, None, 2.0, rules=RankRules(patterns=(("x", rule),))) is None


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ((1.0, MISSING, 3.0), "mean", 2.0),
        ((MISSING, MISSING), "mean", MISSING),
        ((0.1, 0.1, 0.1), "mean", 0.1),
        ((1e308, 1.5e308), "mean", 1.25e308),
        ((math.inf, 1.0), "mean", math.inf),
        ((math.inf, 1.0), "min", 1.0),
        ((math.inf, math.inf), "mean", math.inf),
        ((2**60, 2**60 + 2), "sum", 2**61 + 2),
        ((2**60 + 1, 1), "max", 2**60 + 1),
        ((3, 4), "sum", 7),
        ((2**52, 2**52, 2**52), "sum", float(3 * 2**52)),
        ((1, 2.5), "sum", 3.5),
        ((1, MISSING), "max", 1),
        ((7, 7, MISSING), "mean", 7),
    ],
    ids=str,
)
def test_values_are_reduced_exactly(values: tuple[Any, ...], rule: Any, expected: Any) -> None:
    """Missing does not count, equal values are their own mean, large integers keep their digits."""
    assert merged(*values, rules=RankRules(patterns=(("x", rule),))) == expected


def test_opposite_infinities_have_no_mean() -> None:
    """Infinity and minus infinity give NaN, without a warning."""
    assert math.isnan(merged(math.inf, -math.inf))


@pytest.mark.parametrize("key", ["training/global_step", "actor/lr", "training/epoch", "epoch"])
def test_what_must_be_the_same_is_checked(key: str) -> None:
    """Keys that all ranks state alike are kept; a difference is named with step and values."""
    same = merge_ranks([piece(0, {5: {key: 1}}), piece(1, {5: {key: 1}})])
    assert (rows_of(same.reading)[5][key], same.notes) == (1, ())
    other = merge_ranks([piece(1, {5: {key: 2}}), piece(0, {5: {key: 1}})])
    assert rows_of(other.reading)[5][key] == 1
    (note,) = other.notes
    for word in (key, "step 5", "rank 0: 1", "rank 1: 2"):
        assert word in note


@pytest.mark.parametrize(
    ("one", "other"),
    [("a", "b"), (True, False), ([1], [2]), ({"a": 1}, {"a": 2}), ("a", 1.0)],
    ids=str,
)
def test_what_is_no_number_is_the_first_ranks(one: Any, other: Any) -> None:
    """Text, flags, lists and objects are not reduced; a difference is noted."""
    result = merge_ranks([piece(0, {1: {"x": one}}), piece(3, {1: {"x": other}})])
    assert rows_of(result.reading)[1]["x"] == one
    assert len(result.notes) == 1
    same = merge_ranks([piece(0, {1: {"x": one}}), piece(3, {1: {"x": one}})])
    assert (rows_of(same.reading)[1]["x"], same.notes) == (one, ())


def test_keys_of_one_rank_stay_as_they_are() -> None:
    """What only one rank logs is neither averaged nor changed in type."""
    values = {"a": 2**60, "b": None, "c": "x", "d": True, "e": [1], "f": NAN, "g": 3}
    result = merge_ranks([piece(0, {1: {"z": 1.0}}), piece(1, {1: values, 2: {"z": 2.0}})])
    rows = rows_of(result.reading)
    assert json.dumps({k: rows[1][k] for k in values}) == json.dumps(values)
    assert rows[2] == {"z": 2.0}


def test_per_rank_columns_and_spread_are_added() -> None:
    """On request each rank's value is kept, and the difference of the largest and smallest."""
    rules = RankRules(per_rank=("perf/*",), spread=("perf/*", "taken"))
    pieces = [
        piece(0, {1: {"perf/s": 1.0, "taken": 1.0, "taken/spread": 7.0}, 2: {"perf/s": 2.0}}),
        piece(4, {1: {"perf/s": 4.0, "taken": 2.0}}),
    ]
    result = merge_ranks(pieces, rules)
    rows = rows_of(result.reading)
    assert rows[1]["perf/s"] == 2.5
    assert (rows[1]["rank0/perf/s"], rows[1]["rank4/perf/s"]) == (1.0, 4.0)
    assert rows[1]["perf/s/spread"] == 3.0
    assert rows[2] == {"perf/s": 2.0, "rank0/perf/s": 2.0, "perf/s/spread": 0.0}
    assert rows[1]["taken/spread"] == 7.0
    assert any("taken/spread" in note for note in result.notes)


def test_the_users_patterns_come_first() -> None:
    """A pattern of the user wins over a shipped one, and the first of several wins."""
    rules = RankRules(patterns=(("a/max", "min"), ("a/*", "sum")))
    assert [rules.rule(key) for key in ("a/max", "a/b", "b/max", "b/c")] == [
        "min",
        "sum",
        "max",
        "mean",
    ]


# -- what is missing -----------------------------------------------------------------------


def ranked(*spans: range, world: int = 1) -> tuple[str, ...]:
    pieces = [
        piece(rank, {step: {"actor/pg_loss": 1.0} for step in span}, world=world)
        for rank, span in enumerate(spans)
    ]
    return merge_ranks(pieces).notes


def test_missing_rows_are_reported() -> None:
    """A rank whose log ends early is named with the steps that it lacks."""
    assert ranked(range(100), range(100), range(100), range(60)) == (
        "rank 3 has no rows for steps 60-99; its log ends at step 59",
    )
    assert ranked(range(10), range(8), range(8)) == (
        "ranks 1-2 have no rows for steps 8-9; the log of each ends at step 7",
    )
    assert ranked(range(10), range(5, 10)) == ("rank 1 has no rows for steps 0-4",)
    assert ranked(range(10), range(10)) == ()


def test_holes_are_reported_as_ranges() -> None:
    """Steps that are missing here and there are named as far as they are few."""
    pieces = [
        piece(0, {step: {"actor/pg_loss": 1.0} for step in range(0, 40, 2)}),
        piece(1, {step: {"actor/pg_loss": 1.0} for step in range(0, 40, 2) if step % 3}),
    ]
    (note,) = merge_ranks(pieces).notes
    assert note == "rank 1 has no rows for steps 0, 6, 12 and 4 more stretches"


def test_a_validation_that_one_rank_logs_is_no_gap() -> None:
    """Rows with validation results only, as rank 0 logs them before training, are not missed."""
    pieces = [
        piece(0, {0: {"val-core/x": 0.5}, 1: {"actor/pg_loss": 1.0}}),
        piece(1, {1: {"actor/pg_loss": 1.0}}),
    ]
    result = merge_ranks(pieces)
    assert result.notes == ()
    assert list(rows_of(result.reading)) == [0, 1]


def test_ranks_without_a_log_are_reported() -> None:
    """Ranks that the world has and of which nothing is here are named, unless one logs for all."""
    assert ranked(range(2), range(2), world=8) == ("ranks 2-7 of 8 left no log here",)
    assert ranked(range(2), world=8) == ()


# -- clocks --------------------------------------------------------------------------------


def test_clocks_are_measured_and_corrected() -> None:
    """A constant difference at shared steps is taken out; more than a second is reported."""
    one = piece(0, {s: {"a": 1.0} for s in range(4)}, times=[100.0, 110.0, 120.0, 130.0])
    two = piece(
        1, {s: {"a": 1.0} for s in range(1, 6)}, times=[t + 30.5 for t in (110, 120, 130, 140, 150)]
    )
    three = piece(2, {s: {"a": 1.0} for s in range(4)}, times=[99.6, 109.6, 119.6, 129.6])
    result = merge_ranks([two, three, one])
    assert result.reading.rows.column("_timestamp").to_pylist() == [100, 110, 120, 130, 140, 150]
    assert result.skew == pytest.approx({1: 30.5, 2: -0.4})
    clocks = [note for note in result.notes if "clock" in note]
    assert clocks == ["the clock of rank 1 is 30.5 s ahead of that of rank 0; corrected"]


def test_without_shared_steps_no_clock_is_corrected() -> None:
    """Where nothing can be compared the recorded times stay."""
    one = piece(0, {1: {"a": 1.0}}, times=[100.0])
    two = piece(1, {2: {"a": 1.0}}, times=[500.0])
    result = merge_ranks([one, two])
    assert result.reading.rows.column("_timestamp").to_pylist() == [100.0, 500.0]
    assert result.skew == {}


def test_one_late_step_does_not_move_a_clock() -> None:
    """The median is taken: a step that one rank logged late is no difference of clocks."""
    one = piece(0, {s: {"a": 1.0} for s in range(5)}, times=[10.0, 20.0, 30.0, 40.0, 50.0])
    two = piece(1, {s: {"a": 1.0} for s in range(5)}, times=[10.0, 20.0, 330.0, 40.0, 50.0])
    result = merge_ranks([one, two])
    assert result.skew == {1: 0.0}
    assert result.notes == ()


# -- everything else that readings hold ----------------------------------------------------


def test_nothing_else_of_a_reading_is_lost() -> None:
    """Skips, notes, rounding and ends of all ranks are in the result; a failure wins."""
    skips = [Skip(SkipReason.MALFORMED, f"rank{r}:1", records=1) for r in range(2)]
    one = piece(
        0,
        {1: {"a": 1.0}},
        skips=(skips[0],),
        config={"c": 1},
        ending=Ending(0, "ended"),
        started_at=5.0,
        ended_at=10.0,
        notes=("n", "m"),
        below_precision=("a",),
    )
    two = piece(
        1,
        {1: {"a": 1.0}},
        skips=(skips[1],),
        ending=Ending(1, "failed"),
        started_at=6.0,
        ended_at=11.0,
        rounding=0.5,
        notes=("n",),
        below_precision=("b",),
    )
    result = merge_ranks([two, one])
    reading = result.reading
    assert reading.skips == tuple(skips)
    assert reading.config == {"c": 1}
    assert reading.ending == Ending(1, "failed")
    assert (reading.started_at, reading.ended_at) == (5.0, 11.0)
    assert (reading.rounding, reading.below_precision) == (0.5, ("a", "b"))
    assert reading.notes == ("n", "m")
    assert (result.ranks, result.merged) == ((0, 1), 1)


def test_several_rows_of_a_step_are_one() -> None:
    """Within a rank later keys win, as everywhere; then ranks are reduced."""
    one = piece(0, [(1, {"a": 1.0, "b": 1.0}), (1, {"a": 3.0}), (0, {"a": 0.0})])
    two = piece(1, {1: {"a": 5.0, "b": 2.0}})
    result = merge_ranks([one, two])
    assert rows_of(result.reading) == {0: {"a": 0.0}, 1: {"a": 4.0, "b": 1.5}}
    assert result.merged == 2


def test_several_pieces_of_a_rank_follow_one_another() -> None:
    """Two logs of one rank, as after a move to another folder, are one rank's rows."""
    early = piece(0, {1: {"a": 1.0}, 2: {"a": 2.0}}, started_at=1.0)
    late = piece(0, {2: {"a": 4.0}, 3: {"a": 3.0}}, started_at=2.0)
    for order in ([early, late], [late, early]):
        rows = rows_of(merge_ranks(order).reading)
        assert rows == {1: {"a": 1.0}, 2: {"a": 4.0}, 3: {"a": 3.0}}


def test_ranks_without_rows_do_no_harm() -> None:
    """A rank that logged nothing is missed, not stumbled over."""
    result = merge_ranks([piece(0, {1: {"actor/pg_loss": 1.0}}), piece(1, {})])
    assert rows_of(result.reading) == {1: {"actor/pg_loss": 1.0}}
    assert result.notes == ("rank 1 has no rows for step 1",)
    assert merge_ranks([piece(0, {}), piece(1, {})]).reading.rows.num_rows == 0


def test_no_pieces_is_a_mistake() -> None:
    """There is nothing to merge without a piece."""
    with pytest.raises(ValueError, match="no pieces"):
        merge_ranks([])


def test_real_logs_of_ranks_merge(tmp_path: Path) -> None:
    """What four StepLoggers wrote becomes one reading."""
    for rank in range(4):
        with StepLogger(
            "p", "e", directory=tmp_path, rank=rank, world_size=4, attempt_id="j"
        ) as one:
            for step in range(1, 11 if rank else 13):
                one.log({"actor/pg_loss": np.float32(rank), "perf/max_memory_gb": 40 + rank}, step)
    source = StepLog()
    pieces = [(f.facts.rank or 0, f, source.read(f)) for f in discover([tmp_path], [source]).files]
    result = merge_ranks(pieces)
    rows = rows_of(result.reading)
    assert rows[1] == {"actor/pg_loss": 1.5, "perf/max_memory_gb": 43}
    assert rows[12] == {"actor/pg_loss": 0.0, "perf/max_memory_gb": 40}
    assert result.notes == (
        "ranks 1-3 have no rows for steps 11-12; the log of each ends at step 10",
    )
    assert result.merged == 12 + 3 * 10 - 12


# -- laws ----------------------------------------------------------------------------------

VALUES = (
    st.floats() | st.integers(-(2**62), 2**62) | st.none() | st.text(max_size=2) | st.booleans()
)
KEYS = st.sampled_from(["a", "b/max", "c/min", "d/count", "x/lr", "epoch"])
ROWS = st.dictionaries(st.integers(0, 6), st.dictionaries(KEYS, VALUES, max_size=4), max_size=5)


def text_of(reading: Reading) -> str:
    """Everything about the rows that counts."""
    return json.dumps({k: dict(sorted(v.items())) for k, v in rows_of(reading).items()})


@settings(deadline=None, max_examples=150)
@given(st.lists(ROWS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_ranks_and_rows_does_not_matter(
    ranks: list[dict[int, dict[str, Any]]], random: Any
) -> None:
    """However pieces, and the rows in them, are ordered: the same rows and the same notes."""
    rules = RankRules(per_rank=("a",), spread=("b/*",))
    pieces = [piece(rank, rows) for rank, rows in enumerate(ranks)]
    one = merge_ranks(pieces, rules)
    shuffled = []
    for rank, rows in enumerate(ranks):
        pairs = list(rows.items())
        random.shuffle(pairs)
        shuffled.append(piece(rank, pairs))
    random.shuffle(shuffled)
    other = merge_ranks(shuffled, rules)
    if len(ranks) > 1:
        assert text_of(other.reading) == text_of(one.reading)
    assert sorted(other.notes) == sorted(one.notes)
    assert other.ranks == one.ranks == tuple(range(len(ranks)))


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(0, 9))
def test_one_rank_is_itself(rows: dict[int, dict[str, Any]], rank: int) -> None:
    """A single rank's reading is given back untouched."""
    own = piece(rank, rows)
    result = merge_ranks([own], RankRules(per_rank=("*",)))
    assert result.reading is own[2]
    assert (result.ranks, result.notes, result.merged) == ((rank,), (), 0)


@settings(deadline=None, max_examples=100)
@given(ROWS, st.integers(2, 4))
def test_equal_ranks_give_what_each_says(rows: dict[int, dict[str, Any]], count: int) -> None:
    """Ranks that agree in everything give the same row, except where values are summed."""
    # In order, since the first row tells whether a column is written as integers.
    rows = {
        step: {k: v for k, v in row.items() if "count" not in k}
        for step, row in sorted(rows.items())
    }
    result = merge_ranks([piece(rank, rows) for rank in range(count)])
    assert result.notes == ()
    assert text_of(result.reading) == text_of(piece(0, rows)[2])
