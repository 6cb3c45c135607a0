"""Histograms whose bins stay the same from step to step where that is possible."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from verl_logsync.rollouts.statistics import Missing
from verl_logsync.rollouts.values import Histogram

# Scores mostly lie within one of these; with a fixed range the steps of a run can be compared.
_USUAL: Final = ((0.0, 1.0), (-1.0, 1.0))


def histogram(values: np.ndarray[Any, np.dtype[np.float64]], bins: int) -> Histogram | Missing:
    """How many values lie in each of so many equal bins over 0..1, else -1..1, else from the
    lowest value to the highest. The last bin includes its upper edge.
    """
    if not len(values):
        return Missing("no values")
    low, high = float(values.min()), float(values.max())
    for start, end in _USUAL:
        if start <= low and high <= end:
            low, high = start, end
            break
    if not np.isfinite(high - low) or (high > low and (high - low) / bins == 0):
        return Missing("the values are too large or too close for bins")
    try:
        counts, edges = np.histogram(values, bins=bins, range=(low, high))
    except ValueError:
        return Missing("the values are too close for bins")
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))
