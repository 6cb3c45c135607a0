"""Which diagnostics made the derived columns of which rows; kept in the run's marker.

Rows that were sent keep the columns that they were sent with, so a run that lives through an
update of this program, or through other rules, has stretches. Old code is not shipped: what stays
the same is the set of columns, and what changes is written down with the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from verl_logsync.model import DerivedBy

#: Two machines with different options could add a stretch at each upload.
MOST_STRETCHES: Final = 64
#: Stands for the versions of stretches that are no longer told apart.
SEVERAL: Final = "several"


def continued(
    stretches: Sequence[DerivedBy], by: DerivedBy, first_step: int | None
) -> tuple[DerivedBy, ...]:
    """The stretches once rows from `first_step` on (None: none) are sent with columns by `by`."""
    if first_step is None:
        return tuple(stretches)
    kept = tuple(s for s in stretches if s.first_step < first_step)
    if not kept and not by.version:
        return ()
    if kept and replace(kept[-1], first_step=0) == replace(by, first_step=0):
        return kept
    kept = (*kept, replace(by, first_step=first_step))
    if len(kept) <= MOST_STRETCHES:
        return kept
    merged = replace(kept[1], version=SEVERAL, options="")
    return (kept[0], merged, *kept[3:])


def column_set(stretches: Sequence[DerivedBy]) -> str:
    """The version whose set of columns a run keeps to; empty where it has none yet."""
    return next((s.columns_of for s in reversed(stretches) if s.version), "")


def of_others(stretches: Sequence[DerivedBy], by: DerivedBy, step: int) -> bool:
    """Whether a step was sent with the columns of another version, or by other options."""
    covering = [s for s in stretches if s.first_step <= step][-1:]
    return any(s.version and changed(s, by) for s in covering)


def changed(before: DerivedBy, by: DerivedBy) -> str:
    """In what the two differ, in words; empty if in nothing that is known."""
    if before.version != by.version:
        return f"of version {by.version}, and not of {before.version or 'none'}"
    if before.options and before.options != by.options:
        return "by other rules or options"
    return ""
