"""The file in a checkpoint folder that says which run its training belongs to.

A job that resumes from the checkpoint finds the run id there and continues the same run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Final

from verl_logsync.errors import UnreadableInput, UsageError, quoted, unreadable
from verl_logsync.regular import read_start

#: Its usual name.
BINDING_FILE: Final = "wandb_run_id"

# What W&B takes as a run id.
_RUN_ID: Final = re.compile(r"[^/\\#?%:.\s\x00-\x1f][^/\\#?%:\s\x00-\x1f]{0,127}")
_LARGEST: Final = 4096


def is_run_id(text: str) -> bool:
    """Whether W&B takes a text as a run id."""
    return _RUN_ID.fullmatch(text) is not None


def read_binding(folder: str | os.PathLike[str], file_name: str = BINDING_FILE) -> str:
    """The run id that a checkpoint folder is bound to; empty when it is bound to none.

    Raises:
        UnreadableInput: there is such a file, but it cannot be read or holds no run id.
    """
    path = Path(folder) / file_name
    try:
        text = read_start(path, _LARGEST).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise unreadable(path, error) from error
    if not is_run_id(text):
        raise UnreadableInput(
            f"holds no run id: {text[:40]!r}", place=str(path), hint=f"See: cat {quoted(path)}"
        )
    return text


def bind_checkpoint(
    folder: str | os.PathLike[str], run_id: str, file_name: str = BINDING_FILE
) -> Path:
    """Write a run id into a checkpoint folder, whole or not at all. Again is free.

    Raises:
        UsageError: no such folder, no usable run id, or the folder is bound to another run.
        UnreadableInput: there is a binding already, which cannot be read.
    """
    path = Path(folder) / file_name
    if not is_run_id(run_id):
        raise UsageError(f"{run_id!r} is no run id", hint="W&B's are letters, digits, - and _")
    if Path(file_name).name != file_name:
        raise UsageError(
            f"{file_name!r} is no file name", hint="A name without a folder, like wandb_run_id"
        )
    if not Path(folder).is_dir():
        raise UsageError(
            "no such folder", place=str(folder), hint="Give trainer.default_local_dir of the run"
        )
    known = read_binding(folder, file_name)
    if not known:
        _write_new(path, run_id)
        known = read_binding(folder, file_name)
    if known != run_id:
        raise UsageError(
            f"belongs to run {known}, not to {run_id}",
            place=str(path),
            hint=f"If that is wrong, remove it first: rm {quoted(path)}",
        )
    return path


def _write_new(path: Path, run_id: str) -> None:
    """Create the file with its content; of two that try the first wins."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(descriptor, f"{run_id}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _place(made, path)
    except OSError as error:
        hint = f"Check it with: ls -ld {quoted(path.parent)}"
        raise UsageError(
            f"cannot be written: {error.strerror}", place=str(path), hint=hint
        ) from error
    finally:
        made.unlink(missing_ok=True)


def _place(made: Path, path: Path) -> None:
    """Give a finished file its name, unless that is taken."""
    try:
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if not path.exists():  # a file system without hard links
            made.rename(path)


def checkpoint_root(path: Path) -> Path:
    """The folder of all checkpoints of a job, from any path that stands for them."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name.startswith("global_step_") else folder
