"""Checkpoint folders are claimed whole, tell which run they belong to, and hide no log."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.errors import LogsyncError, UnreadableInput, UsageError
from verl_logsync.model import LogFile, SkipReason
from verl_logsync.sources import SOURCES
from verl_logsync.sources.checkpoint import TRACKER, Checkpoint, bind_checkpoint
from verl_logsync.testing.builders import write_verl_log

SOURCE = Checkpoint()


def make(folder: Path, *steps: int, latest: int | None = None) -> Path:
    """A checkpoint folder as verl leaves it."""
    for step in steps:
        actor = folder / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_bytes(b"payload")
        (actor / "tokens.jsonl").write_text('{"step": 1, "data": {"a": 1}}\n')
    folder.mkdir(parents=True, exist_ok=True)
    if latest is not None:
        (folder / TRACKER).write_text(str(latest))
    return folder


def only(path: Path) -> LogFile:
    (file,) = discover([path], SOURCES).files
    return file


def test_a_checkpoint_folder_is_claimed_whole(tmp_path: Path) -> None:
    """One log file of role checkpoint, named by its folders; nothing in its payload is looked at."""
    folder = make(tmp_path / "checkpoints/proj/exp", 20, 40, latest=40)
    found = discover([tmp_path], SOURCES)
    (file,) = found.files
    assert found.skips == ()
    assert (file.source, file.role) == ("checkpoint", "checkpoint")
    assert (file.facts.project, file.facts.name, file.facts.last_step) == ("proj", "exp", 40)
    reading = SOURCE.read(file)
    assert reading.rows.num_rows == 0
    assert reading.notes == ("checkpoints at steps 20, 40; latest 40",)
    assert found.reached == ((str(folder), file),)


@pytest.mark.parametrize(
    ("steps", "latest", "notes"),
    [
        ((), 40, ("checkpoints are gone; the latest was of step 40",)),
        ((20,), None, ("checkpoint at step 20; none is marked as the latest",)),
        (
            (20,),
            40,
            (
                "checkpoint at step 20; latest 40",
                "the latest checkpoint, of step 40, is not here",
            ),
        ),
        (
            (100, 20, 40),
            40,
            (
                "checkpoints at steps 20, 40, 100; latest 40",
                "not marked as whole, so a resume does not use it: step 100",
            ),
        ),
        (
            tuple(range(1, 15)),
            14,
            ("checkpoints at steps 1, 2, 3, ..., 12, 13, 14 (14 of them); latest 14",),
        ),
    ],
)
def test_notes_say_what_is_there(
    steps: tuple[int, ...], latest: int | None, notes: tuple[str, ...], tmp_path: Path
) -> None:
    """Which checkpoints there are, and what does not fit together."""
    file = only(make(tmp_path / "p/e", *steps, latest=latest))
    assert SOURCE.read(file).notes == notes


def test_logs_beside_checkpoints_are_found(tmp_path: Path) -> None:
    """A folder in which other things lie too is not claimed whole; its checkpoints still are."""
    folder = make(tmp_path / "p/e", 20, 40, latest=40)
    write_verl_log(folder / "metrics.jsonl", [(1, {"a": 0.5})])
    (folder / "rollouts").mkdir()
    found = discover([tmp_path], SOURCES)
    assert sorted((f.source, f.path.name) for f in found.files) == [
        ("checkpoint", "global_step_20"),
        ("checkpoint", "global_step_40"),
        ("checkpoint", TRACKER),
        ("verl_file", "metrics.jsonl"),
    ]
    claimed = [f for f in found.files if f.source == "checkpoint"]
    assert {(f.facts.project, f.facts.name) for f in claimed} == {("p", "e")}
    assert {SOURCE.read(f).notes for f in claimed} == {("checkpoints at steps 20, 40; latest 40",)}


def test_dumps_beside_checkpoints_are_found(tmp_path: Path) -> None:
    """A folder beside the checkpoints may hold logs, so that it is looked into."""
    folder = make(tmp_path / "p/e", 20, latest=20)
    write_verl_log(folder / "logs" / "metrics.jsonl", [(1, {"a": 0.5})])
    found = discover([tmp_path], SOURCES)
    assert sorted(f.source for f in found.files) == ["checkpoint", "checkpoint", "verl_file"]


@pytest.mark.parametrize("junk", [b"", b"forty", b"\xff\xfe", b"-1", b"4" * 40, b"40 \n"])
def test_a_damaged_tracker_does_no_harm(junk: bytes, tmp_path: Path) -> None:
    """Whatever stands in it, the folder is claimed; what is no step is said."""
    folder = make(tmp_path / "p/e", 40)
    (folder / TRACKER).write_bytes(junk)
    file = only(tmp_path)
    expected = 40 if junk.strip() == b"40" else None
    assert file.facts.last_step == expected
    reasons = [skip.reason for skip in SOURCE.read(file).skips]
    assert reasons == ([] if expected or not junk else [SkipReason.MALFORMED])


def test_a_bound_folder_tells_its_run(tmp_path: Path) -> None:
    """The run id in the folder is a fact of the log file; another file name can be configured."""
    folder = make(tmp_path / "p/e", 20, latest=20)
    before = only(tmp_path)
    bind_checkpoint(folder, "abc123")
    after = only(tmp_path)
    assert (before.facts.run_id, after.facts.run_id) == ("", "abc123")
    assert before.stamp != after.stamp
    bind_checkpoint(folder, "other", "my_binding")
    (file,) = discover([tmp_path], [Checkpoint("my_binding")]).files
    assert file.facts.run_id == "other"


def test_binding_again_is_free_and_another_run_is_refused(tmp_path: Path) -> None:
    """A folder belongs to one run; the file is never overwritten, and nothing is left behind."""
    path = bind_checkpoint(tmp_path, "abc123")
    assert path == tmp_path / "wandb_run_id"
    assert path.read_text() == "abc123\n"
    bind_checkpoint(tmp_path, "abc123")
    with pytest.raises(UsageError, match="belongs to run abc123"):
        bind_checkpoint(tmp_path, "def456")
    assert path.read_text() == "abc123\n"
    assert [p.name for p in tmp_path.iterdir()] == ["wandb_run_id"]


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "two words", "x" * 129, "a\nb", "a#b"])
def test_what_is_no_run_id_is_refused(run_id: str, tmp_path: Path) -> None:
    """Nothing is written that W&B would not take as a run id."""
    with pytest.raises(UsageError, match="no run id"):
        bind_checkpoint(tmp_path, run_id)
    assert list(tmp_path.iterdir()) == []


def test_binding_needs_a_folder_and_a_file_name(tmp_path: Path) -> None:
    """A missing folder is not made, and a name does not lead out of the folder."""
    with pytest.raises(UsageError, match="no such folder"):
        bind_checkpoint(tmp_path / "missing", "abc")
    with pytest.raises(UsageError, match="no file name"):
        bind_checkpoint(tmp_path, "abc", "../abc")


def test_a_damaged_binding_is_said_not_overwritten(tmp_path: Path) -> None:
    """Junk in the binding file is an error for binding, and a Skip for reading."""
    folder = make(tmp_path / "p/e", 20, latest=20)
    (folder / "wandb_run_id").write_bytes(b"\xff\0 junk")
    file = only(tmp_path)
    assert file.facts.run_id == ""
    (skip,) = SOURCE.read(file).skips
    assert skip.reason is SkipReason.MALFORMED
    with pytest.raises(UnreadableInput):
        bind_checkpoint(folder, "abc123")
    assert (folder / "wandb_run_id").read_bytes() == b"\xff\0 junk"


def test_a_folder_that_vanished_is_an_input_error(tmp_path: Path) -> None:
    """A checkpoint folder that is gone when it is read is said, with its place."""
    folder = make(tmp_path / "p/e", latest=20)
    file = only(tmp_path)
    (folder / TRACKER).unlink()
    folder.rmdir()
    with pytest.raises(LogsyncError) as raised:
        SOURCE.read(file)
    assert raised.value.place
