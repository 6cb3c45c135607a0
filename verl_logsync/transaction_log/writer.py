"""Writes `.wandb` files, fast: history rows are encoded by hand, not through message objects."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Self

from verl_logsync.errors import WriteError, quoted
from verl_logsync.transaction_log.framing import FrameWriter
from verl_logsync.transaction_log.wire import varint

_STEP_KEY = "_step"

# Protobuf tags: field number * 8 + wire type (0 varint, 2 length-delimited).
_RECORD_HISTORY = b"\x12"
_HISTORY_ITEM = b"\x0a"
_HISTORY_STEP = b"\x12"
_STEP_NUM = b"\x08"
_ITEM_NESTED_KEY = b"\x12"
_ITEM_VALUE_JSON = b"\x82\x01"

# A float needs at most 24 characters; longer values take the slow path.
_CACHED_LENGTHS = 32


class EncodedKey(tuple[bytes, ...]):  # noqa: SLOT001 - tuples have no slots of their own
    """A metric name with everything that stands before its value in the file.

    As a tuple it holds those bytes for values of 0, 1, 2, ... characters.
    """

    name: str
    _body: bytes

    def __new__(cls, name: str) -> Self:
        raw = name.encode()
        body = _ITEM_NESTED_KEY + varint(len(raw)) + raw + _ITEM_VALUE_JSON
        self = super().__new__(cls, (_head(body, length) for length in range(_CACHED_LENGTHS)))
        self.name, self._body = name, body
        return self

    def head(self, length: int) -> bytes:
        """The bytes before a value of that length."""
        return _head(self._body, length)

    def __repr__(self) -> str:
        return f"EncodedKey({self.name!r})"


def _head(body: bytes, length: int) -> bytes:
    tail = body + varint(length)
    return _HISTORY_ITEM + varint(len(tail) + length) + tail


_STEP = EncodedKey(_STEP_KEY)


@lru_cache(maxsize=4096)
def encode_key(name: str) -> EncodedKey:
    """Prepare a metric name for `encode_history`; do it once a column, not once a row."""
    if name == _STEP_KEY:
        raise ValueError("encode_history adds the _step item itself")
    return EncodedKey(name)


def encode_history(step: int, keys: Sequence[EncodedKey], values: Sequence[bytes]) -> bytes:
    """Serialize one history record.

    The record holds the `_step` item, by which W&B goes, as well as `step.num`.

    Args:
        step: the training step.
        keys: the metrics that this row has.
        values: their values as JSON text (NaN and infinities as W&B's bare tokens).
    """
    if step < 0:
        raise ValueError(f"W&B has no negative steps: {step}")
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys but {len(values)} values")
    try:
        # Nearly all the time of an upload that is not the uploader's goes through this line.
        heads = list(map(getitem, keys, map(len, values)))
    except IndexError:
        heads = [key.head(len(value)) for key, value in zip(keys, values, strict=True)]
    text = b"%d" % step
    num = _STEP_NUM + varint(step)
    end = b"".join((_STEP[len(text)], text, _HISTORY_STEP, varint(len(num)), num))
    body = b"".join(chain.from_iterable(zip(heads, values, strict=True))) + end
    return _RECORD_HISTORY + varint(len(body)) + body


class TransactionLogWriter:
    """Writes one `.wandb` file that appears under its name only when it is whole.

    Use it as a context manager. Until the end of the block the bytes are in a file of another
    name in the same folder, not ending in `.wandb`; an exception inside the block removes it.

    Args:
        path: the file.
        durable: whether it must outlive a crash of the machine: an fsync costs milliseconds.

    Raises:
        WriteError: the folder or the file cannot be written.
    """

    def __init__(self, path: Path | str, *, durable: bool = True) -> None:
        self.path = Path(path)
        self._durable = durable
        # Process ids repeat among containers that share a folder.
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        self._stream: BinaryIO | None = None
        self._frames: FrameWriter | None = None

    def __enter__(self) -> Self:
        with self._explained():
            self._stream = self._temporary.open("xb", buffering=1 << 20)
            self._frames = FrameWriter(self._stream)
        return self

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._open_frames().offset

    def write_payload(self, payload: bytes) -> None:
        """Append one serialized record."""
        try:
            self._open_frames().write(payload)
        except OSError as error:
            raise self._state_error(error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                with self._explained():
                    self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        stream = self._stream
        if stream is None:
            raise ValueError("use the writer as a context manager")
        stream.flush()
        if self._durable:
            os.fsync(stream.fileno())
        stream.close()
        self._temporary.replace(self.path)
        if self._durable:  # the rename itself is only on disk once the folder is
            _fsync_folder(self.path.parent)

    def _discard(self) -> None:
        """Drop what was not committed; after a commit there is nothing left to drop."""
        stream, self._stream, self._frames = self._stream, None, None
        # Closing flushes, which fails again on a full disk; the file goes anyway.
        with suppress(OSError):
            if stream is not None:
                stream.close()
        with suppress(OSError):
            self._temporary.unlink()

    def _open_frames(self) -> FrameWriter:
        if self._frames is None:
            raise ValueError("write only inside the `with` block")
        return self._frames

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._state_error(error) from error

    def _state_error(self, error: OSError) -> WriteError:
        return WriteError(
            f"cannot be written ({error.strerror or error})",
            place=str(self.path),
            hint=f"Check the folder and its free space: df -h {quoted(self.path.parent)}",
        )


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
