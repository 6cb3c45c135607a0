"""The source `rollouts`: which folders are dumps, of what kind, and what is said about them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_logsync.discover import Found, discover
from verl_logsync.errors import InputError, NotALog
from verl_logsync.model import LogFile, SkipReason
from verl_logsync.rollouts.folder import kind_of, reduce_folder, stamp_of_dumps, survey
from verl_logsync.sources import SOURCES
from verl_logsync.sources.rollouts import Rollouts

ROW = {"input": "p", "output": "o", "score": 1.0, "step": 1}


def look(*paths: Path) -> Found:
    """What all sources together find."""
    return discover(paths, SOURCES)


def only(*paths: Path) -> LogFile:
    found = look(*paths)
    (file,) = found.files
    return file


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "rollouts"
    folder.mkdir(parents=True)
    for step in (1, 2, 10):
        lines = [{**ROW, "output": f"{step}.{i}", "step": step} for i in range(4)]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def test_a_folder_is_one_log(dumps: Path) -> None:
    """Steps are sorted as numbers; nothing says project or name."""
    file = only(dumps.parent)
    assert (file.path, file.source, file.role) == (dumps, "rollouts", "rollouts")
    assert (file.facts.first_step, file.facts.last_step) == (1, 10)
    assert (file.facts.project, file.facts.name, file.facts.run_id) == ("", "", "")
    assert file.facts.head_digest


def test_the_stamp_changes_with_any_dump(dumps: Path) -> None:
    """It is the sizes together, the latest time, and the folder's inode."""
    before = only(dumps).stamp
    assert before.size == sum(p.stat().st_size for p in dumps.iterdir())
    assert before.mtime_ns == max(p.stat().st_mtime_ns for p in dumps.iterdir())
    assert (before.inode, before.device) == (dumps.stat().st_ino, dumps.stat().st_dev)
    assert only(dumps).stamp == before
    os.utime(dumps / "2.jsonl", ns=(before.mtime_ns + 10**9, before.mtime_ns + 10**9))
    assert only(dumps).stamp != before
    again = only(dumps).stamp
    with (dumps / "1.jsonl").open("a") as stream:
        stream.write(json.dumps(ROW) + "\n")
    assert only(dumps).stamp.size > again.size


def test_the_digest_stays_when_steps_come(dumps: Path) -> None:
    """New dumps do not change who the log is; another first record does."""
    before = only(dumps).facts
    shutil.copy(dumps / "10.jsonl", dumps / "11.jsonl")
    assert only(dumps).facts.head_digest == before.head_digest
    assert only(dumps).facts.last_step == 11
    shutil.copy(dumps / "2.jsonl", dumps / "1.jsonl")
    assert only(dumps).facts.head_digest != before.head_digest


def test_a_single_dump_works_as_well(dumps: Path) -> None:
    """A file that is given itself is one log, with its own stamp."""
    file = only(dumps / "10.jsonl")
    assert (file.source, file.facts.first_step, file.facts.last_step) == ("rollouts", 10, 10)
    assert file.stamp.size == (dumps / "10.jsonl").stat().st_size
    assert [r.step for r in reduce_folder(file)] == [10]
    assert "step 10, 4 rows a step" in Rollouts().read(file).notes[0]


@pytest.mark.parametrize(
    "content",
    [b'{"step": 1, "data": {"a": 1}}\n', b'{"input": 1}\n', b"[]\n", b"junk\n", b'{"output": 3}\n'],
)
def test_other_logs_of_such_names_are_not_claimed(tmp_path: Path, content: bytes) -> None:
    """A folder of `0.jsonl`, `1.jsonl` with other rows is left to other sources."""
    for rank in range(3):
        (tmp_path / f"{rank}.jsonl").write_bytes(content)
    assert all(file.source != "rollouts" for file in look(tmp_path).files)


@pytest.mark.parametrize("count", [1, 3])
def test_other_logs_in_a_folder_are_not_lost(dumps: Path, count: int) -> None:
    """A folder with a log of another kind is not claimed: its dumps are found one by one."""
    for index in range(count):
        (dumps / f"run{index}.jsonl").write_text('{"step": 1, "data": {"a": 1}}\n')
    sources = sorted(file.source for file in look(dumps).files)
    assert sources == ["rollouts"] * 3 + ["verl_file"] * count


def test_logs_in_inner_folders_are_not_lost(dumps: Path) -> None:
    """A folder with a folder inside is entered; both hold dumps."""
    inner = dumps / "val"
    inner.mkdir()
    shutil.copy(dumps / "1.jsonl", inner / "0.jsonl")
    places = {str(file.path.relative_to(dumps)) for file in look(dumps).files}
    assert places == {"1.jsonl", "2.jsonl", "10.jsonl", "val"}


def test_other_files_in_a_claimed_folder_are_named(dumps: Path) -> None:
    """One stray file is skipped with its name; hidden ones are nobody's business."""
    (dumps / "notes.txt").write_text("mine")
    (dumps / ".5.jsonl.swp").write_text("x")
    (dumps / ".log").mkdir()
    (dumps / "12.jsonl").touch()
    reading = Rollouts().read(only(dumps))
    assert reading.rows.num_rows == 0
    assert {(Path(s.place).name, s.reason) for s in reading.skips} == {
        ("notes.txt", SkipReason.NOT_RECOGNISED),
        ("12.jsonl", SkipReason.NOTHING_YET),
    }
    assert not any(skip.records for skip in reading.skips)


def test_a_folder_of_mostly_other_files_is_not_claimed(dumps: Path) -> None:
    """Three dumps among other files are three logs."""
    for index in range(3):
        (dumps / f"picture{index}.png").touch()
    assert [file.source for file in look(dumps).files] == ["rollouts"] * 3


def test_copies_of_dumps_are_no_other_logs(dumps: Path) -> None:
    """`2.jsonl.bak` is skipped with its name, and the folder is claimed."""
    shutil.copy(dumps / "2.jsonl", dumps / "2.jsonl.bak")
    reading = Rollouts().read(only(dumps))
    assert [Path(s.place).name for s in reading.skips] == ["2.jsonl.bak"]


def test_empty_dumps_are_nothing_yet(tmp_path: Path) -> None:
    """A folder whose dumps are all empty is looked at again next time."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "1.jsonl").touch()
    found = look(folder)
    assert found.files == ()
    assert [skip.reason for skip in found.skips] == [SkipReason.NOTHING_YET]


def test_the_first_dump_may_be_empty_or_damaged(dumps: Path) -> None:
    """The first row is then that of the next dump or line that has one."""
    (dumps / "1.jsonl").write_bytes(b"")
    assert only(dumps).facts.first_step == 1
    (dumps / "1.jsonl").write_bytes(b"\0" * 50 + b"\n{junk\n" + json.dumps(ROW).encode() + b"\n")
    assert only(dumps).facts.first_step == 1


def test_a_long_first_row(tmp_path: Path) -> None:
    """Prompts longer than what discover reads of a file are no obstacle."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "1.jsonl").write_text(json.dumps({**ROW, "input": "p" * 200_000}) + "\n")
    assert only(folder).source == "rollouts"
    assert only(folder / "1.jsonl").source == "rollouts"


def test_huge_and_odd_numbers_in_names(dumps: Path) -> None:
    """Names with more digits than any step are no dumps; leading zeros are."""
    shutil.copy(dumps / "1.jsonl", dumps / f"{'9' * 40}.jsonl")
    shutil.copy(dumps / "1.jsonl", dumps / "0012.jsonl")
    file = only(dumps)
    assert file.facts.last_step == 12
    assert [Path(s.place).name for s in Rollouts().read(file).skips] == [f"{'9' * 40}.jsonl"]


@pytest.mark.parametrize(
    ("case", "kind", "note"),
    [
        ("v1_0.9", "train", "rollout dumps: train, steps 1-5, 40 rows a step, key set v1 0.9"),
        ("v0_0.8", "train", "rollout dumps: train, steps 1-5, 40 rows a step, key set v0 0.8-0.9"),
        ("v0_0.4", "train", "rollout dumps: train, steps 1-5, 40 rows a step, key set v0 0.4-0.5"),
        ("v1_0.9_edge", "train", "rollout dumps: train, step 6, 41 rows a step, key set v1 0.9"),
        (
            "val_v1_0.9",
            "validation",
            "rollout dumps: validation, steps 0-20, 96 rows a step, key set v1 0.9",
        ),
        (
            "val_v0_0.6",
            "validation",
            "rollout dumps: validation, steps 0-20, 96 rows a step, key set v0 0.6-0.9",
        ),
    ],
)
def test_notes(fixture_files: Path, case: str, kind: str, note: str) -> None:
    """One sentence says what the dumps are."""
    file = only(fixture_files / "rollouts" / case)
    assert Rollouts().read(file).notes == (note,)
    assert {r.kind for r in reduce_folder(file)} == {kind}


V0_VALIDATION = (*ROW, "reward")


@pytest.mark.parametrize(
    ("folder", "keys", "steps", "kind"),
    [
        ("exp/rollouts", ROW, [1, 2, 3], "train"),
        ("exp/dumps", ROW, [7], "train"),
        ("exp/validation", V0_VALIDATION, [0, 10, 20], "validation"),
        ("exp/val_dumps", V0_VALIDATION, [5], "validation"),
        ("exp/dumps", V0_VALIDATION, [0, 10, 20], "validation"),
        ("exp/dumps", V0_VALIDATION, [10, 20, 30], "validation"),
        ("exp/dumps", V0_VALIDATION, [1, 2, 3, 4], "unknown"),
        ("exp/dumps", V0_VALIDATION, [3], "unknown"),
        ("exp/rollouts", V0_VALIDATION, [10, 20], "unknown"),
        ("exp/val", ROW, [0, 10], "unknown"),
        ("exp/dumps", ROW, [0, 1], "unknown"),
        ("interval/values", ROW, [1, 2], "train"),
    ],
)
def test_kind(folder: str, keys: Any, steps: list[int], kind: str) -> None:
    """Key, name and steps together say train or validation; where they disagree, nothing does."""
    assert kind_of(Path(folder), keys, steps) == kind


def test_a_dump_that_cannot_be_read(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad dump costs one dump: the others are reduced, and it says why it is empty."""
    file = only(dumps)
    (dumps / "2.jsonl").unlink()
    (dumps / "2.jsonl").mkdir()
    assert [r.step for r in reduce_folder(file)] == [1, 10], "a folder of that name is no dump"
    found = survey(dumps)
    assert found is not None
    monkeypatch.setattr("verl_logsync.rollouts.folder.survey", lambda _: found)
    (dumps / "10.jsonl").unlink()
    one, ten = reduce_folder(file)
    assert one.rows == 4
    assert ten.rows == 0
    assert [skip.reason for skip in ten.skips] == [SkipReason.UNREADABLE]
    assert "No such file" in ten.missing["rows"]


def test_a_folder_without_dumps_any_more(dumps: Path) -> None:
    """It is an input error that names the folder."""
    file = only(dumps)
    for path in dumps.iterdir():
        path.unlink()
    with pytest.raises(NotALog) as error:
        Rollouts().read(file)
    assert error.value.place == str(dumps)
    dumps.rmdir()
    with pytest.raises(InputError) as gone:
        list(reduce_folder(file))
    assert gone.value.place == str(dumps)


def test_the_stamp_without_opening_a_file(dumps: Path) -> None:
    """It is the one that the log file has, and nothing for a folder without dumps."""
    assert stamp_of_dumps(dumps) == only(dumps).stamp
    assert stamp_of_dumps(dumps / "1.jsonl") == only(dumps / "1.jsonl").stamp
    assert stamp_of_dumps(dumps.parent) is None
    assert stamp_of_dumps(dumps / "gone") is None
