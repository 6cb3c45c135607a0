"""verl-logsync: bring verl's offline training logs into Weights & Biases, complete and verified.

The public Python names are imported when they are first used, since pandas, pyarrow and wandb
each take a good part of a second:

* `load(paths)`: the runs below some paths, each with its aligned history as a DataFrame.
* `upload(paths)`: send everything to W&B, as `verl-logsync upload` does.
* `StepLogger`: keeps a trainer's metrics on disk, step by step; needs the standard library only.
* `Run`, `Outcome`, `Settings`: the values that these take and give.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from typing import Any

    from verl_logsync.api import Run, load, upload
    from verl_logsync.model import Outcome
    from verl_logsync.settings import Settings
    from verl_logsync.steplog import StepLogger

__all__ = ["Outcome", "Run", "Settings", "StepLogger", "__version__", "diagnose", "load", "upload"]

__version__ = "0.1.0"

_HOMES = {
    "Outcome": "verl_logsync.model",
    "Run": "verl_logsync.api",
    "Settings": "verl_logsync.settings",
    "StepLogger": "verl_logsync.steplog",
    "diagnose": "verl_logsync.api",
    "load": "verl_logsync.api",
    "upload": "verl_logsync.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
