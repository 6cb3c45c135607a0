"""Where the time of a step goes, and how many tokens a second come out of it."""

from __future__ import annotations

from typing import Final

import numpy as np

from verl_logsync.diagnostics import configuration as cf
from verl_logsync.diagnostics.canonical import (
    contained_in_step,
    is_asynchronous,
    sequences,
)
from verl_logsync.diagnostics.derived import Asked, Candidate, Made, choose, divided, where
from verl_logsync.diagnostics.series import Flags, Floats, Frame, Series, nothing, plain
from verl_logsync.verl_keys import beside_step_time

SHARE: Final = "timing_share"
REST: Final = "timing_share/rest"
THROUGHPUT: Final = "rollout/tokens_per_second"

_STEP: Final = "timing_s/step"
#: Phases that follow one another in a step. What lies within them (`agent_loop/...`,
#: `generate_sequences`, `reshard`, `generation_timing/...`) is never added.
PHASES: Final = (
    "gen",
    "gen_max",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
    "save_checkpoint",
    "dump_rollout_generations",
)
_AROUND: Final = frozenset({"testing", "save_checkpoint", "dump_rollout_generations"})
#: Clocks are read one after the other: phases may add up to this much more than the step.
_SLACK: Final = 1.01


def speed(asked: Asked) -> list[Made]:
    """All of them; those that cannot be computed say why."""
    return [*step_shares(asked), token_rate(asked), flops_share(asked)]


def step_shares(asked: Asked) -> list[Made]:
    """20: what part of a step each phase takes, and what is left when all are taken off."""
    frame = asked.frame
    total, inner = _total(frame), _inner(frame)
    usable = ~is_asynchronous(asked) & ~frame.seen_any("separate_async/", "fully_async/")
    fits = usable & (inner.values <= _SLACK * frame.logged(_STEP).values)
    why_not = _why_no_shares(frame, usable)
    shares = [
        _share(
            asked, phase, divided(where(fits, frame.logged(f"timing_s/{phase}")), total), why_not
        )
        for phase in PHASES
        if f"timing_s/{phase}" in frame.first_rows
    ]
    with np.errstate(invalid="ignore"):
        left = plain(np.maximum(frame.logged(_STEP).values - inner.values, 0.0), inner.there & fits)
    others = _unknown_phases(frame)
    notes = (f"with {', '.join(others)}, of which it is not known where they belong",) * bool(
        others
    )
    formula = f"({_STEP} - what is logged of {', '.join(PHASES)} within it) / total"
    rest = Candidate(divided(left, total), _STEP, formula, notes)
    return [*shares, choose(asked, REST, [rest], why_not)]


def _share(asked: Asked, phase: str, share: Series, why_not: str) -> Made:
    key = f"timing_s/{phase}"
    made = choose(
        asked,
        f"{SHARE}/{phase}",
        [Candidate(share, key, f"{key} / total; total = {_STEP} and what its version leaves out")],
        "",
    )
    return Made(made.key, made.series, made.facts, "" if made.series.there.any() else why_not)


def _why_no_shares(frame: Frame, usable: Flags) -> str:
    if _STEP not in frame.first_rows:
        return f"{_STEP} is not logged"
    if not usable.all():
        return "generation runs beside training: the phases do not follow one another"
    return "the phases that are logged take longer than the step: they overlap"


def _total(frame: Frame) -> Series:
    """The time of a step with its validation and saving, whatever its version counts in."""
    whole = frame.logged(_STEP)
    values = whole.values.copy()
    for rows, names in frame.stretches():
        for key in beside_step_time(names):
            values[rows] += _or_zero(frame, key)[rows]
    return plain(values, whole.finite)


def _inner(frame: Frame) -> Series:
    """What the phases within a step add up to."""
    whole = frame.logged(_STEP)
    values = np.zeros(len(frame))
    for rows, names in frame.stretches():
        within = [p for p in PHASES if p not in _AROUND]
        within += [key.removeprefix("timing_s/") for key in contained_in_step(names)]
        for phase in within:
            values[rows] += _or_zero(frame, f"timing_s/{phase}")[rows]
    return plain(values, whole.finite)


def _or_zero(frame: Frame, key: str) -> Floats:
    series = frame.logged(key)
    return np.where(series.finite, series.values, 0.0)


def _unknown_phases(frame: Frame) -> list[str]:
    known = {*PHASES, "step", "generate_sequences", "reshard", "start_profile", "stop_profile"}
    return sorted(
        name
        for name in frame.first_rows
        if name.startswith("timing_s/")
        and "/" not in name.removeprefix("timing_s/")
        and name.removeprefix("timing_s/") not in known
    )


def token_rate(asked: Asked) -> Made:
    """23: tokens of responses per second of generation, of all GPUs together."""
    frame = asked.frame
    dropped = frame.seen_any("train/num_gen_batches", "training/filter_groups/")
    dropped |= asked.config.flag(cf.FILTER_GROUPS) is True
    usable = ~is_asynchronous(asked) & ~dropped
    seconds = where(usable, frame.logged("timing_s/gen"))
    per_token = where(usable, frame.logged("timing_per_token_ms/gen"))
    one = plain(np.full(len(frame), 1000.0), np.ones(len(frame), dtype=bool))
    length = frame.logged("response_length/mean")
    notes = (
        "tokens of tools count too; the time is up to the slowest sequence, from verl 0.7 on with"
        " rewards that are computed on the way",
    )
    rate = "timing_per_token_ms/gen"
    candidates = [Candidate(divided(one, per_token), rate, f"1000 / {rate}", notes)]
    candidates += [
        Candidate(
            divided(_times(counted.series, length), seconds),
            f"response_length/mean, timing_s/gen, {counted.source}",
            f"N * response_length/mean / timing_s/gen; {counted.formula}",
            notes,
        )
        for counted in sequences(asked)
    ]
    return choose(asked, THROUGHPUT, candidates, _why_no_rate(asked, dropped))


def _why_no_rate(asked: Asked, dropped: Flags) -> str:
    if is_asynchronous(asked).any():
        return "generation runs beside training: timing_s/gen is only the wait for it"
    if dropped.any():
        return "groups are dropped: how many tokens they had is not logged"
    return "timing_s/gen is not logged, or not how many tokens were generated"


def _times(one: Series, other: Series) -> Series:
    return plain(one.values * other.values, one.finite & other.finite)


def flops_share(asked: Asked) -> Made:
    """23: `perf/mfu/actor`, where verl 0.2 called it `mfu/actor`; 0 and above 1 mean nothing."""
    logged = asked.frame.logged("mfu/actor")
    with np.errstate(invalid="ignore"):
        possible = where((logged.values > 0) & (logged.values <= 1), logged)
    notes = ("0 (unknown model or GPU) and more than 1 are left out",)
    made = choose(
        asked, "perf/mfu/actor", [Candidate(possible, "mfu/actor", "mfu/actor", notes)], ""
    )
    if made.series.there.any() or "perf/mfu/actor" in asked.frame.first_rows:
        return made
    why_not = "no perf/mfu/actor or mfu/actor is logged, or verl does not know the model or GPU"
    return Made(made.key, nothing(len(asked.frame)), why_not=why_not)
