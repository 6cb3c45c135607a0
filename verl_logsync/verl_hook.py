"""Gives every `Tracking` of verl a step log, without a change to verl or to the trainer.

Set `VERL_USE_EXTERNAL_MODULES=verl_logsync.verl_hook` in the environment of the job: verl
imports the modules named there (seen in 0.6.1 and 0.9.1, not in 0.4.1). With any verl
`import verl_logsync.verl_hook` does the same, wherever it stands: in the reward function's file,
or in a `sitecustomize.py`.

verl itself is never imported from here; `Tracking` is prepared when the trainer imports it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from verl_logsync.steplog import attach
from verl_logsync.steplog.attach import BACKEND

_MODULE: Final = "verl.utils.tracking"
_MARK: Final = "__verl_logsync__"


def install() -> None:
    """Prepare `Tracking` now if it is imported already, else as soon as it is."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "Tracking"):
        prepare(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def prepare(module: ModuleType) -> None:
    """Make the `Tracking` of a module attach a step log to each of its objects."""
    tracking = getattr(module, "Tracking", None)
    if tracking is None or hasattr(tracking, _MARK):
        return
    tracking.__init__ = _attaching(tracking.__init__)
    if hasattr(tracking, "finish"):  # 0.9.0 and newer
        tracking.finish = _finishing(tracking.finish)
    setattr(tracking, _MARK, True)


def _attaching(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        try:
            _attach(self, *args, **kwargs)
        # Whatever this finds in a verl that is not known yet, it must not end the training.
        except Exception as error:  # noqa: BLE001
            with contextlib.suppress(RuntimeWarning):  # warnings may be errors
                warnings.warn(f"step log: not attached: {error!r}", RuntimeWarning, stacklevel=2)

    return __init__


def _attach(
    tracking: Any,
    project_name: str,
    experiment_name: str,
    _: object = None,
    config: Any = None,
    **__: object,
) -> None:
    trainer = config.get("trainer") if isinstance(config, Mapping) else None
    folder = trainer.get("default_local_dir") if isinstance(trainer, Mapping) else None
    attach(
        tracking,
        project_name,
        experiment_name,
        config=config,
        checkpoint_dir=folder if isinstance(folder, str) else None,
        format=os.environ.get("VERL_LOGSYNC_STEP_LOG_FORMAT") or "jsonl",
    )


def _finishing(original: Any) -> Any:
    @functools.wraps(original)
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Without an argument it is called by `__del__`, which does not know how it ended.
        code = args[0] if args else kwargs.get("exit_code")
        logger = getattr(self, "logger", {}).get(BACKEND)
        if logger is not None:
            logger.finish(exit_code=code)
        return original(self, *args, **kwargs)

    return finish


class _Finder(MetaPathFinder):
    """Sees verl's tracking module being imported, and prepares it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PreparingLoader(spec.loader)
        return spec


class _PreparingLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        prepare(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


install()
