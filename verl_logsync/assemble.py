"""What a run has besides its history, put together from the readings of all its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from verl_logsync.columns import AXES, MISSING, RUNTIME, STEP, decode
from verl_logsync.model import (
    AttemptReading,
    Ending,
    FileRef,
    History,
    LogFile,
    PassThrough,
    Reading,
)
from verl_logsync.secrets_mask import mask_config, secrets_in, without_known
from verl_logsync.spooled import changed, joined

_T = TypeVar("_T")

#: W&B's own entries of a config; the server writes them itself.
_INTERNAL: Final = "_wandb"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Config (secrets masked), pass-through records and recorded end of a run.

    `streams` holds the same records log by log, under each log's key: what a server holds of
    system metrics and console lines can only be told log by log.
    `offline_last_step` is how far the last attempt's offline run goes; None without one.
    """

    config: Mapping[str, Any]
    extra: PassThrough
    streams: tuple[tuple[str, PassThrough], ...]
    ending: Ending | None
    offline_last_step: int | None


def assemble(attempts: Sequence[AttemptReading], configs: Sequence[Reading]) -> Surroundings:
    """Put together all attempts; what a later attempt says replaces what an earlier said.

    Args:
        attempts: in order.
        configs: readings of sources that give config only; the offline run's own is more
            precise, since it was resolved.
    """
    readings = [reading for attempt in attempts for _, reading in attempt.readings]
    config: dict[str, Any] = {}
    for reading in (*configs, *readings):
        config.update(reading.config)
    config.pop(_INTERNAL, None)
    last = attempts[-1].readings if attempts else ()
    ending = next((r.ending for _, r in last if r.ending is not None), None)
    known = secrets_in(config)
    streams = [(key, _hushed(extra, known)) for key, extra in _streams(attempts)]
    return Surroundings(
        mask_config(config),
        _merged([r.extra for r in (*configs, *readings)]),
        tuple(_with_ended_lines(streams)),
        ending,
        _offline_last_step(last),
    )


def _hushed(extra: PassThrough, known: frozenset[str]) -> PassThrough:
    """Console text without the secrets that the run's config names, however they are printed."""
    if not known:
        return extra
    console = changed(extra.console, partial(without_known, secrets=known))
    return replace(extra, console=console, unfinished=without_known(extra.unfinished, known))


def _streams(attempts: Sequence[AttemptReading]) -> Iterator[tuple[str, PassThrough]]:
    """The pass-through records log by log; console text that W&B kept too is not told twice."""
    logs = [(file, r.extra) for attempt in attempts for file, r in attempt.readings]
    kept = any(extra.console for file, extra in logs if file.source == "offline_run")
    for file, extra in logs:
        if kept and file.source == "console":
            yield file.key, replace(extra, console=(), unfinished="")
        else:
            yield file.key, extra


def _with_ended_lines(
    streams: Sequence[tuple[str, PassThrough]],
) -> Iterator[tuple[str, PassThrough]]:
    """An earlier attempt is over, and so is its last line."""
    for number, (key, extra) in enumerate(streams):
        if extra.unfinished and number < len(streams) - 1:
            yield (
                key,
                replace(extra, console=joined([extra.console, (extra.unfinished,)]), unfinished=""),
            )
        else:
            yield key, extra


def _offline_last_step(readings: Iterable[tuple[LogFile, Reading]]) -> int | None:
    steps = [
        max(reading.rows.column(STEP).to_pylist(), default=0)
        for file, reading in readings
        if file.source == "offline_run"
    ]
    return max(steps, default=None)


def _merged(extras: Sequence[PassThrough]) -> PassThrough:
    files: dict[str, FileRef] = {}
    summary: dict[str, Any] = {}
    for extra in extras:
        files.update({file.name: file for file in extra.files})
        summary.update(extra.summary)
    worded = [extra for extra in extras if extra.group or extra.tags or extra.notes]
    first = worded[0] if worded else PassThrough()
    return PassThrough(
        metrics=_unique(m for extra in extras for m in extra.metrics),
        artifacts=_unique(a for extra in extras for a in extra.artifacts),
        others=tuple(other for extra in extras for other in extra.others),
        files=tuple(files[name] for name in sorted(files)),
        summary=mask_config(summary),
        tags=first.tags,
        notes=first.notes,
        group=first.group,
        job_type=first.job_type,
    )


def _unique(things: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(things))


def summarise(history: History, recorded: Mapping[str, Any], *, defined: bool) -> dict[str, Any]:
    """The run's summary: the last value of every key, and what the trainer set itself.

    A fragment's summary replaces the whole summary, so it is always complete.

    Args:
        history: the rows that the server will hold.
        recorded: the summary that offline runs recorded.
        defined: whether metric definitions may make a summary other than the last value.
    """
    summary: dict[str, Any] = {}
    for name in history.table.schema.names:
        value = _last_value(history.table.column(name))
        if value is not MISSING:
            summary[name] = value
    for key, value in recorded.items():
        if key not in summary or (defined and key not in AXES):
            summary[key] = value
    runtime = summary.get(RUNTIME)
    if isinstance(runtime, int | float):
        summary[_INTERNAL] = {"runtime": int(runtime)}
    return summary


def _last_value(column: Any) -> Any:
    if column.null_count == 0 and len(column):
        return decode(column.slice(len(column) - 1))[0]
    values = column.drop_null()
    return decode(values.slice(len(values) - 1))[0] if len(values) else MISSING
