"""What the stages are run with, and the one place that catches everything."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from verl_logsync.errors import AuthError, LogsyncError, Unreachable, quoted
from verl_logsync.interfaces import Sink, Source
from verl_logsync.ledger import Ledger
from verl_logsync.model import Outcome, RunSources, Target
from verl_logsync.pipeline.recipe import Recipe, read_recipe
from verl_logsync.settings import Settings

_T = TypeVar("_T")

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` for when nobody is looking."""


@dataclass(slots=True)
class Engine:
    """What the stages are run with.

    `ledger` is None where nothing is remembered; `stop` ends all waiting at once.
    """

    settings: Settings
    sources: Sequence[Source]
    sink: Sink | None = None
    ledger: Ledger | None = None
    progress: Progress = no_progress
    now: Callable[[], float] = time.time
    stop: threading.Event = field(default_factory=threading.Event)
    by_name: Mapping[str, Source] = field(init=False)

    _recipe: Recipe | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.by_name = {source.name: source for source in self.sources}

    @property
    def recipe(self) -> Recipe:
        """What decides derived columns; read once.

        Raises:
            UsageError: the file of rules cannot be used.
        """
        if self._recipe is None:
            self._recipe = read_recipe(self.settings)
        return self._recipe

    @property
    def decisive(self) -> str:
        """What decides what is sent, besides the files, as text."""
        return self.settings.decisive + (self.recipe.key if self.settings.diagnostics else "")


def sends(engine: Engine) -> bool:
    """Whether an upload with these settings sends anything."""
    return not engine.settings.dry_run and engine.settings.mode != "disabled"


def by_project(items: Sequence[_T], target: Callable[[_T], Target]) -> list[list[_T]]:
    """Groups of items whose runs one question to the server can be about."""
    groups: dict[Target, list[_T]] = {}
    for item in items:
        groups.setdefault(replace(target(item), run_id=""), []).append(item)
    return list(groups.values())


def attempted(engine: Engine, run: RunSources, work: Callable[[], _T]) -> _T | Outcome:
    """Do the work of one run; whatever goes wrong is that run's outcome alone."""
    try:
        return work()
    except Exception as error:
        known = _explained(run, error)
        if engine.sink is not None and _concerns_all(engine.sink, known):
            raise known from error
        return failed_outcome(run, known)


def _explained(run: RunSources, error: Exception) -> LogsyncError:
    """An error that is ours, or a word about one that should not have happened."""
    if isinstance(error, LogsyncError):
        return error
    place = run.files[0].place if run.files else run.name
    where = traceback.extract_tb(error.__traceback__)[-1]
    return LogsyncError(
        f"internal error: {type(error).__name__}: {error} ({Path(where.filename).name}:"
        f"{where.lineno})",
        place=place,
        hint=f"Please report it with the output of: verl-logsync scan --json {quoted(place)}",
    )


def _concerns_all(sink: Sink, error: LogsyncError) -> bool:
    """Whether the server as a whole is away or refuses, so that no other run would fare better."""
    if not isinstance(error, AuthError | Unreachable):
        return False
    try:
        sink.probe()
    except LogsyncError:
        return True
    return False


def failed_outcome(run: RunSources, error: LogsyncError) -> Outcome:
    """The outcome of a run that an error prevented."""
    return Outcome(run.target, run.name, None, error=error, notes=run.notes)
