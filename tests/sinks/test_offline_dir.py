"""What `--mode offline` wrote is verified from the files, not from what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from verl_logsync.assemble import Surroundings
from verl_logsync.errors import UnreadableInput
from verl_logsync.held import NOTHING_HELD
from verl_logsync.model import (
    ArtifactRef,
    Attempt,
    Facts,
    FileRef,
    History,
    LogFile,
    PassThrough,
    RunSources,
    Stamp,
    Target,
    UploadPlan,
)
from verl_logsync.plan import Situation, make_plan
from verl_logsync.readiness import Readiness
from verl_logsync.sinks.offline_dir import OfflineDirSink
from verl_logsync.transaction_log import Entry, TransactionLogWriter, read_records
from verl_logsync.transaction_log.fragment import ARTIFACT_FILES
from verl_logsync.transaction_log.records import artifact_record
from verl_logsync.verify import verify_counts

TARGET = Target("", "p", "r")


@pytest.fixture
def plan(tmp_path: Path) -> UploadPlan:
    """A finished run of three rows with a file and an artifact that is staged elsewhere."""
    staged, output = tmp_path / "staged", tmp_path / "eval.txt"
    staged.write_text("notes")
    output.write_text("answers")
    payload = artifact_record(
        kind="dataset",
        name="notes",
        digest="d1",
        client_id="c",
        sequence_client_id="s",
        entries=[("notes.txt", "md5", 5, str(staged))],
    )
    extra = PassThrough(
        artifacts=(ArtifactRef("notes", "d1", payload),),
        files=(FileRef("eval.txt", output, 2, 0),),
    )
    table = pa.table({"_step": [0, 1, 2], "a": [0.5, 1.5, 2.5]})
    history = History(table, np.zeros(3, dtype=np.int64))
    file = LogFile(Path("e.jsonl"), "verl_file", Stamp(1, 1, 1, 1), Facts(head_digest="h"))
    run = RunSources(TARGET, "e", "", "derived", (Attempt((file,), None, "content"),))
    situation = Situation(
        run,
        history,
        Surroundings({}, extra, (), None, None),
        Readiness(3, "finished", 0, None),
        {},
        None,
        None,
        NOTHING_HELD,
        can_rewind=False,
    )
    return make_plan(situation)


def _found(folder: Path) -> Path:
    (run,) = folder.glob("offline-run-*-r")
    return run


def test_what_was_written_is_what_was_meant(plan: UploadPlan, tmp_path: Path) -> None:
    """Rows, state, files and artifacts are found in the folder, also those staged elsewhere."""
    sink = OfflineDirSink(tmp_path / "out")
    sink.send([sink.pack(plan)])
    (tmp_path / "staged").unlink()
    assert plan.expect.files == {"eval.txt"}
    assert plan.expect.artifacts == {("notes", "d1")}
    verdict = verify_counts(plan, sink.look([TARGET])[TARGET])
    assert verdict.agrees, verdict.differences


def _without_artifact_files(run: Path) -> None:
    for path in (run / ARTIFACT_FILES).iterdir():
        path.unlink()


def _with_cut_artifact(run: Path) -> None:
    for path in (run / ARTIFACT_FILES).iterdir():
        path.write_text("no")


def _without_file(run: Path) -> None:
    (run / "files" / "eval.txt").unlink()


def _without_end(run: Path) -> None:
    log = run / "run-r.wandb"
    kept = [e.payload for e in read_records(log) if isinstance(e, Entry) and e.kind != "exit"]
    with TransactionLogWriter(log) as writer:
        for payload in kept:
            writer.write_payload(payload)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (_without_artifact_files, "artifact notes"),
        (_with_cut_artifact, "artifact notes"),
        (_without_file, "file eval.txt"),
        (_without_end, "state: finished meant, running found"),
    ],
)
def test_what_did_not_reach_the_folder_is_named(
    loss: Callable[[Path], None], named: str, plan: UploadPlan, tmp_path: Path
) -> None:
    """A file, an artifact's content or the run's end that is not in the folder is a difference."""
    sink = OfflineDirSink(tmp_path / "out")
    sink.send([sink.pack(plan)])
    loss(_found(tmp_path / "out"))
    verdict = verify_counts(plan, sink.look([TARGET])[TARGET])
    assert not verdict.agrees
    assert any(named in text for text in verdict.differences)


def test_an_artifact_whose_file_is_gone_is_not_written_half(
    plan: UploadPlan, tmp_path: Path
) -> None:
    """A staged file that vanished before it was copied is an error that names it."""
    (tmp_path / "staged").unlink()
    sink = OfflineDirSink(tmp_path / "out")
    with pytest.raises(UnreadableInput, match=r"staged: cannot be read"):
        sink.pack(plan)
    assert not list((tmp_path / "out").iterdir())
