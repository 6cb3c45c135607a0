"""The values that travel through the program. All of them are frozen.

In the order in which they are made: `LogFile` (discover), `RunSources` (catalog), `Reading`
(a source), `History` and `Account` (align), `RemoteState` (a sink), `UploadPlan` (plan),
`Verdict` (verify), `Outcome` and `Report` (pipeline).

Tables of rows are Arrow tables whose metric columns obey `verl_logsync.columns`; `_step` is
int64 and always there, `_timestamp` (seconds since 1970, UTC) and `_runtime` (seconds) are
float64 and may be missing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_logsync.errors import ExitCode, LogsyncError, as_run

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


# -- found on disk -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells an unchanged file from a changed one without reading it."""

    size: int
    mtime_ns: int
    inode: int
    device: int

    @property
    def mtime(self) -> float:
        """Seconds since 1970."""
        return self.mtime_ns / 1e9


class SkipReason(Enum):
    """Why something that was seen is not in the history."""

    NOT_RECOGNISED = "not recognised"
    NOTHING_YET = "nothing yet"
    UNREADABLE = "unreadable"
    NOT_A_LOG = "not a log"
    DUPLICATE = "duplicate copy"
    NO_HISTORY = "no history"
    CONFIG_ONLY = "config without metrics"
    PARTIAL_LINE = "partial last line"
    TORN_TAIL = "tail incomplete"
    CORRUPT = "corrupt"
    MALFORMED = "malformed record"
    TOO_LONG = "record too long"
    NO_STEP = "record without a step"
    UNKNOWN_KIND = "unknown records"
    HELD = "kept as it is on the server"
    FILE_GONE = "file is gone"
    NO_MATCH = "no match"
    NO_OWNER = "belongs to no run"
    FAILED = "failed"


#: These are the normal life of a log and never make an upload "partial" by themselves.
HARMLESS = frozenset(
    {
        SkipReason.NOT_RECOGNISED,
        SkipReason.CONFIG_ONLY,
        SkipReason.DUPLICATE,
        SkipReason.PARTIAL_LINE,
        SkipReason.UNKNOWN_KIND,
        SkipReason.HELD,
        SkipReason.FILE_GONE,
        SkipReason.NO_OWNER,
    }
)


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was left out, where, and why.

    `records` counts history records lost with it: 0 for whole files and for pieces that
    cannot be counted (a corrupt stretch), which are named by place instead.
    """

    reason: SkipReason
    place: str
    detail: str = ""
    hint: str = ""
    records: int = 0

    def __str__(self) -> str:
        parts = [f"{self.place}: {self.reason.value}"]
        if self.detail:
            parts.append(f" ({self.detail})")
        if self.hint:
            parts.append(f". {self.hint}")
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a quick look at a log file (its name, head and tail) tells.

    Empty strings and None mean "the file does not say". `config` holds the essentials of the
    training configuration (see `verl_logsync.fingerprint`), empty when the file has none.
    `head_digest` identifies the first record and `training_digest` the first record of a
    training step: two starts of a job may have the first validation in common; `tail_digest` (of
    sources whose bytes may differ for the same records) identifies the last. `carries` are
    the digests of the logs that a fragment of our own was made from, and `derived` the columns that
    diagnostics added to it. `rank` is None for logs that one process writes for all;
    `attempt_id` is what all ranks of one start recorded. `dirs` are the folders that the config
    names for dumps and checkpoints, as written there. `place_name` names a log that names no
    experiment after its place; by default such a one has its file's name.
    """

    entity: str = ""
    project: str = ""
    name: str = ""
    run_id: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    started_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    opens_with_validation: bool = False
    head_digest: str = ""
    training_digest: str = ""
    tail_digest: str = ""
    carries: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    attempt_id: str = ""
    host: str = ""
    dirs: Mapping[str, str] = field(default_factory=dict)
    place_name: str = ""


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log file that a source recognises. `role` says what it gives to its run.

    `before` are the digests of logs that the same path held at earlier uploads: verl truncates
    its log at a restart, and the new one belongs to the run of the old one.
    """

    path: Path
    source: str
    stamp: Stamp
    facts: Facts
    role: Literal["history", "config", "rollouts", "checkpoint"] = "history"
    before: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def key(self) -> str:
        """What identifies its content on every machine."""
        facts = self.facts
        return facts.head_digest or f"{facts.run_id}@{facts.started_at}"

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of its first records; training digests are marked."""
        facts = self.facts
        own = (facts.head_digest, facts.training_digest and f"{TRAINED}{facts.training_digest}")
        return facts.carries or tuple(filter(None, own))


#: Marks the digest of a training record among others.
TRAINED = "t:"


def short_digest(*words: str) -> str:
    """Twelve characters that identify these words: the length of a W&B run id or less."""
    hasher = hashlib.blake2b("\0".join(words).encode(errors="replace"), digest_size=8)
    return base64.b32encode(hasher.digest()).decode().lower()[:12]


# -- grouped into runs ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run lives on the server. An empty entity means the key's default entity."""

    entity: str
    project: str
    run_id: str

    def __str__(self) -> str:
        return "/".join(part for part in (self.entity, self.project, self.run_id) if part)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the training job, and the files that it wrote."""

    files: tuple[LogFile, ...]
    started_at: float | None
    ordered_by: Literal["recorded start", "content", "guess"]

    @property
    def first_step(self) -> int | None:
        return min(
            (f.facts.first_step for f in self.files if f.facts.first_step is not None), default=None
        )

    @property
    def last_step(self) -> int | None:
        return max(
            (f.facts.last_step for f in self.files if f.facts.last_step is not None), default=None
        )


@dataclass(frozen=True, slots=True)
class RunSources:
    """All that is on disk of one run."""

    target: Target
    name: str
    fingerprint: str
    id_from: Literal["offline run", "log", "checkpoint", "derived", "bound"]
    attempts: tuple[Attempt, ...]
    configs: tuple[LogFile, ...] = ()
    rollouts: tuple[LogFile, ...] = ()
    checkpoints: tuple[LogFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names_key(self) -> str:
        """What all runs of this project and name share, on every machine."""
        return short_digest(self.target.project, self.name)

    @property
    def heads(self) -> frozenset[str]:
        """Digests of the first records of its files: its content's identity."""
        return frozenset(d for a in self.attempts for f in a.files for d in f.digests)

    @property
    def first_step(self) -> int | None:
        return min((a.first_step for a in self.attempts if a.first_step is not None), default=None)

    @property
    def files(self) -> tuple[LogFile, ...]:
        logs = tuple(f for attempt in self.attempts for f in attempt.files)
        return logs + self.configs + self.rollouts

    def as_new_run(self) -> str:
        """The flags that make another run of its logs, to be pasted."""
        logs = dict.fromkeys(file.place for a in self.attempts for file in a.files)
        return as_run(f"{self.name}-2", logs)

    @property
    def changed_at(self) -> float:
        """Latest modification of any of its files, seconds since 1970."""
        return max((f.stamp.mtime for f in self.files), default=0.0)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything under the given paths, grouped."""

    runs: tuple[RunSources, ...]
    skips: tuple[Skip, ...]


# -- read ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file of the run (media, requirements...): its name in the run, and where it lies.

    With `content` that is sent instead: a copy without secrets.
    """

    name: str
    path: Path
    policy: int = 0
    kind: int = 0
    content: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes; raises OSError when the file is gone."""
        return self.path.stat().st_size if self.content is None else len(self.content)


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """An artifact record; name and digest identify its content."""

    name: str
    digest: str
    payload: bytes

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.digest


@dataclass(frozen=True, slots=True)
class PassThrough:
    """What an offline run holds besides history; records are serialised protobuf.

    `events` are system metrics, `console` whole lines in order (see `verl_logsync.spooled`),
    `unfinished` console text that has no line end yet.
    """

    events: tuple[bytes, ...] = ()
    console: Sequence[str] = ()
    unfinished: str = ""
    metrics: tuple[bytes, ...] = ()
    artifacts: tuple[ArtifactRef, ...] = ()
    others: tuple[bytes, ...] = ()
    files: tuple[FileRef, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    notes: str = ""
    group: str = ""
    job_type: str = ""

    @property
    def carries(self) -> bool:
        """Whether it holds anything that is sent once (definitions are sent every time)."""
        return bool(self.events or self.console or self.files or self.artifacts)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, when its log says so."""

    exit_code: int
    because: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A start of the job that a log records: before which of its rows, when, and its id."""

    row: int
    started_at: float | None = None
    attempt_id: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything one log file says: its rows in file order, and what could not be read.

    `restarts` are the indices of rows before which a new attempt was recorded (files that are
    appended to). `rounding` is half the last printed digit of its numbers, 0 where they are
    exact; keys in `below_precision` were printed as 0 at least once although they may be
    smaller than that. `notes` are sentences for the report; `merged` counts records that became
    part of another row already (ranks). `earlier_configs` are those that `config` took the place
    of (earlier starts of the job), `checkpoints` the steps of checkpoints that are or were there.
    """

    rows: pa.Table
    skips: tuple[Skip, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    extra: PassThrough = PassThrough()
    ending: Ending | None = None
    started_at: float | None = None
    ended_at: float | None = None
    restarts: tuple[Restart, ...] = ()
    rounding: float = 0.0
    below_precision: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    merged: int = 0
    earlier_configs: tuple[Mapping[str, Any], ...] = ()
    checkpoints: frozenset[int] = frozenset()


# -- aligned -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conflict:
    """One key of one step that two records state differently; `kept` is in the history."""

    step: int
    key: str
    kept: str
    dropped: str


@dataclass(frozen=True, slots=True)
class Origin:
    """From which files the rows of a stretch of steps come; `attempt` counts from 0."""

    first_step: int
    last_step: int
    attempt: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """Where every record went: seen = kept + merged + superseded + skipped."""

    seen: int
    kept: int
    merged: int
    superseded: int
    skipped: int
    superseded_steps: tuple[int, ...] = ()
    skips: tuple[Skip, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    conflict_count: int = 0
    notes: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    below_precision: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        return self.seen == self.kept + self.merged + self.superseded + self.skipped


#: Where `_timestamp` comes from.
Clock = Literal["recorded", "estimated", "unknown"]


@dataclass(frozen=True, slots=True)
class History:
    """The aligned table of a run: one row a step, ascending; `attempts` says whose row it is.

    Columns in `added` were derived, not logged; a row's identity is what was logged. Those in
    `logged_from` are derived up to that step only: rows from there on log them.
    """

    table: pa.Table
    attempts: np.ndarray[Any, np.dtype[np.int64]]
    clock: Clock = "unknown"
    added: frozenset[str] = frozenset()
    logged_from: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def steps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        steps: np.ndarray[Any, np.dtype[np.int64]] = self.table.column("_step").to_numpy()
        return steps

    @property
    def last_step(self) -> int | None:
        return int(self.steps[-1]) if len(self) else None

    def head(self, count: int) -> History:
        """The first `count` rows."""
        return replace(self, table=self.table.slice(0, count), attempts=self.attempts[:count])


@dataclass(frozen=True, slots=True)
class AttemptReading:
    """What the files of one attempt say, most precise source last."""

    attempt: Attempt
    readings: tuple[tuple[LogFile, Reading], ...]


# -- remote, plan, verdict -----------------------------------------------------------------


#: The config key under which a run's marker is stored on the server.
MARKER_KEY = "verl_logsync"

#: A stretch of one log's lines: (key of the log, first line, line after the last).
Segment = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class DerivedBy:
    """What made the derived columns of the rows from `first_step` on, up to the next of its kind.

    `version` is that of the diagnostics, empty where none were added; `columns_of` is the version
    whose set of columns they keep to. `options` is a digest of the rules and of the options that
    decide values, empty where it is not known.
    """

    version: str = ""
    columns_of: str = ""
    options: str = ""
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class Marker:
    """What the tool writes into a run's config, to find and recognise it again.

    It says who the run is, never that it is complete: config arrives before the rows. `heads`
    are the first records' digests of its files, `digest` covers its rows up to `last_step`,
    `clock` pins what the estimated clock settled on (see `verl_logsync.clock`), and `events` and
    `logs` say in which order system metrics and console lines of which log were sent.
    `diagnostics` say what derived the columns `added` of which rows, `logged_from` from which step
    on some of them are logged, and `alerts` name what was alerted.
    """

    names_key: str
    heads: frozenset[str]
    fingerprint: str
    digest: str
    last_step: int
    clock: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Segment, ...] = ()
    logs: tuple[Segment, ...] = ()
    diagnostics: tuple[DerivedBy, ...] = ()
    added: frozenset[str] = frozenset()
    alerts: tuple[str, ...] = ()
    logged_from: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that people are told at once: `key` names it for good, `step` is when it began."""

    key: str
    step: int
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class RemoteState:
    """What the server holds of a run."""

    state: str
    lines: int
    events: int
    logs: int
    last_step: int | None
    summary: Mapping[str, Any]
    key_counts: Mapping[str, int]
    marker: Marker | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    artifacts: frozenset[tuple[str, str]] = frozenset()
    tags: tuple[str, ...] = ()

    @property
    def summary_step(self) -> int | None:
        step = self.summary.get("_step")
        return int(step) if isinstance(step, int | float) else None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What the ledger remembers of a run: the state that was last verified."""

    target: Target
    names_key: str
    heads: frozenset[str]
    fingerprint: str
    steps: np.ndarray[Any, np.dtype[np.int64]]
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    state: str
    clock: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Binding:
    """A run that exists already: known from the ledger or found on the server."""

    target: Target
    names_key: str
    heads: frozenset[str]
    fingerprint: str
    last_step: int


class Action(Enum):
    """What an upload does to the run on the server."""

    NEW = "new"
    APPEND = "append"
    REWIND = "rewind"
    FINISH = "finish"
    NOTHING = "nothing to do"
    AHEAD = "remote is ahead"
    KEPT_OLD = "kept old rows"


#: The actions for which a fragment is written and sent.
SENDING = frozenset({Action.NEW, Action.APPEND, Action.REWIND, Action.FINISH, Action.KEPT_OLD})

RunState = Literal["running", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the server must hold once a plan has been carried out."""

    lines: int
    events: int
    logs: int
    last_step: int | None
    summary: Mapping[str, Any]
    key_counts: Mapping[str, int] | None
    state: RunState
    artifacts: frozenset[tuple[str, str]] = frozenset()
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Exactly what will be sent for one run.

    `rows` are the rows of `history` from index `first_row` on; `branch_step` is the last step
    that stays in a rewind. Everything in `extra` is only what the server lacks. `tags` are None
    when those on the server stay.
    """

    target: Target
    name: str
    action: Action
    history: History
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    first_row: int
    branch_step: int | None
    extra: PassThrough
    summary: Mapping[str, Any]
    sends_summary: bool
    config: Mapping[str, Any]
    marker: Marker
    state: RunState
    exit_code: int
    started_at: float | None
    new_run: bool
    expect: Expectation
    notes: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    tags: tuple[str, ...] | None = None

    @property
    def rows_to_send(self) -> int:
        return len(self.history) - self.first_row

    @property
    def sends(self) -> bool:
        """Whether anything goes over the wire."""
        if self.action is Action.KEPT_OLD:
            return bool(self.rows_to_send) or self.extra.carries
        return self.action in SENDING


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of reading back: `how` names the read that was used, `lines` counts the history
    lines that were found.
    """

    agrees: bool
    how: str
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lines: int = 0


# -- told to the user ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run. `remembered` is the exit code of its last upload, when nothing
    changed since.
    """

    target: Target
    name: str
    action: Action | None
    rows_sent: int = 0
    rows_planned: int = 0
    rows_total: int = 0
    state: str = ""
    account: Account | None = None
    verdict: Verdict | None = None
    error: LogsyncError | None = None
    clock: str = ""
    notes: tuple[str, ...] = ()
    url: str = ""
    remembered: ExitCode | None = None
    checkpoints: tuple[Path, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        if self.remembered is not None:
            return self.remembered
        if self.error is not None:
            return self.error.exit_code
        if self.verdict is not None and not self.verdict.agrees:
            return ExitCode.NOT_VERIFIED
        if self.action is Action.KEPT_OLD:
            return ExitCode.PARTIAL
        if self.account is not None and any(s.reason not in HARMLESS for s in self.account.skips):
            return ExitCode.PARTIAL
        return ExitCode.OK


#: When several things went wrong the first of these that happened is the exit code.
_WORST_FIRST = (
    ExitCode.INTERNAL,
    ExitCode.USAGE,
    ExitCode.AUTH,
    ExitCode.UNREACHABLE,
    ExitCode.NOT_VERIFIED,
    ExitCode.PARTIAL,
)


@dataclass(frozen=True, slots=True)
class Report:
    """What one command did: an outcome a run, and everything that was left out."""

    outcomes: tuple[Outcome, ...]
    skips: tuple[Skip, ...]
    catalog: Catalog
    mode: str = "online"

    @property
    def exit_code(self) -> ExitCode:
        codes = {outcome.exit_code for outcome in self.outcomes}
        for code in _WORST_FIRST:
            if code in codes:
                return code
        partial = bool(codes - {ExitCode.OK}) or self._skipped_inputs()
        return ExitCode.PARTIAL if partial else ExitCode.OK

    def _skipped_inputs(self) -> bool:
        # A lone log that holds nothing yet is "nothing to do"; beside others it was skipped.
        reasons = {skip.reason for skip in self.skips} - HARMLESS
        if not self.outcomes:
            reasons -= {SkipReason.NOTHING_YET}
        return bool(reasons)
