"""Statistics over the last so many values of a series. What stands at a place never depends on
values after it, down to the last bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

#: The median of absolute deviations of a normal distribution is its standard deviation by this.
_MAD: Final = 1.4826
#: The standard error of a median is that of a mean by this.
_MEDIAN_ERROR: Final = 1.2533


def trailing_median(values: Floats, window: int, least: int) -> Floats:
    """The median of the last `window` values, shorter at the start; NaN for fewer than `least`."""
    count = len(values)
    if count == 0:
        return np.empty(0)
    padded = np.concatenate([np.full(window - 1, np.nan), values])
    ordered = np.sort(sliding_window_view(padded, window), axis=1)  # NaN comes last
    known = np.minimum(np.arange(1, count + 1), window)
    rows = np.arange(count)
    median: Floats = (ordered[rows, (known - 1) // 2] + ordered[rows, known // 2]) / 2
    median[: max(least - 1, 0)] = np.nan
    return median


def trailing_mean(values: Floats, window: int, least: int) -> Floats:
    """The mean of the last `window` values, shorter at the start; NaN for fewer than `least`."""
    count = len(values)
    if count == 0:
        return np.empty(0)
    padded = np.concatenate([np.zeros(window - 1), values])
    known = np.minimum(np.arange(1, count + 1), window)
    mean: Floats = sliding_window_view(padded, window).sum(axis=1) / known
    mean[: max(least - 1, 0)] = np.nan
    return mean


def shifted(values: Floats, by: int) -> Floats:
    """What stood `by` places before; NaN at the start."""
    if by == 0:
        return values
    return np.concatenate([np.full(min(by, len(values)), np.nan), values[:-by]])


def sustained(flags: Flags, rows: int) -> Flags:
    """Whether the last `rows` flags are all set."""
    if rows <= 1:
        return flags
    total = np.cumsum(flags)
    before = np.concatenate([np.zeros(min(rows, len(flags)), dtype=total.dtype), total[:-rows]])
    held: Flags = (total - before) == rows
    held[: rows - 1] = False
    return held


def noise(values: Floats, window: int, least: int) -> Floats:
    """Standard deviation of single values about their trend, from differences of neighbours."""
    steps = np.abs(np.diff(values, prepend=values[:1]))
    scaled: Floats = trailing_median(steps, window, least) * (_MAD / np.sqrt(2.0))
    return scaled


def change(values: Floats, window: int) -> tuple[Floats, Floats, Floats]:
    """From the first to the last third of the last `window` values, by medians.

    Returns:
        The change, its standard error, and the median of the first third. NaN in the first
        `window - 1` places.
    """
    third = max(window // 3, 1)
    late = trailing_median(values, third, third)
    early = shifted(late, window - third)
    spread = noise(values, window, window)
    error = spread * _MEDIAN_ERROR * np.sqrt(2.0 / third)
    return late - early, error, early


def slope(values: Floats, window: int) -> tuple[Floats, Floats, Floats]:
    """The straight line through the last `window` values, by least squares.

    Returns:
        How much it rises over the window, the standard error of that, and the mean.
    """
    count = len(values)
    lacking = np.full(min(window - 1, count), np.nan)
    if count < window:
        return lacking, lacking, lacking
    places = np.arange(window) - (window - 1) / 2
    scale = float((places**2).sum())
    views = sliding_window_view(values, window)
    with np.errstate(all="ignore"):
        mean = views.mean(axis=1)
        rise = (views * places).sum(axis=1) / scale
        rest = ((views - mean[:, None] - rise[:, None] * places) ** 2).sum(axis=1)
        error = np.sqrt(rest / max(window - 2, 1) / scale)
    parts = (rise * (window - 1), error * (window - 1), mean)
    lines = [np.concatenate([lacking, part]) for part in parts]
    return lines[0], lines[1], lines[2]


def swings(values: Floats, window: int) -> tuple[Floats, Floats]:
    """How often the last `window` values turn (share of inner places), and half their range."""
    count = len(values)
    lacking = np.full(min(window - 1, count), np.nan)
    if count < window:
        return lacking, lacking
    views = sliding_window_view(values, window)
    with np.errstate(all="ignore"):
        steps = np.diff(views, axis=1)
        turns = (steps[:, 1:] * steps[:, :-1] < 0).mean(axis=1)
        reach = (views.max(axis=1) - views.min(axis=1)) / 2
    return np.concatenate([lacking, turns]), np.concatenate([lacking, reach])
