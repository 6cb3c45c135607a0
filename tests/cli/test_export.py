"""`verl-logsync export`: the aligned history for other tools."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log

ROWS: list[tuple[int, dict[str, Any]]] = [
    (0, {"val-core/x": 0.5}),
    (1, {"actor/loss": 0.25, "odd": None, "list": [1, {"a": 2}], "count": 3, "flag": True}),
    (2, {"actor/loss": math.nan, "text": 'say "hi",\nü', "count": 4}),
    (3, {"actor/loss": math.inf}),
]


@pytest.fixture
def log(tmp_path):
    return write_verl_log(tmp_path / "logs" / "grpo" / "exp 1.jsonl", ROWS)


def _exported(upload, log, folder, form):
    code, text = upload.text(log, folder, "--to", form, verb="export")
    assert code == 0, text
    (path,) = folder.rglob(f"*.{form}")
    assert path.parent.name == "grpo"
    assert path.name.startswith("exp_1-")
    return path


def test_jsonl_keeps_null_nan_and_missing_apart(upload, log, tmp_path):
    """Python's json reads every row back as it was logged."""
    path = _exported(upload, log, tmp_path / "out", "jsonl")
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [row.pop("_step") for row in rows] == [0, 1, 2, 3]
    assert repr(rows) == repr(
        [{k: data[k] for k in row} for row, (_, data) in zip(rows, ROWS, strict=True)]
    )
    assert [row.keys() for row in rows] == [data.keys() for _, data in ROWS]


def test_csv(upload, log, tmp_path):
    """A missing value is an empty field, null is the word null, NaN is NaN."""
    path = _exported(upload, log, tmp_path / "out", "csv")
    frame = pd.read_csv(path, keep_default_na=False, dtype=str)
    assert frame["_step"].tolist() == ["0", "1", "2", "3"]
    assert frame["actor/loss"].tolist() == ["", "0.25", "NaN", "Infinity"]
    assert frame["odd"].tolist() == ["", "null", "", ""]
    assert json.loads(frame["list"][1]) == [1, {"a": 2}]
    assert json.loads(frame["text"][2]) == 'say "hi",\nü'


def test_parquet_and_the_account(upload, log, tmp_path):
    """Parquet is the history itself; the account beside it says where every record went."""
    path = _exported(upload, log, tmp_path / "out", "parquet")
    frame = pd.read_parquet(path)
    (run,) = verl_logsync.load(log)
    assert frame["_step"].tolist() == run.history().index.tolist()
    assert set(frame.columns) - {"_step"} == set(run.history().columns)
    account = json.loads(path.with_suffix("").with_suffix(".account.json").read_text())
    assert account["account"]["seen"] == 4
    assert account["attempts"][0]["files"][0]["path"] == str(log)


def test_again_replaces_and_nothing_is_left_over(upload, log, tmp_path):
    """A second export leaves the same two files, and no temporary ones."""
    folder = tmp_path / "out"
    for _ in range(2):
        _exported(upload, log, folder, "csv")
    assert len([p for p in folder.rglob("*") if p.is_file()]) == 2


def test_a_full_disk(upload, small_disk, tmp_path):
    """A history that does not fit is named with what to check, exit 3; nothing half is left."""
    write_verl_log(
        tmp_path / "logs" / "grpo" / "exp.jsonl",
        [(step, {f"k{n}": step / (n + 3) for n in range(40)}) for step in range(300)],
    )
    code, text = upload.text(tmp_path / "logs", small_disk / "out", "--to", "csv", verb="export")
    assert code == 3, text
    assert "No space left on device" in text
    assert "df -h" in text
    assert not [path for path in small_disk.rglob("*.csv") if path.is_file()]
