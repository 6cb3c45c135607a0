"""What the user adds to the steps of logs whose job counted from 0 again (`--offset`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from verl_logsync.catalog import matches
from verl_logsync.columns import STEP
from verl_logsync.errors import InputError
from verl_logsync.interfaces import Source
from verl_logsync.model import LogFile, Reading
from verl_logsync.sessions import counted_anew, restarts_of
from verl_logsync.settings import Settings


def offsets_of(path: Path, settings: Settings) -> tuple[int, ...]:
    """Every number of steps that the user gave for a file, in this order."""
    return tuple(steps for pattern, steps in settings.offsets if matches(path, pattern))


def shifted(reading: Reading, offsets: tuple[int, ...]) -> Reading:
    """The reading with its steps as they count in the run.

    In a log that counts from the beginning again, the first offset is for what comes from there
    on, the second for what comes after the next such place. Otherwise the first is for all of it.
    """
    if not offsets:
        return reading
    steps = reading.rows.column(STEP).to_numpy()
    added = np.zeros(len(steps), dtype=np.int64)
    anew = counted_anew(reading)
    for row, offset in zip(anew or (0,), offsets, strict=False):
        added[row:] = offset
    added[anew[len(offsets)] if len(anew) > len(offsets) else len(steps) :] = 0
    index = reading.rows.schema.get_field_index(STEP)
    rows = reading.rows.set_column(index, STEP, pa.array(steps + added))
    # Steps that go on do not give a restart away any more.
    return replace(reading, rows=rows, restarts=restarts_of(reading))


def with_offset(file: LogFile, source: Source, settings: Settings) -> LogFile:
    """A file with the steps that it has in its run; whether it counts anew only its rows tell."""
    offsets = offsets_of(file.path, settings)
    if not offsets or file.facts.first_step is None:
        return file
    try:
        rows = shifted(source.read(file), offsets).rows
    except InputError:
        return file  # said when the run is read
    if not rows.num_rows:
        return file
    steps = rows.column(STEP).to_numpy()
    facts = replace(file.facts, first_step=int(steps[0]), last_step=int(steps[-1]))
    return replace(file, facts=facts)
