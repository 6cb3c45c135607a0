"""Struct types that take objects of certain keys and no others, for `msgspec` to decode into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

#: How a decoder says that a line is nothing that it takes: older versions of msgspec let the errors
#: of invalid UTF-8 through as they are.
REFUSALS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: An integer of 64 bits.
WHOLE: Final[Any] = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
#: What holds no other value. An integer beyond 64 bits, which msgspec would keep and orjson makes a
#: float, is none of these: the general way decides on it.
SCALAR: Final[Any] = bool | WHOLE | float | str | None
#: A value, a list or an object; what is nested more deeply is refused.
NESTED: Final[Any] = SCALAR | list[SCALAR] | dict[str, SCALAR]

_MOST_KEYS: Final = 4096


def strict_struct(
    name: str, keys: Sequence[str], kinds: Sequence[Any], *, required: int | None = None
) -> Any:
    """A struct type whose fields are these keys, in this order; None where none can be.

    Decoding into it refuses objects that lack a key, have another one or a value of another kind.

    Args:
        name: of the type.
        keys: as JSON has them.
        kinds: the type of each key's values.
        required: how many keys, from the first, an object has to have; NaN, which no JSON has,
            stands for others that it lacks. All by default.
    """
    if len(keys) > _MOST_KEYS:
        return None
    fields: list[Any] = [(f"f{place}", kind) for place, kind in enumerate(kinds)]
    if required is not None:
        fields[required:] = [(*field, math.nan) for field in fields[required:]]
    names = {f"f{place}": key for place, key in enumerate(keys)}
    try:
        # Nothing in it can hold a cycle, so the garbage collector need not look.
        return msgspec.defstruct(name, fields, rename=names, forbid_unknown_fields=True, gc=False)
    except ValueError:  # a key that JSON writes with escapes
        return None
