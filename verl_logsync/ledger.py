"""The ledger: an SQLite file that remembers what was confirmed.

It is a cache. Deleting it costs one look at the server, never data: everything in it can be
found again from the files and the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import orjson

from verl_logsync.discover import stamp_of
from verl_logsync.errors import Locked, StateError, quoted
from verl_logsync.model import (
    Binding,
    Confirmed,
    Facts,
    LogFile,
    RunSources,
    Skip,
    Stamp,
    Target,
)
from verl_logsync.regular import is_folder
from verl_logsync.rollouts.folder import stamp_of_dumps

_FILE_NAME: Final = "ledger.sqlite3"
#: Goes before remembered paths; another number forgets all verdicts of an older program.
_VERDICTS: Final = "3:"

#: Named and applied in order, once each. Never edit one that was released; add another.
MIGRATIONS: Final = (
    (
        "0001-runs-and-files",
        """
        CREATE TABLE runs (
            server TEXT NOT NULL, entity TEXT NOT NULL, project TEXT NOT NULL,
            run_id TEXT NOT NULL, name TEXT NOT NULL, names_key TEXT NOT NULL,
            heads TEXT NOT NULL, fingerprint TEXT NOT NULL, steps BLOB NOT NULL,
            digests BLOB NOT NULL, state TEXT NOT NULL, clock TEXT NOT NULL,
            sources TEXT NOT NULL, recheck_at REAL, exit_code INTEGER NOT NULL,
            attention TEXT NOT NULL, confirmed_at REAL NOT NULL,
            PRIMARY KEY (server, entity, project, run_id)
        );
        CREATE TABLE files (path TEXT PRIMARY KEY, verdict BLOB NOT NULL);
        """,
    ),
)


@dataclass(frozen=True, slots=True)
class LedgerRun:
    """One remembered run. `attention` says what its last upload had to leave out or keep."""

    target: Target
    name: str
    rows: int
    last_step: int | None
    state: str
    confirmed_at: float
    recheck_at: float | None
    exit_code: int
    attention: tuple[str, ...]


@contextmanager
def locked(folder: Path, wait: float = 5.0) -> Iterator[int]:
    """Hold the state folder for one upload; the lock ends with the process.

    Args:
        wait: seconds to wait for it; the uploader of a killed run needs a moment to die.

    Yields:
        The descriptor that holds the lock, for a child that must keep it.

    Raises:
        Locked: another upload holds it.
        StateError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _state_error(folder, error) from error
    try:
        _take_lock(descriptor, folder, time.monotonic() + wait)
        yield descriptor
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, folder: Path, end: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise Locked(
                    "another upload is running with this state",
                    place=str(folder),
                    hint="Wait for it, or give another --state-dir",
                ) from error
        except OSError as error:
            raise _state_error(folder, error) from error
        time.sleep(0.1)


def _state_error(folder: Path, error: Exception) -> StateError:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return StateError(
        f"the state folder cannot be used: {text}",
        place=str(folder),
        hint="Give a writable folder with free space: --state-dir DIR",
    )


class Ledger:
    """What is remembered about one server's runs.

    Args:
        folder: the state folder.
        server: base URL of the W&B server; runs of other servers are not seen.
        writable: without it nothing is made or changed; the file must be there.

    Raises:
        StateError: the file cannot be opened, read or written (from any method).
    """

    def __init__(self, folder: Path, server: str, *, writable: bool = True) -> None:
        self._folder = folder
        self._server = server
        self._lock = threading.RLock()  # reading and sending overlap
        try:
            if writable:
                folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                f"file:{quote(str(folder / _FILE_NAME))}?mode={'rwc' if writable else 'ro'}",
                uri=True,
                timeout=30,
                isolation_level=None,
                check_same_thread=False,
            )
            if writable:
                self._migrate()
        except (sqlite3.Error, OSError) as error:
            raise self._explained(error) from error

    @classmethod
    def for_reading(cls, folder: Path, server: str) -> Ledger | None:
        """What is remembered, to look at; None when there is nothing yet."""
        return cls(folder, server, writable=False) if (folder / _FILE_NAME).exists() else None

    def close(self) -> None:
        self._db.close()

    def _explained(self, error: Exception) -> StateError:
        if (isinstance(error, sqlite3.DatabaseError) and "malformed" in str(error)) or (
            "not a database" in str(error)
        ):
            return StateError(
                f"the ledger is damaged: {error}",
                place=str(self._folder / _FILE_NAME),
                hint=f"It is only a cache; remove it: rm {quoted(self._folder / _FILE_NAME)}",
            )
        return _state_error(self._folder, error)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._explained(error) from error

    def _migrate(self) -> None:
        with self._transaction() as db:
            db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, at REAL)")
            done = {name for (name,) in db.execute("SELECT name FROM migrations")}
            unknown = done - {name for name, _ in MIGRATIONS}
            if unknown:
                raise StateError(
                    f"the ledger was written by a newer version ({', '.join(sorted(unknown))})",
                    place=str(self._folder),
                    hint="Update verl-logsync, or give another --state-dir",
                )
            for name, script in MIGRATIONS:
                if name not in done:
                    for statement in script.split(";"):
                        db.execute(statement)
                    db.execute("INSERT INTO migrations VALUES (?, ?)", (name, time.time()))

    def _query(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._explained(error) from error

    # -- files ----------------------------------------------------------------------------

    def recall(self, way: str = "") -> RememberedFiles:
        """The verdicts of the last walk, valid where the file did not change since.

        Args:
            way: how files were looked at, where settings decide what is seen in them.
        """
        rows = self._query("SELECT path, verdict FROM files WHERE path LIKE ?", (f"{_VERDICTS}%",))
        return RememberedFiles(dict(rows), way)

    def remember_files(self, verdicts: Iterable[tuple[str, LogFile]], way: str = "") -> None:
        """Keep what was recognised under the paths at which it was found."""
        rows = [(_verdict_of(path, way), _dump(file)) for path, file in verdicts]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?)", rows)

    # -- runs -----------------------------------------------------------------------------

    def confirmed(self, target: Target) -> Confirmed | None:
        """What was last verified of a run."""
        rows = self._query(
            "SELECT names_key, heads, fingerprint, steps, digests, state, clock FROM runs "
            "WHERE server=? AND entity=? AND project=? AND run_id=?",
            self._key(target),
        )
        if not rows:
            return None
        names_key, heads, fingerprint, steps, digests, state, clock = rows[0]
        return Confirmed(
            target,
            names_key,
            frozenset(orjson.loads(heads)),
            fingerprint,
            np.frombuffer(steps, dtype=np.int64),
            np.frombuffer(digests, dtype=np.uint64),
            state,
            orjson.loads(clock),
        )

    def bindings(self) -> list[Binding]:
        """All known runs, to recognise their files again."""
        rows = self._query(
            "SELECT entity, project, run_id, names_key, heads, fingerprint, substr(steps, -8) "
            "FROM runs WHERE server=?",
            (self._server,),
        )
        return [
            Binding(
                Target(entity, project, run_id),
                names_key,
                frozenset(orjson.loads(heads)),
                fingerprint,
                _last(steps),
            )
            for entity, project, run_id, names_key, heads, fingerprint, steps in rows
        ]

    def settled(self, runs: Iterable[RunSources], now: float, settings_key: str) -> set[Target]:
        """The runs in whose files nothing changed, and for which time changes nothing either."""
        rows = self._query(
            "SELECT entity, project, run_id, sources, recheck_at FROM runs WHERE server=?",
            (self._server,),
        )
        known = {Target(e, p, i): (sources, recheck) for e, p, i, sources, recheck in rows}
        return {
            run.target
            for run in runs
            if run.target in known
            and known[run.target][0] == sources_digest(run, settings_key)
            and (known[run.target][1] is None or known[run.target][1] > now)
        }

    def runs(self) -> list[LedgerRun]:
        """Every remembered run of this server."""
        return _ledger_runs(self._query(f"{_RUNS} WHERE server=? {_ORDER}", (self._server,)))

    def confirm(
        self,
        run: RunSources,
        confirmed: Confirmed,
        settings_key: str,
        recheck_at: float | None,
        exit_code: int = 0,
        attention: Iterable[str] = (),
    ) -> None:
        """Remember a run whose read-back agreed, and what it still lacks."""
        row = (
            *self._key(confirmed.target),
            run.name,
            confirmed.names_key,
            orjson.dumps(sorted(confirmed.heads)).decode(),
            confirmed.fingerprint,
            np.ascontiguousarray(confirmed.steps).tobytes(),
            np.ascontiguousarray(confirmed.digests).tobytes(),
            confirmed.state,
            orjson.dumps(dict(confirmed.clock)).decode(),
            sources_digest(run, settings_key),
            recheck_at,
            exit_code,
            orjson.dumps(list(attention)).decode(),
            time.time(),
        )
        marks = ",".join("?" * len(row))
        with self._transaction() as db:
            db.execute(f"INSERT OR REPLACE INTO runs VALUES ({marks})", row)  # noqa: S608 - marks only

    def doubt(self, targets: Iterable[Target]) -> None:
        """Look at these runs again next time, whatever becomes of them now."""
        keys = [self._key(target) for target in targets]
        with self._transaction() as db:
            db.executemany(
                "UPDATE runs SET recheck_at=0 "
                "WHERE server=? AND entity=? AND project=? AND run_id=?",
                keys,
            )

    def _key(self, target: Target) -> tuple[str, str, str, str]:
        return self._server, target.entity, target.project, target.run_id


def _last(steps: bytes) -> int:
    return int(np.frombuffer(steps[-8:], dtype=np.int64)[0]) if steps else -1


def sources_digest(run: RunSources, settings_key: str) -> str:
    """Changes when a file of the run, or a setting that decides what is sent, changes."""
    hasher = hashlib.blake2b(settings_key.encode(), digest_size=16)
    for file in sorted(run.files, key=lambda f: f.place):
        hasher.update(f"\0{file.place}\0{asdict(file.stamp)}".encode(errors="surrogatepass"))
    return hasher.hexdigest()


def _dump(file: LogFile) -> bytes:
    return orjson.dumps(
        {**asdict(file), "path": os.fsdecode(file.path)}, option=orjson.OPT_NON_STR_KEYS
    )


_RUNS: Final = (
    "SELECT entity, project, run_id, name, length(steps) / 8, substr(steps, -8), state, "
    "confirmed_at, recheck_at, exit_code, attention FROM runs"
)
_ORDER: Final = "ORDER BY project, name, run_id"


def _ledger_runs(rows: Iterable[tuple[Any, ...]]) -> list[LedgerRun]:
    return [
        LedgerRun(
            Target(entity, project, run_id),
            name,
            count,
            _last(steps) if steps else None,
            state,
            at,
            recheck,
            code,
            tuple(orjson.loads(attention)),
        )
        for entity, project, run_id, name, count, steps, state, at, recheck, code, attention in rows
    ]


def remembered_runs(folder: Path, server: str | None = None) -> list[LedgerRun]:
    """Every run in a state folder, of one server or of all; nothing is written."""
    path = folder / _FILE_NAME
    if not path.exists():
        return []
    where, values = ("WHERE server=?", (server,)) if server is not None else ("", ())
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as db:
            return _ledger_runs(db.execute(f"{_RUNS} {where} {_ORDER}", values).fetchall())
    except sqlite3.Error as error:
        raise _state_error(folder, error) from error


def _stamp_now(path: Path) -> Stamp | None:
    """The stamp of a log now; a folder of dumps is as large and as new as its files."""
    return stamp_of_dumps(path) if is_folder(path) else stamp_of(path)


def _verdict_of(path: Path | str, way: str) -> str:
    return f"{_VERDICTS}{way}\0{path}" if way else f"{_VERDICTS}{path}"


class RememberedFiles:
    """A `Recall`: verdicts by path, each checked against the file as it is now."""

    def __init__(self, verdicts: dict[str, bytes], way: str = "") -> None:
        self._verdicts = verdicts
        self._way = way

    def __call__(self, path: Path) -> LogFile | Skip | None:
        data = self._verdicts.get(_verdict_of(path, self._way))
        if data is None:
            return None
        known = orjson.loads(data)
        stamp = Stamp(**known["stamp"])
        if _stamp_now(Path(known["path"])) != stamp:
            return None
        known["facts"]["carries"] = tuple(known["facts"]["carries"])
        facts = Facts(**known["facts"])
        return LogFile(
            Path(known["path"]),
            known["source"],
            stamp,
            facts,
            known["role"],
            tuple(known["before"]),
        )

    def with_memory(self, path: str, file: LogFile) -> LogFile:
        """The same log file, knowing what its path held before."""
        data = self._verdicts.get(_verdict_of(path, self._way))
        if data is None:
            return file
        known = orjson.loads(data)
        old = LogFile(
            file.path, known["source"], file.stamp, Facts(**known["facts"]), before=()
        ).digests
        gone = set(known["before"]) | (set(old) if not set(old) & set(file.digests) else set())
        return replace(file, before=tuple(sorted(gone)))
