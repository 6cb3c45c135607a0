"""What source `verl_file` tells of a file before it reads all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.sources.verl_file import VerlFile


@pytest.mark.parametrize(
    "after",
    [
        b"\0" * (3 << 20),  # what a full disk or a truncation leaves
        b"x" * (3 << 20) + b"\n",
        b"not a record\n" * 200_000,
        b'{"step":41,"data":{"a":' + b"1" * (2 << 20),  # unfinished
    ],
)
def test_the_last_step_before_a_long_damaged_end(tmp_path: Path, after: bytes) -> None:
    """The last step is known, however much that is no record follows it."""
    path = tmp_path / "grpo" / "exp.jsonl"
    path.parent.mkdir()
    lines = [json.dumps({"step": step, "data": {"a": 0.5}}) for step in range(41)]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode() + after)
    (file,) = discover([tmp_path], [VerlFile()]).files
    assert (file.facts.first_step, file.facts.last_step) == (0, 40)
