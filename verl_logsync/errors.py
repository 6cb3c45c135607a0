"""Everything that can go wrong, as a tree of exceptions.

::

    LogsyncError                    exit 1, not retryable
    ├── UsageError                  exit 2   a wrong option, path or configuration file
    ├── InputError                  exit 3   one input cannot be used; the others go on
    │   ├── UnreadableInput                  permission, I/O error, vanished file
    │   ├── NotALog                          the file is not what its name says
    │   ├── OverlapRefused                   attempts overlap and --on-overlap is "error"
    │   └── RestartRefused                   an attempt begins at step 0 again: which way is meant?
    ├── RefusedByServer             exit 3   the server answered, and will not take this run
    │   └── RunDeleted                       its run id was deleted on the server
    ├── AuthError                   exit 5   no key, a wrong key, or no permission
    ├── Unreachable                 exit 6   retryable: network or server down, or too slow
    ├── Locked                      exit 7   retryable: another upload uses this state
    ├── StateError                  exit 2   the state folder or its ledger cannot be used
    └── WriteError                  exit 3   a file of ours cannot be written: a full disk, mostly

A message names the file and the place, says what was seen, and ends with the next command
to type: `message`, `place` and `hint` are kept apart so that reports can lay them out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of the command line; the table is part of the public interface."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    PARTIAL = 3
    NOT_VERIFIED = 4
    AUTH = 5
    UNREACHABLE = 6
    LOCKED = 7
    GATE = 8
    INTERRUPTED = 130


class LogsyncError(Exception):
    """Base of all errors that users see.

    Args:
        message: what was seen, in one sentence.
        place: the file (and line or byte offset) it was seen in.
        hint: the next thing to do, preferably a command.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, place: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}. {self.hint}" if self.hint else text


class UsageError(LogsyncError):
    """A wrong option, path or configuration file."""

    exit_code = ExitCode.USAGE


class InputError(LogsyncError):
    """One input cannot be used; the others go on."""

    exit_code = ExitCode.PARTIAL


class UnreadableInput(InputError):
    """The operating system does not let us read a file."""


def unreadable(path: object, error: OSError) -> UnreadableInput:
    """The error for a file or folder that the system refuses."""
    why = error.strerror or str(error)
    hint = f"Check it with: ls -ld {quoted(path)}"
    return UnreadableInput(f"cannot be read: {why}", place=str(path), hint=hint)


class NotALog(InputError):
    """A file is not what its name says."""


class OverlapRefused(InputError):
    """Attempts overlap and the policy is to refuse that."""


class RestartRefused(InputError):
    """An attempt begins at the beginning again; it may continue, replace, or be another run."""


class RefusedByServer(LogsyncError):
    """The server answered, and does not take this run or these rows."""

    exit_code = ExitCode.PARTIAL


class RunDeleted(RefusedByServer):
    """The run id was deleted on the server, which never takes it again."""


class AuthError(LogsyncError):
    """No API key, a key the server does not know, or no permission."""

    exit_code = ExitCode.AUTH


class Unreachable(LogsyncError):
    """The server cannot be reached, or does not answer in the time given."""

    exit_code = ExitCode.UNREACHABLE
    retryable = True


class Locked(LogsyncError):
    """Another upload holds the same state folder."""

    exit_code = ExitCode.LOCKED
    retryable = True


class StateError(LogsyncError):
    """The state folder or the ledger in it cannot be used."""

    exit_code = ExitCode.USAGE


class WriteError(LogsyncError):
    """A file that this tool makes cannot be written; what was written before it stays."""

    exit_code = ExitCode.PARTIAL


class InputWarning(UserWarning):
    """Something could not be read and was left out, where no report can say so."""


def as_run(name: str, places: Iterable[str]) -> str:
    """The flags that make some logs one run of that name, to be pasted."""
    return " ".join(run_flag(name, place) for place in places)


def run_flag(name: str, pattern: str) -> str:
    """The option that makes files a run, as a shell takes it.

    Names and paths of sweeps hold equals signs themselves; a doubled one is none of those.
    """
    equals = "==" if "=" in name + pattern else "="
    return f"--run {quoted(f'{name}{equals}{pattern}')}"


def quoted(path: object) -> str:
    """A path as a word that can be pasted into a shell; control characters are escapes in it."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    """One character inside of a shell's $'...'."""
    if character in "'\\":
        return f"\\{character}"
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
