"""Reductions that were computed before, so that unchanged dumps are not read again.

One file a dump folder, one line a dump: a digest of the rest of the line, then JSON with what the
reduction depends on and the reduction. It may be deleted at any time; a line that is damaged, of
another version or of a dump that changed is computed again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import orjson

from verl_logsync.model import Stamp
from verl_logsync.rollouts.values import (
    REDUCTION_VERSION,
    ReductionOptions,
    StepReduction,
    from_json,
)

_DIGEST: Final = 16
# Lines for other options are kept up to this size; then they are dropped, oldest first.
_LARGEST: Final = 256 << 20
# The file is written again when so many bytes of dumps were read since: a crash costs no more.
_SAVE_EVERY: Final = 1 << 30


class ReductionCache:
    """A folder of cached reductions. Nothing else should write into it."""

    def __init__(self, folder: Path) -> None:
        self.folder_path = folder
        self.trouble = ""

    def folder(self, dumps: Path, options: ReductionOptions) -> FolderCache:
        """What is known about the dumps of one folder under these options."""
        return FolderCache(self, dumps.absolute(), options)


class FolderCache:
    """The cached reductions of one dump folder, and those to be cached."""

    def __init__(self, cache: ReductionCache, dumps: Path, options: ReductionOptions) -> None:
        self._cache = cache
        name = hashlib.blake2b(os.fsencode(dumps), digest_size=12).hexdigest()
        self._path = cache.folder_path / f"rollouts-{name}.jsonl"
        self._options = options.digest
        self._lines = _read_lines(self._path)
        self._changed = False
        self._unsaved = 0

    def get(self, dump: Path, stamp: Stamp) -> StepReduction | None:
        """The reduction of a dump, if this very file was reduced before."""
        line = self._lines.get(self._key(dump))
        if line is None:
            return None
        try:
            head, _, body = line.partition(b"\t")
            if orjson.loads(head) != self._head(dump, stamp):
                return None
            return from_json(body)
        except (ValueError, TypeError, KeyError):
            return None

    def put(self, dump: Path, stamp: Stamp, reduction: StepReduction) -> None:
        """Remember a reduction; the stamp is that of the file before it was read."""
        head = orjson.dumps(self._head(dump, stamp))
        self._lines.pop(self._key(dump), None)
        self._lines[self._key(dump)] = head + b"\t" + reduction.as_json()
        self._changed = True
        self._unsaved += stamp.size
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def _key(self, dump: Path) -> str:
        return f"{self._options}/{dump.name}"

    def _head(self, dump: Path, stamp: Stamp) -> list[Any]:
        return [
            self._key(dump),
            REDUCTION_VERSION,
            str(dump.absolute()),
            stamp.size,
            stamp.mtime_ns,
            stamp.inode,
            stamp.device,
        ]

    def save(self) -> None:
        """Write what changed, whole or not at all. A failure is kept in the cache's `trouble`:
        the reductions are right without it, only slower next time.
        """
        if not self._changed:
            return
        total = sum(map(len, self._lines.values()))
        for key in list(self._lines):
            if total <= _LARGEST:
                break
            if not key.startswith(f"{self._options}/"):
                total -= len(self._lines.pop(key))
        try:
            _write_lines(self._path, list(self._lines.values()))
        except OSError as error:
            self._cache.trouble = (
                f"{self._path}: reductions cannot be cached: {error.strerror}."
                " They are computed again next time"
            )
            return
        self._changed = False
        self._unsaved = 0


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_DIGEST // 2).hexdigest().encode()


def _read_lines(path: Path) -> dict[str, bytes]:
    """Whole lines by key; whatever is damaged is not there."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    lines: dict[str, bytes] = {}
    for line in data.split(b"\n"):
        digest, rest = line[:_DIGEST], line[_DIGEST + 1 :]
        if not rest or _digest(rest) != digest:
            continue
        try:
            key = orjson.loads(rest.partition(b"\t")[0])[0]
        except (ValueError, TypeError, LookupError):
            continue
        if isinstance(key, str):
            lines[key] = rest
    return lines


def _write_lines(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(_digest(line) + b" " + line + b"\n" for line in lines)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
