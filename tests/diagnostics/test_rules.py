"""The rule engine: every kind of condition by hand, user files, findings as intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from verl_logsync.columns import STEP
from verl_logsync.diagnostics import diagnose, load_rules
from verl_logsync.diagnostics.configuration import Configuration
from verl_logsync.diagnostics.findings import Finding
from verl_logsync.diagnostics.parts import KINDS, Condition, Values
from verl_logsync.diagnostics.rules import Health, Rule, judge
from verl_logsync.diagnostics.series import Frame
from verl_logsync.errors import UsageError
from verl_logsync.testing.tables import column, series, table


def rule(*conditions: Condition, severity: Any = "warning", **more: Any) -> Rule:
    return Rule("CODE", "Title", severity, "advice", "source", conditions, **more)


def judged(
    rows: pa.Table, *conditions: Condition, config: dict[str, Any] | None = None, **more: Any
) -> Health:
    return judge(Frame(rows, {}), Configuration(config or {}), [rule(*conditions, **more)])


def levels(health: Health) -> list[int | None]:
    return column(health.columns, "health/CODE")


def spans(health: Health) -> list[tuple[str, int, int]]:
    return [(f.severity, f.first_step, f.last_step) for f in health.findings]


def holds(values: Sequence[float], condition: Condition) -> list[int]:
    """The places where a condition holds."""
    import numpy as np

    seen = KINDS[condition.kind](Values(np.array(values, dtype=float)), condition)
    return [place for place, there in enumerate(seen.holds.tolist()) if there]


# -- conditions ------------------------------------------------------------------------------


def test_level() -> None:
    """Above the limit, not at it; NaN never."""
    condition = Condition("level", ("x",), above=1.0)
    assert holds([0, 1, 2, math.nan, 3], condition) == [2, 4]
    assert holds([0, 1, 2], Condition("level", ("x",), below=1.0)) == [0]


def test_level_for_some_rows_on_end_after_a_warm_up() -> None:
    """The third of three in a row is the first that counts; the first four values never do."""
    condition = Condition("level", ("x",), above=1.0, rows=3)
    assert holds([2, 2, 0, 2, 2, 2, 2], condition) == [5, 6]
    assert holds([2] * 6, Condition("level", ("x",), above=1.0, warm_up=4)) == [4, 5]


def test_smoothed_level() -> None:
    """The median of three: a single outlier is none."""
    condition = Condition("level", ("x",), above=1.0, smooth=3)
    assert holds([0, 0, 9, 0, 9, 9], condition) == [4, 5]


JUMP = Condition("jump", ("x",), above=2.0, window=4, least=3)


def test_jump_against_the_median_before() -> None:
    """5 is more than twice the median of what came before it, which leaves it out."""
    assert holds([1, 1, 1, 1, 5, 1], JUMP) == [4]
    assert holds([1, 1, 5], JUMP) == []  # fewer than `least` before
    assert holds([1, 1, 1, 1, 2, 1], JUMP) == []  # twice is not more than twice


def test_the_reference_leaves_out_all_rows_being_judged() -> None:
    """With two rows to hold, neither of them is in the median it is compared with."""
    condition = Condition("jump", ("x",), above=2.0, window=3, least=3, rows=2)
    assert holds([1, 1, 1, 1, 5, 5], condition) == [5]


def test_a_jump_that_lasts_is_told_until_it_becomes_normal() -> None:
    """The reference stands still for `hold` values; after that the new level is the run's own."""
    condition = Condition("jump", ("x",), above=2.0, window=4, least=3, hold=6)
    assert holds([1] * 4 + [5] * 12, condition) == [4, 5, 6, 7, 8, 9]


def test_a_jump_ends_when_values_are_back() -> None:
    """And a second one is found."""
    assert holds([1, 1, 1, 1, 5, 5, 1, 1, 1, 1, 5], JUMP) == [4, 5, 10]


def test_drop_with_noise_change_and_reference() -> None:
    """Below half, but only if it is clear of the noise, large, and from a level worth it."""
    drop = Condition("jump", ("x",), below=0.5, window=8, least=6)
    values = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 0.4]
    assert holds(values, drop) == [7]
    stricter = (
        replace(drop, sigmas=20.0),
        replace(drop, change=0.7),
        replace(drop, reference_above=1.5),
    )
    for one in stricter:
        assert holds(values, one) == []


def test_collapse_against_the_own_start() -> None:
    """A tenth of the median of the first three; nothing is said before there are three."""
    condition = Condition("start", ("x",), below=0.2, start=3)
    assert holds([1, 10, 10, 5, 1.9, 2.1, 0], condition) == [4, 6]
    assert holds([1, 0], condition) == []
    assert holds([10, 10, 10, 25], Condition("start", ("x",), above=2.0, start=3)) == [3]


def test_trend() -> None:
    """From the median of the first third of a window to that of the last."""
    condition = Condition("trend", ("x",), above=3.9, window=6)
    assert holds([0, 0, 0, 0, 4, 4, 4], condition) == [5, 6]
    relative = Condition("trend", ("x",), below=-0.4, window=6, relative=True)
    assert holds([10, 10, 10, 10, 5, 5], relative) == [5]
    assert holds([1, 9, 1, 9, 1, 9], Condition("trend", ("x",), within=(-1, 1), window=6)) == [5]


def test_trend_within_the_noise_is_none() -> None:
    """A change smaller than so many standard errors does not hold."""
    values = [0, 5, 0, 5, 0, 5, 1, 6, 1]
    assert holds(values, Condition("trend", ("x",), above=0.5, window=9)) == [8]
    assert holds(values, Condition("trend", ("x",), above=0.5, window=9, sigmas=3.0)) == []
    still = Condition("trend", ("x",), within=(-2, 2), window=9, sigmas=3.0)
    assert holds(values, still) == [8]  # standing still is no matter of being clear of the noise


def test_slope() -> None:
    """A straight line of 2 a value rises by 8 over five values; a flat one does not."""
    condition = Condition("slope", ("x",), above=7.9, window=5)
    assert holds([0, 2, 4, 6, 8, 10], condition) == [4, 5]
    assert holds([3] * 6, condition) == []
    relative = Condition("slope", ("x",), below=-0.5, window=5, relative=True)
    assert holds([6, 5, 4, 3, 2], relative) == [4]  # -4 by the mean of 4
    assert holds([0, 9, 0, 9, 8], Condition("slope", ("x",), above=1.0, window=5, sigmas=4)) == []


def test_ratio_of_two_trends() -> None:
    """y rises by 0.2, x by 1 % or by 50 %: flat against it, or not."""
    flat = Condition("ratio", ("x",), against="y", within=(-0.4, 0.4), relative=True, window=6)
    rising = {s: {"x": 1.0 + 0.01 * (s > 3), "y": 0.5 + 0.2 * (s > 4)} for s in range(1, 7)}
    moving = {s: {"x": 1.0 + 0.5 * (s > 3), "y": 0.5 + 0.2 * (s > 4)} for s in range(1, 7)}
    still = {s: {"x": 1.0, "y": 0.5} for s in range(1, 7)}
    assert spans(judged(table(rising), flat)) == [("warning", 6, 6)]
    assert spans(judged(table(moving), flat)) == []
    least = replace(flat, change=0.1)
    assert spans(judged(table(rising), least)) == [("warning", 6, 6)]
    assert spans(judged(table(still), least)) == []
    little = {s: {"x": 1.0, "y": 0.5 + 0.05 * (s > 4)} for s in range(1, 7)}
    assert spans(judged(table(little), flat)) == [("warning", 6, 6)]
    assert spans(judged(table(little), least)) == []


def test_oscillation() -> None:
    """To and fro by 1 at first, then by 5."""
    condition = Condition("oscillation", ("x",), above=3.0, window=4, start=4)
    quiet, wild = [0, 1] * 6, [0, 10] * 4
    assert holds(quiet + wild, condition)[0] == 13
    assert holds(quiet * 2, condition) == []
    once = Condition("oscillation", ("x",), above=3.0, window=4, start=4, share=0.6)
    assert holds([*quiet, 10, 20, 30, 40, 50, 60], once) == []  # it does not turn


def test_non_finite_of_all_three_kinds() -> None:
    """NaN, an infinity and the null of newer verl; what is missing or text is no number."""
    rows = table(
        {1: {"x": 1.0}, 2: {"x": math.nan}, 3: {"x": math.inf}, 4: {"x": None}, 5: {"y": 1.0}}
    )
    health = judged(rows, Condition("non_finite", ("x",)), severity="critical")
    assert levels(health) == [0, 2, 2, 2, None]
    assert spans(health) == [("critical", 2, 4)]
    assert spans(judged(table({1: {"x": "nan"}}), Condition("non_finite", ("x",)))) == []


def test_a_pattern_stands_for_every_key() -> None:
    """Each has a finding of its own, under its name."""
    rows = table({1: {"actor/a": math.nan, "actor/b": 1.0}, 2: {"actor/a": 1.0, "actor/b": None}})
    health = judged(rows, Condition("non_finite", ("actor/*",)))
    assert [(f.key, f.first_step) for f in health.findings] == [("actor/a", 1), ("actor/b", 2)]
    assert levels(health) == [1, 1]


def test_configuration_as_condition() -> None:
    """A number or a flag of the configuration; without it the rule never holds."""
    few = Condition("config", config="actor_rollout_ref.rollout.n", below=5)
    low = Condition("level", ("x",), below=1.0)
    for config, found in (
        ({"actor_rollout_ref": {"rollout": {"n": 4}}}, 1),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, 0),
        ({"actor_rollout_ref": {"rollout": {"n": "${n}"}}}, 0),
        ({}, 0),
    ):
        assert len(judged(series("x", [0.0]), low, few, config=config).findings) == found


def test_quotient_and_difference_of_series() -> None:
    """(max - min) / mean; rows that lack one of them, or divide by 0, are not judged."""
    condition = Condition("level", ("max",), minus="min", over="mean", above=0.1)
    rows = table(
        {
            1: {"max": 11.0, "min": 9.0, "mean": 10.0},
            2: {"max": 10.5, "min": 10.0, "mean": 10.0},
            3: {"max": 11.0, "mean": 10.0},
            4: {"max": 11.0, "min": 9.0, "mean": 0.0},
        }
    )
    health = judged(rows, condition)
    assert levels(health) == [1, 0, None, None]
    assert health.findings[0].evidence["(max - min) / mean"] == 0.2


# -- findings and columns --------------------------------------------------------------------

HIGH = Condition("level", ("x",), above=1.0)


def test_findings_are_intervals() -> None:
    """Gaps of up to `merge` judged rows are bridged, rows without the series do not count."""
    values = [2, 2, 0, 2, 0, 0, 0, 2, None, 2]
    assert spans(judged(series("x", values), HIGH, merge=1)) == [
        ("warning", 1, 4),
        ("warning", 8, 10),
    ]
    assert spans(judged(series("x", values), HIGH, merge=3)) == [("warning", 1, 10)]


def test_critical_is_a_finding_of_its_own() -> None:
    """From where it is reached on, so that an alert knows when."""
    critical = (Condition("level", ("x",), above=5.0),)
    health = judged(series("x", [0, 2, 2, 9, 9, 0]), HIGH, critical=critical)
    assert levels(health) == [0, 1, 1, 2, 2, 0]
    assert spans(health) == [("critical", 4, 5), ("warning", 2, 3)]
    assert column(health.columns, "health/worst") == [0, 1, 1, 2, 2, 0]


def test_hints_are_told_and_have_no_column() -> None:
    """A rule of thumb raises nothing."""
    health = judged(series("x", [2.0]), HIGH, severity="hint")
    assert health.columns.column_names == [STEP]
    (finding,) = health.findings
    assert finding.hint


def test_a_finding_has_its_numbers_and_a_sentence() -> None:
    """Evidence is that of the first step, and the sentence ends with a full stop."""
    jump = Condition("jump", ("x",), above=2.0, window=4, least=3)
    (finding,) = judged(series("x", [1, 1, 1, 1, 5, 9]), jump).findings
    assert finding.evidence == {"x": 5.0, "x: before": 1.0, "x: above": 2.0}
    assert (
        finding.says
        == "Title: x is 5, 1 before (median of up to 4 rows; alarm above 2 times that)."
    )
    assert finding.as_dict()["first_step"] == 5


def test_series_that_are_absent() -> None:
    """No column, no finding; an empty table and a single row are judged too."""
    assert judged(series("y", [1.0]), HIGH).columns.column_names == [STEP]
    empty = pa.table({STEP: pa.array([], type=pa.int64())})
    assert judged(empty, HIGH).columns.num_rows == 0
    assert levels(judged(series("x", [2.0]), HIGH)) == [1]


def test_the_other_condition_stands_until_its_next_value() -> None:
    """Series of different rhythm are compared by what was known at the step."""
    other = Condition("level", ("slow",), above=1.0)
    rows = table(
        {1: {"x": 2.0}, 2: {"x": 2.0, "slow": 2.0}, 3: {"x": 2.0}, 4: {"x": 2.0, "slow": 0.0}}
    )
    assert levels(judged(rows, HIGH, other)) == [0, 1, 1, 0]


# -- the file of rules -----------------------------------------------------------------------


def test_shipped_rules_are_whole() -> None:
    """Every rule has a title, a source, and advice that names a key or a file to look at."""
    rules = load_rules()
    assert len({r.code for r in rules}) == len(rules) > 40
    for one in rules:
        assert one.title and one.source and one.advice, one.code
        assert re.search(r"\w[._/]\w|[Ll]ook", one.advice), one.code


def by_code(text: str) -> dict[str, Rule]:
    return {r.code: r for r in load_rules(text)}


def test_a_user_changes_one_number() -> None:
    """The rest of the rule and all other rules stay as they are."""
    changed = by_code("[rules.MEMORY_PRESSURE]\nparts.level.above = 0.8\n")["MEMORY_PRESSURE"]
    shipped = by_code("")["MEMORY_PRESSURE"]
    assert changed.conditions[0].above == 0.8
    assert changed.conditions[0].rows == shipped.conditions[0].rows
    assert changed.critical == shipped.critical
    assert len(load_rules("[rules.MEMORY_PRESSURE]\nparts.level.above = 0.8\n")) == len(
        load_rules()
    )


def test_a_user_takes_a_rule_away_and_adds_one() -> None:
    """`off = true`, and a table of a new name."""
    text = (
        "[rules.KL_LOW]\noff = true\n[rules.MINE]\n"
        'parts.a = { kind = "level", series = ["x", "y"], above = 1 }\n'
    )
    rules = by_code(text)
    assert "KL_LOW" not in rules
    assert rules["MINE"].conditions[0].series == ("x", "y")


@pytest.mark.parametrize(
    "text",
    [
        "[rules.KL_LOW",
        "rules = 3",
        "[rule.KL_LOW]\noff = true",
        "[rules.KL_LOW]\nseverity = 'bad'",
        "[rules.KL_LOW]\ncolour = 'red'",
        "[rules.KL_LOW]\nparts.level.above = 'high'",
        "[rules.KL_LOW]\nparts.level.above = nan",
        "[rules.KL_LOW]\nparts.level.rows = -1",
        "[rules.KL_LOW]\nparts.level.rows = 1.5",
        "[rules.KL_LOW]\nparts.level.window = 100000000",
        "[rules.KL_LOW]\nparts.level.kind = 'levels'",
        "[rules.KL_LOW]\nparts.level.abov = 1.0",
        "[rules.KL_LOW]\nparts.level.within = [1]",
        "[rules.KL_LOW]\nparts.level.relative = 1",
        "[rules.KL_LOW]\nparts.level.series = 3",
        "[rules.KL_LOW]\ncritical.other = { above = 1 }",
        "[rules.MINE]\n",
        "[rules.MINE]\nparts.a = 3",
        "[rules.MINE]\nparts.a = { kind = 'level', above = 1 }",
        "[rules.MINE]\nparts.a = { kind = 'level', series = 'x' }",
        "[rules.MINE]\nparts.a = { kind = 'config', above = 1 }",
    ],
)
def test_a_file_that_means_nothing_is_refused(text: str) -> None:
    """With the file and the table, never with a traceback."""
    with pytest.raises(UsageError) as refused:
        load_rules(text, "my.toml")
    assert "my.toml" in str(refused.value)


def test_findings_are_ordered() -> None:
    """The gravest first, then in time."""
    from verl_logsync.diagnostics.findings import in_order, worst

    made = [
        Finding("A", "hint", "x", 1, 1, "", ""),
        Finding("B", "critical", "x", 9, 9, "", ""),
        Finding("C", "warning", "x", 5, 5, "", ""),
        Finding("D", "warning", "x", 3, 3, "", ""),
    ]
    assert [f.code for f in in_order(made)] == ["B", "D", "C", "A"]
    assert worst(made) == "critical"
    assert worst([]) is None


def test_a_multiple_of_a_negative_reference_says_nothing() -> None:
    """Noise around a negative value is no explosion: ten times less than nothing is lower still."""
    noise = np.random.default_rng(0).normal(-0.1, 0.05, 200)
    table = pa.table({"_step": np.arange(200), "actor/grad_norm": noise})
    codes = {finding.code for finding in diagnose(table, {}).findings}
    assert not codes & {"GRADIENT_EXPLOSION", "GRADIENT_SPIKE"}
