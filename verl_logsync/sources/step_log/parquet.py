"""The row groups of a Parquet step log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from verl_logsync.errors import NotALog, unreadable
from verl_logsync.model import Skip, SkipReason
from verl_logsync.sources.step_log.files import Broken, parquet_header
from verl_logsync.sources.step_log.headers import Header

_BROKEN = (pa.ArrowException, OSError, ValueError, OverflowError)


class Group(NamedTuple):
    """One row group: its table, and the number of its first row in the file."""

    first: int
    table: pa.Table

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each row's values; what is null in Parquet is not in the row."""
        for row in self.table.to_pylist():
            yield {key: value for key, value in row.items() if value is not None}


def read_groups(path: Path) -> tuple[Header, list[Group | Skip]]:
    """The header and all row groups; a damaged one is a Skip that counts its rows.

    Raises:
        UnreadableInput: the operating system refuses.
        NotALog: the file is cut, damaged, or not a step log.
    """
    try:
        # Opened once: the logger replaces its file by a longer one, and groups of two do not mix.
        with path.open("rb") as stream:
            return _read_groups(path, stream)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_groups(path: Path, stream: BinaryIO) -> tuple[Header, list[Group | Skip]]:
    found = parquet_header(stream)
    if found is None or isinstance(found, Broken):
        broken = found or Broken("no step log", "")
        raise NotALog(broken.why, place=str(path), hint=broken.hint)
    header, metadata = found
    groups: list[Group | Skip] = []
    first = 0
    for number in range(metadata.num_row_groups):
        count = metadata.row_group(number).num_rows
        groups.append(_group(path, stream, number, first, count))
        first += count
    return header, groups


def _group(path: Path, stream: BinaryIO, number: int, first: int, count: int) -> Group | Skip:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream, page_checksum_verification=True)
        return Group(first, file.read_row_group(number))
    except _BROKEN as error:
        place = f"{path} (row group {number})"
        detail = f"damaged: {str(error).partition(chr(10))[0][:200]}"
        hint = "Copy it again from the training machine if it is whole there"
        return Skip(SkipReason.CORRUPT, place, detail, hint, count)
