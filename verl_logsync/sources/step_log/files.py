"""The files of one rank's log: which follows which, and a quick look at each."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from verl_logsync.jsonlines import LONGEST_LINE, parse_line
from verl_logsync.sources.step_log.headers import Header, header_of
from verl_logsync.steplog.layout import (
    HEADER_START,
    METADATA_KEY,
    SCHEMA_KEY,
    STEP,
    names_after,
)
from verl_logsync.steplog.parquet_file import schema_digest
from verl_logsync.verl_keys import is_validation_only

_RECORD: Final = re.compile(rb'\{"step":(\d{1,18}),"time":')
# The longest line that is read, and a first record behind it.
_HEAD_BYTES: Final = LONGEST_LINE + (1 << 20)
_TAIL_BYTES: Final = 1 << 20
#: The first bytes of every Parquet file.
PARQUET: Final = b"PAR1"


@dataclass(frozen=True, slots=True)
class Glance:
    """What the head and the tail of one file tell.

    `header` is its first one, `opening` the one before its first record, and `latest` its last
    one as far as that was seen; steps are None while there is no record.
    """

    header: Header
    opening: Header
    latest: Header
    first_step: int | None
    last_step: int | None
    opens_with_validation: bool = False
    first_record: bytes = b""


class Broken(NamedTuple):
    """Why a file that is a step log by name or beginning cannot be used, and what to do."""

    why: str
    hint: str


def glance(path: Path, head: bytes) -> Glance | Broken | None:
    """Look at a file; None when it is no step log. Raises OSError."""
    if head.startswith(PARQUET):
        return _glance_parquet(path)
    headers, record = _opening(head)
    if not record and HEADER_START in head:  # a long config may fill the head, and more
        with path.open("rb") as stream:
            headers, record = _opening(stream.read(_HEAD_BYTES))
    if not headers and not record:
        return None
    tail = _tail(path).split(b"\n")[:-1]  # what follows the last line end may be cut
    later = [found for found in map(header_of, tail) if found]
    first = _step_of(record)
    steps = [step for step in map(_step_of, tail) if step is not None]
    return Glance(
        headers[0] if headers else Header(),
        headers[-1] if headers else Header(),
        [*headers, *later][-1] if headers or later else Header(),
        first,
        max([*steps, *([] if first is None else [first])], default=None),
        _opens_with_validation(record),
        record,
    )


def _opening(head: bytes) -> tuple[list[Header], bytes]:
    """The headers before the first record, and that record; empty when there is none yet."""
    headers: list[Header] = []
    for line in head.split(b"\n"):
        data = line.lstrip(b"\0")
        if _RECORD.match(data):
            return headers, data
        if header := header_of(data):
            headers.append(header)
    return headers, b""


def _tail(path: Path) -> bytes:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        return stream.read(_TAIL_BYTES)


def _step_of(line: bytes) -> int | None:
    found = _RECORD.match(line.lstrip(b"\0"))
    return int(found[1]) if found else None


def _opens_with_validation(line: bytes) -> bool:
    try:
        return bool(line) and is_validation_only(parse_line(line)["data"])
    except (ValueError, KeyError, TypeError):
        return False


# -- Parquet -------------------------------------------------------------------------------


def _glance_parquet(path: Path) -> Glance | Broken | None:
    with path.open("rb") as stream:
        found = parquet_header(stream)
    if not isinstance(found, tuple) or isinstance(found, Broken):
        return found
    header, metadata = found
    steps = _parquet_steps(metadata)
    first, last = min(steps, default=None), max(steps, default=None)
    return Glance(header, header, header, first, last, bool(steps) and _validates(path))


def _validates(path: Path) -> bool:
    """Whether the first row holds nothing but validation results."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            row = file.read_row_group(0).slice(0, 1)
    except (pa.ArrowException, OSError, ValueError, OverflowError):
        return False  # it is said when the file is read
    present = [name for name in row.schema.names if row.column(name).null_count == 0]
    return is_validation_only(present)


def parquet_header(stream: BinaryIO) -> tuple[Header, Any] | Broken | None:
    """A Parquet file's header and metadata; None when it is not of ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = Broken(
        "Parquet that ends without its footer, or with a damaged one",
        "Copy it again: StepLogger only ever leaves complete files",
    )
    try:
        metadata = pq.read_metadata(stream)
        words = metadata.metadata or {}
        if METADATA_KEY not in words:
            return None
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError, OverflowError):
        return unfinished
    header = header_of(words[METADATA_KEY])
    if header is None or words.get(SCHEMA_KEY) != schema_digest(schema):
        return unfinished
    return header, metadata


def _parquet_steps(metadata: Any) -> list[int]:
    """The smallest and largest steps of the row groups, from their statistics."""
    column = metadata.schema.names.index(STEP) if STEP in metadata.schema.names else None
    if column is None:
        return []
    found: list[int] = []
    for number in range(metadata.num_row_groups):
        statistics = metadata.row_group(number).column(column).statistics
        if statistics is not None and statistics.has_min_max:
            found += [step for step in (statistics.min, statistics.max) if type(step) is int]
    return found


# -- which follows which -------------------------------------------------------------------


def follower(path: Path, header: Header) -> Path | None:
    """The file that goes on where this one was sealed."""
    for name in names_after(path.name):
        other = path.with_name(name)
        found = _first_header(other)
        if (
            found is not None
            and found.log_id == header.log_id
            and found.number == header.number + 1
            and found.previous == path.name
        ):
            return other
    return None


def chain_of(path: Path) -> tuple[tuple[Path, ...], str]:
    """All files of a log in the order in which they were written, the given one last.

    The second value names the file that should come before the first, when it is missing.
    """
    files = [path]
    header = _first_header(path)
    while header is not None and header.previous:
        before = path.with_name(header.previous)
        found = _first_header(before)
        if found is None or found.log_id != header.log_id or found.number >= header.number:
            return tuple(reversed(files)), header.previous
        files.append(before)
        header = found
    return tuple(reversed(files)), ""


def _first_header(path: Path) -> Header | None:
    """The header with which a file begins; None when it cannot be read."""
    try:
        with path.open("rb") as stream:
            line = stream.readline(_HEAD_BYTES)
            if not line.startswith(PARQUET):
                return header_of(line)
            found = parquet_header(stream)
        return None if found is None or isinstance(found, Broken) else found[0]
    except OSError:
        return None


def digest_of(header: Header, record: bytes) -> str:
    """What identifies a log's content: its own name, or its first record."""
    if header.log_id:
        return header.log_id
    return hashlib.blake2b(record.strip(b"\0\r\n "), digest_size=8).hexdigest() if record else ""
