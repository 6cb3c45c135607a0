"""Logs that are read in several pieces, and what only one format can suffer."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.errors import NotALog
from verl_logsync.interfaces import Source
from verl_logsync.model import SkipReason
from verl_logsync.sources import SOURCES
from verl_logsync.testing.builders import write_verl_log
from verl_logsync.testing.conformance import check_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
BY_NAME = {source.name: source for source in SOURCES}
# Readers take a megabyte at once (of a console a quarter): more is still to come when the log is
# replaced.
STEPS = {"verl_file": 1000, "console": 150}
KEYS = 100


def verl_file(path: Path, start: int) -> Path:
    rows = (
        (step, {f"actor/metric_{k}": math.sin(step * k + start) for k in range(KEYS)})
        for step in range(start, start + STEPS["verl_file"])
    )
    return write_verl_log(path / "grpo" / "qwen.jsonl", rows)


def console(path: Path, start: int) -> Path:
    lines = (
        f"step:{step} - "
        + " - ".join(f"actor/metric_{k}:{math.sin(step * k + start)!r}" for k in range(KEYS))
        for step in range(start, start + STEPS["console"])
    )
    path.mkdir(parents=True)
    log = path / "train.log"
    log.write_text("\n".join(lines) + "\n")
    return log


@pytest.mark.parametrize("make", [verl_file, console])
def test_a_log_of_several_pieces_is_never_mixed_with_another(make, tmp_path):
    """A log of several pieces that is replaced half-way gives rows of one log only, or an error."""
    sample, other = make(tmp_path / "one", 1), make(tmp_path / "other", 7)
    (tmp_path / "work").mkdir()
    check_source(BY_NAME[make.__name__], sample, tmp_path / "work", other=other, places=16)


def parquet_samples() -> list[Path]:
    return sorted(FIXTURES.glob("step_log/parquet/**/*.parquet"))


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("sample", parquet_samples(), ids=lambda path: path.name)
def test_parquet_without_its_footer_is_one_refusal(sample, kept, tmp_path):
    """A Parquet file that ends without its footer is refused once, by name and with its reason."""
    whole = sample.read_bytes()
    log = tmp_path / sample.name
    log.write_bytes(whole[: int(len(whole) * kept)])
    found = discover([tmp_path], SOURCES)
    (skip,) = found.skips
    assert not found.files
    assert (skip.reason, skip.place) == (SkipReason.NOT_A_LOG, str(log))
    assert "without its footer" in skip.detail


@pytest.mark.parametrize("sample", parquet_samples()[:1], ids=lambda path: path.name)
def test_parquet_that_loses_its_footer_after_it_was_found(sample, tmp_path):
    """The same file, cut between the walk and the reading, is one typed error that names it."""
    source: Source = BY_NAME["step_log"]
    folder = tmp_path / "toy"
    shutil.copytree(sample.parent, folder)
    files = discover([folder], [source]).files
    file = next(file for file in files if file.path.suffix == ".parquet")
    file.path.write_bytes(file.path.read_bytes()[:-64])
    with pytest.raises(NotALog, match="without its footer") as error:
        source.read(file)
    assert error.value.place == str(file.path)
