"""Simulated GRPO runs with verl 0.9.1's keys: healthy ones, and ones with a known disease.

    run = simulate("kl_explosion", steps=300, onset=150, seed=3)
    run.table, run.config             # an Arrow table with `_step`, verl's configuration
    run.write(folder)                 # verl's JSONL

Rewards, lengths and advantages come from simulated responses, so they agree with each other; the
rest are curves with the noise of real logs: heavy tails, single outliers, slow drifts. The same
arguments give the same run everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from verl_logsync.columns import STEP, decode
from verl_logsync.rollouts.values import StepReduction
from verl_logsync.testing.builders import write_verl_log

__all__ = ["DISEASES", "Disease", "KeySet", "SimulatedRun", "simulate"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
KeySet = Literal["v1", "async", "0.4"]

#: GiB of one simulated GPU.
DEVICE_MEMORY_GB: Final = 80.0
_EPSILON: Final = 1e-6
_NOT_IN_EVERY_STEP: Final = frozenset({"training/off_policy/evicted_samples"})


@dataclass(frozen=True, slots=True)
class Disease:
    """Something that goes wrong from a step on.

    `codes` are the rules that name it rightly, `others` those that it sets off too; it should be
    found within `within` steps of its onset.
    """

    name: str
    what: str
    codes: frozenset[str]
    within: int
    others: frozenset[str] = frozenset()


def _disease(name: str, what: str, codes: str, within: int, others: str = "") -> Disease:
    return Disease(name, what, frozenset(codes.split()), within, frozenset(others.split()))


DISEASES: Final[Mapping[str, Disease]] = {
    disease.name: disease
    for disease in (
        _disease(
            "entropy_collapse",
            "the entropy falls to a hundredth within 40 steps",
            "ENTROPY_COLLAPSE ENTROPY_SUDDEN_DROP ENTROPY_GONE",
            25,
        ),
        _disease(
            "kl_explosion",
            "the KL divergence grows by 12 % a step, and the reward falls later",
            "KL_EXPLOSION",
            25,
            "KL_UP_REWARD_DOWN REWARD_DECLINE REWARD_CRASH DEAD_GROUPS DEAD_GROUPS_RISE",
        ),
        _disease(
            "reward_crash",
            "every score is 0",
            "REWARD_CRASH",
            4,
            "REWARD_DECLINE NO_ADVANTAGE DEAD_GROUPS DEAD_GROUPS_RISE KL_UP_REWARD_DOWN",
        ),
        _disease(
            "length_hacking",
            "longer answers are rewarded, and answers grow by 2.5 % a step",
            "LENGTH_HACKING",
            30,
            "LENGTH_SURGE SLOW_ROLLOUTS SLOW_STEPS TRUNCATION_RISES",
        ),
        _disease(
            "memory_pressure",
            "the reserved memory grows to 98 % of the GPU within 15 steps",
            "MEMORY_PRESSURE",
            20,
            "MEMORY_GROWS",
        ),
        _disease(
            "slow_rollouts",
            "generation takes three times as long",
            "SLOW_ROLLOUTS SLOWER_ROLLOUTS",
            4,
            "SLOW_STEPS",
        ),
        _disease(
            "dead_groups",
            "each prompt is solved always or never",
            "DEAD_GROUPS NO_ADVANTAGE DEAD_GROUPS_RISE",
            6,
            "EXPLORATION_COLLAPSE",
        ),
        _disease("nan_gradient", "the gradient norm is NaN in one step", "GRADIENT_NON_FINITE", 0),
        _disease(
            "stale_policy",
            "samples get older by one version every four steps, up to ten",
            "STALE_POLICY",
            16,
            "SAMPLES_EVICTED",
        ),
        _disease(
            "reward_up_kl_flat",
            "the reward rises by 0.4 within 100 steps while the KL divergence stays where it is",
            "REWARD_UP_KL_FLAT REWARD_UP_KL_FLAT_SLOWLY",
            60,
        ),
        _disease(
            "exploration_collapse",
            "prompts are solved always or never, within 60 steps: the mean rises, pass@n falls",
            "EXPLORATION_COLLAPSE",
            70,
            "DEAD_GROUPS DEAD_GROUPS_RISE NO_ADVANTAGE REWARD_UP_KL_FLAT REWARD_UP_KL_FLAT_SLOWLY",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One run: `table` has a row a step, `onset` is the first diseased step (None: healthy).

    `reductions` are those of its rollout dumps, as far as they are about pass@k.
    """

    table: pa.Table
    config: Mapping[str, Any]
    disease: Disease | None
    onset: int | None
    seed: int
    keys: KeySet = "v1"
    reductions: tuple[StepReduction, ...] = ()

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, metrics) pairs as verl logs them."""
        names = [name for name in self.table.schema.names if name != STEP]
        columns = {name: self.table.column(name) for name in names}
        there = {name: column.is_valid().to_pylist() for name, column in columns.items()}
        values = {name: decode(column) for name, column in columns.items()}
        return [
            (step, {name: values[name][row] for name in names if there[name][row]})
            for row, step in enumerate(self.table.column(STEP).to_pylist())
        ]

    def write(self, folder: Path, name: str = "grpo_simulated/run") -> Path:
        """Write `PROJECT/EXPERIMENT.jsonl` as verl's `file` logger does."""
        return write_verl_log(folder / f"{name}.jsonl", self.rows())


def simulate(
    disease: str = "",
    *,
    steps: int = 300,
    onset: int = 150,
    seed: int = 0,
    keys: KeySet = "v1",
    prompts: int = 32,
    group_size: int = 8,
    test_every: int = 20,
    without: frozenset[int] = frozenset(),
) -> SimulatedRun:
    """Simulate a run of steps 0 (validation only) to `steps`.

    Args:
        disease: a key of `DISEASES`; empty for a healthy run.
        steps: training steps.
        onset: the first diseased step.
        seed: another seed is another run: model, data and noise.
        keys: which trainer's keys; `stale_policy` always has those of an asynchronous one.
        prompts: prompts a step.
        group_size: responses a prompt.
        test_every: every so many steps are validated.
        without: steps of which no row is left.

    Raises:
        KeyError: no such disease.
    """
    known = DISEASES[disease] if disease else None
    if disease == "stale_policy":
        keys = "async"
    run = _Run(np.random.default_rng(seed), steps, onset, disease, prompts, group_size)
    responses = _responses(run)
    columns = _columns(run, responses, keys)
    table = _with_validation(columns, run, test_every)
    if without:
        keep = [step not in without for step in table.column(STEP).to_pylist()]
        table = table.filter(pa.array(keep))
    config = _config(keys, prompts, group_size)
    dumped = tuple(r for r in _reductions(responses[0]) if r.step not in without)
    return SimulatedRun(table, config, known, onset if known else None, seed, keys, dumped)


def _config(keys: KeySet, prompts: int, group_size: int) -> dict[str, Any]:
    modes: dict[KeySet, dict[str, Any]] = {
        "v1": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        "async": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}},
        "0.4": {},
    }
    return {
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": True,
            "use_kl_in_reward": False,
        },
        "data": {"train_batch_size": prompts, "max_response_length": 2048},
        "actor_rollout_ref": {
            "actor": {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "entropy_coeff": 0},
            "rollout": {"n": group_size},
        },
        "trainer": {"project_name": "grpo_simulated", "experiment_name": "run", **modes[keys]},
    }


@dataclass(frozen=True)
class _Run:
    """What one run is like: its own speed, levels and noise, drawn from its seed."""

    rng: np.random.Generator
    steps: int
    onset: int
    disease: str
    prompts: int
    group_size: int
    traits: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self.rng.uniform
        self.traits.update(
            first_reward=draw(0.15, 0.4),
            last_reward=draw(0.6, 0.85),
            pace=draw(100, 600),
            entropy=draw(0.2, 0.6),
            entropy_left=draw(0.3, 0.7),
            kl=draw(0.01, 0.06),
            kl_falls=float(draw() < 0.3),
            length=draw(150, 400),
            growth=draw(0.9, 2.2),
            gradient=draw(0.1, 0.6),
            seconds_per_token=draw(0.03, 0.06),
            memory=draw(45, 62),
        )

    @property
    def t(self) -> Floats:
        """The training steps, 1 to `steps`."""
        return np.arange(1, self.steps + 1, dtype=np.float64)

    @property
    def sick(self) -> Floats:
        """For each step: how many steps it has been diseased, 0 while it is healthy."""
        return np.maximum(self.t - self.onset + 1, 0.0)

    def has(self, disease: str) -> bool:
        return self.disease == disease

    @property
    def progress(self) -> Floats:
        """From 0 to 1, as training goes on."""
        progress: Floats = 1 - np.exp(-self.t / self.traits["pace"])
        return progress

    def noisy(self, values: Any, spread: float) -> Floats:
        """Each value times lognormal noise."""
        noisy: Floats = values * np.exp(self.rng.normal(0, spread, self.steps))
        return noisy


def _success(run: _Run) -> Floats:
    """The mean chance of a right answer, a step."""
    traits = run.traits
    rise = traits["last_reward"] - traits["first_reward"]
    chance = traits["first_reward"] + rise * run.progress
    if run.has("reward_up_kl_flat"):
        chance = traits["first_reward"] + np.minimum(run.sick / 100, 1.0) * 0.4
    if run.has("kl_explosion"):
        chance = chance * np.exp(-np.maximum(run.sick - 25, 0) / 30)
    if run.has("entropy_collapse"):
        chance = np.where(run.sick > 0, chance[min(run.onset, run.steps) - 1], chance)
    if run.has("reward_crash"):
        chance = np.where(run.sick > 0, 0.0, chance)
    return chance


def _responses(run: _Run) -> tuple[Floats, Floats, Floats]:
    """Scores, advantages and lengths, each (steps, prompts, group size)."""
    shape = (run.steps, run.prompts, run.group_size)
    chance = _success(run)[:, None]
    difficulty = run.rng.normal(0, 1.6, shape[:2]) + run.rng.normal(0, 0.15, (run.steps, 1))
    with np.errstate(divide="ignore"):
        odds = np.log(chance / (1 - chance)) * 1.3
    solved = 1 / (1 + np.exp(-(odds + difficulty)))
    if run.has("exploration_collapse"):
        solved = _given_up(run, solved)
    if run.has("dead_groups"):
        solved = np.where(run.sick[:, None] > 0, np.round(solved), solved)
    scores = (run.rng.random(shape) < solved[:, :, None]).astype(np.float64)
    middle = scores.mean(axis=2, keepdims=True)
    spread = scores.std(axis=2, ddof=1, keepdims=True)
    advantages = (scores - middle) / (spread + _EPSILON)
    return scores, advantages, _lengths(run, scores)


def _given_up(run: _Run, solved: Floats) -> Floats:
    """Chances that become 1 for somewhat more prompts than their mean, and 0 for the others."""
    part = np.minimum(run.sick / 60, 1.0)[:, None]
    mean = solved.mean(axis=1, keepdims=True)
    rank = (-solved).argsort(axis=1).argsort(axis=1)
    decided = rank < (mean + 0.25 * (1 - mean)) * run.prompts
    given_up: Floats = np.where(part > 0, (1 - part) * solved + part * decided, solved)
    return given_up


def _lengths(run: _Run, scores: Floats) -> Floats:
    traits = run.traits
    typical = traits["length"] * (1 + traits["growth"] * (1 - np.exp(-run.t / 700)))
    right = np.full(run.steps, 0.88)
    if run.has("length_hacking"):
        typical = typical * np.minimum(1.025**run.sick, 5.0)
        right = np.where(run.sick > 0, 1.35, right)
    drawn = np.exp(run.rng.normal(0, 0.45, scores.shape))
    by_score = np.where(scores > 0.5, right[:, None, None], 1.0)
    lengths: Floats = np.clip(np.round(typical[:, None, None] * drawn * by_score), 8, 2048)
    return lengths


def _reductions(scores: Floats) -> Iterator[StepReduction]:
    """pass@k of each step, k = 1 to the size of a group."""
    prompts, size = scores.shape[1:]
    solved = scores.sum(axis=2).astype(np.int64)
    chance = np.array(
        [
            [1 - math.comb(size - c, k) / math.comb(size, k) for k in range(1, size + 1)]
            for c in range(size + 1)
        ]
    )
    for row, pass_at_k in enumerate(chance[solved].mean(axis=1).tolist()):
        yield StepReduction(
            row + 1,
            "simulated",
            "train",
            rows=prompts * size,
            group_size=size,
            statistics={"groups": float(prompts)},
            pass_at_k=tuple(pass_at_k),
        )


def _columns(
    run: _Run, responses: tuple[Floats, Floats, Floats], keys: KeySet
) -> dict[str, Floats]:
    scores, advantages, lengths = responses
    return {
        **_policy(run, advantages, keys),
        **_rewards(run, scores, advantages, lengths),
        **_timing(run, lengths, keys),
        **_memory(run, keys),
        **_trainer(run, keys),
    }


def _rewards(run: _Run, scores: Floats, advantages: Floats, lengths: Floats) -> dict[str, Floats]:
    s, a, n = (values.reshape(run.steps, -1) for values in (scores, advantages, lengths))
    by_token = (a * n).sum(axis=1) / n.sum(axis=1)
    columns: dict[str, Floats] = {}
    for name in ("critic/score", "critic/rewards"):
        columns |= {
            f"{name}/mean": s.mean(axis=1),
            f"{name}/max": s.max(1),
            f"{name}/min": s.min(1),
        }
    for name in ("critic/advantages", "critic/returns"):
        columns |= {f"{name}/mean": by_token, f"{name}/max": a.max(1), f"{name}/min": a.min(1)}
    prompt = np.round(run.rng.normal(90, 2, run.steps), 2)
    return {
        **columns,
        "response_length/mean": n.mean(axis=1),
        "response_length/max": n.max(axis=1),
        "response_length/min": n.min(axis=1),
        "response_length/clip_ratio": (n == n.max(axis=1, keepdims=True)).mean(axis=1),
        "prompt_length/mean": prompt,
        "prompt_length/max": np.ceil(prompt + 8),
        "prompt_length/min": np.floor(prompt - 8),
        "prompt_length/clip_ratio": np.full(run.steps, 0.02),
        "perf/total_num_tokens": np.round(n.sum(axis=1) + prompt * run.prompts * run.group_size),
        "variance_proxy/expected_a_squared": np.square(a).mean(axis=1),
    }


def _policy(run: _Run, advantages: Floats, keys: KeySet) -> dict[str, Floats]:
    traits, steps = run.traits, run.steps
    entropy = traits["entropy"] * (
        traits["entropy_left"] + (1 - traits["entropy_left"]) * (1 - run.progress)
    )
    if run.has("entropy_collapse"):
        entropy = entropy * np.maximum(np.exp(-run.sick / 9), 0.01)
    kl = _divergence(run)
    gradient = run.noisy(np.full(steps, traits["gradient"]), 0.15)
    spikes = run.rng.random(steps) < 0.004
    gradient = np.where(spikes, gradient * run.rng.uniform(3, 14, steps), gradient)
    gradient = np.where(np.all(advantages == 0, axis=(1, 2)), gradient * 0.01, gradient)
    if run.has("nan_gradient"):
        gradient[run.onset - 1 : run.onset] = math.nan
    loss = run.rng.normal(0, 0.006, steps)
    entropy_key = "actor/entropy_loss" if keys == "0.4" else "actor/entropy"
    columns = {
        entropy_key: run.noisy(entropy, 0.025),
        "actor/pg_loss": loss,
        "actor/kl_loss": kl,
        "actor/kl_coef": np.full(steps, 0.001),
        "actor/pg_clipfrac": np.abs(run.noisy(np.full(steps, 7e-4), 0.5)),
        "actor/pg_clipfrac_lower": np.zeros(steps),
        "actor/ppo_kl": run.rng.normal(3e-5, 1e-4, steps),
        "actor/grad_norm": gradient,
        "actor/lr": np.full(steps, 1e-6),
    }
    return columns if keys == "0.4" else {**columns, "actor/loss": loss + 0.001 * kl}


def _divergence(run: _Run) -> Floats:
    traits = run.traits
    rising = 5e-4 + traits["kl"] * run.progress
    falling = 0.15 + 0.85 * (1 - run.progress)
    kl = falling if traits["kl_falls"] else rising
    if run.has("reward_up_kl_flat"):
        kl = np.full(run.steps, traits["kl"])
    if run.has("kl_explosion"):
        kl = kl * np.minimum(1.12**run.sick, 500.0)
    return run.noisy(kl, 0.04)


def _timing(run: _Run, lengths: Floats, keys: KeySet) -> dict[str, Floats]:
    flat = lengths.reshape(run.steps, -1)
    tail = 0.5 * flat.max(axis=1) + 0.5 * flat.mean(axis=1)
    generation = run.noisy(4 + run.traits["seconds_per_token"] * tail, 0.06)
    slow = run.rng.random(run.steps) < 0.006
    generation = np.where(slow, generation * run.rng.uniform(1.5, 4, run.steps), generation)
    if run.has("slow_rollouts"):
        generation = np.where(run.sick > 0, generation * 3, generation)
    if run.has("memory_pressure"):
        generation = np.where(run.sick > 0, generation * 1.2, generation)
    if keys == "async":
        generation = run.noisy(np.full(run.steps, 3.0), 0.4)
    tokens = flat.sum(axis=1)
    update = run.noisy(2 + tokens * 9e-5, 0.04)
    passes = run.noisy(np.full(run.steps, 2.0), 0.03)
    step = generation + update + 2 * passes + 0.4
    columns = {
        "timing_s/gen": generation,
        "timing_s/old_log_prob": passes,
        "timing_s/ref": run.noisy(passes, 0.02),
        "timing_s/adv": run.noisy(np.full(run.steps, 0.02), 0.1),
        "timing_s/update_actor": update,
        "timing_s/step": step,
        "timing_per_token_ms/gen": 1000 * generation / tokens,
        "perf/time_per_step": step,
        "perf/throughput": tokens / step / 8,
        "perf/mfu/actor": run.noisy(np.full(run.steps, 0.31), 0.03),
    }
    if keys == "async":
        columns |= {"separate_async/switch/count": np.zeros(run.steps)}
    return columns


def _memory(run: _Run, keys: KeySet) -> dict[str, Floats]:
    settled = run.traits["memory"] * (1 - 0.05 * np.exp(-run.t / 5))
    if run.has("memory_pressure"):
        end = 0.98 * DEVICE_MEMORY_GB
        settled = settled + (end - settled) * np.minimum(run.sick / 15, 1.0)
    reserved = np.maximum.accumulate(np.round(settled * 8) / 8)
    prefix = "perf" if keys == "0.4" else "actor/perf"
    return {
        f"{prefix}/max_memory_allocated_gb": np.round(reserved * 0.75 * 8) / 8,
        f"{prefix}/max_memory_reserved_gb": reserved,
        f"{prefix}/cpu_memory_used_gb": 140 + run.rng.uniform(0, 3, run.steps),
    }


def _trainer(run: _Run, keys: KeySet) -> dict[str, Floats]:
    steps = run.steps
    mean = np.round(run.rng.normal(1380, 40, steps))
    columns: dict[str, Floats] = {
        "global_seqlen/mean": mean,
        "global_seqlen/min": mean - 300,
        "global_seqlen/max": mean + 300,
        "global_seqlen/minmax_diff": np.full(steps, 600.0),
        "global_seqlen/balanced_min": mean - 3,
        "global_seqlen/balanced_max": mean + 3,
        "training/global_step": run.t,
        "training/epoch": np.floor(run.t / 100),
    }
    if keys == "0.4":
        return columns
    columns |= {
        "timing_s/update_weights": run.noisy(np.full(steps, 2.2), 0.03),
        "response/aborted_ratio": np.zeros(steps),
        "training/num_turns/mean": np.full(steps, 2.0),
        "num_turns/mean": np.full(steps, 2.0),
        "training/rollout_probs_diff_mean": run.noisy(np.full(steps, 0.0035), 0.1),
        "training/rollout_actor_probs_pearson_corr": 1 - run.noisy(np.full(steps, 8e-4), 0.2),
        "rollout_corr/kl": run.noisy(np.full(steps, 7e-4), 0.2),
        "rollout_corr/k3_kl": run.noisy(np.full(steps, 8e-4), 0.1),
        "rollout_corr/chi2_token": run.noisy(np.full(steps, 1.7e-3), 0.1),
        "rollout_corr/chi2_seq": run.noisy(np.full(steps, 0.23), 0.1),
        "rollout_corr/ppl_ratio": 1 + run.rng.normal(3e-4, 1e-5, steps),
    }
    stale = np.zeros(steps)
    if keys == "async":
        stale = np.clip(run.rng.normal(0.6, 0.1, steps), 0, 1)
        if run.has("stale_policy"):
            stale = stale + np.minimum(run.sick / 4, 10.0)
        # verl drops what is older than 8 versions, and logs how many only where there are some.
        dropped = np.round(run.prompts * np.clip((stale - 5) / 10, 0, 1))
        if dropped.any():
            columns["training/off_policy/evicted_samples"] = np.where(dropped, dropped, math.nan)
    for part, values in (("mean", stale), ("max", np.ceil(stale)), ("min", np.floor(stale))):
        columns[f"training/off_policy/trajectory_staleness/{part}"] = values
        columns[f"training/off_policy/trajectory_spans/{part}"] = np.ones(steps)
    return columns


def _with_validation(columns: dict[str, Floats], run: _Run, every: int) -> pa.Table:
    """A row of step 0 with the validation only, and validations in every so many steps."""
    count = run.steps + 1
    first = np.arange(count) == 0
    arrays: dict[str, pa.Array] = {STEP: pa.array(np.arange(count, dtype=np.int64))}
    for name, values in columns.items():
        absent = np.concatenate([[True], np.isnan(values) & (name in _NOT_IN_EVERY_STEP)])
        arrays[name] = pa.array(np.concatenate([[0.0], values]), mask=absent)
    validated = first | (np.arange(count) % max(every, 1) == 0)
    accuracy = np.concatenate([[run.traits["first_reward"]], columns["critic/score/mean"]])
    measured = np.clip(accuracy + run.rng.normal(0, 0.02, count), 0, 1)
    arrays["val-core/arith/acc/mean@4"] = pa.array(measured, mask=~validated)
    arrays["val-aux/arith/reward/mean@4"] = arrays["val-core/arith/acc/mean@4"]
    arrays["timing_s/testing"] = pa.array(
        14 + run.rng.normal(0, 0.2, count), mask=~validated | first
    )
    return pa.table(arrays)
