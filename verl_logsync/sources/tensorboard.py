"""TensorBoard event files as verl's `tensorboard` logger writes them.

`TENSORBOARD_DIR`, else `tensorboard_log/PROJECT/EXPERIMENT` (0.4.1 and newer) or
`tensorboard_log` (0.3.0 - 0.4.0). Every start of the job adds a file; nothing is erased. A
second file of a start may hold generations as text, which are no history.

The records are read with the `tensorboard` package, which is optional.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from verl_logsync.columns import AXES, STEP, TIMESTAMP
from verl_logsync.errors import NotALog, UnreadableInput
from verl_logsync.interfaces import Candidate
from verl_logsync.model import Facts, LogFile, Reading, Skip, SkipReason, Stamp
from verl_logsync.table_builder import TableBuilder
from verl_logsync.verl_keys import is_training_key

#: How to get what reads these files.
INSTALL: Final = "pip install 'verl-logsync[tensorboard]'"

_MARK: Final = "tfevents"
_FOLDER: Final = "tensorboard_log"
# A record is framed by its length (8 bytes), that length's checksum (4) and its own (4).
_LENGTH: Final = struct.Struct("<Q")
_HEADER_SIZE, _FRAME_SIZE = 12, 16
_TAIL_BYTES: Final = 1 << 20
# Records of a file's beginning that are looked at to know its first training step.
_LOOKED_AT: Final = 5_000
_TEXT, _SCALARS = "text", "scalars"
_SKIPS_NAMED: Final = 100
_ROUNDED: Final = (
    "TensorBoard keeps values as 32-bit floats: they are exact to about 7 digits "
    "(relative 6e-8), integers up to 16,777,216"
)


class TensorBoard:
    """Source `tensorboard`."""

    name = "tensorboard"
    precision = 15
    patterns = ("*tfevents*",)

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        path = candidate.path
        if candidate.names is not None or _MARK not in path.name:
            return None
        place = str(path)
        if not candidate.head:
            detail, hint = "the file is empty", "It is read again next time."
            return Skip(SkipReason.NOTHING_YET, place, detail, hint)
        if not _is_installed():
            detail = "reading TensorBoard files takes the tensorboard package"
            return Skip(SkipReason.UNREADABLE, place, detail, f"Install it with: {INSTALL}")
        if len(candidate.head) >= _HEADER_SIZE and not _is_header(candidate.head):
            hint = f"Look at its first bytes: head -c 64 {place!r} | xxd"
            return Skip(SkipReason.NOT_A_LOG, place, "no TensorBoard records", hint)
        look = _look(path)
        if isinstance(look, Skip):
            return look
        return LogFile(path, self.name, candidate.stamp, _facts(candidate, look))

    def read(self, file: LogFile) -> Reading:
        if not _is_installed():
            raise UnreadableInput(
                "reading it takes the tensorboard package", place=file.place, hint=INSTALL
            )
        rows = _Rows(file.place)
        size = 0
        for offset, record in _records(file.path):
            rows.take(offset, record)
            size = offset + len(record) + _FRAME_SIZE
        rows.end(_rest(file.path, size))
        return rows.reading()


# -- records -------------------------------------------------------------------------------


def _is_installed() -> bool:
    try:
        import tensorboard.backend.event_processing.event_file_loader  # noqa: F401
    except ImportError:
        return False
    return True


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every whole record up to the first that is cut or damaged.

    Raises:
        UnreadableInput: the operating system refuses.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat import tf

    offset = 0
    try:
        path.open("rb").close()  # the loader's own errors do not tell what is wrong
        for record in RawEventFileLoader(str(path)).Load():
            yield offset, record
            offset += len(record) + _FRAME_SIZE
    except (OSError, tf.errors.OpError) as error:
        raise UnreadableInput(
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
            place=str(path),
            hint=f"Check it with: ls -l {str(path)!r}",
        ) from error


def _rest(path: Path, offset: int) -> Skip | None:
    """What lies behind the last whole record: nothing, the beginning of one, or damage."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            header = stream.read(_HEADER_SIZE)
            left = len(header) + len(stream.read(1 << 20))
            size = path.stat().st_size
    except OSError:
        return None
    if not left:
        return None
    place = f"{path} (byte {offset})"
    if len(header) < _HEADER_SIZE:
        cut = True
    else:
        needed = _LENGTH.unpack_from(header)[0] + _FRAME_SIZE
        cut = _is_header(header) and offset + needed > size
    if cut:
        detail = "the last record is not complete"
        return Skip(SkipReason.TORN_TAIL, place, detail, "It is read when its writer completes it.")
    hint = f"Copy the file again, or look at it with: tail -c +{offset + 1} {str(path)!r} | xxd"
    detail = f"a record is damaged; the {size - offset:,} bytes from there on are not read"
    return Skip(SkipReason.CORRUPT, place, detail, hint)


def _is_header(data: bytes) -> bool:
    """Whether the first 12 bytes are the length of a record and its checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    (checksum,) = struct.unpack_from("<I", data, _LENGTH.size)
    return bool(masked_crc32c(data[: _LENGTH.size]) == checksum)


# -- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scalar:
    step: int
    key: str
    value: float
    wall_time: float


@dataclass(slots=True)
class _Event:
    """What one record says: its time, its scalars, and how many other things."""

    wall_time: float
    scalars: list[_Scalar] = field(default_factory=list)
    texts: int = 0
    others: int = 0


def _event(record: bytes) -> _Event | None:
    """A record's content, or None when it is not an event."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        parsed = Event.FromString(record)
    except DecodeError:
        return None
    event = _Event(parsed.wall_time)
    for value in parsed.summary.value:
        number = _number(value)
        if number is not None:
            event.scalars.append(_Scalar(parsed.step, value.tag, number, parsed.wall_time))
        elif value.metadata.plugin_data.plugin_name == _TEXT or value.tag.endswith("/text_summary"):
            event.texts += 1
        else:
            event.others += 1
    return event


def _number(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return _shortest(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", _SCALARS):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        array = make_ndarray(value.tensor)
    except (TypeError, ValueError):
        return None
    if array.size != 1 or array.dtype.kind not in "fiub":
        return None
    number = array.reshape(-1)[0]
    return _shortest(float(number)) if array.dtype == np.float32 else float(number)


def _shortest(number: float) -> float:
    """The number with the fewest digits that is the same 32-bit float: 1e-06, as was logged."""
    return float(str(np.float32(number)))


# -- rows ----------------------------------------------------------------------------------


class _Rows:
    """Collects the scalars of one file; consecutive ones of one step are a row."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._builder = TableBuilder()
        self._steps: list[int] = []
        self._times: list[float] = []
        self._values: dict[str, float] = {}
        self._step = -1
        self._time = 0.0
        self._began: float | None = None
        self._ended: float | None = None
        self._counts = {_TEXT: 0, "other": 0}
        self._skips: list[Skip] = []
        self._more = 0

    def take(self, offset: int, record: bytes) -> None:
        event = _event(record)
        if event is None:
            self._skip(offset, SkipReason.MALFORMED, "not an event")
            return
        self._began = event.wall_time if self._began is None else self._began
        self._ended = event.wall_time
        self._counts[_TEXT] += event.texts
        self._counts["other"] += event.others
        for scalar in event.scalars:
            if scalar.step < 0 or not scalar.key:
                self._skip(offset, SkipReason.NO_STEP, f"step {scalar.step}, key {scalar.key!r}")
            elif scalar.key not in AXES:
                self._add(scalar)

    def _add(self, scalar: _Scalar) -> None:
        if scalar.step != self._step or scalar.key in self._values:
            self._flush()
            self._step, self._time = scalar.step, scalar.wall_time
        self._values[scalar.key] = scalar.value

    def _flush(self) -> None:
        if self._values:
            self._builder.add(self._values, exactly=False)
            self._steps.append(self._step)
            self._times.append(self._time)
            self._values = {}

    def _skip(self, offset: int, reason: SkipReason, detail: str) -> None:
        if len(self._skips) >= _SKIPS_NAMED:
            self._more += 1
            return
        place = f"{self._place} (byte {offset})"
        self._skips.append(Skip(reason, place, detail, records=1))

    def end(self, rest: Skip | None) -> None:
        """Nothing more comes; `rest` is what could not be read."""
        self._flush()
        if self._more:
            detail = f"{self._more} more like those above"
            self._skips.append(Skip(SkipReason.MALFORMED, self._place, detail, records=self._more))
        for kind, count in self._counts.items():
            if count:
                detail = f"{count} {kind} records (generations and the like) are no history"
                self._skips.append(Skip(SkipReason.UNKNOWN_KIND, self._place, detail))
        if rest is not None:
            self._skips.append(rest)

    def reading(self) -> Reading:
        import pyarrow as pa

        if not self._steps and not self._skips:
            hint = "It is read again next time."
            raise NotALog("holds no scalars", place=self._place, hint=hint)
        columns: dict[str, Any] = {
            STEP: pa.array(self._steps, type=pa.int64()),
            TIMESTAMP: pa.array(self._times, type=pa.float64()),
        }
        return Reading(
            pa.table(columns | self._builder.columns()),
            tuple(self._skips),
            started_at=self._began,
            ended_at=self._ended,
            notes=(_ROUNDED,) if self._steps else (),
        )


# -- a quick look --------------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    """What the beginning of a file tells."""

    started_at: float | None = None
    first: _Scalar | None = None
    trained: _Scalar | None = None
    last_step: int = 0
    texts: int = 0
    complete: bool = False


def _look(path: Path) -> _Look | Skip:
    look = _Look()
    try:
        for number, (_, record) in enumerate(_records(path)):
            event = _event(record)
            if event is not None:
                _note(look, event)
            if look.trained is not None or number >= _LOOKED_AT:
                break
    except UnreadableInput as error:
        return Skip(SkipReason.UNREADABLE, str(path), error.message, error.hint)
    if look.first is not None:
        return look
    if look.texts:
        detail = "text only (generations); the scalars are in the other file of this start"
        return Skip(SkipReason.UNKNOWN_KIND, str(path), detail)
    return Skip(SkipReason.NOTHING_YET, str(path), "no scalars yet", "It is read again next time.")


def _note(look: _Look, event: _Event) -> None:
    if look.started_at is None:
        look.started_at = event.wall_time
    look.texts += event.texts
    for scalar in event.scalars:
        look.first = look.first or scalar
        look.last_step = scalar.step
        if look.trained is None and is_training_key(scalar.key):
            look.trained = scalar


def _facts(candidate: Candidate, look: _Look) -> Facts:
    first, trained = look.first, look.trained
    assert first is not None
    project, name = _names(candidate.path)
    return Facts(
        project=project,
        name=name,
        # One folder is one run, as in TensorBoard itself; many are called the same.
        place_name="/".join(candidate.path.absolute().parent.parts[-2:]),
        started_at=look.started_at,
        first_step=first.step,
        last_step=max(first.step, _last_step(candidate.path, candidate.stamp, look.last_step)),
        opens_with_validation=trained is None or trained.step != first.step,
        head_digest=_digest(first),
        training_digest=_digest(trained) if trained else "",
    )


def _digest(scalar: _Scalar) -> str:
    # With its time: the first value alone is the same in every start of a job.
    text = f"{scalar.step} {scalar.key} {scalar.value!r} {scalar.wall_time!r}"
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _names(path: Path) -> tuple[str, str]:
    """Project and experiment name, where the folders have the form that verl gives them."""
    folders = path.absolute().parent.parts
    if _FOLDER not in folders:
        return "", ""
    *project, name = folders[len(folders) - folders[::-1].index(_FOLDER) :] or ("",)
    return ("/".join(project), name) if project else ("", "")


def _last_step(path: Path, stamp: Stamp, default: int) -> int:
    """The step of the last whole scalar, found from the end of the file."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stamp.size - _TAIL_BYTES))
            tail = stream.read(_TAIL_BYTES)
    except OSError:
        return default
    last = default
    for record in _records_in(tail):
        event = _event(record)
        if event is not None and event.scalars:
            last = event.scalars[-1].step
    return last


def _records_in(data: bytes) -> Iterator[bytes]:
    """The records in a stretch that begins anywhere; the bytes of their values are unchecked."""
    at = _first_header(data)
    while 0 <= at <= len(data) - _HEADER_SIZE and _is_header(data[at : at + _HEADER_SIZE]):
        (length,) = _LENGTH.unpack_from(data, at)
        start, end = at + _HEADER_SIZE, at + _HEADER_SIZE + length
        if end + 4 > len(data):
            return
        yield data[start:end]
        at = end + 4


def _first_header(data: bytes) -> int:
    """Where the first header is, or -1: lengths below 16 MiB end in five zero bytes."""
    zeros = data.find(b"\0" * 5, 3)
    while 0 <= zeros <= len(data) - _HEADER_SIZE:
        at = zeros - 3
        if _is_header(data[at : at + _HEADER_SIZE]):
            return at
        zeros = data.find(b"\0" * 5, zeros + 1)
    return -1
