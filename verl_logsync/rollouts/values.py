"""The values that the reduction of rollout dumps hands over. All are frozen and JSON-serialisable.

Units: scores as verl dumped them (the sum of token-level scores, before any KL term), lengths in
characters of the decoded output (dumps hold no token counts), shares from 0 to 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final, Literal

import orjson

from verl_logsync.errors import UsageError
from verl_logsync.model import Skip, SkipReason
from verl_logsync.rollouts.patterns import TextPattern

#: Raise it whenever a statistic changes its meaning: what older programs cached is forgotten.
REDUCTION_VERSION: Final = 2
#: W&B refuses histograms with more bins.
MOST_BINS: Final = 512

DumpKind = Literal["train", "validation", "unknown"]


@dataclass(frozen=True)
class ReductionOptions:
    """What the reduction must be told, because no dump says it.

    `group_size` is `actor_rollout_ref.rollout.n` (None: the most frequent size). A row is solved
    when its score is at least `success`; with None that is 1, and only where all scores of the
    step are 0/1 or -1/1 (or all three). `answer_pattern` finds the final answer in an output (the
    last match counts; its first bracket if it has one), `format_pattern` is found in outputs of
    the right form (both RE2, see `patterns`); they cost time, and without the first the answer is
    taken from the first of `answer_keys` that the dump has. `kept_groups_only` says that the
    trainer dropped groups without spread before it dumped (DAPO's `algorithm.filter_groups`).

    Raises:
        UsageError: a value that means nothing, with what would.
    """

    group_size: int | None = None
    success: float | None = None
    answer_pattern: str = ""
    format_pattern: str = ""
    answer_keys: tuple[str, ...] = ("pred", "prediction", "extracted_answer", "answer")
    kept_groups_only: bool = False
    bins: int = 64
    sample_groups: int = 1
    sample_outputs: int = 4
    sample_characters: int = 2000

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"a group has at least one row, not {self.group_size}")
        if self.success is not None and not math.isfinite(self.success):
            raise UsageError(f"the success threshold must be a number, not {self.success}")
        if not 1 <= self.bins <= MOST_BINS:
            raise UsageError(f"a histogram has 1 to {MOST_BINS} bins, not {self.bins}")
        if min(self.sample_groups, self.sample_outputs, self.sample_characters) < 0:
            raise UsageError("sizes of samples cannot be negative")
        _ = self.answer, self.form

    @cached_property
    def answer(self) -> TextPattern | None:
        """The answer pattern; None where there is none."""
        return TextPattern(self.answer_pattern) if self.answer_pattern else None

    @cached_property
    def form(self) -> TextPattern | None:
        """The format pattern; None where there is none."""
        return TextPattern(self.format_pattern) if self.format_pattern else None

    @cached_property
    def digest(self) -> str:
        """Identifies what they ask for: reductions with other options are other reductions."""
        text = repr([(f.name, getattr(self, f.name)) for f in fields(self)])
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Histogram:
    """`edges` has one more item than `counts`: bin i is [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def for_wandb(self) -> dict[str, Any]:
        """The object that W&B draws as a histogram."""
        return {"_type": "histogram", "bins": list(self.edges), "values": list(self.counts)}


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Something about the groups that the dump does not settle.

    `kind` is one of: ``size unknown``, ``sizes tied``, ``other size``, ``smaller groups``,
    ``merged groups``, ``larger groups``, ``uid twice``, ``uid of no use``, ``uid missing``,
    ``other step``. `count` says how many groups (rows, where the text says so) it concerns.
    """

    kind: str
    count: int
    text: str


@dataclass(frozen=True, slots=True)
class ExtraStatistics:
    """One numeric extra of the reward function: over the `count` rows where it is finite.

    `std` is that of the population (division by `count`).
    """

    mean: float
    std: float
    count: int


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One response; `length` characters, of which `text` may hold only the first."""

    score: float
    length: int
    text: str


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A group to look at. `why` is ``best``, ``worst`` or ``most split``."""

    why: str
    mean: float
    spread: float
    size: int
    prompt_length: int
    prompt: str
    gts: str
    outputs: tuple[SampleOutput, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """What each group came to, four columns of equal length, in an order of no meaning.

    `prompts` identify input (and gts) on every machine; they are empty where the step has so
    many prompts that they were not remembered. `means` and `spreads` (standard deviation with
    division by n - 1, as verl's) are NaN where they do not exist.
    """

    prompts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    means: tuple[float, ...] = ()
    spreads: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReduction:
    """What one dump file comes to.

    Every row is counted once: lines = `rows` + `padding` + `earlier` (trajectories of a session
    before its last one) + `malformed`. `statistics` holds numbers by name (defined in
    `verl_logsync.rollouts.statistics`), `pass_at_k` the estimate for k = 1, 2, ..., `solved` how
    many groups have 0, 1, ... solved rows. What could not be computed is in `missing`, with why.
    `partial` says that the last line was not finished when it was read.
    """

    step: int
    place: str
    kind: DumpKind = "unknown"
    key_set: str = ""
    rows: int = 0
    padding: int = 0
    earlier: int = 0
    malformed: int = 0
    partial: bool = False
    group_size: int | None = None
    groups: Groups = Groups()
    statistics: Mapping[str, float] = field(default_factory=dict)
    pass_at_k: tuple[float, ...] = ()
    solved: tuple[int, ...] = ()
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    extras: Mapping[str, ExtraStatistics] = field(default_factory=dict)
    ambiguities: tuple[Ambiguity, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    samples: tuple[SampleGroup, ...] = ()
    notes: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()
    version: int = REDUCTION_VERSION

    def as_json(self) -> bytes:
        """JSON text in one line; `from_json` gives an equal value."""
        values = asdict(self)
        values["skips"] = [
            (s.reason.value, s.place, s.detail, s.hint, s.records) for s in self.skips
        ]
        return orjson.dumps(values)


def from_json(text: bytes) -> StepReduction:
    """A reduction from its JSON text.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    values = orjson.loads(text)
    groups = {key: tuple(items) for key, items in values["groups"].items()}
    numbers = {key: _numbers(groups[key]) for key in ("means", "spreads")}
    return StepReduction(
        **{
            **values,
            "groups": Groups(**{**groups, **numbers}),
            "pass_at_k": tuple(values["pass_at_k"]),
            "solved": tuple(values["solved"]),
            "histograms": {
                name: Histogram(tuple(item["edges"]), tuple(item["counts"]))
                for name, item in values["histograms"].items()
            },
            "extras": {key: ExtraStatistics(**item) for key, item in values["extras"].items()},
            "ambiguities": tuple(Ambiguity(**item) for item in values["ambiguities"]),
            "samples": tuple(map(_sample, values["samples"])),
            "notes": tuple(values["notes"]),
            "skips": tuple(Skip(SkipReason(item[0]), *item[1:]) for item in values["skips"]),
        }
    )


def _numbers(items: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if item is None else float(item) for item in items)


def _sample(values: dict[str, Any]) -> SampleGroup:
    outputs = tuple(SampleOutput(**item) for item in values["outputs"])
    spread = math.nan if values["spread"] is None else values["spread"]
    return replace(SampleGroup(**{**values, "outputs": outputs}), spread=spread)
