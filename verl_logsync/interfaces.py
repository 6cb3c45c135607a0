"""What the engine depends on. It names these, never an implementation.

To read another format, write a `Source` and add it to the tuple in `sources/__init__.py`; to
send somewhere else, write a `Sink`. The conformance suites in `verl_logsync.testing` run over
the registries unasked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_logsync.errors import LogsyncError
from verl_logsync.model import (
    Binding,
    LogFile,
    Reading,
    RemoteState,
    Skip,
    Stamp,
    Target,
    UploadPlan,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file or folder that discover came upon.

    `head` holds a file's first bytes, read once for all sources; `names` a folder's entries
    (None for a file). A source that claims a folder claims everything in it.
    """

    path: Path
    stamp: Stamp
    head: bytes = b""
    names: tuple[str, ...] | None = None


class Source(Protocol):
    """The code that reads one log format. It keeps no state and never writes."""

    @property
    def name(self) -> str:
        """The word for it in reports."""

    @property
    def precision(self) -> int:
        """Of two sources of one attempt the one with the higher precision wins."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of files worth opening, as shell patterns in lower case: EXP.JSONL is as good as
        exp.jsonl. A path given by the user is always opened.
        """

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        """Claim a file: a LogFile, a Skip (mine, but unusable because...), or None (not mine).

        Reads no more than the head and the tail. Must not raise for broken content.
        """

    def read(self, file: LogFile) -> Reading:
        """Everything the file says. Damage becomes Skips; what is whole is kept.

        Raises:
            UnreadableInput: the operating system refuses.
            NotALog: nothing in the file can be used.
        """


@dataclass(frozen=True, slots=True)
class Parcel:
    """A plan made ready to be sent. `folder` is the sink's own business."""

    plan: UploadPlan
    folder: Path


@dataclass(frozen=True, slots=True)
class Sent:
    """What the sender can say about one plan. It is never believed: see `Sink.look`.

    `messages` are told when something went wrong, `notes` in any case.
    """

    error: LogsyncError | None = None
    messages: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Sink(Protocol):
    """Where runs go."""

    def look(self, targets: Sequence[Target]) -> Mapping[Target, RemoteState]:
        """What is there now, for those targets that exist. Always asks, never caches."""

    def with_parts(self, target: Target, state: RemoteState) -> RemoteState:
        """The same state with the run's files and artifacts."""

    def find(self, project: Target, keys: Sequence[str]) -> Sequence[Binding]:
        """Runs of a project by the `names_key` of their marker (entity and project count)."""

    def pins(self, target: Target) -> Mapping[str, float]:
        """What the clock of a run settled on when `look` cannot tell it (see `clock.py`)."""

    def can_rewind(self, target: Target) -> bool:
        """Whether the destination offers to drop rows from the end of a run."""

    def refuses_rewind(self, target: Target) -> None:
        """Remember that a rewind of this run was tried and did not happen."""

    def warm_up(self) -> None:
        """Get ready to send while runs are still being read."""

    def close(self) -> None:
        """End everything that was started for sending."""

    def pack(self, plan: UploadPlan) -> Parcel:
        """Make a plan ready to be sent. Raises LogsyncError if that fails."""

    def send(self, parcels: Sequence[Parcel]) -> Mapping[Target, Sent]:
        """Carry out the plans of different runs. Never sends one twice."""

    def probe(self) -> None:
        """Raise LogsyncError if the destination as a whole is away or refuses us."""

    def rows(self, target: Target) -> Iterator[Mapping[str, Any]]:
        """Every stored row, unsampled, in stored order."""

    def url(self, target: Target) -> str:
        """Where a person can look at the run."""
