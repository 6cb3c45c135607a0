"""Puts a step logger beside the other loggers of verl's `Tracking`."""

from __future__ import annotations

import weakref

from verl_logsync.steplog.logger import StepLogger

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from typing import Any, Final

#: The name of the backend: `tracking.log(data, step, backend=["step_log"])` logs here only.
BACKEND: Final = "step_log"


def attach(tracking: Any, project: str, experiment: str, **options: Any) -> StepLogger:
    """Add a step logger to a `verl.utils.tracking.Tracking`.

    Args:
        tracking: the tracking object; from now on all that it logs goes to the step log too.
        project: as given to it (it does not keep it).
        experiment: likewise.
        **options: of `StepLogger`.

    The log is closed when the tracking object goes away, or by `finish` before that.
    """
    logger = StepLogger(project, experiment, **options)
    tracking.logger[BACKEND] = logger
    weakref.finalize(tracking, logger.finish)
    return logger
