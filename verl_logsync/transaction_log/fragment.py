"""A fragment: the run folder that carries an UploadPlan, as `wandb sync` accepts it.

What must be repeated in every fragment (measured with wandb 0.31): the run's first start time,
all metric definitions, the whole summary and the whole config. Name, tags, notes and group go
only with the first one, so that what a person edits on the server survives.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from verl_logsync.columns import STEP, json_values
from verl_logsync.errors import LogsyncError, UnreadableInput, WriteError, quoted
from verl_logsync.limits import LONGEST_NAME, LONGEST_TAG, tags_within
from verl_logsync.model import (
    MARKER_KEY,
    Action,
    ArtifactRef,
    DerivedBy,
    FileRef,
    History,
    Marker,
    Segment,
    UploadPlan,
    short_digest,
)
from verl_logsync.transaction_log.records import (
    alert_record,
    console_record,
    counter_record,
    exit_record,
    files_record,
    run_record,
    run_words,
    summary_record,
)
from verl_logsync.transaction_log.writer import TransactionLogWriter, encode_history, encode_key
from verl_logsync.verl_keys import COUNTERS

#: Where a run folder that is to be carried elsewhere has the files of its artifacts.
ARTIFACT_FILES: Final = "artifacts"
#: Rows are encoded in stretches of this size, which bounds memory.
_STRETCH: Final = 4096
# W&B's limits; longer ones are refused at upload.


def folder_name(plan: UploadPlan) -> str:
    """`offline-run-DATE_TIME-ID`, by the run's own start."""
    # Folder names are for people; a time that no calendar has must not stop an upload.
    seconds = min(max(plan.started_at or 0.0, 0.0), 4102444800.0)
    started = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return f"offline-run-{started:%Y%m%d_%H%M%S}-{plan.target.run_id}"


def write_fragment(
    plan: UploadPlan, parent: Path, *, entity: str, use: Literal["send", "carry"]
) -> Path:
    """Write a plan as a run folder below `parent`, and return the folder.

    Args:
        entity: the entity that the records name; empty for the key's default.
        use: "send" when it is read on this machine at once: the run's files are linked to, and a
            crash of the machine may lose it. "carry" when it travels: files are copied.

    Raises:
        WriteError: the folder cannot be written.
    """
    folder = parent / folder_name(plan)
    assert folder.parent == parent, "a run id is no path"
    try:
        (folder / "files").mkdir(parents=True, exist_ok=True)
        for file in plan.extra.files:
            _place(file, folder / "files", use)
        if use == "carry":
            carried = tuple(_carried(a, folder) for a in plan.extra.artifacts)
            plan = replace(plan, extra=replace(plan.extra, artifacts=carried))
    except OSError as error:
        raise _not_copied(error, folder) from error
    path = folder / f"run-{plan.target.run_id}.wandb"
    with TransactionLogWriter(path, durable=use == "carry") as log:
        for payload in payloads(plan, entity, folder if use == "send" else None):
            log.write_payload(payload)
    return folder


def _not_copied(error: OSError, folder: Path) -> LogsyncError:
    """Which of the two sides of a copy failed."""
    source = error.filename
    unread = isinstance(error, FileNotFoundError | PermissionError)
    if unread and isinstance(source, str) and not Path(source).is_relative_to(folder):
        hint = "It was there when it was found: run the same command again"
        return UnreadableInput(f"cannot be read: {error.strerror}", place=source, hint=hint)
    hint = f"Check its free space: df -h {quoted(folder.parent)}"
    return WriteError(f"cannot be written: {error.strerror}", place=str(folder), hint=hint)


def _place(file: FileRef, folder: Path, use: Literal["send", "carry"]) -> None:
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if file.content is not None:
        place.write_bytes(file.content)
    elif use == "carry":
        shutil.copyfile(file.path, place)
    else:
        place.symlink_to(file.path.absolute())


def _carried(artifact: ArtifactRef, folder: Path) -> ArtifactRef:
    """The same artifact with its files in the run folder, which may leave this machine.

    W&B stages them elsewhere, by absolute paths.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    record = pb.Record.FromString(artifact.payload)
    for entry in record.artifact.manifest.contents:
        if entry.local_path and Path(entry.local_path).is_absolute():
            place = f"{ARTIFACT_FILES}/{short_digest(entry.digest, str(entry.size))}"
            (folder / ARTIFACT_FILES).mkdir(exist_ok=True)
            shutil.copyfile(entry.local_path, folder / place)
            entry.local_path = place
    return replace(artifact, payload=record.SerializeToString())


def payloads(plan: UploadPlan, entity: str, folder: Path | None) -> Iterator[bytes]:
    """The records of a fragment, serialised, in the order in which they are replayed.

    Args:
        folder: where the fragment is; None when it is to be carried elsewhere.
    """
    yield _run_payload(plan, entity)
    yield from plan.extra.metrics or _counters(plan.history)
    yield from plan.extra.others
    yield from plan.extra.events
    yield from (alert_record(alert.title, alert.text) for alert in plan.alerts)
    if plan.extra.files:
        yield files_record(plan.extra.files)
    for artifact in plan.extra.artifacts:
        yield _artifact_payload(artifact.payload, plan, entity, folder)
    yield from map(console_record, plan.extra.console)
    yield from history_payloads(plan.history, plan.first_row)
    if plan.sends_summary and plan.summary:  # the uploader dies of an empty one
        yield summary_record(plan.summary)
    if plan.state != "running":
        yield exit_record(plan.exit_code, _runtime(plan.summary))


def _runtime(summary: Mapping[str, Any]) -> float:
    runtime = summary.get("_runtime", 0)
    usable = isinstance(runtime, int | float) and math.isfinite(runtime)
    return float(runtime) if usable else 0.0


def _run_payload(plan: UploadPlan, entity: str) -> bytes:
    extra = plan.extra
    words = run_words(
        name=plan.name[:LONGEST_NAME],
        notes=extra.notes,
        group=extra.group[:LONGEST_NAME],
        job_type=extra.job_type[:LONGEST_TAG],
    )
    tags = tags_within(plan.tags or ())
    return run_record(
        run_id=plan.target.run_id,
        entity=entity,
        project=plan.target.project,
        config={**plan.config, MARKER_KEY: marker_value(plan.marker)},
        started_at=plan.started_at,
        words=words if plan.new_run else b"",
        tags=tags,
        branch_step=plan.branch_step if plan.action is Action.REWIND else None,
    )


def marker_value(marker: Marker) -> dict[str, Any]:
    """A marker as it is stored in the run's config."""
    return {
        "names_key": marker.names_key,
        "heads": sorted(marker.heads),
        "fingerprint": marker.fingerprint,
        "digest": marker.digest,
        "last_step": marker.last_step,
        "clock": dict(marker.clock),
        "events": [list(segment) for segment in marker.events],
        "logs": [list(segment) for segment in marker.logs],
        "diagnostics": [asdict(by) for by in marker.diagnostics],
        "added": sorted(marker.added),
        "alerts": list(marker.alerts),
        "logged_from": dict(marker.logged_from),
    }


def read_marker(stored: object) -> Marker | None:
    """A marker from the value in a run's config; None when it cannot be understood."""
    if not isinstance(stored, Mapping):
        return None
    try:
        return Marker(
            str(stored["names_key"]),
            frozenset(map(str, stored["heads"])),
            str(stored["fingerprint"]),
            str(stored["digest"]),
            int(stored["last_step"]),
            {str(k): float(v) for k, v in dict(stored["clock"]).items()},
            _segments(stored["events"]),
            _segments(stored["logs"]),
            _derived_by(stored.get("diagnostics") or ()),
            frozenset(map(str, stored.get("added") or ())),
            tuple(map(str, stored.get("alerts") or ())),
            {str(k): int(v) for k, v in dict(stored.get("logged_from") or {}).items()},
        )
    except (KeyError, TypeError, ValueError):
        return None


def _segments(stored: Any) -> tuple[Segment, ...]:
    return tuple((str(key), int(first), int(end)) for key, first, end in stored)


def _derived_by(stored: Any) -> tuple[DerivedBy, ...]:
    if isinstance(stored, str):  # the version alone, as the first programs wrote it
        return (DerivedBy(stored, stored),)
    return tuple(
        DerivedBy(
            str(by["version"]), str(by["columns_of"]), str(by["options"]), int(by["first_step"])
        )
        for by in stored
    )


def _counters(history: History) -> Iterator[bytes]:
    """Verl defines no metrics; what counts progress can then be chosen as an axis."""
    names = set(history.table.schema.names)
    return (counter_record(name) for name in COUNTERS if name in names)


def _artifact_payload(payload: bytes, plan: UploadPlan, entity: str, folder: Path | None) -> bytes:
    """An artifact's record for the target run: with another run or project it is lost.

    Local paths must be absolute: where a file is not found, the artifact stays pending in silence.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    record = pb.Record.FromString(payload)
    record.artifact.run_id = plan.target.run_id
    record.artifact.project = plan.target.project
    record.artifact.entity = entity
    for entry in record.artifact.manifest.contents:
        if folder is not None and entry.local_path and not Path(entry.local_path).is_absolute():
            entry.local_path = str((folder / entry.local_path).absolute())
    return bytes(record.SerializeToString())


def history_payloads(history: History, first_row: int) -> Iterator[bytes]:
    """The serialised history records from a row on."""
    for start in range(first_row, len(history), _STRETCH):
        yield from _stretch(history, start, min(_STRETCH, len(history) - start))


def _stretch(history: History, start: int, count: int) -> Iterator[bytes]:
    table = history.table.slice(start, count)
    names = [n for n in table.schema.names if n != STEP]
    columns = [table.column(n) for n in names]
    filled = [c.null_count < count for c in columns]
    names = [n for n, some in zip(names, filled, strict=True) if some]
    columns = [c for c, some in zip(columns, filled, strict=True) if some]
    keys = [encode_key(name) for name in names]
    steps = table.column(STEP).to_pylist()
    rows = (
        zip(*(json_values(column) for column in columns), strict=True)
        if columns
        else iter([()] * count)
    )
    if all(column.null_count == 0 for column in columns):
        for step, values in zip(steps, rows, strict=True):
            yield encode_history(step, keys, values)
        return
    present = np.column_stack([column.is_valid().to_numpy() for column in columns])
    pick = _Picker(keys)
    for step, values, mask in zip(steps, rows, present, strict=True):
        yield encode_history(step, *pick(mask, values))


class _Picker:
    """Chooses the present values of a row; rows of one kind share the work."""

    def __init__(self, keys: list[Any]) -> None:
        self._keys = keys
        self._known: dict[bytes, tuple[list[Any], Any]] = {}

    def __call__(self, mask: Any, values: tuple[bytes, ...]) -> tuple[list[Any], Any]:
        kind = mask.tobytes()
        if kind not in self._known:
            index = np.flatnonzero(mask).tolist()
            getter = _getter(index)
            self._known[kind] = [self._keys[i] for i in index], getter
        keys, getter = self._known[kind]
        return keys, getter(values)


def _getter(index: list[int]) -> Any:
    if len(index) < 2:  # itemgetter gives a bare value for one index, and nothing for none
        return lambda values: tuple(values[i] for i in index)
    getter: Any = itemgetter
    return getter(*index)
