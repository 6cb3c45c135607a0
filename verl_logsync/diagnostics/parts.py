"""The kinds of condition a rule is made of: each says of every value whether it holds.

A condition sees the values of one series where it is a finite number, in order; what it says of
one depends on that value and earlier ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from verl_logsync.diagnostics import windows as win
from verl_logsync.diagnostics.windows import Flags, Floats


@dataclass(frozen=True)
class Condition:
    """One condition of a rule; see `FIELDS` for what its fields mean.

    `series` are candidates for one series, the first that is there in a row; `minus` is taken off
    it, and `over` divides it. `smooth` is how many values a median smooths it over. Windows and
    `rows`, `start` and `least` count values of the series, not steps.
    """

    kind: str
    series: tuple[str, ...] = ()
    minus: str = ""
    over: str = ""
    against: str = ""
    config: str = ""
    above: float | None = None
    below: float | None = None
    within: tuple[float, float] | None = None
    rows: int = 1
    warm_up: int = 0
    window: int = 50
    least: int = 20
    start: int = 20
    skip: int = 0
    smooth: int = 1
    change: float = 0.0
    sigmas: float = 0.0
    reference_above: float | None = None
    relative: bool = False
    share: float = 0.5
    hold: int = 200


@dataclass(frozen=True)
class Values:
    """The finite values of a series, and what was computed of them already."""

    numbers: Floats
    against: Floats = field(default_factory=lambda: np.empty(0))
    memory: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def median(self, window: int, least: int) -> Floats:
        median: Floats = self._once(("median", window, least), win.trailing_median, window, least)
        return median

    def noise(self, window: int, least: int) -> Floats:
        noise: Floats = self._once(("noise", window, least), win.noise, window, least)
        return noise

    def change(self, window: int) -> tuple[Floats, Floats, Floats]:
        changes: tuple[Floats, Floats, Floats] = self._once(("change", window), win.change, window)
        return changes

    def _once(self, key: tuple[Any, ...], make: Callable[..., Any], *arguments: int) -> Any:
        if key not in self.memory:
            with np.errstate(all="ignore"):
                self.memory[key] = make(self.numbers, *arguments)
        return self.memory[key]


@dataclass(frozen=True, slots=True)
class Judged:
    """For every value: does the condition hold, what was measured, and against what."""

    holds: Flags
    measured: Floats
    reference: Floats


Judge = Callable[[Values, Condition], Judged]


def level(values: Values, condition: Condition) -> Judged:
    """Above or below a limit, for `rows` values on end, after the first `warm_up`."""
    numbers = (
        values.median(condition.smooth, condition.smooth)
        if condition.smooth > 1
        else (values.numbers)
    )
    holds = win.sustained(_outside(numbers, condition), condition.rows)
    return Judged(_after(holds, condition.warm_up), numbers, np.full(len(numbers), np.nan))


def jump(values: Values, condition: Condition) -> Judged:
    """Above or below a multiple of the median of the values before, for `rows` on end.

    The reference leaves out the values being judged. Once the condition holds, the reference
    stays as it is until `rows` values on end are back, or for `hold` values: a level that lasts
    so long is the new normal.
    """
    numbers, rows = values.numbers, condition.rows
    reference = win.shifted(values.median(condition.window, condition.least), rows)
    spread = win.shifted(values.noise(condition.window, condition.least), rows)
    departs = _departs(numbers, reference, spread, condition)
    holds = _after(win.sustained(departs, rows), condition.warm_up)
    reference = reference.copy()
    place = _next(holds, 0)
    while place is not None:
        end = min(place + condition.hold, len(numbers))
        still = _departs(numbers[place:end], reference[place], spread[place], condition)
        back = np.flatnonzero(win.sustained(~still, rows))
        stop = place + int(back[0]) + 1 if len(back) else end
        holds[place:stop] = still[: stop - place]
        reference[place:stop] = reference[place]
        place = _next(holds, stop)
    return Judged(holds, numbers, reference)


def _next(flags: Flags, start: int) -> int | None:
    found = np.flatnonzero(flags[start:])
    return start + int(found[0]) if len(found) else None


def _departs(numbers: Floats, reference: Any, spread: Any, condition: Condition) -> Flags:
    """Whether values leave their reference far enough, in all the ways that are asked for."""
    with np.errstate(all="ignore"):
        moved = numbers - reference
        factor = condition.above if condition.above is not None else condition.below
        if condition.above is not None:
            far = (numbers > condition.above * reference) & (moved > 0)
        elif condition.below is not None:
            far = (numbers < condition.below * reference) & (moved < 0)
        else:
            far = moved != 0
        if factor is not None and factor != 1:
            far &= reference >= 0  # a multiple of a debt is no measure
        far &= np.abs(moved) >= condition.change
        far &= np.abs(moved) >= condition.sigmas * spread
        if condition.reference_above is not None:
            far &= reference > condition.reference_above
        departs: Flags = far & np.isfinite(reference)
        return departs


def start(values: Values, condition: Condition) -> Judged:
    """Above or below a multiple of the run's own start: the median of its first values."""
    first = values.numbers[condition.skip : condition.skip + condition.start]
    smooth = values.median(condition.smooth, condition.smooth)
    base = float(np.median(first)) if len(first) == condition.start else np.nan
    reference = np.full(len(smooth), base)
    # Until the start is whole nothing can be said, and what is said later must not depend on it.
    reference[: condition.skip + condition.start] = np.nan
    departs = _departs(smooth, reference, 0.0, condition)
    return Judged(win.sustained(departs, condition.rows), smooth, reference)


def trend(values: Values, condition: Condition) -> Judged:
    """The change within the last `window` values: above, below or within limits.

    With `relative` as part of the value before; `sigmas` is how many times its standard error
    the change must be at least (at most, for `within`).
    """
    moved, error, before = values.change(condition.window)
    size = _relative(moved, before) if condition.relative else moved
    with np.errstate(all="ignore"):
        clear = np.abs(moved) >= condition.sigmas * error
    holds = _outside(size, condition)
    if condition.within is None:
        holds &= clear
    return Judged(win.sustained(holds, condition.rows), size, before)


def slope(values: Values, condition: Condition) -> Judged:
    """The rise of the straight line through the last `window` values, as `trend` otherwise."""
    with np.errstate(all="ignore"):
        rise, error, mean = win.slope(values.numbers, condition.window)
        size = _relative(rise, mean) if condition.relative else rise
        clear = np.abs(rise) >= condition.sigmas * error
    return Judged(win.sustained(_outside(size, condition) & clear, condition.rows), size, mean)


def ratio(values: Values, condition: Condition) -> Judged:
    """The change of a series by that of another (`against`) within the last `window` values.

    The other must have changed by `change` and by `sigmas` times its standard error.
    """
    moved, _, before = values.change(condition.window)
    with np.errstate(all="ignore"):
        other, error, _ = win.change(values.against, condition.window)
        size = _relative(moved, before) if condition.relative else moved
        enough = (other >= condition.change) & (other >= condition.sigmas * error)
        quotient = size / other
    if condition.reference_above is not None:
        enough &= before > condition.reference_above
    holds = _outside(quotient, condition) & enough
    return Judged(win.sustained(holds, condition.rows), quotient, other)


def oscillation(values: Values, condition: Condition) -> Judged:
    """The values turn in `share` of the places and swing `above` times as far as at the start."""
    with np.errstate(all="ignore"):
        turns, reach = win.swings(values.numbers, condition.window)
        settled = condition.skip + condition.start + condition.window
        at_start = reach[condition.skip + condition.window : settled]
        base = float(np.median(at_start)) if len(at_start) == condition.start else np.nan
        reference = np.full(len(reach), base)
        reference[:settled] = np.nan
        holds = _departs(reach, reference, 0.0, condition) & (turns >= condition.share)
    return Judged(win.sustained(holds, condition.rows), reach, reference)


def non_finite(values: Values, condition: Condition) -> Judged:
    """NaN or infinite. This kind sees all values, the others finite ones only."""
    bad = ~np.isfinite(values.numbers)
    return Judged(win.sustained(bad, condition.rows), values.numbers, np.full(len(bad), np.nan))


def _outside(numbers: Floats, condition: Condition) -> Flags:
    with np.errstate(invalid="ignore"):
        holds = np.isfinite(numbers)
        if condition.above is not None:
            holds &= numbers > condition.above
        if condition.below is not None:
            holds &= numbers < condition.below
        if condition.within is not None:
            holds &= (numbers >= condition.within[0]) & (numbers <= condition.within[1])
        return holds


def _relative(moved: Floats, before: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.where(np.abs(before) > 0, moved / np.abs(before), np.nan)


def _after(flags: Flags, warm_up: int) -> Flags:
    flags = flags.copy()
    flags[:warm_up] = False
    return flags


#: Every kind of condition. `config` is asked of the configuration, not of a series.
KINDS: Final[Mapping[str, Judge]] = {
    "level": level,
    "jump": jump,
    "start": start,
    "trend": trend,
    "slope": slope,
    "ratio": ratio,
    "oscillation": oscillation,
    "non_finite": non_finite,
}
CONFIG: Final = "config"

#: What each kind means, and each field, for the documentation.
MEANINGS: Final[Mapping[str, str]] = {
    "level": "the value (smoothed over `smooth` values) is `above` or `below` a limit, for `rows`"
    " values on end, not in the first `warm_up` values",
    "jump": "the value is `above` or `below` so many times the median of the `window` values before"
    " it, at least `least` of them, for `rows` values on end; the reference stands still meanwhile,"
    " for up to `hold` values",
    "start": "the value (smoothed) is `above` or `below` so many times the median of the run's"
    " first `start` values after `skip`",
    "trend": "the change from the first to the last third of the last `window` values, by medians,"
    " is `above`, `below` or `within` limits",
    "slope": "the rise over `window` values of the straight line through them is `above` or `below`"
    " a limit",
    "ratio": "the change of the series by that of the series `against`, within the last `window`"
    " values, is `above`, `below` or `within` limits; the other must have risen by `change`",
    "oscillation": "the last `window` values turn in `share` of the places, and swing `above` so"
    " many times as far as at the start",
    "non_finite": "the value is NaN, infinite, or the null that newer verl writes for them",
    CONFIG: "the number (true is 1) under a key of verl's configuration is `above`, `below` or"
    " `within` limits",
}
FIELDS: Final[Mapping[str, str]] = {
    "series": "the key, or a list of keys of which the first that a row has counts",
    "minus": "another key, taken off the series",
    "over": "another key, by which the series is divided",
    "change": "the least distance from the reference, in the series' own unit",
    "sigmas": "the least distance in standard deviations of the series' own noise (`jump`) or"
    " standard errors of the change (`trend`, `slope`, `ratio`)",
    "reference_above": "the reference must be above this",
    "relative": "the change is divided by the value before it",
}
