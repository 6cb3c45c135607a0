"""JSON as W&B clients write it: NaN and infinities are bare tokens."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

import orjson

Json: TypeAlias = Any  # the shape is the sender's choice


def parse_json(text: str | bytes) -> Json:
    """Parse JSON, falling back to the tolerant parser for bare NaN and huge integers."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def dump_json(value: object) -> str:
    """Write JSON in the clients' dialect: NaN and infinities as bare tokens."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def strict(value: object) -> object:
    """Replace NaN and infinities by strings, as the real server does in JSON scalars."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return value
