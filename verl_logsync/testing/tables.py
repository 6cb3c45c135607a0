"""Small histories for tests of what is derived from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_logsync.columns import STEP
from verl_logsync.table_builder import TableBuilder


def table(rows: Mapping[int, Mapping[str, Any]]) -> pa.Table:
    """Rows by step."""
    builder = TableBuilder()
    for row in rows.values():
        builder.add(row)
    return pa.table({STEP: pa.array(rows, type=pa.int64()), **builder.columns()})


def series(name: str, values: Iterable[Any], first: int = 1, **more: Any) -> pa.Table:
    """One key, a value a step; None stands for a step that lacks it."""
    rows = {
        step: {**more} if value is None else {name: value, **more}
        for step, value in enumerate(values, first)
    }
    return table(rows)


def verl_file(path: Path) -> pa.Table:
    """A log of verl's `file` logger; records of one step are one row."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        rows.setdefault(record["step"], {}).update(record["data"])
    return table(dict(sorted(rows.items())))


def column(found: pa.Table, name: str) -> list[Any]:
    """The values of a column; None where it has none."""
    values: list[Any] = found.column(name).to_pylist()
    return values
