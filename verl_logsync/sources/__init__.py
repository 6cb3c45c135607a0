"""The log formats that are understood, one module each.

To add one: a module here, a line in `SOURCES`, a folder in `fixtures/`.
"""

from __future__ import annotations

from typing import Final

from verl_logsync.interfaces import Source
from verl_logsync.sources.checkpoint import Checkpoint
from verl_logsync.sources.console import Console
from verl_logsync.sources.hydra import Hydra
from verl_logsync.sources.offline_run import OfflineRun
from verl_logsync.sources.rollouts import Rollouts
from verl_logsync.sources.step_log import StepLog
from verl_logsync.sources.tensorboard import TensorBoard
from verl_logsync.sources.verl_file import VerlFile

#: The source whose logs are begun anew at every start of a job.
TRUNCATED: Final = VerlFile.name

#: In the order in which they are asked whether a file is theirs.
SOURCES: Final[tuple[Source, ...]] = (
    OfflineRun(),
    Hydra(),
    Checkpoint(),
    Rollouts(),
    TensorBoard(),
    StepLog(),
    VerlFile(),
    Console(),
)
