"""Dumps made for one test: rows as dictionaries, written as verl writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

WriteDump = Callable[..., Path]


@pytest.fixture
def write_dump(tmp_path: Path) -> WriteDump:
    """Write rows to `{step}.jsonl`: `write_dump(rows, step=1)` returns the path."""

    def write(rows: Iterable[Mapping[str, Any]], step: int = 1, folder: str = "rollouts") -> Path:
        path = tmp_path / folder / f"{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """Rows of v0 groups: `rows_of([[0, 1], [1, 1]])` gives two groups of two rows."""

    def make(groups: Iterable[Iterable[float | None]], **more: Any) -> list[dict[str, Any]]:
        return [
            {"input": f"prompt {g}", "output": f"{g}.{i}", "score": score, "step": 1, **more}
            for g, scores in enumerate(groups)
            for i, score in enumerate(scores)
        ]

    return make
