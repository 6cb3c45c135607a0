"""A fragment: the run folder that carries an UploadPlan, as `wandb sync` accepts it.

What must be repeated in every fragment (measured with wandb 0.31): the run's first start time,
all metric definitions, the whole summary and the whole config. Name, tags, notes and group go
only with the first one, so that what a person edits on the server survives.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from verl_logsync.columns import STEP, json_values, to_json
from verl_logsync.errors import StateError
from verl_logsync.model import MARKER_KEY, Action, FileRef, History, Marker, Segment, UploadPlan
from verl_logsync.transaction_log.writer import (
    TransactionLogWriter,
    encode_history,
    encode_key,
    encode_record,
)

#: Rows are encoded in stretches of this size, which bounds memory.
_STRETCH: Final = 4096
# W&B's limits; longer ones are refused at upload.
_LONGEST_NAME, _LONGEST_TAG = 128, 64


def folder_name(plan: UploadPlan) -> str:
    """`offline-run-DATE_TIME-ID`, by the run's own start."""
    # Folder names are for people; a time that no calendar has must not stop an upload.
    seconds = min(max(plan.started_at or 0.0, 0.0), 4102444800.0)
    started = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return f"offline-run-{started:%Y%m%d_%H%M%S}-{plan.target.run_id}"


def write_fragment(
    plan: UploadPlan, parent: Path, *, entity: str, files: Literal["link", "copy"]
) -> Path:
    """Write a plan as a run folder below `parent`, and return the folder.

    Args:
        entity: the entity that the records name; empty for the key's default.
        files: whether the run's files are linked to (the folder is read on this machine, at
            once) or copied (it travels).

    Raises:
        StateError: the folder cannot be written.
    """
    folder = parent / folder_name(plan)
    assert folder.parent == parent, "a run id is no path"
    try:
        (folder / "files").mkdir(parents=True, exist_ok=True)
        for file in plan.extra.files:
            _place(file, folder / "files", files)
    except OSError as error:
        raise StateError(
            f"cannot be written: {error.strerror}",
            place=str(folder),
            hint=f"Check its free space: df -h {str(parent)!r}",
        ) from error
    with TransactionLogWriter(folder / f"run-{plan.target.run_id}.wandb") as log:
        for payload in payloads(plan, entity):
            log.write_payload(payload)
    return folder


def _place(file: FileRef, folder: Path, how: Literal["link", "copy"]) -> None:
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if how == "copy":
        shutil.copyfile(file.path, place)
    else:
        place.symlink_to(file.path.absolute())


def payloads(plan: UploadPlan, entity: str) -> Iterator[bytes]:
    """The records of a fragment, serialised, in the order in which they are replayed."""
    from wandb.proto import wandb_internal_pb2 as pb

    yield encode_record(_run_record(pb, plan, entity))
    yield from plan.extra.metrics
    yield from plan.extra.others
    yield from plan.extra.events
    if plan.extra.files:
        yield encode_record(_files_record(pb, plan))
    for artifact in plan.extra.artifacts:
        yield _artifact_payload(pb, artifact.payload, plan, entity)
    for line in plan.extra.console:
        yield encode_record(_console_record(pb, line))
    yield from history_payloads(plan.history, plan.first_row)
    if plan.sends_summary and plan.summary:  # the uploader dies of an empty one
        yield encode_record(_summary_record(pb, plan.summary))
    if plan.state != "running":
        record = pb.Record()
        record.exit.exit_code = plan.exit_code
        record.exit.runtime = int(_runtime(plan.summary))
        yield encode_record(record)


def _runtime(summary: Mapping[str, Any]) -> float:
    runtime = summary.get("_runtime", 0)
    usable = isinstance(runtime, int | float) and math.isfinite(runtime)
    return float(runtime) if usable else 0.0


def _run_record(pb: Any, plan: UploadPlan, entity: str) -> Any:
    record = pb.Record()
    run = record.run
    run.run_id = plan.target.run_id
    run.project = plan.target.project
    run.entity = entity
    if plan.new_run:
        run.display_name = plan.name[:_LONGEST_NAME]
        run.tags.extend(t[:_LONGEST_TAG] for t in dict.fromkeys(plan.extra.tags) if t)
        run.notes = plan.extra.notes
        run.run_group = plan.extra.group[:_LONGEST_NAME]
        run.job_type = plan.extra.job_type[:_LONGEST_TAG]
    for key, value in {**plan.config, MARKER_KEY: marker_value(plan.marker)}.items():
        run.config.update.add(key=key, value_json=to_json(value))
    if plan.started_at is not None:
        seconds = int(plan.started_at)
        run.start_time.seconds = seconds
        run.start_time.nanos = int((plan.started_at - seconds) * 1e9)
    if plan.action is Action.REWIND and plan.branch_step is not None:
        run.branch_point.run = plan.target.run_id
        run.branch_point.metric = STEP
        run.branch_point.value = plan.branch_step
    return record


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
        )
    except (KeyError, TypeError, ValueError):
        return None


def _segments(stored: Any) -> tuple[Segment, ...]:
    return tuple((str(key), int(first), int(end)) for key, first, end in stored)


def _files_record(pb: Any, plan: UploadPlan) -> Any:
    record = pb.Record()
    for file in plan.extra.files:
        record.files.files.add(path=file.name, policy=file.policy, type=file.kind)
    return record


def _artifact_payload(pb: Any, payload: bytes, plan: UploadPlan, entity: str) -> bytes:
    """An artifact's record for the target run: with another run or project it is lost."""
    record = pb.Record.FromString(payload)
    record.artifact.run_id = plan.target.run_id
    record.artifact.project = plan.target.project
    record.artifact.entity = entity
    return encode_record(record)


def _console_record(pb: Any, line: str) -> Any:
    record = pb.Record()
    record.output_raw.output_type = pb.OutputRawRecord.OutputType.STDOUT
    record.output_raw.line = f"{line}\n"
    return record


def _summary_record(pb: Any, summary: Mapping[str, Any]) -> Any:
    record = pb.Record()
    for key, value in summary.items():
        record.summary.update.add(nested_key=[key], value_json=to_json(value))
    return record


def history_payloads(history: History, first_row: int) -> Iterator[bytes]:
    """The serialised history records from a row on."""
    for start in range(first_row, len(history), _STRETCH):
        yield from _stretch(history, start, min(_STRETCH, len(history) - start))


def _stretch(history: History, start: int, count: int) -> Iterator[bytes]:
    table = history.table.slice(start, count)
    names = [n for n in table.column_names if n != STEP]
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
