"""What a logger needs of the file that it writes to: for type checkers only, never imported."""

from __future__ import annotations

from typing import Literal, Protocol

from verl_logsync.steplog.chain import Known

Format = Literal["jsonl", "parquet"]

#: When to force records to the disk: never, after each, or when so many seconds have passed.
Fsync = Literal["never", "always"] | float


class HeaderMaker(Protocol):
    """Gives the header line of a file (or of a new start in it)."""

    def __call__(self, known: Known, *, number: int, continues: bool, previous: str) -> bytes:
        """A whole line.

        Args:
            known: what the log says so far; of one that is continued only the first step counts.
            number: of the file among those of the rank's log, from 1.
            continues: the attempt was begun in the file before, or earlier in this one.
            previous: the name of the file before.
        """


class Store(Protocol):
    """Where the lines of a logger go."""

    #: How often the system did not force the file to the disk when asked.
    unsynced: int
    #: What went wrong without a loss; to be said once.
    trouble: str

    @property
    def path(self) -> str:
        """The file that is written to."""

    def begin(self) -> None:
        """Open the file and write the header, if that was not done yet. Raises OSError."""

    def append(self, line: bytes, step: int) -> None:
        """Keep a record. Raises OSError when it is not kept."""

    def close(self, end: bytes) -> int:
        """End with this line; returns how many records were lost. Raises OSError."""

    def forget(self) -> None:
        """Let go of everything without writing: this is a forked child."""
