"""The sink that writes run folders for another machine to send.

Each folder is a complete first fragment: plain `wandb sync FOLDER` accepts it, and so does
this tool, which on a machine with internet adds only what the server lacks. A run's folder is
replaced when its history changed, so the output always holds the whole present truth. Only one that
begins before the present logs do stays: verl truncates its log at a restart, and the rows of the
start before are nowhere else.
"""

from __future__ import annotations

import filecmp
import glob
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_logsync.columns import STEP
from verl_logsync.errors import LogsyncError, UsageError, WriteError
from verl_logsync.interfaces import Parcel, Sent
from verl_logsync.model import MARKER_KEY, Binding, Marker, RemoteState, Target, UploadPlan
from verl_logsync.transaction_log import (
    Damage,
    config_updates,
    history_row,
    read_records,
    summary_updates,
)
from verl_logsync.transaction_log.fragment import folder_name, read_marker, write_fragment


class OfflineDirSink:
    """Writes below `output`, and reads back what it wrote."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._written: dict[Target, Path] = {}
        self._earlier: dict[Target, Marker] | None = None

    def look(self, targets: Sequence[Target]) -> Mapping[Target, RemoteState]:
        """What was written for these targets by this sink, read back from the files."""
        return {t: self._read_back(t) for t in targets if t in self._written}

    def with_parts(self, target: Target, state: RemoteState) -> RemoteState:
        """The same: reading back covers files and artifacts."""
        return state

    def find(self, project: Target, keys: Sequence[str]) -> Sequence[Binding]:
        """The runs that were written here before, so that they keep their ids."""
        found = []
        for target, marker in self._before().items():
            if target.project == project.project and marker.names_key in keys:
                found.append(
                    Binding(
                        replace(target, entity=project.entity),
                        marker.names_key,
                        marker.heads,
                        marker.fingerprint,
                        marker.last_step,
                    )
                )
        return found

    def pins(self, target: Target) -> Mapping[str, float]:
        """What the clock of a run written before settled on."""
        marker = self._before().get(replace(target, entity=""))
        return marker.clock if marker is not None else {}

    def _before(self) -> Mapping[Target, Marker]:
        """The markers of the folders that an earlier call left, read once."""
        if self._earlier is None:
            self._earlier = dict(_markers(self._output))
        return self._earlier

    def can_rewind(self, target: Target) -> bool:
        """Never needed."""
        return False

    def refuses_rewind(self, target: Target) -> None:
        """Never called: nothing is rewound."""

    def rows(self, target: Target) -> Iterator[Mapping[str, Any]]:
        """The rows in the written file."""
        folder = self._written[target]
        for entry in read_records(folder / f"run-{target.run_id}.wandb"):
            if not isinstance(entry, Damage) and entry.kind == "history":
                step, row = history_row(entry.record)
                if step is not None:
                    yield {STEP: step, **row}

    def probe(self) -> None:
        """A folder refuses nobody."""

    def warm_up(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing was started."""

    def url(self, target: Target) -> str:
        """The folder; empty when the run could not be written."""
        return str(self._written[target]) if target in self._written else ""

    def pack(self, plan: UploadPlan) -> Parcel:
        """Write the plan's folder beside its place."""
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=self._output, prefix=".writing-"))
        except OSError as error:
            raise _unwritable(self._output, error) from error
        try:
            folder = write_fragment(plan, work, entity=plan.target.entity, use="carry")
        except LogsyncError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        return Parcel(plan, folder)

    def send(self, parcels: Sequence[Parcel]) -> Mapping[Target, Sent]:
        """Put every folder in its place, whole or not at all."""
        return {parcel.plan.target: self._place(parcel) for parcel in parcels}

    def _place(self, parcel: Parcel) -> Sent:
        place = self._output / folder_name(parcel.plan)
        work = parcel.folder.parent
        first = parcel.plan.history.steps[0] if len(parcel.plan.history) else None
        kept: list[str] = []
        try:
            olds = self._output.glob(f"offline-run-*-{glob.escape(parcel.plan.target.run_id)}")
            for old in sorted({place, *olds}):
                if old.exists() and not _is_ours(old):
                    return Sent(_not_ours(old))
                if first is not None and _first_step(old, parcel.plan.target) < first:
                    kept.append(old.name)
                elif old != place:  # the same run, under an earlier estimate of its start
                    old.rename(work / old.name)
            if place.name in kept:
                return Sent(_holds_more(place))
            if not _same(parcel.folder, place):
                _replace(parcel.folder, place, work / "old")
        except OSError as error:
            return Sent(_unwritable(place, error))
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._written[parcel.plan.target] = place
        return Sent(notes=tuple(map(_kept, kept)))

    def _read_back(self, target: Target) -> RemoteState:
        folder = self._written[target]
        return _state_in(folder, folder / f"run-{target.run_id}.wandb")


def _state_in(folder: Path, log: Path) -> RemoteState:
    """What a run folder holds: its records, and the files that they name."""
    steps: list[int] = []
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    summary: dict[str, Any] = {}
    artifacts: set[tuple[str, str]] = set()
    state = "running"
    for entry in read_records(log):
        if isinstance(entry, Damage):
            continue
        kinds[entry.kind] += 1
        if entry.kind == "history":
            step, row = history_row(entry.record)
            steps.append(-1 if step is None else step)
            counts.update(row.keys())
        elif entry.kind == "summary":
            summary.update(summary_updates(entry.record))
        elif entry.kind == "artifact" and _is_complete(entry.record.artifact, folder):
            artifacts.add((entry.record.artifact.name, entry.record.artifact.digest))
        elif entry.kind == "exit":
            state = "failed" if entry.record.exit.exit_code else "finished"
    return RemoteState(
        state=state,
        lines=len(steps),
        events=kinds["stats"],
        logs=kinds["output_raw"],
        last_step=steps[-1] if steps else None,
        summary=summary,
        key_counts=counts,
        files=_sizes(folder / "files"),
        artifacts=frozenset(artifacts),
    )


def _is_complete(artifact: Any, folder: Path) -> bool:
    """Whether all files of an artifact's manifest came along, of the size that it states."""
    return all(
        (place := folder / item.local_path).is_file() and place.stat().st_size == item.size
        for item in artifact.manifest.contents
        if item.local_path
    )


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def _markers(output: Path) -> Iterator[tuple[Target, Marker]]:
    for log in sorted(output.glob("offline-run-*/run-*.wandb")):
        yield from _marker_in(log)


def _marker_in(log: Path) -> Iterator[tuple[Target, Marker]]:
    """The marker of one log; nothing where the file is damaged or was not written by us."""
    try:
        entry = next((e for e in read_records(log) if not isinstance(e, Damage)), None)
        config = config_updates(entry.record) if entry and entry.kind == "run" else {}
    except (LogsyncError, ValueError):
        return
    marker = read_marker(config.get(MARKER_KEY))
    if entry is not None and marker is not None:
        run = entry.record.run
        yield Target("", run.project, run.run_id), marker


def _is_ours(folder: Path) -> bool:
    """Whether a run folder was written by this tool, so that it may be replaced."""
    return any(True for log in folder.glob("run-*.wandb") for _ in _marker_in(log))


def _first_step(folder: Path, target: Target) -> float:
    """The first step in a run folder; infinity where there is none."""
    log = folder / f"run-{target.run_id}.wandb"
    if not log.exists():
        return math.inf
    rows = (e for e in read_records(log) if not isinstance(e, Damage) and e.kind == "history")
    return next((s for e in rows if (s := history_row(e.record)[0]) is not None), math.inf)


def _kept(name: str) -> str:
    return f"{name} stays beside it: its first steps are in no log any more. Move both"


def _holds_more(place: Path) -> UsageError:
    return UsageError(
        "holds steps that are in no log any more; it is not replaced",
        place=str(place),
        hint="Give another folder with --output",
    )


def _not_ours(place: Path) -> UsageError:
    return UsageError(
        "holds a run that the trainer wrote; it is not replaced",
        place=str(place),
        hint="Give another folder with --output",
    )


def _unwritable(place: Path, error: OSError) -> WriteError:
    return WriteError(
        f"cannot be written: {error.strerror}",
        place=str(place),
        hint="Give another folder with --output",
    )


def _same(one: Path, other: Path) -> bool:
    """Whether two run folders hold the same files."""
    if not other.is_dir():
        return False
    names = sorted(p.relative_to(one).as_posix() for p in one.rglob("*") if p.is_file())
    _, mismatch, errors = filecmp.cmpfiles(one, other, names, shallow=False)
    return not mismatch and not errors


def _replace(new: Path, place: Path, aside: Path) -> None:
    """Put a folder in its place; the old one is moved out of the way first, then dropped."""
    if place.exists():
        place.rename(aside)
    new.rename(place)
    shutil.rmtree(aside, ignore_errors=True)
