"""Answers from a training configuration, which may be nested, flat with dots, or unresolved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: verl's keys that diagnostics ask for.
GROUP_SIZE: Final = "actor_rollout_ref.rollout.n"
BATCH_SIZE: Final = "data.train_batch_size"
GENERATED: Final = "data.gen_batch_size"
MAX_RESPONSE: Final = "data.max_response_length"
ENTROPY_COEFFICIENT: Final = "actor_rollout_ref.actor.entropy_coeff"
KL_LOSS_TYPE: Final = "actor_rollout_ref.actor.kl_loss_type"
KL_IN_REWARD: Final = "algorithm.use_kl_in_reward"
KL_PENALTY: Final = "algorithm.kl_penalty"
ESTIMATOR: Final = "algorithm.adv_estimator"
BY_STD: Final = "algorithm.norm_adv_by_std_in_grpo"
FILTER_GROUPS: Final = "algorithm.filter_groups.enable"
MULTI_TURN: Final = "actor_rollout_ref.rollout.multi_turn.enable"
MINI_BATCH: Final = "actor_rollout_ref.actor.ppo_mini_batch_size"
REQUIRED_BATCHES: Final = "async_training.require_batches"
SYNC_EVERY: Final = "async_training.trigger_parameter_sync_step"
USE_V1: Final = "trainer.use_v1"
V1_MODE: Final = "trainer.v1.trainer_mode"

_WORDS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A verl configuration. None means: it does not say (or not in a way that can be used)."""

    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value under a dotted key; None for what is missing or not resolved."""
        if key in self.values:
            return _resolved(self.values[key])
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(part)
        return _resolved(found)

    def number(self, key: str) -> float | None:
        """A finite number."""
        value = self.get(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None

    def count(self, key: str) -> int | None:
        """A whole number above 0."""
        number = self.number(key)
        return int(number) if number is not None and number >= 1 and number % 1 == 0 else None

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.get(key)
        if isinstance(value, str):
            return _WORDS.get(value.strip().lower())
        return value if isinstance(value, bool) else None

    def text(self, key: str) -> str:
        """A word; empty if there is none."""
        value = self.get(key)
        return value if isinstance(value, str) else ""


def _resolved(value: Any) -> Any:
    return None if isinstance(value, str) and "${" in value else value
