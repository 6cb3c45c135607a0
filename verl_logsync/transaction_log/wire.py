"""The protobuf wire format, as far as it takes to write records by hand.

Importing wandb's message classes costs half a second, which a short upload from cron would
spend before its first row; and message objects make history rows five times slower.
"""

from __future__ import annotations

import struct
from typing import Final

_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_INT64: Final = (1 << 64) - 1


def varint(number: int) -> bytes:
    """An integer of up to 64 bits; negative ones as their two's complement."""
    number &= _INT64
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    """What stands before a field's value."""
    return varint(field << 3 | wire_type)


def message(field: int, body: bytes) -> bytes:
    """A message, or bytes, as a field of another message; empty ones are written too."""
    return tag(field, _LENGTH) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """A string field; the empty default is left out, as proto3 does."""
    # Lone surrogates have no UTF-8 form; protobuf would refuse the whole record.
    return message(field, value.encode(errors="replace")) if value else b""


def integer(field: int, value: int) -> bytes:
    """An integer or enum field; the default 0 is left out."""
    return tag(field, _VARINT) + varint(value) if value else b""


def double(field: int, value: float) -> bytes:
    """A double field; the default 0 is left out."""
    return tag(field, _FIXED64) + struct.pack("<d", value) if value else b""
