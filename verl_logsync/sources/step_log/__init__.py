"""Step logs of `StepLogger`: JSON lines or Parquet, one log a rank, all starts of a job in it.

A log that outgrew its file goes on in another one. The files are found again by what their
headers say, and the last one (the one that is written to) stands for the log.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from verl_logsync.errors import LogsyncError
from verl_logsync.fingerprint import data_folders, essentials
from verl_logsync.interfaces import Candidate
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason
from verl_logsync.sources.step_log.contents import Contents
from verl_logsync.sources.step_log.files import (
    PARQUET,
    Broken,
    Glance,
    chain_of,
    digest_of,
    follower,
    glance,
)
from verl_logsync.sources.step_log.headers import newer_version

_NAMED_SO: Final = re.compile(r"\.steps(\.\d+)?\.(jsonl|parquet)(\.\w+)*$", re.IGNORECASE)
_HEAD_BYTES: Final = 1 << 16


class StepLog:
    """Source `step_log`."""

    name = "step_log"
    precision = 25
    patterns = ("*.jsonl", "*.jsonl.*", "*.parquet", "*.parquet.*")

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        path = candidate.path
        if candidate.names is not None:
            return None
        named_so = bool(_NAMED_SO.search(path.name))
        try:
            found = glance(path, candidate.head)
        except OSError as error:
            hint = f"Check it with: ls -l {str(path)!r}"
            return Skip(SkipReason.UNREADABLE, str(path), error.strerror or str(error), hint)
        if version := newer_version(candidate.head):
            detail = f"version {version} of the step log format, which is newer than this program"
            hint = "Upgrade it: pip install -U verl-logsync"
            return Skip(SkipReason.NOT_RECOGNISED, str(path), detail, hint)
        if isinstance(found, Glance):
            return self._claim(candidate, found)
        if not named_so:
            return None
        return _refusal(candidate, found)

    def _claim(self, candidate: Candidate, found: Glance) -> LogFile | Skip:
        path = candidate.path
        after = follower(path, found.header)
        if after is not None:
            detail = f"the beginning of {after}, with which it is read"
            return Skip(SkipReason.DUPLICATE, str(path), detail)
        if found.first_step is None and found.header.log_first_step is None:
            detail = "a start of the job is recorded, but no step yet"
            return Skip(SkipReason.NOTHING_YET, str(path), detail, "It is read again next time.")
        return LogFile(path, self.name, candidate.stamp, _facts(path, found))

    def read(self, file: LogFile) -> Reading:
        contents = _contents(file.path, exactly=False)
        if contents.rounded:
            contents = _contents(file.path, exactly=True)
        return contents.reading()


def _contents(path: Path, *, exactly: bool) -> Contents:
    """Everything in a log and the files before it. Raises what the last file raises."""
    contents = Contents(str(path), exactly=exactly)
    files, missing = chain_of(path)
    if missing:
        contents.missing(path.parent, missing)
    for file in files:
        try:
            _take(contents, file)
        except LogsyncError as error:
            if file == path:
                raise
            contents.unusable(error)
    return contents


def _take(contents: Contents, path: Path) -> None:
    try:
        with path.open("rb") as stream:
            is_parquet = stream.read(len(PARQUET)) == PARQUET
    except OSError:
        is_parquet = False  # the error is said when the lines are read
    if is_parquet:
        contents.take_parquet(path)
    else:
        contents.take_lines(path)


def _facts(path: Path, found: Glance) -> Facts:
    """What is known of the whole log, whose first file may be another one."""
    header, first = found.header, found
    files = chain_of(path)[0] if header.number > 1 else (path,)
    if files[0] != path:
        first = _look_again(files[0]) or found
    started = [first.opening.started_at, header.log_started_at]
    folder = path.absolute().parent
    steps = [
        s for s in (first.first_step, header.log_first_step, found.first_step) if s is not None
    ]
    return Facts(
        project=header.project or folder.parent.name,
        name=header.experiment or folder.name,
        run_id=found.latest.run_id or header.run_id or first.header.run_id,
        config=essentials(first.opening.config or header.config or {}),
        dirs=data_folders(first.opening.config or header.config or {}),
        started_at=next((time for time in started if time is not None), None),
        first_step=steps[0],
        last_step=max([*steps, *([] if found.last_step is None else [found.last_step])]),
        opens_with_validation=first.opens_with_validation,
        head_digest=digest_of(header, found.first_record),
        rank=header.rank,
        world_size=header.world_size,
        attempt_id=first.opening.attempt_id,
        host=header.host,
    )


def _look_again(path: Path) -> Glance | None:
    try:
        with path.open("rb") as stream:
            found = glance(path, stream.read(_HEAD_BYTES))
    except OSError:
        return None
    return found if isinstance(found, Glance) else None


def _refusal(candidate: Candidate, found: Broken | None) -> Skip | None:
    """What to say of a file that bears the name of a step log and is none."""
    place = str(candidate.path)
    if isinstance(found, Broken):
        return Skip(SkipReason.NOT_A_LOG, place, found.why, found.hint)
    if not candidate.head.strip(b"\0\n\r "):
        size = candidate.stamp.size
        detail = "the file is empty" if not size else f"{size} bytes, all of them blank"
        return Skip(SkipReason.NOTHING_YET, place, detail, "It is read next time.")
    if candidate.path.name.endswith(".parquet"):
        return Skip(SkipReason.NOT_A_LOG, place, "no Parquet", f"See: head -c 64 {place!r} | xxd")
    return None  # verl's own format may be in it
