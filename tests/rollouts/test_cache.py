"""The cache of reductions: unchanged dumps are not read again, and it may always be deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_logsync.discover import discover
from verl_logsync.model import LogFile
from verl_logsync.rollouts import cache as cache_module
from verl_logsync.rollouts import folder as folder_module
from verl_logsync.rollouts.cache import ReductionCache
from verl_logsync.rollouts.folder import reduce_folder
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions, StepReduction
from verl_logsync.sources.rollouts import Rollouts

OPTIONS = ReductionOptions(group_size=5)


@pytest.fixture
def dumps(fixture_files: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    shutil.copytree(fixture_files / "rollouts/v0_0.8/grpo_arith/rollout_data", folder)
    return folder


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the dumps that are read, in order."""
    names: list[str] = []
    original = reduce_file

    def watched(path: Path, *arguments: Any) -> StepReduction:
        names.append(path.name)
        return original(path, *arguments)

    monkeypatch.setattr(folder_module, "reduce_file", watched)
    return names


def found(folder: Path) -> LogFile:
    (file,) = discover([folder], [Rollouts()]).files
    return file


def reduced(folder: Path, state: Path, options: ReductionOptions = OPTIONS) -> list[StepReduction]:
    return list(reduce_folder(found(folder), options, ReductionCache(state)))


def test_unchanged_dumps_are_not_read_again(
    dumps: Path, tmp_path: Path, read_files: list[str]
) -> None:
    """The second time no dump is read, and every reduction is equal to the first."""
    first = reduced(dumps, tmp_path / "state")
    assert read_files == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl", "5.jsonl"]
    assert reduced(dumps, tmp_path / "state") == first
    assert len(read_files) == 5


def test_only_what_changed_is_read(dumps: Path, tmp_path: Path, read_files: list[str]) -> None:
    """A dump that was overwritten and one that is new are read, no others."""
    reduced(dumps, tmp_path / "state")
    read_files.clear()
    shutil.copy(dumps / "3.jsonl", dumps / "6.jsonl")
    (dumps / "2.jsonl").write_bytes((dumps / "3.jsonl").read_bytes())
    again = reduced(dumps, tmp_path / "state")
    assert read_files == ["2.jsonl", "6.jsonl"]
    assert [r.step for r in again] == [1, 2, 3, 4, 5, 6]
    assert again[1].statistics == again[2].statistics


def test_the_same_size_and_time_in_another_file(
    dumps: Path, tmp_path: Path, read_files: list[str]
) -> None:
    """A file that replaced another is read, although size and time are the same."""
    reduced(dumps, tmp_path / "state")
    read_files.clear()
    path = dumps / "1.jsonl"
    status = path.stat()
    fresh = dumps / "fresh"
    fresh.write_bytes(path.read_bytes().replace(b'"score": 1.0', b'"score": 0.0'))
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.replace(path)
    assert path.stat().st_size == status.st_size
    reduced(dumps, tmp_path / "state")
    assert read_files == ["1.jsonl"]


def test_other_options_are_other_reductions(
    dumps: Path, tmp_path: Path, read_files: list[str]
) -> None:
    """Options are part of the key; the reductions of both are kept."""
    state = tmp_path / "state"
    other = ReductionOptions(group_size=5, success=0.5)
    reduced(dumps, state)
    reduced(dumps, state, other)
    assert len(read_files) == 10
    reduced(dumps, state)
    reduced(dumps, state, other)
    assert len(read_files) == 10


def test_another_version_forgets(
    dumps: Path, tmp_path: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older program computed is computed again."""
    reduced(dumps, tmp_path / "state")
    monkeypatch.setattr(cache_module, "REDUCTION_VERSION", 999)
    reduced(dumps, tmp_path / "state")
    assert len(read_files) == 10


def test_the_same_size_in_the_same_file(dumps: Path, tmp_path: Path, read_files: list[str]) -> None:
    """A file that was overwritten in place is read, although its size is the same."""
    reduced(dumps, tmp_path / "state")
    read_files.clear()
    path = dumps / "1.jsonl"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"score": 1.0', b'"score": 0.0'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert (path.stat().st_size, path.stat().st_ino) == (status.st_size, status.st_ino)
    assert reduced(dumps, tmp_path / "state")[0].statistics["score_mean"] == 0
    assert read_files == ["1.jsonl"]


@pytest.mark.parametrize("damage", ["delete", "empty", "junk", "flip", "cut", "folder"])
def test_a_damaged_cache_is_recomputed(
    dumps: Path, tmp_path: Path, read_files: list[str], damage: str
) -> None:
    """Deleted, emptied, overwritten, cut: the reductions are the same, what is damaged is read."""
    state = tmp_path / "state"
    first = reduced(dumps, state)
    (path,) = state.iterdir()
    data = path.read_bytes()
    read_files.clear()
    if damage == "delete":
        shutil.rmtree(state)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "junk":
        path.write_bytes(b"\xff\0junk\n" * 100 + b"\n\n")
    elif damage == "flip":
        path.write_bytes(data.replace(b'"score_mean":0.25', b'"score_mean":0.75', 1))
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
        path.mkdir()
    assert reduced(dumps, state) == first
    assert "1.jsonl" in read_files or damage == "cut"
    assert len(read_files) in ((1,) if damage == "flip" else (2, 3, 4, 5))


def test_a_cache_that_cannot_be_written(dumps: Path, tmp_path: Path) -> None:
    """The reductions are there all the same, and the trouble is said."""
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    cache = ReductionCache(blocked)
    assert len(list(reduce_folder(found(dumps), OPTIONS, cache))) == 5
    assert "cannot be cached" in cache.trouble
    assert str(blocked) in cache.trouble


def test_nothing_is_left_beside_the_cache(dumps: Path, tmp_path: Path) -> None:
    """Temporary files are gone, and nothing is written beside the dumps."""
    before = sorted(dumps.iterdir())
    reduced(dumps, tmp_path / "state")
    assert [p.suffix for p in (tmp_path / "state").iterdir()] == [".jsonl"]
    assert sorted(dumps.iterdir()) == before


def test_what_was_done_is_kept_when_the_reader_stops(
    dumps: Path, tmp_path: Path, read_files: list[str]
) -> None:
    """Two steps were taken and the rest was not asked for: the two are cached."""
    steps = reduce_folder(found(dumps), OPTIONS, ReductionCache(tmp_path / "state"))
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    read_files.clear()
    reduced(dumps, tmp_path / "state")
    assert read_files == ["3.jsonl", "4.jsonl", "5.jsonl"]


def test_a_dump_that_is_being_written_is_cached_as_it_was(
    dumps: Path, tmp_path: Path, read_files: list[str]
) -> None:
    """A partial dump is read again when it has grown."""
    path = dumps / "5.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert reduced(dumps, tmp_path / "state")[-1].partial
    path.write_bytes(data)
    last = reduced(dumps, tmp_path / "state")[-1]
    assert (last.partial, last.rows) == (False, 40)
    assert read_files.count("5.jsonl") == 2


def test_old_options_give_way(
    dumps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_files: list[str]
) -> None:
    """A cache that grew too large drops what other options asked for, never what was just asked."""
    monkeypatch.setattr(cache_module, "_LARGEST", 1)
    reduced(dumps, tmp_path / "state")
    reduced(dumps, tmp_path / "state", ReductionOptions(success=0.5))
    read_files.clear()
    reduced(dumps, tmp_path / "state", ReductionOptions(success=0.5))
    assert read_files == []
    reduced(dumps, tmp_path / "state")
    assert len(read_files) == 5
