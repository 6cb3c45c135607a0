"""A step log as Parquet: always a complete file, one row group a flush.

A Parquet file cannot be read before its footer is written, so nothing is ever appended to one:
each flush writes the file anew beside the old one and takes its place. After some flushes the
file is sealed and the next is begun, so that little is written twice. What is lost when the
process is killed are the records since the last flush.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from verl_logsync.errors import UsageError
from verl_logsync.steplog.chain import Known, parse_header
from verl_logsync.steplog.layout import (
    METADATA_KEY,
    MONO,
    SCHEMA_KEY,
    STEP,
    TIME,
    live_name,
    sealed_name,
    sealed_number,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from verl_logsync.steplog.store import Fsync, HeaderMaker

_KIND: Final = "parquet"
#: So many flushes go into one file.
ROW_GROUPS: Final = 20
# So many records that could not be written wait for the next try.
_WAITING: Final = 10_000


class ParquetFile:
    """One rank's Parquet files.

    Args:
        folder: where; made when it is not there.
        stem: name without extension.
        make_header: gives the header that is kept in each file's metadata.
        flush_records: write after so many records,
        flush_seconds: or when so many seconds have passed at the next one.
        fsync: "never", or anything else: each file is forced to the disk before it counts.

    Raises:
        UsageError: pyarrow is not installed.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        make_header: HeaderMaker,
        *,
        flush_records: int,
        flush_seconds: float,
        fsync: Fsync = "never",
    ) -> None:
        _require_pyarrow()
        self._folder = folder
        self._stem = stem
        self._make_header = make_header
        self._flush_records = flush_records
        self._flush_seconds = flush_seconds
        self._fsync: Final = fsync
        self._waiting: list[bytes] = []
        self._groups: list[pa.Table] = []
        self._header = b""
        self._number = 0
        self._previous = ""
        self._flushed = time.monotonic()
        self._first_step: int | None = None
        self.unsynced = 0
        self.trouble = ""

    @property
    def path(self) -> str:
        return str(self._live)

    @property
    def _live(self) -> Path:
        return self._folder / live_name(self._stem, _KIND)

    def begin(self) -> None:
        if not self._header:
            self._open()

    def append(self, line: bytes, step: int) -> None:
        if len(self._waiting) >= _WAITING:
            raise OSError(errno.ENOSPC, "too many records wait to be written", self.path)
        self._waiting.append(line)
        if self._first_step is None:
            self._first_step = step
        late = time.monotonic() - self._flushed >= self._flush_seconds
        if late or len(self._waiting) % self._flush_records == 0:
            try:
                self.flush()
            except OSError as error:  # they wait; if they are lost in the end `close` says it
                self.trouble = f"records wait to be written: {error.strerror or error}"

    def flush(self) -> None:
        """Write what waits as a row group (or several, after trouble), or raise OSError."""
        self._flushed = time.monotonic()
        self.begin()
        while self._waiting:
            if len(self._groups) >= ROW_GROUPS:
                self._begin_next()
            group = _table_of(self._waiting[: self._flush_records])
            self._replace([*self._groups, group], self._header)
            del self._waiting[: self._flush_records]

    def close(self, end: bytes) -> int:
        """The end is kept in the metadata of the last file."""
        try:
            with contextlib.suppress(OSError):  # what is lost is counted by the caller
                self.flush()
            lost = len(self._waiting)
            if self._header:
                header = {**json.loads(self._header), "end": {**json.loads(end), "lost": lost}}
                with contextlib.suppress(OSError):
                    self._replace(self._groups, json.dumps(header).encode())
        finally:
            self.forget()
        return lost

    def forget(self) -> None:
        self._waiting.clear()
        self._groups = []

    # -- files -----------------------------------------------------------------------------

    def _open(self) -> None:
        """Seal what an earlier start left, and place a file with a header and no rows."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = _known(self._live)
        numbers = [sealed_number(name, self._stem, _KIND) for name in os.listdir(self._folder)]
        last = max(numbers, default=0)
        if known is None and last:
            known = _known(self._folder / sealed_name(self._stem, last, _KIND))
        if self._live.exists():
            last += 1
        previous = sealed_name(self._stem, last, _KIND) if last else ""
        before = known or Known({}, None, torn=False)
        header = self._make_header(
            before, number=last + 1, continues=False, previous=previous
        ).rstrip()
        self._replace([], header, seal_as=previous if self._live.exists() else "")
        self._header, self._number = header, last + 1
        self._first_step = before.first_step if before.first_step is not None else self._first_step

    def _begin_next(self) -> None:
        """Seal the file of this start that is full; its rows are complete there."""
        sealed = sealed_name(self._stem, self._number, _KIND)
        known = Known({}, self._first_step, torn=False)
        header = self._make_header(
            known, number=self._number + 1, continues=True, previous=sealed
        ).rstrip()
        self._replace([], header, seal_as=sealed)
        self._header, self._number = header, self._number + 1

    def _replace(self, groups: list[pa.Table], header: bytes, seal_as: str = "") -> None:
        """Write a whole file under a passing name, then let it take the live one's place."""
        made = self._folder / f".{live_name(self._stem, _KIND)}.{os.getpid()}"
        try:
            _write(made, groups, header)
            if self._fsync != "never":
                self._sync(made)
            if seal_as:
                self._live.rename(self._folder / seal_as)
            made.rename(self._live)
        except OSError:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            raise
        self._groups = groups

    def _sync(self, made: Path) -> None:
        descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError:
            self.unsynced += 1
        finally:
            os.close(descriptor)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            'format="parquet" needs pyarrow', hint="Install it with: pip install pyarrow"
        ) from error


def _table_of(lines: list[bytes]) -> pa.Table:
    """Records as columns: axes, and metrics by the rules of `verl_logsync.columns`."""
    import pyarrow as pa

    from verl_logsync.table_builder import TableBuilder

    builder = TableBuilder()
    axes: dict[str, list[float]] = {STEP: [], TIME: [], MONO: []}
    for line in lines:
        record = json.loads(line)
        builder.add({key: v for key, v in record["data"].items() if key not in axes})
        for name, field in ((STEP, "step"), (TIME, "time"), (MONO, "mono")):
            axes[name].append(record[field])
    columns: dict[str, Any] = {
        name: pa.array(values, type=pa.int64() if name == STEP else pa.float64())
        for name, values in axes.items()
    }
    return pa.table(columns | builder.columns())


def _write(path: Path, groups: list[pa.Table], header: bytes) -> None:
    """A complete file, one row group a table. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_logsync.columns import concat

    whole = concat(groups) if groups else _table_of([])
    schema = whole.schema.with_metadata(
        {METADATA_KEY: header, SCHEMA_KEY: schema_digest(whole.schema)}
    )
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        start = 0
        for group in groups:
            piece = whole.slice(start, group.num_rows)
            writer.write_table(pa.table(piece.columns, schema=schema), row_group_size=len(piece))
            start += group.num_rows


def schema_digest(schema: pa.Schema) -> bytes:
    """A digest of the names and types of all columns, in order."""
    words = "\0".join(f"{field.name}\0{field.type}" for field in schema)
    return hashlib.blake2b(words.encode(errors="replace"), digest_size=8).hexdigest().encode()


def _known(path: Path) -> Known | None:
    """What an earlier file says; None when it is not there or cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            header = parse_header(metadata.get(METADATA_KEY, b""))
            log = header.get("log")
            first = log.get("first_step") if isinstance(log, dict) else None
            if first is None and file.metadata.num_rows:
                first = file.read_row_group(0, columns=[STEP]).column(STEP)[0].as_py()
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return Known(header, first, torn=False)
