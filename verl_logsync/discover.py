"""Paths -> log files: walk the given paths, and give everything that looks like a log a verdict."""

from __future__ import annotations

import os
import re
import stat as statmode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from verl_logsync.errors import UsageError, quoted
from verl_logsync.interfaces import Candidate, Source
from verl_logsync.model import LogFile, Skip, SkipReason, Stamp
from verl_logsync.regular import is_link, is_there

#: First bytes of a file that are read to recognise it.
HEAD_BYTES: Final = 1 << 16
#: Folders deeper than this below a given path are not entered.
DEPTH: Final = 24
#: Folders behind more links in a row than this are not entered: links lead out of the logs.
LINKS: Final = 2

_NEVER_ENTERED: Final = frozenset(
    {".git", "node_modules", "__pycache__", ".venv", ".ipynb_checkpoints"}
)
# Names that promise a log, whether or not a source claims the file.
_LOG_LIKE: Final = re.compile(
    r"\.(jsonl|ndjson|wandb|log|out|err|parquet)(\.(\d+|gz|zst|bak|old))?$|\.tfevents\.|^main_ppo\.log",
    re.IGNORECASE,
)
# `.run-x.wandb.Ab3xYz`: what rsync, or a writer, has not finished.
_UNFINISHED: Final = re.compile(
    r"\.(jsonl|ndjson|wandb|parquet|log|out|err)(\.\w+)*$", re.IGNORECASE
)
# The client's own diary, and that of its core, which W&B writes beside every run.
_CLIENT_DIARY: Final = re.compile(r"^(core-)?debug(-\w+)*(\.\w+)*\.log$")

#: What the last upload knew about a path: its verdict, if nothing changed since.
Recall = Callable[[Path], LogFile | Skip | None]


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that a walk came upon, in the order of the paths' names.

    `reached` holds the paths at which log files were claimed (a folder for an offline run).
    """

    files: tuple[LogFile, ...]
    skips: tuple[Skip, ...]
    reached: tuple[tuple[str, LogFile], ...] = ()


def remember_nothing(_: Path) -> None:
    """The `Recall` of a first upload."""
    return


def discover(
    paths: Sequence[Path],
    sources: Sequence[Source],
    recall: Recall = remember_nothing,
    excluded: Sequence[Path] = (),
    patterns: Sequence[str] = (),
) -> Found:
    """Find every log below the paths.

    Folders that are reached twice (by symlinks, or because paths overlap) are entered once.
    Excluded ones (our own state and output) are not entered, unless given themselves; nor is what
    the shell patterns match: its name, or its path where a pattern has a slash.

    Raises:
        UsageError: a given path does not exist.
    """
    walk = _Walk(sources, recall, excluded, patterns)
    for path in sorted(paths, key=str):
        if not _may_be_there(path):
            raise UsageError(
                "no such file or folder", place=str(path), hint="See: verl-logsync scan --help"
            )
        walk.enter(path)
    files = sorted(walk.files, key=lambda file: str(file.path))
    skips = tuple(sorted(walk.skips, key=lambda skip: skip.place))
    return Found(tuple(files), skips, tuple(walk.reached))


def _is_like(path: Path, patterns: Sequence[str]) -> bool:
    """Whether a path is what a shell pattern means: its name, where the pattern has no slash."""
    return any(
        fnmatch(str(path), pattern) or fnmatch(str(path.absolute()), pattern)
        if "/" in pattern
        else fnmatch(path.name, pattern)
        for pattern in patterns
    )


class _Walk:
    def __init__(
        self,
        sources: Sequence[Source],
        recall: Recall,
        excluded: Sequence[Path],
        patterns: Sequence[str],
    ) -> None:
        self._sources = sources
        self._recall = recall
        self._excluded = {path.resolve() for path in excluded}
        self._patterns = patterns
        self.reached: list[tuple[str, LogFile]] = []
        self._seen: set[tuple[int, int]] = set()
        self.files: list[LogFile] = []
        self.skips: list[Skip] = []

    def enter(self, path: Path, depth: int = 0, links: int = 0) -> None:
        """Look at a path; a given one (depth 0) is examined whatever its name.

        `links` counts the linked folders on the way to it.
        """
        if not _is_text(path):
            self._unnamable(path)
            return
        try:
            status = path.stat()
        except OSError as error:
            self._unreachable(path, error)
            return
        identity = (status.st_dev, status.st_ino)
        if identity in self._seen:
            return
        self._seen.add(identity)
        if statmode.S_ISDIR(status.st_mode):
            self._folder(path, status, depth, links + (depth > 0 and is_link(path)))
        elif statmode.S_ISREG(status.st_mode):
            self._file(path, _stamp(status), given=depth == 0)

    def _unnamable(self, path: Path) -> None:
        place = os.fsencode(path).decode(errors="backslashreplace")
        hint = "Rename it: W&B's names are UTF-8 text"
        self.skips.append(Skip(SkipReason.UNREADABLE, place, "its name is no UTF-8", hint))

    def _unreachable(self, path: Path, error: OSError) -> None:
        dangling = is_link(path) and not is_there(path)
        detail = "dangling symlink" if dangling else (error.strerror or str(error))
        # W&B leaves links to its diary and its latest run, which break when a folder is moved.
        if _is_log_like(path) or not dangling:
            hint = f"Check it with: ls -l {quoted(path)}"
            self.skips.append(Skip(SkipReason.UNREADABLE, str(path), detail, hint))

    def _folder(self, path: Path, status: os.stat_result, depth: int, links: int) -> None:
        if depth and path.resolve() in self._excluded:
            return
        try:
            names = tuple(sorted(os.listdir(path)))
        except OSError as error:
            self._unreachable(path, error)
            return
        known = self._recall(path)
        verdict = known or self._ask(Candidate(path, _stamp(status), names=names))
        if verdict is not None:
            self._keep(path, verdict)
            return
        if links > LINKS:
            detail = f"behind more than {LINKS} links"
            hint = "Give this path itself to look into it"
            self.skips.append(Skip(SkipReason.NOT_RECOGNISED, str(path), detail, hint))
            return
        if depth >= DEPTH:
            self.skips.append(
                Skip(
                    SkipReason.NOT_RECOGNISED,
                    str(path),
                    f"deeper than {DEPTH} folders",
                    "Give this path itself to look into it",
                )
            )
            return
        # Real entries first: a folder is called by its own name, not by that of a link to it.
        for entry in sorted((path / name for name in names), key=lambda e: (is_link(e), e)):
            if entry.name not in _NEVER_ENTERED and not _is_like(entry, self._patterns):
                self.enter(entry, depth + 1, links)

    def _file(self, path: Path, stamp: Stamp, *, given: bool) -> None:
        if path.name.startswith(".") and not given:
            self._hidden(path)
            return
        known = self._recall(path)
        if known is not None:
            self._keep(path, known)
            return
        if given or self._is_interesting(path.name):
            try:
                with path.open("rb") as stream:
                    head = stream.read(HEAD_BYTES)
            except OSError as error:
                self._unreachable(path, error)
                return
            verdict = self._ask(Candidate(path, stamp, head))
            if verdict is not None:
                self._keep(path, verdict)
                return
        if given or (_is_log_like(path) and not _CLIENT_DIARY.match(path.name)):
            self.skips.append(_not_recognised(path, stamp))

    def _hidden(self, path: Path) -> None:
        """Writers and copiers (rsync) hide a file until it is whole; killed, they leave it."""
        if _UNFINISHED.search(path.name):
            detail = "its name begins with a dot: a file that was not finished"
            hint = "Give this path itself to read it all the same"
            self.skips.append(Skip(SkipReason.NOT_RECOGNISED, str(path), detail, hint))

    def _is_interesting(self, name: str) -> bool:
        lower = name.lower()
        return any(fnmatch(lower, p) for source in self._sources for p in source.patterns)

    def _ask(self, candidate: Candidate) -> LogFile | Skip | None:
        for source in self._sources:
            verdict = source.recognise(candidate)
            if verdict is not None:
                return verdict
        return None

    def _keep(self, path: Path, verdict: LogFile | Skip) -> None:
        if isinstance(verdict, LogFile):
            self.files.append(verdict)
            self.reached.append((str(path), verdict))
        else:
            self.skips.append(verdict)


def _may_be_there(path: Path) -> bool:
    """Whether a given path exists, or may exist in a folder that we must not enter."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # what is wrong with it is said when it is entered
    return True


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file now; None when it cannot be looked at."""
    try:
        return _stamp(path.stat())
    except OSError:
        return None


def _is_log_like(path: Path) -> bool:
    return bool(_LOG_LIKE.search(path.name))


def _not_recognised(path: Path, stamp: Stamp) -> Skip:
    if stamp.size == 0 or path.name.startswith("main_ppo.log"):
        # Hydra's log of the driver: verl's workers log elsewhere.
        what = "empty; " if stamp.size == 0 else ""
        return Skip(
            SkipReason.NOT_RECOGNISED,
            str(path),
            f"{what}verl's metrics are not in this file",
            "Look for EXPERIMENT.jsonl, a console log or a wandb/ folder",
        )
    return Skip(SkipReason.NOT_RECOGNISED, str(path), "no source knows its content")
