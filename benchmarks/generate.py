"""The data of the benches, made from nothing: the same arguments give the same bytes.

verl logs have the key set that verl 0.9.1's default GRPO trainer writes without a KL loss (90
metrics a training step, 33 more in a step with validation), float32 results printed as
float64, integers, and constants, as orjson writes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

_SPREAD: Final = ("mean", "max", "min")

#: The metrics of a training step, in the order in which verl logs them.
TRAINING_KEYS: Final[tuple[str, ...]] = (
    *(
        f"global_seqlen/{k}"
        for k in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")
    ),
    "actor/entropy",
    *(f"training/rollout_probs_diff_{k}" for k in ("valid", "max", "mean", "std")),
    "training/rollout_actor_probs_pearson_corr",
    *(
        f"rollout_corr/{k}"
        for k in (
            "training_ppl",
            "training_log_ppl",
            "kl",
            "k3_kl",
            "rollout_ppl",
            "rollout_log_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "log_ppl_diff_max",
            "log_ppl_diff_min",
            "ppl_ratio",
            "chi2_token",
            "chi2_seq",
        )
    ),
    *(
        f"actor/{k}"
        for k in (
            "pg_clipfrac",
            "ppo_kl",
            "pg_clipfrac_lower",
            "pg_loss",
            "loss",
            "grad_norm",
            "perf/max_memory_allocated_gb",
            "perf/max_memory_reserved_gb",
            "perf/cpu_memory_used_gb",
            "lr",
        )
    ),
    "perf/mfu/actor",
    "training/global_step",
    "training/epoch",
    *(f"critic/{k}/{s}" for k in ("score", "rewards", "advantages", "returns") for s in _SPREAD),
    *(
        f"{k}/{s}"
        for k in ("response_length", "response_length_non_aborted")
        for s in (*_SPREAD, "clip_ratio")
    ),
    "response/aborted_ratio",
    *(f"prompt_length/{s}" for s in (*_SPREAD, "clip_ratio")),
    *(f"num_turns/{s}" for s in ("min", "max", "mean")),
    *(
        f"timing_s/{k}"
        for k in ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
    ),
    *(f"timing_per_token_ms/{k}" for k in ("gen", "update_actor", "adv")),
    *(f"perf/{k}" for k in ("total_num_tokens", "time_per_step", "throughput")),
    *(f"training/num_turns/{s}" for s in _SPREAD),
    *(
        f"training/off_policy/trajectory_{k}/{s}"
        for k in ("spans", "staleness", "staleness_worst")
        for s in _SPREAD
    ),
)

#: The metrics that a validation adds to its step.
VALIDATION_KEYS: Final[tuple[str, ...]] = (
    *(
        f"val-{'core' if (k, s) in {('acc', 'mean@4'), ('acc', 'best@4/mean')} else 'aux'}"
        f"/openai/gsm8k/{k}/{s}"
        for k in ("reward", "acc", "acc_success_only")
        for s in (
            "mean@4",
            "std@4",
            "best@2/mean",
            "best@2/std",
            "worst@2/mean",
            "worst@2/std",
            "best@4/mean",
            "best@4/std",
            "worst@4/mean",
            "worst@4/std",
        )
    ),
    *(f"val-aux/num_turns/{s}" for s in ("min", "max", "mean")),
)

#: Every so many steps are validated.
VALIDATE_EVERY: Final = 20

_WHOLE: Final = ("num_turns/m", "staleness", "spans/m", "total_num_tokens", "val-aux/num_turns/m")
_ROUND: Final = (
    "global_seqlen",
    "length/max",
    "length/min",
    "aborted/max",
    "aborted/min",
    "perf/max_memory",
    "perf/cpu_memory",
)
_FIXED: Final = {
    "actor/lr": 1e-6,
    "actor/pg_clipfrac_lower": 0.0,
    "response/aborted_ratio": 0.0,
    "training/rollout_probs_diff_valid": 1.0,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/rewards/max": 1.0,
    "critic/rewards/min": 0.0,
}


def rows(
    count: int,
    *,
    metrics: int = len(TRAINING_KEYS),
    seed: int = 0,
    validate_every: int = VALIDATE_EVERY,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps 1 to `count` of a run, each with its values.

    Args:
        count: how many steps.
        metrics: how many of the training keys; the step time is always among them.
        seed: another seed gives another run.
        validate_every: steps from one validation to the next; 0 for none.
    """
    numbers = np.random.default_rng(seed)
    keys = training_keys(metrics)
    training = [_values(key, count, numbers) for key in keys]
    validations = count // validate_every if validate_every else 0
    validated = zip(*[_values(key, validations, numbers) for key in VALIDATION_KEYS], strict=True)
    for step, values in enumerate(zip(*training, strict=True), start=1):
        row = dict(zip(keys, values, strict=True))
        if validate_every and step % validate_every == 0:
            row.update(zip(VALIDATION_KEYS, next(validated), strict=True))
        yield step, row


def training_keys(metrics: int) -> tuple[str, ...]:
    """So many of the training keys, the step time among them."""
    if not 1 <= metrics <= len(TRAINING_KEYS):
        raise ValueError(f"metrics must be 1 to {len(TRAINING_KEYS)}, not {metrics}")
    kept = TRAINING_KEYS[:metrics]
    return kept if "timing_s/step" in kept else (*kept[:-1], "timing_s/step")


def _values(key: str, count: int, numbers: np.random.Generator) -> Sequence[Any]:
    if key in _FIXED:
        return [_FIXED[key]] * count
    if key == "training/global_step":
        return range(1, count + 1)
    if key == "training/epoch":
        return [step // 200 for step in range(count)]
    if any(part in key for part in _WHOLE) and not key.endswith("/mean"):
        return _listed(numbers.integers(0, 20_000 if "tokens" in key else 4, count))
    if any(part in key for part in _ROUND):
        return _listed(numbers.integers(200, 9_000, count) / 4)
    drift = np.cumsum(numbers.normal(0.0, 0.01, count)) + numbers.normal(0.0, 0.05, count)
    if key.startswith(("timing", "perf", "val")):
        return _listed(np.abs(2.0 + drift))
    return _listed(drift.astype(np.float32).astype(np.float64))


def _listed(values: np.ndarray[Any, Any]) -> list[Any]:
    listed: list[Any] = values.tolist()
    return listed


def verl_file(path: Path, count: int, *, metrics: int = len(TRAINING_KEYS), seed: int = 0) -> Path:
    """Write one file of verl's `file` logger, of a run that ended long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        for step, values in rows(count, metrics=metrics, seed=seed):
            stream.write(orjson.dumps({"step": step, "data": values}) + b"\n")
    over = time.time() - 10 * 3600
    os.utime(path, (over, over))
    return path


def verl_files(folder: Path, runs: int, steps: int, *, metrics: int = len(TRAINING_KEYS)) -> Path:
    """Write `folder/grpo/exp-NNN.jsonl` for so many runs; returns the folder."""
    for number in range(runs):
        verl_file(folder / "grpo" / f"exp-{number:03}.jsonl", steps, metrics=metrics, seed=number)
    return folder


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a verl file, as a script of a user would read them."""
    with path.open("rb") as stream:
        for line in stream:
            record = orjson.loads(line)
            yield record["step"], record["data"]


_WORDS: Final = (
    *("the", "then", "check", "sum", "count", "add", "rest", "so", "we"),
    *("\n", "é", '"x"', "\\frac{1}{2}"),
)


def rollout_dump(path: Path, size: int, *, group: int = 8, characters: int = 4000) -> Path:
    """Write a dump of the v1 trainer of at least so many bytes: groups of responses of 400 to
    about so many characters, as many words of which one in four is not plain ASCII or escaped.
    """
    numbers = np.random.default_rng(0)
    texts = [" ".join(numbers.choice(_WORDS, characters // 3)) for _ in range(200)]
    written = 0
    with path.open("wb") as stream:
        while written < size:
            name = numbers.bytes(16).hex()
            prompt = f"system\nsolve it\nuser\n{name} {texts[written % 200][:500]}"
            for session in range(group):
                answer = f"\n#### {numbers.integers(4)}"
                length = int(numbers.integers(400, characters))
                row = {
                    "input": prompt,
                    "output": f"The {texts[int(numbers.integers(200))][:length]}{answer}",
                    "gts": "1",
                    "score": float(answer.endswith("1")),
                    "step": 1,
                    "uid": f"{name}_{session}_0",
                }
                written += stream.write(orjson.dumps(row) + b"\n")
    return path
