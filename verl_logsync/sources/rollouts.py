"""Rollout and validation dumps: a folder of `{step}.jsonl`, one JSON object a response.

Written by verl 0.4.0 - 0.9.1 where `trainer.rollout_data_dir` or `trainer.validation_data_dir`
are set. They give no history rows: `read` says what is there, and `reduce_folder` what the
groups of each step come to.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from verl_logsync.columns import STEP
from verl_logsync.errors import UnreadableInput, unreadable
from verl_logsync.interfaces import Candidate
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason
from verl_logsync.regular import is_folder
from verl_logsync.rollouts.folder import DumpFolder, describe, gone, reduce_folder, survey
from verl_logsync.rollouts.records import DUMP_NAME

__all__ = ["Rollouts", "reduce_folder"]

# A folder with more entries of other kinds than this share is not claimed as a whole.
_OTHERS: Final = 0.1
# Other entries of such names are for other sources to look at (`5.jsonl.bak` is not).
_LOG: Final = re.compile(
    r"(?!\d+\.jsonl(\.|$)).*(\.(jsonl|ndjson|wandb|log|out|err|parquet)\b|tfevents)",
    re.IGNORECASE,
)


class Rollouts:
    """Source `rollouts`."""

    name = "rollouts"
    precision = 0
    patterns = ("[0-9]*.jsonl",)

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        names = candidate.names
        path = candidate.path
        if names is None:
            if not DUMP_NAME.match(path.name) or b'"input"' not in candidate.head:
                return None
        elif not _is_mostly_dumps(path, names):
            return None
        try:
            found = survey(path, names)
        except UnreadableInput:
            return None  # said when its files are looked at one by one
        if found is None or not found.keys:
            return _nothing_yet(candidate, found)
        return self._claimed(candidate, found)

    def _claimed(self, candidate: Candidate, found: DumpFolder) -> LogFile:
        facts = Facts(
            first_step=found.files[0].step,
            last_step=found.files[-1].step,
            head_digest=hashlib.blake2b(found.first_row.strip(), digest_size=8).hexdigest(),
        )
        stamp = candidate.stamp if candidate.names is None else found.stamp
        return LogFile(candidate.path, self.name, stamp, facts, role="rollouts")

    def read(self, file: LogFile) -> Reading:
        import pyarrow as pa

        found = survey(file.path)
        if found is None or not found.keys:
            raise gone(file)
        try:
            note = describe(found)
        except OSError as error:
            raise unreadable(file.path, error) from error
        no_rows = pa.table({STEP: pa.array([], type=pa.int64())})
        return Reading(no_rows, _left_out(file.path, found), notes=(note,))


def _is_mostly_dumps(path: Path, names: tuple[str, ...]) -> bool:
    others = [name for name in names if not DUMP_NAME.match(name) and not name.startswith(".")]
    dumps = sum(bool(DUMP_NAME.match(name)) for name in names)
    if not dumps or len(others) > max(1, _OTHERS * dumps):
        return False
    # Whatever lies in a claimed folder is not looked at: other logs would be lost.
    return not any(_LOG.match(name) or is_folder(path / name) for name in others)


def _nothing_yet(candidate: Candidate, found: DumpFolder | None) -> Skip | None:
    """A verdict on a folder of empty files; others may be somebody else's."""
    if candidate.names is None or found is None or any(f.stamp.size for f in found.files):
        return None
    detail = f"{len(found.files)} dumps, all of them empty"
    return Skip(SkipReason.NOTHING_YET, str(candidate.path), detail, "It is read next time.")


def _left_out(path: Path, found: DumpFolder) -> tuple[Skip, ...]:
    empty = (
        Skip(SkipReason.NOTHING_YET, str(file.path), "the file is empty", "It is read next time.")
        for file in found.files
        if not file.stamp.size
    )
    others = (
        Skip(
            SkipReason.NOT_RECOGNISED,
            str(path / name),
            "it is no dump of a step",
            "Give this path itself to look into it",
        )
        for name in found.others
        if not name.startswith(".")
    )
    return (*empty, *others)
