"""Copies of logs that verl truncates at every start, so that nothing of an earlier one is lost.

verl's `file` logger opens its file anew at a restart. A copy taken every few minutes by cron
keeps what was there: as long as a log grows, its copy grows with it; when it was begun anew, a new
copy is begun. The copies have the names of attempts, so that they are read together with the log.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal

from verl_logsync.errors import WriteError, quoted
from verl_logsync.model import LogFile

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What was done for one log: `added` bytes went into `copy`."""

    log: Path
    copy: Path
    what: Literal["new", "grown", "unchanged"]
    added: int


def snapshot_file(file: LogFile, folder: Path) -> Copied:
    """Bring the copy of a log up to date.

    The copy is `FOLDER/ID/PROJECT/EXPERIMENT.attemptN.jsonl`, where ID tells logs of equal names
    in different folders apart. Only whole lines are copied.

    Raises:
        WriteError: the copy cannot be written, or the log cannot be read.
    """
    place = _place(file, folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        return _brought_up(file, place)
    except OSError as error:
        raise WriteError(
            f"cannot be copied: {error.strerror or error}",
            place=file.place,
            hint=f"Check the folder and its free space: df -h {quoted(folder)}",
        ) from error


def _place(file: LogFile, folder: Path) -> Path:
    where = os.fsencode(file.path.absolute().parent)
    name = hashlib.blake2b(where, digest_size=6).hexdigest()
    return folder / name / file.path.absolute().parent.name


def _brought_up(file: LogFile, place: Path) -> Copied:
    copies = _copies(file, place)
    if copies and _is_beginning(copies[-1], file.path):
        size = copies[-1].stat().st_size
        added = _append(file.path, size, copies[-1])
        return Copied(file.path, copies[-1], "grown" if added else "unchanged", added)
    copy = place / f"{_stem(file)}.attempt{len(copies) + 1}.jsonl"
    added = _append(file.path, 0, copy)
    return Copied(file.path, copy, "new", added)


def _stem(file: LogFile) -> str:
    return file.path.name.removesuffix(".jsonl")


def _copies(file: LogFile, place: Path) -> Sequence[Path]:
    named = re.compile(re.escape(_stem(file)) + r"\.attempt(\d+)\.jsonl")
    found = [match for name in os.listdir(place) if (match := named.fullmatch(name))]
    return [place / match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def _is_beginning(copy: Path, log: Path) -> bool:
    """Whether the copy's bytes are the first bytes of the log."""
    with copy.open("rb") as ours, log.open("rb") as theirs:
        while data := ours.read(_CHUNK):
            if theirs.read(len(data)) != data:
                return False
    return True


def _append(log: Path, start: int, copy: Path) -> int:
    """Add the whole lines from a byte on; a new copy appears only when it is whole."""
    temporary = copy.with_name(f".{copy.name}.tmp")
    try:
        if start:
            shutil.copyfile(copy, temporary)
        with log.open("rb") as source, temporary.open("ab" if start else "wb") as target:
            source.seek(start)
            added = _copy_lines(source, target)
            target.flush()
            os.fsync(target.fileno())
        if added or not start:
            temporary.replace(copy)
        return added
    finally:
        temporary.unlink(missing_ok=True)


def _copy_lines(source: BinaryIO, target: BinaryIO) -> int:
    added = 0
    rest = b""
    while data := source.read(_CHUNK):
        whole, newline, rest = (rest + data).rpartition(b"\n")
        target.write(whole + newline)
        added += len(whole) + len(newline)
    return added
