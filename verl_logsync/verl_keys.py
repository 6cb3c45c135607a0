"""What the names of verl's metrics mean (verl 0.2 - 0.9.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_VALIDATION: Final = ("val-core/", "val-aux/", "val/", "eval/")
# Logged beside a validation or after the loop, without a training step: the validation's own
# time, and DAPO's extra record with nothing but the time of saving (prefix `timing/`).
_AROUND: Final = ("timing_s/testing", "timing_s/save_checkpoint", "timing/")

#: Runs start at step 0 (validation before training) or 1; what starts later was resumed.
LATEST_START: Final = 1

#: What counts the progress of a training besides its steps.
COUNTERS: Final = ("training/global_step", "training/epoch", "perf/total_num_tokens")

#: Seconds of one step, in order of preference.
STEP_SECONDS: Final = ("timing_s/step", "perf/time_per_step", "timing(s)/step", "train/time(s)")
#: Seconds of validation and of saving a checkpoint; see `beside_step_time`.
TESTING_SECONDS: Final = "timing_s/testing"
SAVING_SECONDS: Final = "timing_s/save_checkpoint"
_SINCE_0_6: Final = frozenset({"response/aborted_ratio"})
_UNTIL_0_5: Final = frozenset({"actor/entropy_loss", "mfu/actor", "val/test_score"})


def is_training_key(key: str) -> bool:
    """Whether a key is only logged when a training step was done.

    After a resume with `val_before_train` verl logs a record at the checkpoint's step that
    holds validation keys only; it must not be mistaken for that step being trained again.
    """
    return not key.startswith(("_", *_VALIDATION, *_AROUND))


def is_validation_only(keys: Iterable[str]) -> bool:
    """Whether a record with these keys holds no result of a training step."""
    return not any(map(is_training_key, keys))


def training_keys(table: pa.Table) -> list[str]:
    """The columns that hold results of training steps."""
    return [name for name in table.schema.names if is_training_key(name)]


def training_rows(table: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows hold a result of a training step, shape (rows,)."""
    found = np.zeros(table.num_rows, dtype=bool)
    for name in training_keys(table):
        column = table.column(name)
        if column.null_count == 0:
            return np.ones(table.num_rows, dtype=bool)
        found |= column.is_valid().to_numpy()
        if found.all():
            break
    return found


def beside_step_time(names: Iterable[str]) -> tuple[str, ...]:
    """The durations that `timing_s/step` does not contain in the verl version of these keys.

    0.2-0.5 time the whole iteration; 0.6.0-0.7.0 leave validation and saving out; from 0.7.1
    on only validation is left out. A log without any mark of a version is taken for a late one.
    """
    known = set(names)
    if "timing_s/update_weights" in known or any(k.startswith("actor/perf/") for k in known):
        return (TESTING_SECONDS,)
    if known & _SINCE_0_6 or any(k.startswith("response_length_non_aborted/") for k in known):
        return (TESTING_SECONDS, SAVING_SECONDS)
    if known & _UNTIL_0_5 or any(k.startswith("perf/") for k in known):
        return ()
    return (TESTING_SECONDS,)
