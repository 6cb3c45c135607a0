"""The aligned history as files for other tools: one file a run, the account beside it.

Parquet keeps everything (text, lists, objects and explicit nulls as JSON text in string columns).
In CSV a missing value is an empty field, null is `null`, and objects are JSON text. In JSON lines a
missing key is absent; NaN and infinities are the bare tokens that Python's json writes and reads.
"""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from verl_logsync.columns import json_values, to_json
from verl_logsync.errors import WriteError, quoted
from verl_logsync.model import History, RunSources

Format = Literal["parquet", "csv", "jsonl"]

_UNSAFE: Final = re.compile(r"[^\w.@+-]+")
_STRETCH: Final = 4096


def export_run(
    run: RunSources,
    history: History,
    account: Mapping[str, Any],
    folder: Path,
    form: Format,
) -> Path:
    """Write `PROJECT/NAME-RUNID.FORM` and `PROJECT/NAME-RUNID.account.json` below a folder.

    Existing files are replaced, each as a whole.

    Returns:
        The path of the history.

    Raises:
        WriteError: the folder cannot be written.
    """
    stem = f"{_safe(run.name)}-{_safe(run.target.run_id)}"
    place = folder / _safe(run.target.project)
    path = place / f"{stem}.{form}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _replace(path, lambda stream: _WRITERS[form](history.table, stream))
        text = orjson.dumps(account, option=orjson.OPT_INDENT_2)
        _replace(place / f"{stem}.account.json", lambda stream: stream.write(text))
    except OSError as error:
        raise WriteError(
            f"cannot be written: {error.strerror or error}",
            place=str(path),
            hint=f"Check the folder and its free space: df -h {quoted(folder)}",
        ) from error
    return path


def _safe(name: str) -> str:
    """A name as one part of a path."""
    return _UNSAFE.sub("_", name).lstrip(".")[:120] or "_"


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_parquet(table: pa.Table, stream: BinaryIO) -> None:
    pq.write_table(table, stream)


def _write_csv(table: pa.Table, stream: BinaryIO) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(table.schema.names)
    for texts, present in _rows(table):
        writer.writerow(
            value.decode() if there else "" for value, there in zip(texts, present, strict=True)
        )
    text.detach()


def _write_jsonl(table: pa.Table, stream: BinaryIO) -> None:
    keys = [to_json(name).encode() for name in table.schema.names]
    for texts, present in _rows(table):
        pairs = (
            key + b":" + value
            for key, value, there in zip(keys, texts, present, strict=True)
            if there
        )
        stream.write(b"{" + b",".join(pairs) + b"}\n")


def _rows(table: pa.Table) -> Iterator[tuple[tuple[bytes, ...], Any]]:
    """JSON texts of every row, and which of them are there."""
    for start in range(0, table.num_rows, _STRETCH):
        part = table.slice(start, _STRETCH)
        texts = [json_values(column) for column in part.columns]
        present = np.column_stack([column.is_valid().to_numpy() for column in part.columns])
        yield from zip(zip(*texts, strict=True), present.tolist(), strict=True)


_WRITERS: Final[Mapping[str, Callable[[pa.Table, BinaryIO], None]]] = {
    "parquet": _write_parquet,
    "csv": _write_csv,
    "jsonl": _write_jsonl,
}
