"""From frames to records, and from records to plain Python values."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_logsync.errors import NotALog, unreadable
from verl_logsync.transaction_log.framing import (
    FILE_HEADER_SIZE,
    Damage,
    Frame,
    Header,
    HeaderState,
    check_header,
    read_frames,
)

STEP_KEY = "_step"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record: `kind` is the name of its record type, `payload` its serialized bytes.

    A kind that this wandb's protobuf does not know (written by a newer version) is `UNKNOWN`;
    its payload can still be passed on unchanged.
    """

    offset: int
    kind: str
    payload: bytes
    record: Any


def probe(path: Path | str) -> Header:
    """Judge a file by its first bytes, without importing protobuf."""
    path = Path(path)
    with _explained(path), path.open("rb") as stream:
        return check_header(stream.read(FILE_HEADER_SIZE + 1))


def read_records(path: Path | str, *, start: int = 0) -> Iterator[Entry | Damage]:
    """Yield every record of a file, and every stretch of it that gave none.

    A file that holds nothing yet (no byte, or only the header) yields nothing.

    Args:
        path: the `.wandb` file.
        start: offset of a 32 KiB border to begin at, to read only the end of a file.

    Raises:
        UnreadableInput: the operating system does not let us read the file.
        NotALog: the file does not begin with W&B's header.
    """
    path = Path(path)
    with _explained(path), path.open("rb") as stream:
        header = check_header(stream.read(FILE_HEADER_SIZE + 1))
        if header.state is HeaderState.FOREIGN:
            raise NotALog(
                header.reason,
                place=str(path),
                hint=f"Look at its first bytes: head -c 64 '{path}' | xxd",
            )
        if header.state is HeaderState.OK:
            yield from _parse(stream, start)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def _parse(stream: BinaryIO, start: int) -> Iterator[Entry | Damage]:
    # Importing wandb takes most of a second, and `--help` must not pay for it.
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    record_from = messages.Record.FromString
    for frame in read_frames(stream, start=start):
        if isinstance(frame, Damage):
            yield frame
            continue
        try:
            record = record_from(frame.payload)
        except DecodeError as error:
            yield _not_protobuf(frame, error)
            continue
        kind = record.WhichOneof("record_type") or UNKNOWN
        yield Entry(frame.offset, kind, frame.payload, record)


def _not_protobuf(frame: Frame, error: Exception) -> Damage:
    # The length leaves out chunk headers and padding, which a frame does not remember.
    return Damage(frame.offset, len(frame.payload), f"not a protobuf record ({error})", tail=False)


def history_row(record: Any) -> tuple[int | None, dict[str, object]]:
    """The step and the metrics of a history record.

    The step is the `_step` item, which is not repeated in the row. Only when there is no such
    item, `step.num` is believed, and only above 0: writers before 0.18 leave it at 0 in every
    row, and W&B itself goes by the item alone.

    Nested paths become nested dicts; a path of one element is a metric name, slashes and dots
    included. The tokens NaN, Infinity and -Infinity become floats, null becomes None.

    Raises:
        ValueError: an item holds text that is not JSON.
    """
    history = record.history
    row = _items_to_dict(history.item)
    step = _as_step(row.get(STEP_KEY))
    if step is not None:
        del row[STEP_KEY]
    elif STEP_KEY not in row and history.step.num > 0:
        step = int(history.step.num)
    return step, row


def summary_updates(record: Any) -> dict[str, object]:
    """The values that a summary record, or the summary inside a run record, sets."""
    summary = record.summary if record.HasField("summary") else record.run.summary
    return _items_to_dict(summary.update)


def config_updates(record: Any) -> dict[str, object]:
    """The values that a config record, or the config inside a run record, sets."""
    config = record.config if record.HasField("config") else record.run.config
    return _items_to_dict(config.update)


def stats_row(record: Any) -> tuple[float, dict[str, object]]:
    """Time (seconds since 1970) and values of a system-metrics record."""
    items = record.stats.item
    names = [item.key for item in items]
    values = _parse_json(names, [item.value_json for item in items])
    return timestamp(record.stats.timestamp), dict(zip(names, values, strict=True))


_GPU_SHARE = re.compile(r"gpu\.\d+\.memoryAllocated")
_GPU_BYTES = re.compile(r"gpu\.\d+\.memoryAllocatedBytes")


def gpu_memory(payload: bytes) -> tuple[float, float | None, float | None]:
    """Of a serialised system-metrics record: its time (seconds since 1970), and the memory of the
    fullest GPU in percent and in bytes; None where it has none.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    try:
        seconds, values = stats_row(messages.Record.FromString(payload))
    except (ValueError, DecodeError):
        return 0.0, None, None
    return seconds, _largest(values, _GPU_SHARE), _largest(values, _GPU_BYTES)


def _largest(values: Mapping[str, object], names: re.Pattern[str]) -> float | None:
    found = [
        float(value)
        for name, value in values.items()
        if names.fullmatch(name.removeprefix("system."))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ]
    return max(found, default=None)


def timestamp(stamp: Any) -> float:
    """Seconds since 1970 of a protobuf Timestamp."""
    return float(stamp.seconds) + float(stamp.nanos) / 1e9


def _as_step(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def _items_to_dict(items: Iterable[Any]) -> dict[str, object]:
    paths = [item.nested_key or (item.key,) for item in items]
    texts = [item.value_json or _typed_json(item) for item in items]
    values = _parse_json(paths, texts)
    row: dict[str, object] = {}
    for path, value in zip(paths, values, strict=True):
        if len(path) == 1:
            row[path[0]] = value
        else:
            _set_nested(row, path, value)
    return row


def _set_nested(row: dict[str, object], path: Iterable[str], value: object) -> None:
    *parents, name = path
    target = row
    for parent in parents:
        child = target.get(parent)
        if not isinstance(child, dict):
            child = target[parent] = {}
        target = child
    target[name] = value


def _typed_json(item: Any) -> str:
    """JSON text of the typed value fields, "" when none is set.

    wandb 0.31 writes them beside `value_json` when asked to (`x_history_value_encoding`);
    a file that has them alone is prepared for in its protobuf, but no version writes it yet.
    """
    if "value" not in item.DESCRIPTOR.oneofs_by_name:
        return _undeclared_json(item)
    field = item.WhichOneof("value")
    if field is None:
        return ""
    value = getattr(item, field)
    return _TYPED_FIELDS[item.DESCRIPTOR.fields_by_name[field].number](value)


def _undeclared_json(item: Any) -> str:
    """The same, for protobuf definitions older than the file."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown: Any = UnknownFieldSet(item)
    for field in unknown:
        decode = _UNDECLARED_FIELDS.get(field.field_number)
        if decode is not None:
            return _TYPED_FIELDS[field.field_number](decode(field.data))
    return ""


# By field number: none, boolean, integer, number, text, json.
_TYPED_FIELDS: dict[int, Callable[[Any], str]] = {
    3: lambda _: "null",
    4: json.dumps,
    5: json.dumps,
    6: json.dumps,
    7: json.dumps,
    8: str,
}

# From the wire: `integer` is zigzag-encoded, `number` comes as the bits of a double.
_UNDECLARED_FIELDS: dict[int, Callable[[Any], object]] = {
    3: int,
    4: bool,
    5: lambda data: (data >> 1) ^ -(data & 1),
    6: lambda data: struct.unpack("<d", struct.pack("<Q", data))[0],
    7: bytes.decode,
    8: bytes.decode,
}


def _parse_json(names: list[Any], texts: list[str]) -> list[object]:
    """Parse many JSON texts in one call, which costs a fraction of a call for each."""
    joined = f"[{','.join(texts)}]"
    try:
        values = orjson.loads(joined)
    except orjson.JSONDecodeError:
        # The tokens NaN and Infinity, which orjson rightly refuses, or real damage.
        try:
            values = json.loads(joined)
        except (ValueError, RecursionError):
            values = []
    if len(values) == len(texts):
        return list(values)
    return [_parse_one(name, text) for name, text in zip(names, texts, strict=True)]


def _parse_one(name: str | Iterable[str], text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        shown = name if isinstance(name, str) else ".".join(name)
        raise ValueError(f"the value of {shown!r} is not JSON: {text[:80]!r}") from error
