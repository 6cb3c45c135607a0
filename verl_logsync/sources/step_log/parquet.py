"""The row groups of a Parquet step log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    import pyarrow.parquet as pq

    try:
        found = parquet_header(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if found is None or isinstance(found, Broken):
        broken = found or Broken("no step log", "")
        raise NotALog(broken.why, place=str(path), hint=broken.hint)
    header, metadata = found
    groups: list[Group | Skip] = []
    first = 0
    for number in range(metadata.num_row_groups):
        count = metadata.row_group(number).num_rows
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                groups.append(Group(first, file.read_row_group(number)))
        except _BROKEN as error:
            place = f"{path} (row group {number})"
            detail = f"damaged: {str(error).partition(chr(10))[0][:200]}"
            hint = "Copy it again from the training machine if it is whole there"
            groups.append(Skip(SkipReason.CORRUPT, place, detail, hint, count))
        first += count
    return header, groups
