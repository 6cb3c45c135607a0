"""A folder of dumps: `rollout_data_dir` or `validation_data_dir` of verl's trainers."""

from __future__ import annotations

import os
import re
import stat as statmode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verl_logsync.errors import NotALog, UnreadableInput
from verl_logsync.jsonlines import parse_line
from verl_logsync.model import LogFile, Skip, SkipReason, Stamp
from verl_logsync.regular import is_folder
from verl_logsync.rollouts.cache import ReductionCache
from verl_logsync.rollouts.records import DUMP_NAME, LONGEST_ROW, key_set
from verl_logsync.rollouts.reduce import DEFAULTS, reduce_file
from verl_logsync.rollouts.values import DumpKind, ReductionOptions, StepReduction

# So many files are opened to find one that has a first row.
_TRIED: Final = 8
# So many lines of a file are tried: the first may be damaged.
_LINES_TRIED: Final = 3
_VALIDATES: Final = frozenset({"val", "valid", "validation", "validations", "eval"})
_TRAINS: Final = frozenset({"train", "training", "rollout", "rollouts"})


@dataclass(frozen=True, slots=True)
class DumpFile:
    """The dump of one step."""

    path: Path
    step: int
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class DumpFolder:
    """What a look at the names and one first row tells. `files` ascend by step.

    `first_row` is the text of the first row of the earliest file that has one, `keys` its keys;
    both are empty while no file has a row. `others` are names that are no dumps.
    """

    files: tuple[DumpFile, ...]
    kind: DumpKind
    keys: tuple[str, ...]
    first_row: bytes
    others: tuple[str, ...]

    @property
    def stamp(self) -> Stamp:
        """Changes when any dump does; inode and device are those of the earliest dump's folder,
        or of the file itself where a single one was given.
        """
        return _combined(self.files)


def survey(path: Path, names: Sequence[str] | None = None) -> DumpFolder | None:
    """Look at a folder (or a single dump file); None when it holds no dumps.

    Args:
        path: the folder or file.
        names: the folder's entries, if they are known already.

    Raises:
        UnreadableInput: the operating system refuses.
    """
    try:
        if names is None:
            names = os.listdir(path) if is_folder(path) else None
        files, others = _files(path, names)
        if not files:
            return None
        row, keys = _first_row(files)
    except OSError as error:
        raise UnreadableInput(
            f"cannot be read: {error.strerror}",
            place=str(path),
            hint=f"Check it with: ls -l {str(path)!r}",
        ) from error
    folder = path if names is not None else path.parent
    kind = kind_of(folder, keys, [file.step for file in files])
    return DumpFolder(files, kind, keys, row, others)


def _files(path: Path, names: Sequence[str] | None) -> tuple[tuple[DumpFile, ...], tuple[str, ...]]:
    if names is None:
        named = DUMP_NAME.match(path.name)
        status = path.stat()
        # A file that was given under another name is a dump of a step that its rows tell.
        return (DumpFile(path, int(named[1]) if named else -1, _stamp(status)),), ()
    found, others = [], []
    for name in names:
        named = DUMP_NAME.match(name)
        if not named:
            others.append(name)
            continue
        place = path / name
        try:
            status = place.stat()
        except FileNotFoundError:
            continue  # renamed or deleted since the folder was listed
        if statmode.S_ISREG(status.st_mode):
            found.append(DumpFile(place, int(named[1]), _stamp(status)))
        else:
            others.append(name)
    return tuple(sorted(found, key=lambda f: (f.step, f.path.name))), tuple(sorted(others))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def _combined(files: Sequence[DumpFile]) -> Stamp:
    if len(files) == 1 and files[0].step < 0:
        return files[0].stamp
    folder = files[0].path.parent
    try:
        status = folder.stat()
        inode, device = status.st_ino, status.st_dev
    except OSError:
        inode, device = 0, 0
    return Stamp(
        size=sum(file.stamp.size for file in files),
        mtime_ns=max(file.stamp.mtime_ns for file in files),
        inode=inode,
        device=device,
    )


def stamp_of_dumps(path: Path) -> Stamp | None:
    """The stamp of a dump folder (or file) now, as `DumpFolder.stamp` has it, without opening
    any file; None when it holds no dumps or cannot be looked at.
    """
    try:
        if not is_folder(path):
            return _stamp(path.stat())
        files, _ = _files(path, os.listdir(path))
    except OSError:
        return None
    return _combined(files) if files else None


def _first_row(files: Sequence[DumpFile]) -> tuple[bytes, tuple[str, ...]]:
    """Text and keys of the first row of the earliest file that has one."""
    for file in [f for f in files if f.stamp.size][:_TRIED]:
        with file.path.open("rb") as stream:
            for _ in range(_LINES_TRIED):
                line = stream.readline(LONGEST_ROW)
                keys = _keys_of(line)
                if keys:
                    return line, keys
    return b"", ()


def _keys_of(line: bytes) -> tuple[str, ...]:
    """The keys of a row of a dump; empty when it is none."""
    if b'"output"' not in line:
        return ()
    try:
        row = parse_line(line)
    except ValueError:
        return ()
    is_row = isinstance(row, dict) and {"input", "output", "score"} <= row.keys()
    return tuple(row) if is_row else ()


def kind_of(folder: Path, keys: Iterable[str], steps: Sequence[int]) -> DumpKind:
    """Whether dumps are of training or of validation, when path, keys and steps agree.

    Validation dumps have the key `reward`, which a reward function may also return; they hold
    step 0 or only some steps, while every training step is dumped; and the folder's name often
    says it.
    """
    words = set(re.split(r"[^a-z]+", f"{folder.parent.name}/{folder.name}".lower()))
    ordered = sorted(steps)
    dense = len(ordered) > 1 and ordered[-1] - ordered[0] < 2 * len(ordered) and 0 not in steps
    sparse = 0 in ordered or (len(ordered) > 1 and not dense)
    if "reward" not in set(keys):
        return "unknown" if words & _VALIDATES or 0 in ordered else "train"
    if words & _VALIDATES:
        return "validation"
    return "validation" if sparse and not words & _TRAINS else "unknown"


def reduce_folder(
    file: LogFile,
    options: ReductionOptions = DEFAULTS,
    cache: ReductionCache | None = None,
) -> Iterator[StepReduction]:
    """The reduction of every dump of a folder (or of a single dump), by ascending step.

    Dumps that did not change since they were cached are not read. One that cannot be read gives
    an empty reduction that says so.

    Raises:
        UnreadableInput: the folder cannot be read.
        NotALog: it holds no dumps any more.
    """
    folder = survey(file.path)
    if folder is None:
        raise gone(file)
    known = cache.folder(file.path, options) if cache is not None else None
    try:
        for dump in folder.files:
            reduction = known.get(dump.path, dump.stamp) if known is not None else None
            if reduction is None or reduction.kind != folder.kind:
                reduction = _reduced(dump, options, folder.kind)
                if known is not None and reduction.key_set:
                    known.put(dump.path, dump.stamp, reduction)
            yield reduction
    finally:
        if known is not None:
            known.save()


def _reduced(dump: DumpFile, options: ReductionOptions, kind: DumpKind) -> StepReduction:
    try:
        return reduce_file(dump.path, options, kind)
    except UnreadableInput as error:
        skip = Skip(SkipReason.UNREADABLE, error.place, error.message, error.hint)
        return StepReduction(
            dump.step, str(dump.path), kind, missing={"rows": error.message}, skips=(skip,)
        )


def gone(file: LogFile) -> NotALog:
    """The error for a folder that held dumps when it was found."""
    return NotALog("holds no rollout dumps", place=file.place, hint="It is read again next time.")


def rows_of(dump: DumpFile) -> int:
    """How many lines a dump has.

    Raises:
        OSError: it cannot be read.
    """
    count, last = 0, b"\n"
    with dump.path.open("rb", buffering=0) as stream:
        while data := stream.read(1 << 20):
            count += data.count(b"\n")
            last = data[-1:]
    return count + (last != b"\n")


def describe(folder: DumpFolder) -> str:
    """One sentence for the report."""
    first, last = folder.files[0], folder.files[-1]
    steps = f"step {first.step}" if first is last else f"steps {first.step}-{last.step}"
    counted = next((file for file in folder.files if file.stamp.size), first)
    rows = f"{rows_of(counted)} rows a step"
    keys = f"key set {key_set(folder.keys)}" if folder.keys else "no rows yet"
    return f"rollout dumps: {folder.kind}, {steps}, {rows}, {keys}"
