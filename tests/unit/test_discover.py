"""Which files of a folder are looked at."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.model import LogFile
from verl_logsync.sources import SOURCES

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = {
    "verl_file": (FIXTURES / "verl_file/whole_run/qwen_small_grpo.jsonl", "Exp.jsonl"),
    "a kept copy": (FIXTURES / "verl_file/whole_run/qwen_small_grpo.jsonl", "Exp.jsonl.bak"),
    "console": (FIXTURES / "console/two_sessions/train.log", "train.log"),
    "standard error": (FIXTURES / "console/two_sessions/train.log", "train.out.1"),
}


def found_in(folder: Path) -> list[LogFile]:
    found = discover([folder], SOURCES)
    assert not found.skips
    return list(found.files)


@pytest.mark.parametrize("shaped", [str.upper, str.title], ids=["upper", "title"])
@pytest.mark.parametrize(("fixture", "name"), NAMES.values(), ids=NAMES)
def test_the_case_of_an_extension_does_not_matter(
    fixture: Path, name: str, shaped: Callable[[str], str], tmp_path: Path
) -> None:
    """EXP.JSONL in a folder is found, claimed by the same source and named as exp.jsonl is."""
    stem, _, extension = name.partition(".")
    folders = tmp_path / "lower", tmp_path / "other"
    for folder, ending in zip(folders, (extension, shaped(extension)), strict=True):
        place = folder / "grpo" / f"{stem}.{ending}"
        place.parent.mkdir(parents=True)
        shutil.copy(fixture, place)
    (lower,), (other,) = map(found_in, folders)
    assert (other.source, other.role, other.facts) == (lower.source, lower.role, lower.facts)


def test_dumps_in_capitals(tmp_path: Path) -> None:
    """Dumps of steps are one folder of dumps, however their extension is written."""
    for step, extension in enumerate(("jsonl", "JSONL", "Jsonl"), 1):
        row = f'{{"input": "a", "output": "b", "score": 1.0, "step": {step}}}\n'
        (tmp_path / f"{step}.{extension}").write_text(row)
    (folder,) = found_in(tmp_path)
    assert (folder.source, folder.facts.last_step) == ("rollouts", 3)


def test_what_looks_like_a_log_in_capitals_has_a_verdict(tmp_path: Path) -> None:
    """No file whose name promises a log is passed over in silence."""
    (tmp_path / "BROKEN.JSONL").write_text("no JSON\n")
    (tmp_path / "RUN-1.WANDB").write_text("nothing")
    found = discover([tmp_path], SOURCES)
    assert sorted(Path(skip.place).name for skip in found.skips) == ["BROKEN.JSONL", "RUN-1.WANDB"]
