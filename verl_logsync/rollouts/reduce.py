"""One dump file -> one `StepReduction`, in one pass and little memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from verl_logsync.rollouts import statistics as st
from verl_logsync.rollouts.extras import Extra
from verl_logsync.rollouts.gather import Gathered
from verl_logsync.rollouts.grouping import Grouping
from verl_logsync.rollouts.histograms import histogram
from verl_logsync.rollouts.records import DUMP_NAME, DumpReader
from verl_logsync.rollouts.samples import CHANGED, Shelf, read_samples
from verl_logsync.rollouts.statistics import Missing, Number, Step
from verl_logsync.rollouts.values import (
    Ambiguity,
    DumpKind,
    ExtraStatistics,
    Groups,
    Histogram,
    ReductionOptions,
    SampleGroup,
    StepReduction,
)

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]

DEFAULTS: Final = ReductionOptions()
_KEPT_ONLY: Final = Missing("the trainer dropped groups without spread before it dumped")
_NO_ADVANTAGES: Final = Missing("a validation computes no advantages")


def reduce_file(
    path: Path, options: ReductionOptions = DEFAULTS, kind: DumpKind = "unknown"
) -> StepReduction:
    """What the dump file of one step comes to. A file without rows has everything missing.

    Args:
        path: a `{step}.jsonl`; under another name the step is that of its rows, or -1.
        options: what the dump does not say itself.
        kind: train or validation, when the caller knows.

    Raises:
        UnreadableInput: the file cannot be opened or read.
    """
    reader, gathered = DumpReader(path), Gathered(options)
    for block in reader.blocks():
        gathered.take(block)
    gathered.finish()
    grouping = _arranged(gathered.keys.resolve(options.group_size), gathered)
    found = _Found()
    shelf = _statistics(found, gathered, grouping, options, kind)
    extras = _extras(found, gathered, grouping, options)
    step, other_step = _step_of(path, gathered)
    return StepReduction(
        step=step,
        place=str(path),
        kind=kind,
        key_set=" + ".join(sorted(gathered.key_sets)),
        rows=len(grouping.rows),
        padding=grouping.padding,
        earlier=grouping.earlier,
        malformed=reader.malformed,
        partial=reader.partial,
        group_size=grouping.expected,
        groups=_groups(shelf),
        statistics=found.numbers,
        pass_at_k=found.pass_at_k,
        solved=found.solved,
        histograms=found.histograms,
        extras=extras,
        ambiguities=(*grouping.ambiguities, *other_step),
        samples=_samples(found, path, shelf, options),
        missing=found.missing,
        notes=tuple(found.notes),
        skips=reader.skips,
    )


def _arranged(grouping: Grouping, gathered: Gathered) -> Grouping:
    """The same groups, their rows in the order that a `Step` has."""
    rows = grouping.rows
    scores = _column(gathered.scores, np.float64)[rows]
    lengths = _column(gathered.lengths, np.uint32)[rows]
    return replace(grouping, rows=rows[st.arranged(scores, lengths, grouping.sizes)])


@dataclass(slots=True)
class _Found:
    """Statistics as they are found, and why others are not."""

    numbers: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pass_at_k: tuple[float, ...] = ()
    solved: tuple[int, ...] = ()

    def put(self, name: str, value: Number) -> None:
        if isinstance(value, Missing):
            self.missing[name] = str(value)
        elif not math.isfinite(value):
            self.missing[name] = "the values are too large"
        else:
            self.numbers[name] = value

    def put_histogram(self, name: str, values: _Floats, bins: int) -> None:
        drawn = histogram(values[np.isfinite(values)], bins)
        if isinstance(drawn, Missing):
            self.missing[name] = str(drawn)
        else:
            self.histograms[name] = drawn


def _statistics(
    found: _Found,
    gathered: Gathered,
    grouping: Grouping,
    options: ReductionOptions,
    kind: DumpKind,
) -> Shelf:
    rows = grouping.rows
    every = Step(
        _column(gathered.scores, np.float64)[rows],
        _column(gathered.lengths, np.uint32)[rows].astype(np.float64),
        _column(gathered.outputs, np.int64)[rows],
        grouping.starts,
        grouping.sizes,
    )
    scored = every.scored
    compared = scored.compared
    success = _success(scored, options)
    _counts(found, every, scored, grouping)
    _scores(found, scored, compared, options)
    _spread(found, scored, compared, success, options)
    _solved(found, scored, success, grouping.expected)
    _advantages(found, compared, grouping.expected, kind)
    _lengths(found, every, scored, success)
    _texts(found, every, gathered, rows, options)
    found.put(
        "prompt_repetition",
        st.prompt_repetition(grouping.prompts, grouping.sizes, grouping.expected, grouping.by_uid),
    )
    if not gathered.keys.digests_whole:
        found.missing["prompts"] = "more different prompts than are remembered"
    return Shelf(
        every.scores,
        _column(gathered.offsets, np.int64)[rows],
        every.outputs,
        every.starts,
        every.sizes,
        st.group_means(every),
        st.group_spreads(every),
        [gathered.keys.prompt_digest(prompt) for prompt in grouping.prompts.tolist()],
    )


def _column(column: Any, kind: type[np.generic]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(column, dtype=kind) if len(column) else np.empty(0, dtype=kind)


def _success(scored: Step, options: ReductionOptions) -> Number:
    if options.success is not None:
        return options.success if len(scored.scores) else st.NO_SCORES
    return st.success_of(scored.scores)


def _counts(found: _Found, every: Step, scored: Step, grouping: Grouping) -> None:
    groups = len(every.sizes)
    found.put("groups", float(groups))
    found.put("groups_single", float((every.sizes == 1).sum()))
    found.put("groups_uneven", float((every.sizes != (grouping.expected or 0)).sum()))
    found.put("groups_unscored", float(groups - len(scored.sizes)))
    found.put("rows_unscored", float((~np.isfinite(every.scores)).sum()))
    if len(scored.sizes) < groups:
        found.notes.append(
            f"{groups - len(scored.sizes)} groups have rows without a finite score, and are in"
            " no statistic of scores"
        )


def _scores(found: _Found, scored: Step, compared: Step, options: ReductionOptions) -> None:
    scores = scored.scores
    found.put("score_mean", st.mean(scores, st.NO_SCORES))
    found.put("score_max", float(scores.max()) if len(scores) else st.NO_SCORES)
    found.put("score_min", float(scores.min()) if len(scores) else st.NO_SCORES)
    at_max = scores == scores.max() if len(scores) else np.empty(0, dtype=bool)
    found.put("score_at_max_share", st.share(at_max, st.NO_SCORES))
    for name, values in (
        ("score", scores),
        ("within_group", st.around_group_means(compared)),
    ):
        skewness, kurtosis = st.moments(values)
        found.put(f"{name}_skewness", skewness)
        found.put(f"{name}_kurtosis", kurtosis)
    found.put_histogram("scores", scores, options.bins)
    found.put_histogram("group_means", st.group_means(scored), options.bins)
    found.put_histogram("group_spreads", st.group_spreads(compared), options.bins)


def _spread(
    found: _Found, scored: Step, compared: Step, success: Number, options: ReductionOptions
) -> None:
    found.put("within_group_std", st.mean(st.group_spreads(compared)))
    names = ("zero_spread_share", "zero_spread_best_share", "zero_spread_worst_share")
    if options.kept_groups_only:
        for name in (*names, "effective_prompt_ratio"):
            found.put(name, _KEPT_ONLY)
        return
    equal = st.zero_spread(compared)
    found.put(names[0], st.share(equal))
    useful = int((~equal).sum())
    found.put(
        "effective_prompt_ratio",
        useful / len(scored.sizes) if len(scored.sizes) else st.NO_SCORES,
    )
    best: Number | np.ndarray[Any, Any]
    for name, wanted in ((names[1], True), (names[2], False)):
        if isinstance(success, Missing):
            found.put(name, success)
        else:
            best = st.group_means(compared) >= success
            found.put(name, st.share(equal & (best == wanted)))


def _solved(found: _Found, scored: Step, success: Number, expected: int | None) -> None:
    found.put("success_threshold", success)
    why = success if isinstance(success, Missing) else None
    if why is None and (not expected or not len(scored.sizes)):
        why = st.NO_SCORES
    if why is not None or expected is None or isinstance(success, Missing):
        found.missing.update({"pass_at_k": str(why), "solved": str(why), "solved_share": str(why)})
        return
    found.pass_at_k = st.pass_at_k(scored, success, expected)
    found.solved = st.solved_histogram(scored, success, expected)
    found.put("solved_share", st.share(scored.scores >= success, st.NO_SCORES))


def _advantages(found: _Found, compared: Step, expected: int | None, kind: DumpKind) -> None:
    values = st.advantages(compared)
    computed: dict[str, Number] = {
        "advantage_max": float(values.max()) if len(values) else st.NO_GROUPS,
        "advantage_min": float(values.min()) if len(values) else st.NO_GROUPS,
        "advantage_bound": st.advantage_bound(expected or 0),
        "advantage_positive_share": st.share(values > 0),
        "advantage_negative_share": st.share(values < 0),
    }
    for name, value in computed.items():
        found.put(name, _NO_ADVANTAGES if kind == "validation" else value)


def _lengths(found: _Found, every: Step, scored: Step, success: Number) -> None:
    found.put("output_characters_mean", st.mean(every.lengths, Missing("no rows")))
    found.put("length_score_correlation", st.correlation(scored.lengths, scored.scores))
    within = st.correlations_within(scored)
    found.put("length_score_correlation_groups", float(len(within)))
    no_spread = Missing("no group of three rows has spread in both length and score")
    found.put("length_score_correlation_within", st.mean(within, no_spread))
    found.put(
        "wrong_minus_right_characters",
        success if isinstance(success, Missing) else st.wrong_minus_right(scored, success),
    )


def _texts(
    found: _Found, every: Step, gathered: Gathered, rows: _Ints, options: ReductionOptions
) -> None:
    several = every.compared
    no_groups = Missing("no group has two rows")
    found.put(
        "unique_output_share", st.mean(st.distinct_shares(several, several.outputs), no_groups)
    )
    no_rows = Missing("no rows")
    if options.form is None:
        found.put("format_share", Missing("no pattern of the right form was given"))
    else:
        found.put("format_share", st.share(_column(gathered.formed, np.int8)[rows] > 0, no_rows))
    if not gathered.has_answers:
        why = Missing("no answer pattern was given, and the dump has no key such as pred")
        found.put("no_answer_share", why)
        found.put("answer_agreement", why)
        return
    answers = _column(gathered.answers, np.int64)[rows]
    found.put("no_answer_share", st.share(answers == 0, no_rows))
    agreed = answers[np.repeat(every.sizes >= 2, every.sizes)]
    found.put("answer_agreement", st.mean(st.modal_shares(several, agreed), no_groups))


def _extras(
    found: _Found, gathered: Gathered, grouping: Grouping, options: ReductionOptions
) -> dict[str, ExtraStatistics]:
    columns = gathered.extras.finish()
    if gathered.extras.beyond:
        found.missing["rollout_extra"] = f"{gathered.extras.beyond} more keys were left out"
    if gathered.text_scores:
        found.notes.append(f"{gathered.text_scores} scores were written as text")
    kept: dict[str, ExtraStatistics] = {}
    for key, extra in columns.items():
        name = f"rollout_extra/{key}"
        if extra.values is None:
            found.missing[name] = extra.why_not
            continue
        if extra.coerced:
            found.notes.append(f"{key}: {extra.coerced} written as text were taken as such")
        summary = _summary(extra.values[grouping.rows])
        if isinstance(summary, Missing):
            found.missing[name] = str(summary)
        else:
            kept[key] = summary
    _agreement(found, columns, gathered, grouping, options)
    return kept


def _summary(values: _Floats) -> ExtraStatistics | Missing:
    finite = np.sort(values[np.isfinite(values)])
    average = st.mean(finite, Missing("it is nowhere a finite number"))
    if isinstance(average, Missing):
        return average
    with np.errstate(over="ignore", invalid="ignore"):
        spread = math.sqrt(float(((finite - average) ** 2).mean()))
    if not math.isfinite(spread):
        return Missing("the values are too large")
    return ExtraStatistics(average, 0.0 if finite[0] == finite[-1] else spread, len(finite))


def _agreement(
    found: _Found,
    columns: Mapping[str, Extra],
    gathered: Gathered,
    grouping: Grouping,
    options: ReductionOptions,
) -> None:
    """`score_acc_agreement`: see `statistics.agreement`."""
    acc = columns.get("acc")
    if acc is None or acc.values is None:
        found.put("score_acc_agreement", Missing("the dump has no numbers under acc"))
        return
    scores = _column(gathered.scores, np.float64)[grouping.rows]
    success = options.success
    threshold = st.success_of(scores[np.isfinite(scores)]) if success is None else success
    found.put("score_acc_agreement", st.agreement(scores, acc.values[grouping.rows], threshold))


def _groups(shelf: Shelf) -> Groups:
    columns = (shelf.sizes.tolist(), shelf.means.tolist(), shelf.spreads.tolist())
    rows = zip(shelf.names, *columns, strict=True)
    if np.isfinite(shelf.means).all() and np.isfinite(shelf.spreads).all():
        ordered = sorted(rows)
    else:
        ordered = sorted(rows, key=lambda row: tuple(map(_sortable, row)))
    return Groups(*map(tuple, zip(*ordered, strict=True))) if ordered else Groups()


def _sortable(value: Any) -> Any:
    return value if isinstance(value, str) or math.isfinite(value) else -math.inf


def _samples(
    found: _Found, path: Path, shelf: Shelf, options: ReductionOptions
) -> tuple[SampleGroup, ...]:
    try:
        samples, why_not = read_samples(path, shelf, options)
    except OSError:
        samples, why_not = (), CHANGED
    if why_not:
        found.missing["samples"] = why_not
    return samples


def _step_of(path: Path, gathered: Gathered) -> tuple[int, tuple[Ambiguity, ...]]:
    named = DUMP_NAME.match(path.name)
    seen = gathered.steps
    step = int(named[1]) if named else min(seen, default=-1)
    others = sorted(seen - {step})
    if not others:
        return step, ()
    listed = ", ".join(map(str, others[:5])) + (", ..." if len(others) > 5 else "")
    text = f"rows say step {listed}, the file is called {path.name}"
    return step, (Ambiguity("other step", len(others), text),)
