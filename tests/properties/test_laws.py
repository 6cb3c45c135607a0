"""Laws that must hold for any input, checked by generated examples."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_logsync import api, pipeline
from verl_logsync.align import Policy, align
from verl_logsync.columns import MISSING, STEP, concat, decode
from verl_logsync.digests import canonical, row_digests
from verl_logsync.model import Attempt, AttemptReading, Facts, History, LogFile, Reading, Stamp
from verl_logsync.settings import Settings
from verl_logsync.sources import SOURCES
from verl_logsync.table_builder import TableBuilder
from verl_logsync.transaction_log import history_row, read_records
from verl_logsync.transaction_log.fragment import history_payloads
from verl_logsync.transaction_log.writer import TransactionLogWriter

KEYS = st.sampled_from(["actor/loss", "critic/score/mean", "val-core/x", "a b", "é", "step", "n"])
VALUES = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.lists(st.integers(-5, 5), max_size=3),
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(-5, 5), max_size=2),
)
ROWS = st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=12)
LAW = settings(deadline=None, max_examples=150)


def _table(rows: Sequence[dict[str, Any]], steps: Sequence[int]) -> pa.Table:
    builder = TableBuilder()
    for row in rows:
        builder.add(row)
    return pa.table({STEP: pa.array(steps, type=pa.int64()), **builder.columns()})


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    columns = {n: decode(table.column(n)) for n in table.column_names if n != STEP}
    return [
        {name: values[i] for name, values in columns.items() if values[i] is not MISSING}
        for i in range(table.num_rows)
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: canonical(value) for key, value in row.items()}


@LAW
@given(ROWS)
def test_columns_keep_every_value(rows: list[dict[str, Any]]) -> None:
    """null, NaN, missing, text, large integers and objects come back from Arrow as they were."""
    table = _table(rows, range(len(rows)))
    assert [_plain(r) for r in _rows(table)] == [_plain(r) for r in rows]


@LAW
@given(ROWS, st.integers(0, 12))
def test_columns_do_not_depend_on_batches(rows: list[dict[str, Any]], cut: int) -> None:
    """Two tables put together say the same as one, whatever types their columns took."""
    parts = [_table(rows[:cut], range(len(rows[:cut]))), _table(rows[cut:], range(len(rows[cut:])))]
    assert [_plain(r) for r in _rows(concat(parts))] == [_plain(r) for r in rows]


@LAW
@given(ROWS)
def test_fragment_keeps_every_value(rows: list[dict[str, Any]]) -> None:
    """Promise 9: what the fragment says, read back, is what the log said."""
    history = History(_table(rows, range(len(rows))), np.zeros(len(rows), dtype=np.int64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run-x.wandb"
        with TransactionLogWriter(path) as log:
            for payload in history_payloads(history, 0):
                log.write_payload(payload)
        entries = [history_row(entry.record) for entry in read_records(path)]  # type: ignore[union-attr]
    assert [step for step, _ in entries] == list(range(len(rows)))
    assert [_plain(row) for _, row in entries] == [_plain(row) for row in rows]


@LAW
@given(ROWS, st.randoms(use_true_random=False))
def test_digests_know_values_only(rows: list[dict[str, Any]], rng: Any) -> None:
    """A row's digest does not depend on key order, other rows or column types."""
    history = History(_table(rows, range(len(rows))), np.zeros(len(rows), dtype=np.int64))
    together = row_digests(history).tolist()
    for step, row in enumerate(rows):
        keys = list(row)
        rng.shuffle(keys)
        alone = History(_table([{k: row[k] for k in keys}], [step]), np.zeros(1, dtype=np.int64))
        assert row_digests(alone).tolist() == [together[step]]


@LAW
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=6), st.data())
def test_digests_see_every_change(row: dict[str, Any], data: st.DataObject) -> None:
    """Another value, or a missing key, gives another digest."""
    key = data.draw(st.sampled_from(sorted(row)))
    other = data.draw(VALUES)
    changed = {**row, key: other}
    one = History(_table([row], [3]), np.zeros(1, dtype=np.int64))
    two = History(_table([changed], [3]), np.zeros(1, dtype=np.int64))
    # Integers beyond 2^53 are equal as the floats that they become on the wire.
    same = _as_floats(canonical(row[key])) == _as_floats(canonical(other))
    assert (row_digests(one).tolist() == row_digests(two).tolist()) is same


def _as_floats(value: Any) -> Any:
    if isinstance(value, bool):
        return ("bool", value)
    if value in ("NaN", "Infinity", "-Infinity"):
        return str(float(value))
    return (
        float(value)
        if isinstance(value, int | float)
        else json.dumps(value, sort_keys=True)
        if (value is not MISSING)
        else "missing"
    )


# -- alignment -----------------------------------------------------------------------------

STEPS = st.integers(0, 8)
ATTEMPT = st.tuples(STEPS, st.integers(1, 8), st.booleans())


def _attempt_rows(
    number: int, first: int, count: int, validates: bool
) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    if validates:
        rows.append((first, {"val-core/x": float(number)}))
    rows += [(first + 1 + i, {"actor/loss": float(number), "n": i}) for i in range(count)]
    return rows


def _reading(number: int, rows: list[tuple[int, dict[str, Any]]]) -> AttemptReading:
    table = _table([row for _, row in rows], [step for step, _ in rows])
    file = LogFile(Path(f"{number}.jsonl"), "verl_file", Stamp(0, 0, 0, 0), Facts())
    return AttemptReading(Attempt((file,), None, "content"), ((file, Reading(table)),))


def _model(attempts: list[list[tuple[int, dict[str, Any]]]]) -> dict[int, dict[str, Any]]:
    """The rule of the design, said again as simply as possible."""
    history: dict[int, dict[str, Any]] = {}
    for rows in attempts:
        trained = [step for step, row in rows if "actor/loss" in row]
        history = {s: r for s, r in history.items() if not trained or s < min(trained)}
        for step, row in rows:
            history.setdefault(step, {}).update(row)
    return history


@LAW
@given(st.lists(ATTEMPT, min_size=1, max_size=5))
def test_align_follows_the_rule(shapes: list[tuple[int, int, bool]]) -> None:
    """Promises 1 and 2: steps are true, later training supersedes, validation merges, and
    records seen = kept + merged + superseded + skipped."""
    attempts = [_attempt_rows(n, *shape) for n, shape in enumerate(shapes)]
    history, account = align(
        [_reading(n, rows) for n, rows in enumerate(attempts)],
        {"verl_file": 20},
        Policy(on_restart="replace"),
    )
    meant = _model(attempts)
    assert history.steps.tolist() == sorted(meant)
    assert _rows(history.table) == [_plain(meant[step]) for step in sorted(meant)]
    assert account.balanced
    assert account.seen == sum(map(len, attempts))


@LAW
@given(st.lists(ATTEMPT, min_size=1, max_size=4), st.sampled_from(["first", "both"]), st.booleans())
def test_every_policy_balances(
    shapes: list[tuple[int, int, bool]], policy: Any, keep_tail: bool
) -> None:
    """Whatever the policy, no record disappears from the account and steps stay unique."""
    attempts = [_attempt_rows(n, *shape) for n, shape in enumerate(shapes)]
    history, account = align(
        [_reading(n, rows) for n, rows in enumerate(attempts)],
        {"verl_file": 20},
        Policy(policy, keep_tail),
    )
    assert account.balanced
    assert (np.diff(history.steps) > 0).all()
    if policy == "both":
        stated = {
            (s, float(v))
            for rows in attempts
            for s, r in rows
            if (v := r.get("actor/loss")) is not None
        }
        kept = {
            (int(step), value)
            for step, row in zip(history.steps, _rows(history.table), strict=True)
            for key, value in row.items()
            if key.endswith("actor/loss")
        }
        assert {v for _, v in stated} >= {v for _, v in kept}


@settings(deadline=None, max_examples=25)
@given(st.permutations(["EXP.jsonl.2", "EXP.jsonl.1", "EXP.jsonl"]), st.integers(1, 9))
def test_order_of_files_does_not_matter(order: list[str], gap: int) -> None:
    """Promise 11: the same files, given or written in any order, give the same history."""
    contents = {
        "EXP.jsonl.2": [(s, {"actor/loss": 1.0}) for s in range(12)],
        "EXP.jsonl.1": [(gap, {"val-core/x": 2.0})]
        + [(s, {"actor/loss": 2.0}) for s in range(gap + 1, 14)],
        "EXP.jsonl": [(s, {"actor/loss": 3.0}) for s in range(12, 16)],
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name in order:
            path = Path(folder) / "proj" / name
            path.parent.mkdir(exist_ok=True)
            lines = (json.dumps({"step": s, "data": d}) + "\n" for s, d in contents[name])
            path.write_text("".join(lines))
            paths.append(path)
        runs = api.load(paths)
    assert len(runs) == 1
    frame = runs[0].history()
    losses = frame["actor/loss"].fillna(-1).tolist()
    expected = [1.0] * (gap + 1) + [2.0] * (11 - gap) + [3.0] * 4
    assert frame.index.tolist() == list(range(16))
    assert losses == expected


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, None, 2**53 + 1]),
        min_size=1,
        max_size=9,
    )
)
def test_log_to_history_keeps_values(values: list[Any]) -> None:
    """Values as verl writes them, bare tokens included, are in the history as they were."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "p" / "e.jsonl"
        path.parent.mkdir()
        path.write_text(
            "".join(
                json.dumps({"step": i, "data": {"actor/x": v}}) + "\n" for i, v in enumerate(values)
            )
        )
        engine = pipeline.Engine(Settings(), SOURCES)
        run = pipeline.survey(engine, [path]).runs[0]
        got = decode(pipeline.load(engine, run).history.table.column("actor/x"))
    finally:
        shutil.rmtree(folder)
    assert [canonical(v) for v in got] == [canonical(v) for v in values]
