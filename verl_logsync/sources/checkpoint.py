"""Checkpoint folders: `global_step_N/` and `latest_checkpointed_iteration.txt` of one experiment.

They hold no metrics. They are claimed so that their payload is not searched for logs, and since
they tell which run a resumed job belongs to (see `bind_checkpoint`) and where it went on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from verl_logsync.binding import BINDING_FILE, bind_checkpoint, read_binding
from verl_logsync.columns import STEP
from verl_logsync.errors import LogsyncError, unreadable
from verl_logsync.interfaces import Candidate
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason, Stamp
from verl_logsync.regular import is_folder, is_there, read_start

__all__ = ["BINDING_FILE", "Checkpoint", "bind_checkpoint"]

#: verl writes the step of the newest whole checkpoint into this file, last of all.
TRACKER: Final = "latest_checkpointed_iteration.txt"

_STEP_FOLDER: Final = re.compile(r"^global_step_(\d{1,15})$")
_LOG_LIKE: Final = re.compile(
    r"\.(jsonl|ndjson|wandb|log|out|err|parquet)(\.\w+)?$|tfevents|^wandb$|^\.hydra$",
    re.IGNORECASE,
)
# So many checkpoints are listed one by one.
_LISTED: Final = 12


class Checkpoint:
    """Source `checkpoint`: gives no rows, but a run id and a note.

    Args:
        binding_file: the name of the file that holds the run id.
    """

    name = "checkpoint"
    precision = 0
    patterns = (TRACKER,)

    def __init__(self, binding_file: str = BINDING_FILE) -> None:
        self._binding_file = binding_file

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        path, names = candidate.path, candidate.names
        if names is None:
            # Logs lie beside the checkpoints, so that the folder was not claimed as a whole.
            return self._claim(path.parent) if path.name == TRACKER else None
        if _STEP_FOLDER.match(path.name):
            return None if _holds_logs(path, names) else self._claim_one(candidate)
        is_root = TRACKER in names or any(map(_STEP_FOLDER.match, names))
        if not is_root or _holds_logs(path, names, self._binding_file):
            return None
        return self._claim(path)

    def _claim(self, folder: Path) -> LogFile | Skip:
        tracker = folder / TRACKER
        try:
            stamp = _stamp(folder, (TRACKER, self._binding_file))
            has_tracker = is_there(tracker)
        except OSError as error:
            return _unreadable(folder, error)
        facts = self._facts(folder, _tracked(tracker))
        path = tracker if has_tracker else folder
        return LogFile(path, self.name, stamp, facts, role="checkpoint")

    def _claim_one(self, candidate: Candidate) -> LogFile:
        """One checkpoint of a folder in which other things lie too."""
        folder = candidate.path
        facts = self._facts(folder.parent, _step_of(folder.name))
        return LogFile(folder, self.name, candidate.stamp, facts, role="checkpoint")

    def _facts(self, folder: Path, last_step: int | None) -> Facts:
        place = folder.absolute()
        try:
            run_id = read_binding(folder, self._binding_file)
        except LogsyncError:
            run_id = ""  # said when it is read
        return Facts(project=place.parent.name, name=place.name, run_id=run_id, last_step=last_step)

    def read(self, file: LogFile) -> Reading:
        import pyarrow as pa

        folder = file.path if is_folder(file.path) else file.path.parent
        root = folder.parent if _STEP_FOLDER.match(folder.name) else folder
        try:
            steps = sorted(s for s in map(_step_of, _names(root)) if s is not None)
            skips = self._damaged(root)
        except OSError as error:
            raise unreadable(root, error) from error
        no_rows = pa.table({STEP: pa.array([], type=pa.int64())})
        latest = _tracked(root / TRACKER)
        known = frozenset(steps if latest is None else (*steps, latest))
        return Reading(no_rows, skips, notes=_notes(steps, latest), checkpoints=known)

    def _damaged(self, folder: Path) -> tuple[Skip, ...]:
        """What is in the two small files but cannot be understood. Raises OSError."""
        skips: list[Skip] = []
        tracker = folder / TRACKER
        if is_there(tracker) and read_start(tracker, 64).strip() and _tracked(tracker) is None:
            hint = f"See: head -c 100 {str(tracker)!r}"
            skips.append(Skip(SkipReason.MALFORMED, str(tracker), "holds no step", hint))
        try:
            read_binding(folder, self._binding_file)
        except LogsyncError as error:
            skips.append(Skip(SkipReason.MALFORMED, error.place, error.message, error.hint))
        return tuple(skips)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _holds_logs(folder: Path, names: Iterable[str], binding_file: str = BINDING_FILE) -> bool:
    """Whether a folder has something in it that may be, or hold, a log.

    Inside of one checkpoint folders are payload; beside checkpoints they may hold dumps.
    """
    is_root = not _STEP_FOLDER.match(folder.name)
    for name in names:
        if _STEP_FOLDER.match(name) or name in (TRACKER, binding_file):
            continue
        if _LOG_LIKE.search(name) or (is_root and is_folder(folder / name)):
            return True
    return False


def _step_of(name: str) -> int | None:
    found = _STEP_FOLDER.match(name)
    return int(found[1]) if found else None


def _tracked(tracker: Path) -> int | None:
    """The step in the tracker file; None when there is none."""
    try:
        text = read_start(tracker, 64).strip()
    except OSError:
        return None
    return int(text) if re.fullmatch(rb"\d{1,15}", text) else None


def _stamp(folder: Path, names: Iterable[str]) -> Stamp:
    """A stamp that changes with the folder and with the small files in it. Raises OSError.

    It is the stamp of no file, so the folder is looked at every time.
    """
    status = folder.stat()
    inner = [path.stat() for path in (folder / name for name in names) if is_there(path)]
    return Stamp(
        status.st_size + sum(one.st_size for one in inner),
        max(one.st_mtime_ns for one in (status, *inner)),
        status.st_ino,
        status.st_dev,
    )


def _unreadable(path: Path, error: OSError) -> Skip:
    hint = f"Check it with: ls -l {str(path)!r}"
    return Skip(SkipReason.UNREADABLE, str(path), error.strerror or str(error), hint)


def _notes(steps: list[int], latest: int | None) -> tuple[str, ...]:
    """What is there, and what does not fit together."""
    if not steps:
        return () if latest is None else (f"checkpoints are gone; the latest was of step {latest}",)
    listed = _listed(steps)
    word = "checkpoint at step" if len(steps) == 1 else "checkpoints at steps"
    if latest is None:
        return (f"{word} {listed}; none is marked as the latest",)
    notes = [f"{word} {listed}; latest {latest}"]
    if latest not in steps:
        notes.append(f"the latest checkpoint, of step {latest}, is not here")
    unfinished = [step for step in steps if step > latest]
    if unfinished:
        words = _listed(unfinished)
        notes.append(f"not marked as whole, so a resume does not use it: step {words}")
    return tuple(notes)


def _listed(steps: list[int]) -> str:
    if len(steps) <= _LISTED:
        return ", ".join(map(str, steps))
    first, last = (", ".join(map(str, part)) for part in (steps[:3], steps[-3:]))
    return f"{first}, ..., {last} ({len(steps)} of them)"
