"""What the course of a run tells: reward bought with entropy, and training against validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from verl_logsync.diagnostics import configuration as cf
from verl_logsync.diagnostics.canonical import entropy, reward_mean
from verl_logsync.diagnostics.derived import Asked, Candidate, Made, choose
from verl_logsync.diagnostics.series import (
    Flags,
    Floats,
    Frame,
    Ints,
    Series,
    either,
    nothing,
    plain,
)
from verl_logsync.diagnostics.windows import trailing_mean

FIT: Final = "entropy_fit"
GAP: Final = "val_gap"

#: A line through fewer rows, or through entropies that differ less, or that explains less of the
#: reward, says nothing.
_LEAST_ROWS: Final = 50
_LEAST_FALL: Final = 0.2
_LEAST_EXPLAINED: Final = 0.5
#: A step's reward is that of few prompts: so many rows are averaged before it is compared.
_AVERAGED: Final = 10
_LEAST_AVERAGED: Final = 5


def learning(asked: Asked) -> list[Made]:
    """All of them; those that cannot be computed say why."""
    return [*entropy_fit(asked), *validation_gaps(asked)]


# -- 6: reward against entropy ---------------------------------------------------------------


def entropy_fit(asked: Asked) -> list[Made]:
    """6: R = -a e^H + b over all rows up to each; b - a is the reward when no entropy is left."""
    frame = asked.frame
    reward = either(frame.logged("reward/mean"), reward_mean(asked).series)
    uncertainty = either(frame.logged("actor/entropy"), entropy(asked).series)
    both = reward.finite & uncertainty.finite & frame.trained
    rows = np.flatnonzero(both)
    fit = _fitted(uncertainty.values[rows], reward.values[rows])
    notes = ["over all rows so far; the training reward, where the paper has a validation's"]
    if asked.config.number(cf.ENTROPY_COEFFICIENT) != 0:
        notes.append("the law holds where nothing holds the entropy: entropy_coeff is not 0")
    why_not = _why_no_fit(len(rows), fit)
    values = {"a": fit.a, "b": fit.b, "ceiling": fit.b - fit.a, "explained": fit.explained}
    return [
        _partly(
            asked,
            f"{FIT}/{name}",
            [
                Candidate(
                    _on_rows(frame, rows[fit.good], part[fit.good]),
                    "reward/mean, actor/entropy",
                    f"{_FIT_FORMULAS[name]} of R = -a e^H + b by least squares",
                    tuple(notes),
                )
            ],
            why_not,
        )
        for name, part in values.items()
    ]


_FIT_FORMULAS: Final = {"a": "a", "b": "b", "ceiling": "b - a", "explained": "R^2"}


class _Fit(NamedTuple):
    """For every row: the line through it and all rows before, and whether it says anything."""

    a: Floats
    b: Floats
    explained: Floats
    good: Flags


def _fitted(uncertainty: Floats, reward: Floats) -> _Fit:
    count = np.arange(1, len(reward) + 1, dtype=np.float64)
    with np.errstate(all="ignore"):
        x = np.exp(uncertainty)
        # About the first row, so that sums of squares do not drown what differs.
        dx, dy = x - x[:1], reward - reward[:1]
        mean_x, mean_y = np.cumsum(dx) / count, np.cumsum(dy) / count
        xx = np.cumsum(dx * dx) / count - mean_x**2
        xy = np.cumsum(dx * dy) / count - mean_x * mean_y
        yy = np.cumsum(dy * dy) / count - mean_y**2
        a = -xy / xx
        b = (mean_y + reward[:1]) + a * (mean_x + x[:1])
        explained = xy * xy / (xx * yy)
        fallen = 1 - np.minimum.accumulate(uncertainty) / uncertainty[:1]
        good = (count >= _LEAST_ROWS) & (fallen >= _LEAST_FALL) & (a > 0)
        good &= np.isfinite(a) & np.isfinite(b) & (explained >= _LEAST_EXPLAINED)
    return _Fit(a, b, np.minimum(explained, 1.0), good)


def _why_no_fit(rows: int, fit: _Fit) -> str:
    if not rows:
        return "no entropy is logged, or no reward"
    if rows < _LEAST_ROWS:
        return f"fewer than {_LEAST_ROWS} rows have entropy and reward"
    if not fit.good.any():
        return (
            f"the reward does not follow the entropy: it fell by less than {100 * _LEAST_FALL:.0f}"
            f" %, did not rise with it, or explains less than {100 * _LEAST_EXPLAINED:.0f} %"
        )
    return ""


# -- 26: training against validation ---------------------------------------------------------


def validation_gaps(asked: Asked) -> list[Made]:
    """26: the score of training minus that of validation, for each source, where it is validated.

    Both are means of the same reward: `acc` would be another scale.
    """
    frame = asked.frame
    score = frame.logged("critic/score/mean")
    rows = np.flatnonzero(score.finite)
    trained = trailing_mean(score.values[rows], _AVERAGED, _LEAST_AVERAGED)
    latest = _carried(frame, rows, trained)
    notes = ("training samples and validation may differ in temperature and data",)
    found = []
    for source, keys in _validated_rewards(frame).items():
        candidates = [
            Candidate(
                _difference(latest, frame.logged(key)),
                f"critic/score/mean, {key}",
                f"mean of critic/score/mean over up to {_AVERAGED} rows - {key}",
                notes,
            )
            for key in keys
        ]
        why_not = (
            f"{keys[0]} is in no row that follows {_LEAST_AVERAGED} rows with critic/score/mean"
        )
        found.append(_partly(asked, f"{GAP}/{source}", candidates, why_not))
    if found:
        return found
    why_not = "no validation of the reward is logged (val-core or val-aux SOURCE/reward/mean@N)"
    return [Made(GAP, nothing(len(frame)), why_not=why_not)]


def _validated_rewards(frame: Frame) -> dict[str, list[str]]:
    """The keys of each source's mean reward, that of the most samples first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in frame.first_rows:
        if name.startswith("val/test_score/"):  # verl 0.2 - 0.3
            found.setdefault(name.removeprefix("val/test_score/"), []).append((0, name))
        family, _, rest = name.partition("/")
        source, _, last = rest.rpartition("/reward/")
        count = last.removeprefix("mean@")
        if family in {"val-core", "val-aux"} and source and count.isdecimal() and count != last:
            found.setdefault(source, []).append((int(count[:9]), name))
    return {
        source: [name for _, name in sorted(keys, reverse=True)]
        for source, keys in sorted(found.items())
    }


def _carried(frame: Frame, rows: Ints, values: Floats) -> Series:
    """Values of some rows, each standing until the next."""
    place = np.searchsorted(rows, np.arange(len(frame)), side="right") - 1
    there = place >= 0
    if not len(rows):
        return nothing(len(frame))
    carried = np.where(there, values[np.maximum(place, 0)], np.nan)
    return plain(carried, np.isfinite(carried))


def _difference(one: Series, other: Series) -> Series:
    there = one.finite & other.finite
    with np.errstate(invalid="ignore"):
        return plain(one.values - other.values, there)


def _on_rows(frame: Frame, rows: Ints, values: Floats) -> Series:
    full, there = np.full(len(frame), np.nan), np.zeros(len(frame), dtype=bool)
    full[rows], there[rows] = values, True
    return plain(full, there)


def _partly(asked: Asked, key: str, candidates: Sequence[Candidate], why_not: str) -> Made:
    """A series that is meant for some rows only: it is missing where it has no value at all."""
    made = choose(asked, key, candidates, "")
    return Made(key, made.series, made.facts, "" if made.series.there.any() else why_not)
