"""What goes along with a run's rows: the pass-through records that the server lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from verl_logsync.assemble import Surroundings
from verl_logsync.config_files import artifact_name
from verl_logsync.model import FileRef, PassThrough, RemoteState, Segment
from verl_logsync.spooled import joined

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Lacking:
    """What goes along with the rows, and what the server's streams consist of afterwards."""

    extra: PassThrough
    events: tuple[Segment, ...]
    logs: tuple[Segment, ...]
    notes: tuple[str, ...] = ()


def nothing_but_rows(around: Surroundings, remote: RemoteState | None) -> Lacking:
    """What a rewind may carry besides rows: config and summary, no streams, files or artifacts."""
    marker = remote.marker if remote is not None else None
    carried = replace(around.extra, files=(), artifacts=(), others=())
    return Lacking(carried, *((marker.events, marker.logs) if marker is not None else ((), ())))


def lacking(
    around: Surroundings, remote: RemoteState | None, run_id: str, *, ended: bool
) -> Lacking:
    """The pass-through records that the server does not hold yet.

    Args:
        ended: whether the run is over, so that its last console line counts without a line end.
    """
    marker = remote.marker if remote is not None else None
    events = _continue(
        [(key, e.events) for key, e in around.streams],
        marker.events if marker is not None else (),
        remote.events if remote is not None else 0,
    )
    logs = _continue(
        [(key, _lines(e, ended=ended)) for key, e in around.streams],
        marker.logs if marker is not None else (),
        remote.logs if remote is not None else 0,
    )
    carried = replace(around.extra, events=tuple(events.items), console=logs.items)
    if remote is not None:
        carried = _without_stored_parts(carried, remote, artifact_name(run_id))
    strange = [n for n, s in (("system metrics", events), ("console", logs)) if s.strange]
    notes = tuple(
        f"the server holds {what} lines that did not come from these logs; none are added"
        for what in strange
    )
    return Lacking(carried, events.stored, logs.stored, notes)


def _without_stored_parts(
    extra: PassThrough, remote: RemoteState, config_artifact: str
) -> PassThrough:
    """The same without the files and artifacts that the server has."""
    artifacts = tuple(a for a in extra.artifacts if a.key not in remote.artifacts)
    # It is sent from the same files, also if the run has files of their size already.
    anew = any(a.name == config_artifact for a in artifacts)
    files = tuple(
        f for f in extra.files if (anew and f.content is not None) or not _is_there(f, remote)
    )
    return replace(extra, files=files, artifacts=artifacts, others=())


def _lines(extra: PassThrough, *, ended: bool) -> Sequence[str]:
    more = ended and extra.unfinished
    return joined([extra.console, (extra.unfinished,)]) if more else extra.console


@dataclass(frozen=True, slots=True)
class _Stream(Generic[_T]):
    items: Sequence[_T]
    stored: tuple[Segment, ...]
    strange: bool = False


def _continue(
    logs: Sequence[tuple[str, Sequence[_T]]], recorded: Sequence[Segment], held: int
) -> _Stream[_T]:
    """What of some logs follows the lines that the server holds.

    The marker records in which order stretches of which log were sent, before they were; the
    server's line count says how many of them arrived. Lines that are not explained so came
    from elsewhere: of a single log they are taken for its beginning, otherwise nothing is sent.
    """
    stored: list[Segment] = []
    left = held
    for key, first, end in recorded:
        taken = min(end - first, left)
        if taken:
            stored.append((key, first, first + taken))
        left -= taken
    if left and not recorded and len(logs) == 1:
        stored.append((logs[0][0], 0, min(left, len(logs[0][1]))))
        left = 0
    if left:
        return _Stream((), tuple(recorded), strange=any(len(lines) for _, lines in logs))
    items: list[Sequence[_T]] = []
    for key, lines in logs:
        reached = max((end for k, _, end in stored if k == key), default=0)
        if reached < len(lines):
            items.append(lines[reached:])
            stored.append((key, reached, len(lines)))
    return _Stream(joined(items), tuple(stored))


def _is_there(file: FileRef, remote: RemoteState) -> bool:
    try:
        return remote.files.get(file.name) == file.size
    except OSError:
        return True  # gone since it was found; there is nothing to send
