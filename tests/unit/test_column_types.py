"""The type of a column is that of all its values, in whatever order they came."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

import verl_logsync
from verl_logsync.table_builder import TableBuilder
from verl_logsync.testing.builders import write_verl_log


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 0.0, 1], pa.float64()),
        ([0, 1, 2], pa.int64()),
        ([1.5, 0, 2], pa.float64()),
        ([0, None, 2], pa.string()),
        ([True, 0, 1.0], pa.string()),
    ],
)
def test_the_order_of_rows_does_not_decide(values, kind, exactly):
    """Every order of the same rows gives one type: integers only where all were written so."""
    kinds = set()
    for order in itertools.permutations(values):
        builder = TableBuilder()
        for value in order:
            builder.add({"a": value, "b": 0.5}, exactly=exactly)
        kinds.add(builder.columns()["a"].type)
    assert kinds == {kind}


def test_the_order_of_files_does_not_decide(outputs, age):
    """Two starts that wrote 0 and 0.0 give the same column, whichever is read first."""
    tables = []
    for first, second in (("a", "b"), ("b", "a")):
        for name, zero in ((first, 0), (second, 0.0)):
            rows = [(s, {"actor/x": zero, "actor/loss": s / 7}) for s in range(1, 4)]
            write_verl_log(outputs / name / "grpo" / "exp.jsonl", rows)
        age(outputs)
        (run,) = verl_logsync.load(outputs, merge="always", on_restart="replace")
        tables.append(run.history().dtypes.astype(str).to_dict())
    assert tables[0] == tables[1]
