"""What the loopback server remembers: projects, runs and their line files.

Line files keep true offsets: a chunk sent at offset 0 overwrites line 0, it is never
appended blindly. Many uploader bugs show only against a server that does this.
"""

from __future__ import annotations

import base64
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from operator import le
from typing import Any

from verl_logsync.testing._json import dump_json, parse_json

HISTORY = "wandb-history.jsonl"
EVENTS = "wandb-events.jsonl"
SUMMARY = "wandb-summary.json"
OUTPUT = "output.log"

_INTERNAL_CONFIG = "_wandb"
_TYPE_NAMES: dict[type, str] = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "list",
    type(None): "null",
}


class DeletedRunError(Exception):
    """The run id was used by a run that has been deleted; it cannot be used again."""


def utc_now() -> str:
    """Return the present time in the form that W&B answers with."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def global_id(*parts: str) -> str:
    """Make an opaque GraphQL id; clients decode artifact ids from base64."""
    return base64.b64encode(":".join(parts).encode()).decode()


class LineFile:
    """Numbered lines that are written by offset."""

    def __init__(self) -> None:
        self._lines: list[str | None] = []
        self.gaps: list[tuple[int, int]] = []
        self.overwrites: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def lines(self) -> list[str]:
        """The lines that were really received, without the holes."""
        return [line for line in self._lines if line is not None]

    @property
    def last(self) -> str | None:
        """The last line, if there is any."""
        return self._lines[-1] if self._lines else None

    def put(self, offset: int, content: list[str]) -> bool:
        """Write lines at an offset; return whether lines that were there changed hands."""
        if offset > len(self._lines):
            missing = offset - len(self._lines)
            self.gaps.append((len(self._lines), missing))
            self._lines.extend([None] * missing)
        covered = self._lines[offset : offset + len(content)]
        overwritten = sum(line is not None for line in covered)
        if overwritten:
            self.overwrites.append((offset, overwritten))
        self._lines[offset : offset + len(content)] = content
        return bool(covered)

    def since(self, line: int) -> Iterable[str | None]:
        """Return the lines from a line number on, None for a hole."""
        return islice(self._lines, line, None)

    def keep(self, lines: list[str | None]) -> None:
        """Replace everything by these lines."""
        self._lines = lines


@dataclass
class KeyStats:
    """What is known about one history key."""

    counts: Counter[str] = field(default_factory=Counter)
    monotonic: bool = True
    previous: object = None

    def add(self, column: list[Any]) -> None:
        """Count one more stretch of values, in row order."""
        types = Counter(map(type, column))
        for type_, count in types.items():
            self.counts[_TYPE_NAMES.get(type_, "map")] += count
        if self.monotonic:
            self.monotonic = self._still_monotonic(column, types)
        self.previous = column[-1]

    def _still_monotonic(self, column: list[Any], types: Mapping[type, int]) -> bool:
        if not types.keys() <= {int, float}:
            return False
        if isinstance(self.previous, (int, float)) and not self.previous <= column[0]:
            return False
        return all(map(le, column, islice(column, 1, None)))


class HistoryIndex:
    """Steps and per-key counts of a history.

    Lines are counted as they arrive, column by column, so that a client which reads back
    right after sending does not pay for it.
    """

    def __init__(self, history: LineFile) -> None:
        self._history = history
        self._counted = 0
        self.steps: list[float | None] = []
        self.keys: dict[str, KeyStats] = {}

    def forget(self) -> None:
        """Start over, because lines already counted have changed."""
        self._counted = 0
        self.steps = []
        self.keys = {}

    def refresh(self) -> None:
        """Count the lines that arrived since the last time."""
        columns: defaultdict[str, list[Any]] = defaultdict(list)
        for line in self._history.since(self._counted):
            row = {} if line is None else parse_json(line)
            step = row.get("_step")
            self.steps.append(step if isinstance(step, (int, float)) else None)
            for key, value in row.items():
                columns[key].append(value)
        self._counted = len(self._history)
        for key, column in columns.items():
            self._count(key, column)

    def _count(self, key: str, column: list[Any]) -> None:
        plain = [value for value in column if not isinstance(value, dict)]
        if plain:
            self.keys.setdefault(key, KeyStats()).add(plain)
        if len(plain) == len(column):
            return
        nested: defaultdict[str, list[Any]] = defaultdict(list)
        for value in column:
            if isinstance(value, dict) and "_type" in value:
                stats = self.keys.setdefault(key, KeyStats())
                stats.counts[str(value["_type"])] += 1
                stats.monotonic = False
            elif isinstance(value, dict):
                for name, item in value.items():
                    nested[f"{key}.{name}"].append(item)
        for name, items in nested.items():
            self._count(name, items)

    @property
    def last_step(self) -> int:
        """The highest step, or -1 without any."""
        return int(max((step for step in self.steps if step is not None), default=-1))

    def as_json(self) -> dict[str, object]:
        """Return the value of the GraphQL field `historyKeys`."""
        return {
            "sets": [],
            "keys": {
                key: {
                    "typeCounts": [{"type": t, "count": n} for t, n in stats.counts.items()],
                    "monotonic": stats.monotonic,
                    "previousValue": stats.previous,
                }
                for key, stats in self.keys.items()
            },
            "lastStep": self.last_step,
        }


class StoredRun:
    """A run as the server holds it."""

    def __init__(self, entity: str, project: str, run_id: str, lock: threading.RLock) -> None:
        self._lock = lock
        self.entity = entity
        self.project = project
        self.id = run_id
        self.storage_id = global_id("Run", "v1", run_id, project, entity)
        self.state = "running"
        self.exit_code: int | None = None
        self.name = run_id
        self.tags: list[str] = []
        self.notes: str | None = None
        self.group: str | None = None
        self.job_type: str | None = None
        self.fields: dict[str, object] = {}
        self.raw_config: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.file_times: dict[str, str] = {}
        self.upserts = 0
        self.rewinds: list[tuple[float, int]] = []
        self.stopped = False
        self.created_at = self.heartbeat_at = utc_now()
        self.line_files: dict[str, LineFile] = {
            name: LineFile() for name in (HISTORY, EVENTS, SUMMARY, OUTPUT)
        }
        self._index = HistoryIndex(self.line_files[HISTORY])

    def __repr__(self) -> str:
        path = f"{self.entity}/{self.project}/{self.id}"
        return f"<StoredRun {path} {self.state}, {len(self.history)} history lines>"

    @property
    def history(self) -> LineFile:
        """The history with its offsets."""
        return self.line_files[HISTORY]

    @property
    def lines(self) -> list[str]:
        """The history lines as they were sent."""
        with self._lock:
            return self.history.lines

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history lines, parsed."""
        return [parse_json(line) for line in self.lines]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The system metrics, parsed."""
        with self._lock:
            return [parse_json(line) for line in self.line_files[EVENTS].lines]

    @property
    def logs(self) -> list[str]:
        """The console lines as they were sent."""
        with self._lock:
            return self.line_files[OUTPUT].lines

    @property
    def summary_json(self) -> str:
        """The last line written to the summary file."""
        return self.line_files[SUMMARY].last or "{}"

    @property
    def summary(self) -> dict[str, Any]:
        """The summary, parsed."""
        parsed: dict[str, Any] = parse_json(self.summary_json)
        return parsed

    @property
    def config(self) -> dict[str, Any]:
        """The config values that the user gave."""
        with self._lock:
            return {
                key: item.get("value") if isinstance(item, dict) else item
                for key, item in self.raw_config.items()
                if key != _INTERNAL_CONFIG
            }

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Holes left in the history when they came about: (line, number of lines)."""
        return self.history.gaps

    @property
    def overwrites(self) -> list[tuple[int, int]]:
        """History lines written over: (offset of the chunk, lines replaced)."""
        return self.history.overwrites

    @property
    def index(self) -> HistoryIndex:
        """Steps and key counts, up to date."""
        with self._lock:
            self._index.refresh()
            return self._index

    def write(self, name: str, offset: int, content: list[str]) -> None:
        """Write lines of one file at their offset."""
        changed = self.line_files.setdefault(name, LineFile()).put(offset, content)
        if name == HISTORY:
            if changed:
                self._index.forget()
            self._index.refresh()

    def complete(self, exit_code: int) -> None:
        """End the run as its exit code says."""
        self.exit_code = exit_code
        self.state = "finished" if exit_code == 0 else "failed"

    def rewind(self, step: float) -> None:
        """Drop the history above a step; summary, events and console stay as they are."""
        steps = self.index.steps
        kept = [
            line
            for line, at in zip(self.history.since(0), steps, strict=True)
            if at is None or at <= step
        ]
        self.rewinds.append((step, len(self.history) - len(kept)))
        self.history.keep(kept)
        self._index.forget()

    def scan(self, low: float | None, high: float | None) -> list[str]:
        """Return the history lines with low <= step < high; None leaves an end open."""
        if low is None and high is None:
            return self.lines
        floor = float("-inf") if low is None else low
        ceiling = float("inf") if high is None else high
        with self._lock:
            steps = self.index.steps
            return [
                line
                for line, step in zip(self.history.since(0), steps, strict=True)
                if line is not None and step is not None and floor <= step < ceiling
            ]

    def update(self, values: Mapping[str, Any]) -> None:
        """Apply the input of an `upsertBucket` mutation.

        Config merges at its top-level keys. Everything else is replaced when given
        and kept when absent or empty.
        """
        self.upserts += 1
        self.heartbeat_at = utc_now()
        if values.get("config"):
            self.raw_config.update(parse_json(values["config"]) or {})
        if values.get("summaryMetrics"):
            summary = self.line_files[SUMMARY]
            summary.put(max(0, len(summary) - 1), [values["summaryMetrics"]])
        self.name = values.get("displayName") or self.name
        self.tags = list(values.get("tags") or self.tags)
        self.notes = values.get("notes") or self.notes
        self.group = values.get("groupName") or self.group
        self.job_type = values.get("jobType") or self.job_type
        for key in ("description", "commit", "host", "jobProgram", "jobRepo", "sweep"):
            if values.get(key):
                self.fields[key] = values[key]

    def reopen(self, state: str) -> None:
        """Take the state of a run that a client writes to."""
        self.state = state
        self.exit_code = None

    def config_json(self) -> str:
        """Return the config in the form of the GraphQL field `config`."""
        return dump_json(self.raw_config)

    def internal_config(self, keys: Iterable[str] | None) -> str:
        """Return the config's internal part; `t` in it marks a run that has started."""
        item = self.raw_config.get(_INTERNAL_CONFIG) or {}
        internal = item.get("value") or {}
        wanted = set(internal if keys is None else keys)
        return dump_json({key: value for key, value in internal.items() if key in wanted})


class Store:
    """All runs of the server."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.projects: dict[tuple[str, str], dict[str, StoredRun]] = {}
        self.deleted: set[tuple[str, str, str]] = set()
        self.lines_received = 0

    @property
    def runs(self) -> list[StoredRun]:
        """All runs, oldest first within a project."""
        with self.lock:
            return [run for runs in self.projects.values() for run in runs.values()]

    def find(self, entity: str, project: str, run_id: str) -> StoredRun | None:
        """Return a run, or None."""
        return self.projects.get((entity, project), {}).get(run_id)

    def find_by_storage_id(self, storage_id: str) -> StoredRun | None:
        """Return the run with a GraphQL id, or None."""
        return next((run for run in self.runs if run.storage_id == storage_id), None)

    def make_project(self, entity: str, project: str) -> dict[str, StoredRun]:
        """Return a project's runs; projects come into being when first written to."""
        return self.projects.setdefault((entity, project), {})

    def upsert(self, entity: str, project: str, run_id: str) -> tuple[StoredRun, bool]:
        """Return a run and whether it is new."""
        if (entity, project, run_id) in self.deleted:
            raise DeletedRunError(run_id)
        runs = self.make_project(entity, project)
        if run_id in runs:
            return runs[run_id], False
        runs[run_id] = StoredRun(entity, project, run_id, self.lock)
        return runs[run_id], True

    def delete(self, run: StoredRun) -> None:
        """Delete a run; its id stays taken."""
        with self.lock:
            del self.projects[run.entity, run.project][run.id]
            self.deleted.add((run.entity, run.project, run.id))

    def stream(self, run: StoredRun, body: Mapping[str, Any]) -> None:
        """Apply one file-stream request."""
        with self.lock:
            for name, chunk in (body.get("files") or {}).items():
                content = chunk.get("content") or []
                if isinstance(content, str):
                    content = [content]
                run.write(name, int(chunk.get("offset") or 0), content)
                if name == HISTORY:
                    self.lines_received += len(content)
            run.heartbeat_at = utc_now()
            if body.get("complete"):
                run.complete(int(body.get("exitcode") or 0))
