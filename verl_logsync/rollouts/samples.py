"""Groups to look at: the best, the worst and the most split of a step.

Which they are is known at the end of the pass, so only their rows are read again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from verl_logsync.rollouts.records import Record, read_row
from verl_logsync.rollouts.values import ReductionOptions, SampleGroup, SampleOutput

#: Rows were asked for that the file no longer holds.
CHANGED: Final = "the file changed while it was read"

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where the rows of each group lie: rows sorted by group, one item a row or a group.

    `outputs` are hashes of the outputs, by which a row is known again.
    """

    scores: _Floats
    offsets: _Ints
    outputs: _Ints
    starts: _Ints
    sizes: _Ints
    means: _Floats
    spreads: _Floats
    names: Sequence[str]


def choose(shelf: Shelf, count: int) -> list[tuple[str, int]]:
    """So many best, worst and most split groups, none of them twice."""
    sizes = shelf.sizes.tolist()
    firsts = np.minimum.reduceat(shelf.offsets, shelf.starts).tolist() if sizes else []
    whole = np.isfinite(shelf.means)
    with np.errstate(invalid="ignore"):
        split = whole & (shelf.spreads > 0)
    free = np.ones(len(sizes), dtype=bool)
    chosen: list[tuple[str, int]] = []
    for why, groups, sign, values in (
        ("best", whole, -1, shelf.means),
        ("worst", whole, 1, shelf.means),
        ("most split", split, -1, shelf.spreads),
    ):
        front = _front(sign * values, groups & free, count)
        keys = ((sign * values[g], -sizes[g], shelf.names[g], firsts[g], g) for g in front)
        fresh = [key[-1] for key in nsmallest(count, keys)]
        free[fresh] = False
        chosen.extend((why, group) for group in fresh)
    return chosen


def _front(values: _Floats, among: _Flags, count: int) -> list[int]:
    """The places of the lowest so many values, and of all that are equal to the last of them."""
    places = np.flatnonzero(among)
    if count and len(places) > count:
        last = np.partition(values[places], count - 1)[count - 1]
        places = places[values[places] <= last]
    return [int(place) for place in places]


def read_samples(
    path: Path, shelf: Shelf, options: ReductionOptions
) -> tuple[tuple[SampleGroup, ...], str]:
    """The chosen groups with their texts, and why some are missing (empty: none is).

    Raises:
        OSError: the file cannot be opened or read any more.
    """
    chosen = choose(shelf, options.sample_groups)
    if not chosen or not options.sample_outputs:
        return (), "" if chosen else "no group has scores"
    with path.open("rb") as stream:
        read = [_sample(stream, shelf, group, why, options) for why, group in chosen]
    found = tuple(sample for sample in read if sample is not None)
    return found, "" if len(found) == len(read) else CHANGED


def _sample(
    stream: BinaryIO, shelf: Shelf, group: int, why: str, options: ReductionOptions
) -> SampleGroup | None:
    start, size = int(shelf.starts[group]), int(shelf.sizes[group])
    # From the highest score down; rows of a group ascend by score and length.
    rows = list(range(start + size - 1, start - 1, -1))
    records: list[Record] = []
    for row in _ends(rows, options.sample_outputs):
        record = read_row(stream, int(shelf.offsets[row]))
        if record is None or hash(record.output) != shelf.outputs[row]:
            return None
        records.append(record._replace(score=float(shelf.scores[row])))
    limit = options.sample_characters
    first = records[0]
    return SampleGroup(
        why=why,
        mean=float(shelf.means[group]),
        spread=float(shelf.spreads[group]),
        size=size,
        prompt_length=len(first.input),
        prompt=first.input[:limit],
        gts=_as_text(first.gts)[:limit],
        outputs=tuple(SampleOutput(r.score, len(r.output), r.output[:limit]) for r in records),
    )


def _ends(rows: list[int], count: int) -> list[int]:
    """So many rows, from both ends of the list in turn, in its order."""
    if len(rows) <= count:
        return rows
    head = (count + 1) // 2
    return rows[:head] + (rows[-(count - head) :] if count > head else [])


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
