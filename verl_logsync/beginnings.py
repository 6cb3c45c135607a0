"""Why a job that begins at the beginning again cannot have had a checkpoint to go on from.

verl saves a checkpoint at every multiple of `trainer.save_freq` (never when that is not positive)
and at the last step, before it logs that step; `trainer.resume_mode: disable` resumes from none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_logsync.model import AttemptReading, Reading


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What is known of a run besides its logs.

    `configs` are the run's own config files, `steps` those of the checkpoints that are or were
    in its folders; None when such a folder cannot be read.
    """

    configs: tuple[Mapping[str, Any], ...] = ()
    steps: frozenset[int] | None = frozenset()


def why_anew(
    known: Checkpoints, earlier: Sequence[AttemptReading], later: AttemptReading, reached: int
) -> str:
    """Why `later` began with nothing, in words; empty when it may have gone on.

    Where several configs of the run differ in what they state, all have to agree on that.

    Args:
        earlier: the attempts before it.
        reached: the last step that one of those trained.
    """
    begun = reached + 1  # a checkpoint is saved before its step is logged
    if known.steps is None or any(step <= begun for step in known.steps):
        return ""
    own = _configs(reading for _, reading in later.readings)
    modes = _stated(own, "resume_mode") or _stated(known.configs, "resume_mode")
    if modes and all(mode == "disable" for mode in modes):
        return "by trainer.resume_mode: disable it resumed from no checkpoint"
    before = [reading for attempt in earlier for _, reading in attempt.readings]
    configs = (*known.configs, *_configs(before), *own)
    frequencies = [f for f in _stated(configs, "save_freq") if type(f) is int]
    if not frequencies or len(frequencies) != len(_stated(configs, "save_freq")):
        return ""
    stated = f"by trainer.save_freq: {max(frequencies)} no checkpoint was saved"
    if max(frequencies) <= 0:
        return "" if known.steps else stated
    saved = any(0 < frequency <= begun for frequency in frequencies)
    return "" if saved or _finished(before, configs, reached) else f"{stated} up to step {reached}"


def _configs(readings: Iterable[Reading]) -> tuple[Mapping[str, Any], ...]:
    return tuple(c for reading in readings for c in (*reading.earlier_configs, reading.config))


def _stated(configs: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """What configs say about a key of the trainer."""
    trainers = [config.get("trainer") for config in configs]
    return [t[key] for t in trainers if isinstance(t, Mapping) and key in t]


def _finished(
    readings: Iterable[Reading], configs: Iterable[Mapping[str, Any]], reached: int
) -> bool:
    """Whether the last step was done, which saves a checkpoint whatever its number."""
    totals = [t for t in _stated(configs, "total_training_steps") if type(t) is int and t > 0]
    ended = any(r.ending is not None and r.ending.exit_code == 0 for r in readings)
    return ended or any(reached >= total - 1 for total in totals)
