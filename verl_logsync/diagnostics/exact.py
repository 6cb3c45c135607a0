"""What the logged metrics of GRPO say exactly about groups, without a rollout dump.

For a group of n rewards with any spread the advantages (r - mean) / std, std with division by
n - 1, add up to 0, their squares average (n - 1) / n, and none is larger than (n - 1) / sqrt(n).
Each derivation is made only where these hold; otherwise it says why it is not.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from verl_logsync.diagnostics import configuration as cf
from verl_logsync.diagnostics.canonical import is_v1
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.derived import Asked, Candidate, Made, choose, where
from verl_logsync.diagnostics.series import Flags, Frame, Series, plain

ZERO_SPREAD: Final = "grpo/zero_spread_share_exact"
NO_ADVANTAGE: Final = "grpo/no_advantage"
COVARIANCE: Final = "grpo/length_advantage_covariance"
LENGTH_SHIFT: Final = "grpo/length_advantage_shift"
ASYMMETRY: Final = "grpo/advantage_asymmetry"
MAX_TO_BOUND: Final = "grpo/advantage_max_to_bound"
MIN_TO_BOUND: Final = "grpo/advantage_min_to_bound"
PROMPT_RATIO: Final = "grpo/effective_prompt_ratio_at_most"

_FILTERED: Final = "training/filter_groups/evicted_samples"
_SQUARE: Final = "variance_proxy/expected_a_squared"
#: The logged numbers are float32.
_ROUNDING: Final = 1e-4
#: A single-turn agent loop counts two turns: the question and the answer.
_SINGLE_TURN: Final = 2


def exact(asked: Asked) -> list[Made]:
    """All derivations; those that do not hold say why."""
    return [
        zero_spread_share(asked),
        no_advantage(asked),
        *length_covariance(asked),
        *advantage_extremes(asked),
        effective_prompt_ratio(asked),
    ]


def zero_spread_share(asked: Asked) -> Made:
    """1b: the share of groups without spread, from the mean square of the advantages."""
    size = asked.config.count(cf.GROUP_SIZE)
    square = asked.frame.logged(_SQUARE)
    why_not = _not_normalised(asked.config, size) or _filtered(asked)
    values, there = square.values, np.zeros(len(asked.frame), dtype=bool)
    if size and not why_not:
        values = 1 - square.values * size / (size - 1)
        with np.errstate(invalid="ignore"):
            there = square.finite & (values >= -_ROUNDING) & (values <= 1 + _ROUNDING)
        values = np.clip(values, 0.0, 1.0)
    if not square.there.any():
        why_not = f"{_SQUARE} is not logged (calculate_sum_pi_squared)"
    candidate = Candidate(
        plain(values, there),
        _SQUARE,
        f"1 - {_SQUARE} * n / (n - 1), n = {size}",
        ("exact for groups of equal size",),
    )
    return choose(asked, ZERO_SPREAD, [candidate], why_not or f"{_SQUARE} does not fit n = {size}")


def no_advantage(asked: Asked) -> Made:
    """1c: 1 where every advantage is 0, so that nothing is learned from the step."""
    highest = asked.frame.logged("critic/advantages/max")
    lowest = asked.frame.logged("critic/advantages/min")
    there = highest.finite & lowest.finite
    none = (highest.values == 0) & (lowest.values == 0)
    candidate = Candidate(
        plain(none.astype(np.float64), there),
        "critic/advantages/max, critic/advantages/min",
        "1 if both are 0, else 0",
    )
    return choose(asked, NO_ADVANTAGE, [candidate], "the extremes of advantages are not logged")


def length_covariance(asked: Asked) -> list[Made]:
    """10b: covariance of length and advantage in a step, and the same by the mean length.

    The logged mean of advantages is over tokens: sum(A * L) / sum(L). As advantages add up to 0
    in each group, times the mean length it is the covariance over sequences.
    """
    frame = asked.frame
    mean, length = frame.logged("critic/advantages/mean"), frame.logged("response_length/mean")
    valid, why_not = _sums_to_zero(asked)
    there = mean.finite & length.finite & valid
    with np.errstate(all="ignore"):
        product = plain(mean.values * length.values, there)
    notes = () if asked.config.text(cf.ESTIMATOR) else ("taken for GRPO: returns = advantages",)
    covariance = Candidate(
        product,
        "critic/advantages/mean, response_length/mean",
        "critic/advantages/mean * response_length/mean",
        notes,
    )
    shift = Candidate(
        where(there, mean),
        "critic/advantages/mean",
        "critic/advantages/mean: the covariance / response_length/mean",
        notes,
    )
    return [
        choose(asked, COVARIANCE, [covariance], why_not),
        choose(asked, LENGTH_SHIFT, [shift], why_not),
    ]


def _sums_to_zero(asked: Asked) -> tuple[Flags, str]:
    """The rows where the advantages of each group add up to 0, and why others do not."""
    frame, config = asked.frame, asked.config
    no = np.zeros(len(frame), dtype=bool)
    why_not = _other_estimator(config)
    size = config.count(cf.GROUP_SIZE)
    if not why_not and size == 1:
        why_not = "groups of one row: their advantage is the reward"
    if not why_not and config.flag(cf.KL_IN_REWARD):
        why_not = "a KL term in the reward is not the same for all tokens"
    if not why_not and config.flag(cf.MULTI_TURN):
        why_not = "several turns: lengths count tokens that have no advantage"
    why_not = why_not or _filtered(asked)
    if why_not:
        return no, why_not
    masked = frame.seen(lambda name: "rollout_rs_" in name)
    turns = frame.logged("num_turns/mean")
    with np.errstate(invalid="ignore"):
        several = turns.there & (turns.values > _SINGLE_TURN)
    unfiltered = ~frame.seen_any("train/num_gen_batches", "training/filter_groups/")
    known = bool(config.text(cf.ESTIMATOR)) | _returns_are_advantages(frame)
    why_not = "not GRPO as far as the log shows, or rows are masked, filtered or of several turns"
    return ~masked & ~several & unfiltered & known, why_not


def _returns_are_advantages(frame: Frame) -> Flags:
    """Rows whose returns are the advantages, as GRPO has it, and no critic is trained."""
    same = ~frame.seen_any("critic/vf_loss", "critic/values/mean")
    for part in ("mean", "max", "min"):
        one, other = (frame.logged(f"critic/{kind}/{part}") for kind in ("returns", "advantages"))
        same = same & one.there & other.there & (one.values == other.values)
    return same


def advantage_extremes(asked: Asked) -> list[Made]:
    """13: highest plus lowest advantage, and both as parts of the bound (n - 1) / sqrt(n)."""
    frame, size = asked.frame, asked.config.count(cf.GROUP_SIZE)
    highest, lowest = (frame.logged(f"critic/advantages/{part}") for part in ("max", "min"))
    other = _other_estimator(asked.config)
    both = highest.finite & lowest.finite & (not other)
    total = plain(
        highest.values + lowest.values,
        both & (bool(asked.config.text(cf.ESTIMATOR)) | _returns_are_advantages(frame)),
    )
    not_logged = "the extremes of advantages are not logged, or this is not GRPO"
    made = [
        choose(
            asked,
            ASYMMETRY,
            [
                Candidate(
                    total,
                    "critic/advantages/max, critic/advantages/min",
                    "critic/advantages/max + critic/advantages/min",
                )
            ],
            other or not_logged,
        )
    ]
    why_not = _not_normalised(asked.config, size)
    bound = (size - 1) / math.sqrt(size) if size and not why_not else math.nan
    for key, series, sign in ((MAX_TO_BOUND, highest, 1.0), (MIN_TO_BOUND, lowest, -1.0)):
        part = "max" if sign > 0 else "min"
        candidate = Candidate(
            plain(sign * series.values / bound, series.finite & (not why_not)),
            f"critic/advantages/{part}",
            f"{'' if sign > 0 else '-'}critic/advantages/{part} / ((n - 1) / sqrt(n)), n = {size}",
        )
        made.append(choose(asked, key, [candidate], why_not or not_logged))
    return made


def effective_prompt_ratio(asked: Asked) -> Made:
    """3: DAPO's kept prompts by the generated ones, from above: the last batch is cut."""
    config, batches = asked.config, asked.frame.logged("train/num_gen_batches")
    batch, generated = config.count(cf.BATCH_SIZE), config.count(cf.GENERATED)
    dropped = asked.frame.logged(_FILTERED)
    why_not = f"train/num_gen_batches or {_FILTERED} is not logged: no groups are filtered"
    if batches.there.any() or dropped.there.any():
        why_not = f"{cf.BATCH_SIZE} or {cf.GENERATED} is not known"
    candidates = []
    if batch and generated:
        candidates.append(
            Candidate(
                _ratio(batches, batch / generated),
                "train/num_gen_batches",
                f"{cf.BATCH_SIZE} / (train/num_gen_batches * {cf.GENERATED})",
                ("an upper estimate: the last generation batch is cut",),
            )
        )
    if batch:
        candidates.append(
            Candidate(
                _kept(asked, dropped, batch),
                _FILTERED,
                f"{cf.BATCH_SIZE} / ({cf.BATCH_SIZE} + {_FILTERED}); 1 where it is not logged",
                ("an upper estimate: groups that were left over are not counted",),
            )
        )
    return choose(asked, PROMPT_RATIO, candidates, why_not)


def _kept(asked: Asked, dropped: Series, batch: int) -> Series:
    """v1 logs what it dropped only in steps where it dropped something."""
    filters = asked.frame.seen_any("training/filter_groups/")
    filters |= is_v1(asked) & (asked.config.flag(cf.FILTER_GROUPS) is True)
    count = np.where(dropped.finite, np.maximum(dropped.values, 0.0), 0.0)
    trained = asked.frame.logged("critic/score/mean").there
    return plain(batch / (batch + count), dropped.finite | (filters & trained))


def _ratio(batches: Series, whole: float) -> Series:
    there = batches.finite & (np.nan_to_num(batches.values) > 0)
    return plain(np.minimum(whole / np.where(there, batches.values, 1.0), 1.0), there)


def _other_estimator(config: Configuration) -> str:
    name = config.text(cf.ESTIMATOR)
    return f"holds for GRPO, and adv_estimator is {name}" if name not in {"", "grpo"} else ""


def _not_normalised(config: Configuration, size: int | None) -> str:
    """Why advantages are not known to be divided by the standard deviation of groups of n."""
    if config.text(cf.ESTIMATOR) != "grpo":
        return _other_estimator(config) or f"{cf.ESTIMATOR} is not known to be grpo"
    if config.flag(cf.BY_STD) is False:
        return "norm_adv_by_std_in_grpo is off"
    if size is None or size <= 1:
        return f"{cf.GROUP_SIZE} is not known to be above 1"
    return ""


def _filtered(asked: Asked) -> str:
    if asked.config.flag(cf.FILTER_GROUPS):
        return "the trainer drops groups without spread before (filter_groups)"
    return ""
