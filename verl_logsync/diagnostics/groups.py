"""Reductions of rollout dumps -> columns of the history, and what each of them means.

Training dumps (and those of unknown kind) give `grpo/...`, validation dumps the same under
`grpo_val/...`, so that both can stand in the row of one step. What could not be computed has no
value, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from verl_logsync.columns import STEP
from verl_logsync.rollouts.values import MOST_BINS, Histogram, StepReduction
from verl_logsync.table_builder import TableBuilder

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Described:
    """One key: how it is computed, from what, what is healthy, and who says so.

    A `{k}` or `{KEY}` in the key stands for a number or a name. "rule" as source means practice
    or a derivation, not a published bound. `since` is the version of the diagnostics that has it
    first.
    """

    key: str
    formula: str
    needs: str
    healthy: str
    source: str
    unit: str = "1"
    since: int = 1


_DUMP: Final = "rollout dump"
_TWO: Final = "rollout dump, groups of two rows or more"
_SUCCESS: Final = "rollout dump, scores of 0/1 or -1/1 or a success threshold"
_UNFILTERED: Final = "rollout dump of a trainer that does not drop groups (not DAPO)"
_TRAINING: Final = "training dump, GRPO with norm_adv_by_std_in_grpo"

#: Every key that `grpo_columns` can give, for training dumps.
DESCRIBED: Final[tuple[Described, ...]] = (
    Described("grpo/rows", "rows without padding and earlier trajectories", _DUMP, "", "", "rows"),
    Described("grpo/groups", "groups of any size", _DUMP, "", "", "groups"),
    Described(
        "grpo/group_size",
        "rollout.n as given, else the most frequent size",
        _DUMP,
        "constant",
        "rule",
        "rows",
    ),
    Described(
        "grpo/groups_single", "groups of one row", _DUMP, "0, unless n = 1", "rule", "groups"
    ),
    Described(
        "grpo/groups_uneven", "groups of another size than group_size", _DUMP, "0", "rule", "groups"
    ),
    Described(
        "grpo/groups_unscored",
        "groups with a score that is not finite; they are in no statistic of scores",
        _DUMP,
        "0",
        "rule",
        "groups",
    ),
    Described("grpo/rows_unscored", "rows whose score is not finite", _DUMP, "0", "rule", "rows"),
    Described("grpo/score_mean", "mean of all scores", _DUMP, "rising", "", "score"),
    Described("grpo/score_max", "highest score", _DUMP, "", "", "score"),
    Described("grpo/score_min", "lowest score", _DUMP, "", "", "score"),
    Described(
        "grpo/score_at_max_share",
        "rows with the highest score of the step / rows",
        _DUMP,
        "not near 1: saturated",
        "rule",
    ),
    Described(
        "grpo/score_skewness",
        "m3 / m2^1.5 over all scores, m_k = mean (r - mean)^k",
        _DUMP,
        "judge it with the mean: 0/1 scores are left-skewed above 0.5",
        "statistics",
    ),
    Described("grpo/score_kurtosis", "m4 / m2^2 - 3 over all scores", _DUMP, "", "statistics"),
    Described(
        "grpo/within_group_skewness",
        "m3 / m2^1.5 over scores minus the mean of their group",
        _TWO,
        "near 0",
        "rule",
    ),
    Described(
        "grpo/within_group_kurtosis",
        "m4 / m2^2 - 3 over scores minus the mean of their group",
        _TWO,
        "",
        "statistics",
    ),
    Described(
        "grpo/within_group_std",
        "mean over groups of the standard deviation (division by n - 1) of their scores",
        _TWO,
        "> 0; falling while the reward is flat: the signal dies",
        "TRL reward_std; DeepSeekMath arXiv 2402.03300",
        "score",
    ),
    Described(
        "grpo/zero_spread_share",
        "groups whose highest score is their lowest / groups of two rows or more",
        _UNFILTERED,
        "< 0.5 (rule); 1: no gradient; rising: data too easy or too hard",
        "TRL frac_reward_zero_std; arXiv 2509.21880; DAPO arXiv 2503.14476",
    ),
    Described(
        "grpo/zero_spread_best_share",
        "groups without spread that are solved / groups of two rows or more",
        f"{_UNFILTERED}; {_SUCCESS}",
        "rising: data too easy",
        "rule",
    ),
    Described(
        "grpo/zero_spread_worst_share",
        "groups without spread that are not solved / groups of two rows or more",
        f"{_UNFILTERED}; {_SUCCESS}",
        "rising: data too hard",
        "rule",
    ),
    Described(
        "grpo/effective_prompt_ratio",
        "groups with spread / all groups with scores (those of one row have none)",
        _UNFILTERED,
        "> 0.5 (rule); below 0.3 DAPO would generate over 3 times as much",
        "DAPO arXiv 2503.14476",
    ),
    Described(
        "grpo/success_threshold", "a row is solved from this score on", _SUCCESS, "", "", "score"
    ),
    Described("grpo/solved_share", "solved rows / rows", _SUCCESS, "rising", ""),
    Described(
        "grpo/pass@{k}",
        "mean over groups of n >= k rows, c of them solved, of 1 - C(n - c, k) / C(n, k);"
        " k = 1, 2, 4, ... and n",
        _SUCCESS,
        "pass@1 up while pass@n falls: diversity is lost (rule)",
        "Chen et al. arXiv 2107.03374; PKPO arXiv 2505.15201",
    ),
    Described(
        "grpo/pass@n",
        "pass@k with k = group_size: under one name whatever the size",
        f"{_SUCCESS}; a group of group_size rows",
        "not falling while pass@1 rises: exploration is lost (rule)",
        "Chen et al. arXiv 2107.03374; PKPO arXiv 2505.15201",
        since=2,
    ),
    Described(
        "grpo/advantage_max",
        "highest (r - group mean) / (group std + 1e-6)",
        _TRAINING,
        "at the bound: some group has one success only; above it: another n, or merged groups",
        "derivation (Samuelson's inequality)",
    ),
    Described(
        "grpo/advantage_min",
        "lowest (r - group mean) / (group std + 1e-6)",
        _TRAINING,
        "at minus the bound: some group has one failure only",
        "derivation (Samuelson's inequality)",
    ),
    Described(
        "grpo/advantage_bound",
        "(n - 1) / sqrt(n) with n = group_size",
        _TRAINING,
        "1.789 (n = 5), 2.475 (8), 3.75 (16)",
        "derivation (Samuelson's inequality)",
    ),
    Described(
        "grpo/advantage_positive_share",
        "rows with advantage > 0 / rows in groups of two or more",
        _TRAINING,
        "",
        "rule",
    ),
    Described(
        "grpo/advantage_negative_share",
        "rows with advantage < 0 / rows in groups of two or more",
        _TRAINING,
        "",
        "rule",
    ),
    Described(
        "grpo/output_characters_mean",
        "mean length of the outputs (dumps hold no token counts)",
        _DUMP,
        "",
        "",
        "characters",
    ),
    Described(
        "grpo/length_score_correlation",
        "Pearson's correlation of length and score over all rows",
        f"{_DUMP}, spread in both",
        "near 0; strongly negative: wrong answers ramble; positive: length is rewarded",
        "Dr. GRPO arXiv 2503.20783",
    ),
    Described(
        "grpo/length_score_correlation_within",
        "mean over groups of that correlation, where a group of three rows has spread in both",
        f"{_DUMP}, spread in both within a group",
        "as above; needs about 15 groups: below, 0.3 is passed by chance",
        "Dr. GRPO arXiv 2503.20783",
    ),
    Described(
        "grpo/length_score_correlation_groups",
        "how many groups the correlation within groups is a mean of",
        _DUMP,
        ">= 15",
        "rule",
        "groups",
    ),
    Described(
        "grpo/wrong_minus_right_characters",
        "mean length of rows that are not solved minus that of rows that are",
        _SUCCESS,
        "near 0; growing: wrong answers ramble",
        "Dr. GRPO arXiv 2503.20783",
        "characters",
    ),
    Described(
        "grpo/unique_output_share",
        "mean over groups of different outputs / rows",
        _TWO,
        "> 0.9 for long answers; 1/n: temperature 0 or collapsed",
        "rule (PKPO arXiv 2505.15201)",
    ),
    Described(
        "grpo/format_share",
        "rows in which the format pattern is found / rows",
        "rollout dump, format pattern",
        "rising early; falling: truncation or reward hacking",
        "rule",
    ),
    Described(
        "grpo/no_answer_share",
        "rows without final answer / rows",
        "rollout dump, answer pattern or a key such as pred",
        "falling early; rising: truncation or reward hacking",
        "rule",
    ),
    Described(
        "grpo/answer_agreement",
        "mean over groups of rows with the most frequent answer / rows",
        "rollout dump, answer pattern or a key such as pred",
        "rising with the reward; rising while it is flat: confident errors",
        "rule (maj@k)",
    ),
    Described(
        "grpo/prompt_repetition",
        "1 - different prompts / uses of prompts in the step",
        _DUMP,
        "0 but at the end of an epoch",
        "rule",
    ),
    Described(
        "grpo/score_acc_agreement",
        "rows in which (score >= success) = (acc >= 0.5) / rows with both",
        f"{_SUCCESS}; numeric acc",
        "near 1; DAPO may write acc into other rows",
        "verl issue 4232",
    ),
    Described(
        "grpo/solved",
        "histogram: whole groups with 0, 1, ..., n solved rows",
        _SUCCESS,
        "mass between 1 and n - 1; a U shape: little to learn",
        "DAPO arXiv 2503.14476",
        "groups",
    ),
    Described("reward/group_distribution", "histogram of all scores", _DUMP, "", "", "rows"),
    Described(
        "grpo/group_means",
        "histogram of the groups' mean scores",
        _DUMP,
        "mass away from both ends",
        "rule",
        "groups",
    ),
    Described(
        "grpo/group_spread",
        "histogram of the groups' standard deviations (division by n - 1)",
        _TWO,
        "little mass at 0",
        "rule",
        "groups",
    ),
    Described(
        "rollout_extra/{KEY}/mean",
        "mean of a numeric extra of the reward function, where it is finite",
        "rollout dump with reward extras (v0, or a validation)",
        "",
        "",
        "its own",
    ),
    Described(
        "rollout_extra/{KEY}/std",
        "standard deviation (division by the count) of that extra",
        "rollout dump with reward extras (v0, or a validation)",
        "",
        "",
        "its own",
    ),
)

#: Where the histograms of a reduction go.
_HISTOGRAMS: Final[Mapping[str, str]] = {
    "scores": "reward/group_distribution",
    "group_means": "grpo/group_means",
    "group_spreads": "grpo/group_spread",
}
#: The families of keys of validation dumps, by those of training dumps.
VALIDATION: Final[Mapping[str, str]] = {
    "grpo": "grpo_val",
    "reward": "reward_val",
    "rollout_extra": "rollout_extra_val",
}


def grpo_columns(reductions: Iterable[StepReduction]) -> pa.Table:
    """One row a reduction that has rows, in the given order: `_step` and the keys of `DESCRIBED`.

    Numbers are float64 columns, histograms JSON text of W&B's histogram objects (see
    `verl_logsync.columns`); a key that a step lacks is missing in its row.
    """
    import pyarrow as pa

    steps: list[int] = []
    builder = TableBuilder()
    for reduction in reductions:
        if reduction.rows:
            steps.append(reduction.step)
            builder.add(dict(_named(reduction)))
    return pa.table({STEP: pa.array(steps, type=pa.int64()), **builder.columns()})


def _named(reduction: StepReduction) -> Iterator[tuple[str, Any]]:
    """The keys and values of one step."""
    for key, value in _values(reduction):
        if reduction.kind == "validation":
            family, _, rest = key.partition("/")
            yield f"{VALIDATION[family]}/{rest}", value
        else:
            yield key, value


def _values(reduction: StepReduction) -> Iterator[tuple[str, Any]]:
    yield "grpo/rows", float(reduction.rows)
    if reduction.group_size is not None:
        yield "grpo/group_size", float(reduction.group_size)
    for name, value in reduction.statistics.items():
        yield f"grpo/{name}", value
    for k in _chosen(len(reduction.pass_at_k)):
        yield f"grpo/pass@{k}", reduction.pass_at_k[k - 1]
    if reduction.pass_at_k and len(reduction.pass_at_k) == reduction.group_size:
        yield "grpo/pass@n", reduction.pass_at_k[-1]
    if reduction.solved:
        yield "grpo/solved", _solved(reduction.solved).for_wandb
    for name, key in _HISTOGRAMS.items():
        if name in reduction.histograms:
            yield key, reduction.histograms[name].for_wandb
    for name, extra in reduction.extras.items():
        yield f"rollout_extra/{name}/mean", extra.mean
        yield f"rollout_extra/{name}/std", extra.std


def _chosen(most: int) -> list[int]:
    """1, 2, 4, ... and the last, as verl chooses k; a column for every k of 1024 helps nobody."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
    return sorted({*powers, most} - {0})


def _solved(counts: tuple[int, ...]) -> Histogram:
    """A bin of width 1 around each number of solved rows; of many, neighbours share one."""
    width = -(-len(counts) // MOST_BINS)
    merged = tuple(sum(counts[start : start + width]) for start in range(0, len(counts), width))
    return Histogram(tuple(width * i - 0.5 for i in range(len(merged) + 1)), merged)
