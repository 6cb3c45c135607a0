"""Structured step logs for trainers: `StepLogger`.

Only the standard library is imported (pyarrow when `format="parquet"` is asked for), nothing is
sent anywhere, and nothing that goes wrong here ends a training. How to use it:
docs/how-to/sources/step-log.md; what it writes: docs/reference/step-log-format.md.
"""

from __future__ import annotations

from verl_logsync.steplog.attach import attach
from verl_logsync.steplog.logger import StepLogger, StepLogReport
from verl_logsync.steplog.values import histogram, table

__all__ = ["StepLogReport", "StepLogger", "attach", "histogram", "table"]
