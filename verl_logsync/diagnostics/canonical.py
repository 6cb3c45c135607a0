"""Series under one name for all versions of verl: what a person looks for first in a run.

They are added, never renamed, and only in rows before the first that logs the key itself.
Facts about verl 0.2 to 0.9.1: which trainer logs what, when a number means something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.diagnostics import configuration as cf
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.derived import (
    Asked,
    Candidate,
    Derived,
    Given,
    Made,
    choose,
    constant,
    divided,
    gathered,
    where,
)
from verl_logsync.diagnostics.series import Flags, Frame, Series, by_step, nothing, plain
from verl_logsync.verl_keys import (
    SAVING_SECONDS,
    STEP_SECONDS,
    TESTING_SECONDS,
    beside_step_time,
)

_DUMPING: Final = "timing_s/dump_rollout_generations"
_GIBIBYTE: Final = 1 << 30
#: A share of the device's memory above this means that another device was meant.
_IMPOSSIBLE: Final = 1.02

_ESTIMATORS: Final[Mapping[str, str]] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "|k1|",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
_SCALE: Final = (
    "its scale depends on the version: a mean over micro-batches up to 0.5, divided by their"
    " number once more in 0.6, a sum over mini-batches in 0.7 (legacy FSDP), the mean of the"
    " global batch from 0.8 on"
)


def canonical_series(table: pa.Table, config: Mapping[str, Any], facts: Given) -> Derived:
    """The canonical series of a run.

    Args:
        table: the aligned history, one row a step.
        config: verl's configuration, nested or with dotted keys; may be empty.
        facts: what the history does not say.
    """
    asked = Asked(Frame(table, {}), Configuration(config), facts)
    return gathered(asked.frame, canonical(asked))


def canonical(asked: Asked) -> list[Made]:
    """All of them; those that cannot be computed say why."""
    return [
        actor_loss(asked),
        reward_mean(asked),
        kl_divergence(asked),
        entropy(asked),
        latency(asked),
        sequence_latency(asked),
        step_rate(asked),
        memory_share(asked),
        memory_allocated(asked),
        truncation(asked),
        learning_rate(asked),
    ]


# -- which verl wrote this ------------------------------------------------------------------


def version_hint(names: frozenset[str]) -> str:
    """What the keys of a log tell about the version of verl; empty if nothing."""
    marks = (
        (any(k.endswith("acc_success_only") or "/acc_success_only/" in k for k in names), "0.9.1"),
        (any(k.startswith("training/off_policy/") for k in names), "0.9 or later, v1"),
        (any(k.startswith("actor/perf/") for k in names), "0.8 or later"),
        ("timing_s/update_weights" in names, "0.7.1 or later"),
        (any(k.startswith("mismatch/") for k in names), "0.6.0"),
        ("response/aborted_ratio" in names, "0.6 or later"),
        ("mfu/actor" in names, "0.2"),
        (any(k.startswith("val/test_score") for k in names), "0.3 or earlier"),
        ("actor/entropy_loss" in names and "actor/entropy" not in names, "0.4.0 or earlier"),
        ("training/global_step" in names, "0.4 or later"),
    )
    return next((hint for found, hint in marks if found), "")


def is_fully_async(frame: Frame) -> Flags:
    """Rows from which on the log is known to be that of the fully-async trainer."""
    return frame.seen_any("fully_async/", "dynamic_resource/")


def is_asynchronous(asked: Asked) -> Flags:
    """Rows in which generation runs beside training: `timing_s/gen` is only the wait for it."""
    mode = asked.config.text(cf.V1_MODE)
    seen = asked.frame.seen_any(
        "fully_async/",
        "separate_async/",
        "timing_s/wait_prev_gen",
        "timing_s/generate_async",
        "timing_s/sync_rollout_weights",
        "timing_s/switch_to_trainer",
        "timing_s/switch_to_rollout",
        "timing_s/switch_wait",
        "timing_s/wait_for_enough_samples",
    )
    return seen | (mode in {"colocate_async", "separate_async"})


def is_v1(asked: Asked) -> Flags:
    """Rows from which on the log is known to be that of the v1 trainer."""
    seen = asked.frame.seen_any("training/off_policy/", "training/num_turns/")
    return seen | (asked.config.flag(cf.USE_V1) is True)


def _caveats(asked: Asked, *more: str) -> tuple[str, ...]:
    hint = version_hint(frozenset(asked.frame.first_rows))
    return (*more, *((f"keys of verl {hint}",) if hint else ()))


# -- loss, reward, divergence ----------------------------------------------------------------


def actor_loss(asked: Asked) -> Made:
    """`actor/loss`: the total loss of the actor."""
    frame = asked.frame
    policy, coefficient = frame.logged("actor/pg_loss"), frame.logged("actor/kl_coef")
    kl = frame.logged("actor/kl_loss")
    weight = asked.config.number(cf.ENTROPY_COEFFICIENT)
    bonus, formula, note = _entropy_term(frame, weight)
    there = policy.there & coefficient.there & kl.there & bonus.there
    with np.errstate(all="ignore"):
        total = policy.values + coefficient.values * kl.values - bonus.values
        without_kl = policy.values - bonus.values
    alone = policy.there & ~coefficient.there & bonus.there & (weight is not None)
    candidates = [
        Candidate(
            plain(total, there),
            "actor/pg_loss, actor/kl_coef, actor/kl_loss",
            f"actor/pg_loss + actor/kl_coef * actor/kl_loss{formula}",
            _caveats(asked, _SCALE, *note),
        ),
        Candidate(
            plain(without_kl, alone),
            "actor/pg_loss",
            f"actor/pg_loss{formula} (no KL term is logged)",
            _caveats(asked, _SCALE, *note),
        ),
        Candidate(
            where(~coefficient.there & (weight is None), policy),
            "actor/pg_loss",
            "actor/pg_loss: the policy gradient loss alone",
            _caveats(asked, _SCALE, *note),
        ),
        Candidate(frame.logged("train/loss"), "train/loss", "train/loss of supervised training"),
    ]
    why_not = "no actor/loss, actor/pg_loss or train/loss is logged"
    if weight and policy.there.any():
        why_not = "entropy_coeff is not 0, and some rows have no entropy"
    return choose(asked, "actor/loss", candidates, why_not)


def _entropy_term(frame: Frame, weight: float | None) -> tuple[Series, str, tuple[str, ...]]:
    rows = len(frame)
    if weight is None:
        note = "the entropy term is left out: entropy_coeff is not known"
        return constant(0.0, rows), "", (note,)
    if weight == 0:
        return constant(0.0, rows), "", ()
    # The loss of the update is meant, so the entropy during the update comes first.
    during, before = frame.logged("actor/entropy_loss"), frame.logged("actor/entropy")
    values = np.where(during.there, during.values, before.values)
    term = plain(weight * values, during.there | before.there)
    return term, f" - {weight:g} * entropy", ()


def reward_mean(asked: Asked) -> Made:
    """`reward/mean`: the mean reward of a sequence."""
    frame = asked.frame
    in_reward = asked.config.flag(cf.KL_IN_REWARD)
    note = ("the KL penalty is subtracted (use_kl_in_reward)",) if in_reward else ()
    scores = by_step(frame.steps, asked.given.dump_scores)
    candidates = [
        _copy(asked, "critic/rewards/mean", *note),
        _copy(asked, "critic/score/mean", "before any KL penalty"),
        Candidate(
            where(~is_fully_async(frame), scores),
            "rollout dump",
            "mean score of the rows of the rollout dump",
            ("before any KL penalty",),
        ),
    ]
    return choose(asked, "reward/mean", candidates, "no reward, score or rollout dump")


def _copy(asked: Asked, key: str, *notes: str) -> Candidate:
    return Candidate(asked.frame.logged(key), key, key, notes)


def kl_divergence(asked: Asked) -> Made:
    """`kl_divergence`: policy against reference model."""
    frame, config = asked.frame, asked.config
    believed = where(frame.logged("actor/kl_coef").there, frame.logged("actor/kl_loss"))
    of_loss = _estimator(config.text(cf.KL_LOSS_TYPE), "low_var_kl (k3)")
    of_reward = _estimator(config.text(cf.KL_PENALTY), "kl (k1)")
    candidates = [
        Candidate(believed, "actor/kl_loss", "actor/kl_loss", _caveats(asked, of_loss, _SCALE)),
        *(
            Candidate(frame.logged(key), key, key, _caveats(asked, of_reward))
            for key in ("actor/reward_kl_penalty", "critic/kl")
        ),
    ]
    why_not = (
        "no divergence from a reference model is logged (use_kl_loss and use_kl_in_reward are off);"
        " actor/ppo_kl and rollout_corr/kl are other quantities"
    )
    if (frame.logged("actor/kl_loss").there & ~frame.logged("actor/kl_coef").there).any():
        why_not = (
            "actor/kl_loss without actor/kl_coef: verl 0.7 logs 0.0 there although no reference"
            " model is used"
        )
    made = choose(asked, "kl_divergence", candidates, why_not)
    if not made.facts:
        return made
    by_loss = made.facts["from"] == "actor/kl_loss"
    kind = config.text(cf.KL_LOSS_TYPE if by_loss else cf.KL_PENALTY)
    facts = {**made.facts, "estimator": _ESTIMATORS.get(kind.removesuffix("+"), "unknown")}
    return Made(made.key, made.series, facts, made.why_not)


def _estimator(kind: str, default: str) -> str:
    name = _ESTIMATORS.get(kind.removesuffix("+"))
    if name:
        return f"estimator {name} ({kind})"
    return f"estimator unknown: the configuration does not say ({default} by default)"


def entropy(asked: Asked) -> Made:
    """`actor/entropy`, where an earlier verl called it `actor/entropy_loss`."""
    candidates = [
        _copy(
            asked,
            "actor/entropy_loss",
            "verl up to 0.4.0; wrong mask order with use_dynamic_bsz in 0.4.0",
        )
    ]
    return choose(asked, "actor/entropy", candidates, "no entropy is logged")


def learning_rate(asked: Asked) -> Made:
    """`train/lr`, where `train/lr(1e-3)` is logged, which is a thousand times as large."""
    thousandfold = asked.frame.logged("train/lr(1e-3)")
    candidates = [
        Candidate(
            plain(thousandfold.values / 1000, thousandfold.there),
            "train/lr(1e-3)",
            "train/lr(1e-3) / 1000",
        )
    ]
    made = choose(asked, "train/lr", candidates, "")
    return Made(made.key, made.series, made.facts)


# -- time ------------------------------------------------------------------------------------


def sequences(asked: Asked) -> list[Candidate]:
    """How many sequences a step generated (without further generation batches), best first."""
    frame, config, given = asked.frame, asked.config, asked.given
    batch, size = config.count(cf.BATCH_SIZE), config.count(cf.GROUP_SIZE)
    planned = batch * size if batch and size else None
    response = frame.logged("response_length/mean")
    per_token = frame.logged("timing_per_token_ms/gen")
    seconds = frame.logged("timing_s/gen")
    from_rate = divided(divided(seconds, per_token, times=1000.0), response)
    dumped = {step: float(rows) for step, rows in given.dump_rows.items()}
    return [
        Candidate(
            constant(planned, len(frame)), f"{cf.BATCH_SIZE} * {cf.GROUP_SIZE}", f"N = {planned}"
        ),
        Candidate(
            where(~is_fully_async(frame), by_step(frame.steps, dumped)),
            "rollout dump",
            "N = rows of the dump without padding",
        ),
        from_tokens(frame),
        Candidate(
            _rounded(from_rate),
            "timing_per_token_ms/gen",
            "N = round(1000 * timing_s/gen / timing_per_token_ms/gen / response_length/mean)",
        ),
    ]


def from_tokens(frame: Frame) -> Candidate:
    """How many sequences have so many tokens at their mean length."""
    tokens = frame.logged("perf/total_num_tokens")
    prompt, response = frame.logged("prompt_length/mean"), frame.logged("response_length/mean")
    both = plain(prompt.values + response.values, prompt.there & response.there)
    return Candidate(
        _rounded(divided(tokens, both)),
        "perf/total_num_tokens",
        "N = round(perf/total_num_tokens / (prompt_length/mean + response_length/mean))",
    )


def _rounded(series: Series) -> Series:
    there = series.finite & (np.nan_to_num(series.values) >= 0.5)
    return plain(np.round(series.values), there)


def latency(asked: Asked) -> Made:
    """`rollout/latency_ms`: amortised, milliseconds of generation per sequence."""
    frame = asked.frame
    seconds = frame.logged("timing_s/gen")
    asynchronous = is_asynchronous(asked)
    batches = frame.logged("train/num_gen_batches")
    dapo = frame.seen_any("train/num_gen_batches")
    usable = where(~asynchronous & ~dapo, seconds)
    candidates = []
    for counted in sequences(asked):
        quotient = divided(usable, counted.series, times=1000.0)
        formula = f"1000 * timing_s/gen / N; {counted.formula}"
        source = f"timing_s/gen, {counted.source}"
        candidates.append(Candidate(quotient, source, formula, ("inverse throughput",)))
    candidates.append(_filtered_latency(asked, where(~asynchronous, seconds), batches))
    why_not = "timing_s/gen or the number of sequences is not known"
    if asynchronous.any():
        why_not = "generation runs beside training: timing_s/gen is only the wait for it"
    elif dapo.any():
        why_not = (
            "timing_s/gen holds several generation batches, and "
            f"{cf.GENERATED} or {cf.GROUP_SIZE} is not known"
        )
    return choose(asked, "rollout/latency_ms", candidates, why_not)


def _filtered_latency(asked: Asked, seconds: Series, batches: Series) -> Candidate:
    """DAPO generates until enough groups have spread; the time is that of all batches."""
    size, generated = asked.config.count(cf.GROUP_SIZE), asked.config.count(cf.GENERATED)
    known = size * generated if size and generated else None
    count = constant(known, len(asked.frame))
    total = plain(batches.values * count.values, batches.there & count.there)
    return Candidate(
        divided(seconds, total, times=1000.0),
        "timing_s/gen, train/num_gen_batches",
        f"1000 * timing_s/gen / (train/num_gen_batches * {cf.GENERATED} * {cf.GROUP_SIZE})",
        ("inverse throughput",),
    )


def sequence_latency(asked: Asked) -> Made:
    """`rollout/sequence_latency_ms`: how long a trajectory takes, milliseconds."""
    candidates = [
        Candidate(
            _scaled(asked.frame.logged(key), 1000.0),
            key,
            f"1000 * {key}",
            ("the mean over trajectories",),
        )
        for key in (
            "timing_s/agent_loop/generate_sequences/mean",
            "fully_async/processing_time/avg",
        )
    ]
    why_not = "no time of single trajectories is logged (the v1 trainer has none)"
    return choose(asked, "rollout/sequence_latency_ms", candidates, why_not)


def _scaled(series: Series, factor: float) -> Series:
    return plain(series.values * factor, series.there)


def step_rate(asked: Asked) -> Made:
    """`trainer/step_per_second`: training steps per second, without validation and saving."""
    frame = asked.frame
    one = constant(1.0, len(frame))
    notes: tuple[str, ...] = ()
    if is_fully_async(frame).any() or frame.seen_any("separate_async/").any():
        notes = ("the time is that of a whole sync cycle: per parameter version",)
    candidates = []
    for key in STEP_SECONDS:
        seconds, subtracted = _training_seconds(asked, key)
        minus = "".join(f" - {name}" for name in subtracted)
        formula = f"1 / ({key}{minus})" if minus else f"1 / {key}"
        candidates.append(Candidate(divided(one, seconds), key, formula, _caveats(asked, *notes)))
    return choose(asked, "trainer/step_per_second", candidates, "no time of steps is logged")


def _training_seconds(asked: Asked, key: str) -> tuple[Series, list[str]]:
    """The time of a step without what its version of verl counts in; what was taken off."""
    frame = asked.frame
    whole = frame.logged(key)
    values, taken = whole.values.copy(), set()
    rest = values.copy()
    for rows, names in frame.stretches():
        for part in contained_in_step(names):
            seconds = frame.logged(part)
            inside = seconds.finite[rows]
            rest[rows] = np.where(inside, rest[rows] - seconds.values[rows], rest[rows])
            if (inside & whole.there[rows]).any():
                taken.add(part)
    # A part longer than the whole was not in it.
    with np.errstate(invalid="ignore"):
        values = np.where(rest > 0, rest, values)
    return plain(values, whole.finite), sorted(taken)


def contained_in_step(names: frozenset[str]) -> tuple[str, ...]:
    """What `timing_s/step` holds besides training, in the version of verl with these keys."""
    beside = beside_step_time(names)
    if not beside:
        return (TESTING_SECONDS, SAVING_SECONDS, _DUMPING)
    return (_DUMPING,) if SAVING_SECONDS in beside else (SAVING_SECONDS,)


# -- memory and truncation -------------------------------------------------------------------


def memory_share(asked: Asked) -> Made:
    """`hybrid_engine/gpu_mem_util`: share of a GPU's memory, 0 to 1."""
    frame, given = asked.frame, asked.given
    device = constant(given.device_memory_gb, len(frame))
    of_device = f"{given.device_memory_gb} GiB ({given.device_memory_from})"
    used = by_step(frame.steps, given.gpu_memory_bytes)
    percent = by_step(frame.steps, given.gpu_memory_percent)
    peak = "running peak of the training process's allocator; rollout processes are not counted"
    candidates = [
        *(
            Candidate(
                _share(divided(frame.logged(key), device)), key, f"{key} / {of_device}", (peak,)
            )
            for key in ("actor/perf/max_memory_reserved_gb", "perf/max_memory_reserved_gb")
        ),
        Candidate(
            _share(_scaled(percent, 0.01)),
            "GPU records of the offline run",
            "memory in use, percent / 100",
            ("of all processes on the GPU",),
        ),
        Candidate(
            _share(divided(_scaled(used, 1 / _GIBIBYTE), device)),
            "GPU records of the offline run",
            f"bytes in use / {of_device}",
            ("of all processes on the GPU",),
        ),
    ]
    why_not = "how much memory a GPU has is nowhere in the logs: give --device-memory-gb"
    if given.device_memory_gb is not None:
        why_not = f"no reserved memory is logged, or it is more than {of_device}"
    return choose(asked, "hybrid_engine/gpu_mem_util", candidates, why_not)


def _share(series: Series) -> Series:
    with np.errstate(invalid="ignore"):
        return where((series.values >= 0) & (series.values <= _IMPOSSIBLE), series)


def memory_allocated(asked: Asked) -> Made:
    """`hybrid_engine/gpu_mem_allocated_gb`: GiB."""
    peak = "running peak since the process started, highest of all ranks, training process only"
    used = by_step(asked.frame.steps, asked.given.gpu_memory_bytes)
    candidates = [
        *(
            _copy(asked, key, peak)
            for key in ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb")
        ),
        Candidate(
            _scaled(used, 1 / _GIBIBYTE),
            "GPU records of the offline run",
            "bytes in use / 2^30",
            ("of all processes on the GPU",),
        ),
    ]
    why_not = "no memory is logged (verl up to 0.2, and engine workers of 0.7)"
    return choose(asked, "hybrid_engine/gpu_mem_allocated_gb", candidates, why_not)


def truncation(asked: Asked) -> Made:
    """`rollout/truncation_ratio`: share of responses cut at the longest length allowed."""
    frame = asked.frame
    ratio, longest = frame.logged("response_length/clip_ratio"), frame.logged("response_length/max")
    limit = asked.config.number(cf.MAX_RESPONSE)
    at_limit = longest.there & (longest.values == limit) if limit else np.zeros(len(frame), bool)
    below = longest.finite & (longest.values < limit) if limit else np.zeros(len(frame), bool)
    # Nothing was cut below the limit, whoever logged it: v1 cannot always be told by its keys.
    relative = is_v1(asked) | below | (_limit_moves(ratio, longest) if not limit else below)
    none = plain(np.zeros(len(frame)), ratio.there & below)
    late = "0 although answers were cut where max_model_len is the tighter limit"
    candidates = [
        Candidate(
            where(~relative | at_limit, ratio),
            "response_length/clip_ratio",
            "response_length/clip_ratio",
            (late,),
        ),
        Candidate(
            none,
            "response_length/max",
            f"0, since response_length/max < {cf.MAX_RESPONSE}",
            (late, "v1 compares with the longest answer of the batch: its clip_ratio is no ratio"),
        ),
    ]
    why_not = "no response_length/clip_ratio is logged"
    if (ratio.there & relative).any():
        why_not = (
            "response_length/clip_ratio compares with the longest answer of the batch (the v1"
            f" trainer), and {cf.MAX_RESPONSE} is not known, or shorter than that answer"
        )
    return choose(asked, "rollout/truncation_ratio", candidates, why_not)


def _limit_moves(ratio: Series, longest: Series) -> Flags:
    """Rows from which on answers were "cut" at two lengths: no limit, but the longest of each."""
    cut = ratio.finite & (ratio.values > 0) & longest.finite
    if not cut.any():
        return cut
    first = longest.values[np.argmax(cut)]
    moved: Flags = np.logical_or.accumulate(cut & (longest.values != first))
    return moved


__all__ = ["Derived", "Given", "canonical", "canonical_series", "nothing", "version_hint"]
