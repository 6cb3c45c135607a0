"""`StepLogger`: what a trainer calls to keep its metrics, step by step.

Whatever goes wrong in here, the training goes on: what could not be kept is counted, said once
as a warning, and said again when the logger is closed.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref

from verl_logsync.steplog.identity import find_place, find_start, host_name
from verl_logsync.steplog.jsonl_file import JsonlFile
from verl_logsync.steplog.layout import SCHEMA, TABLE, stem_of
from verl_logsync.steplog.values import encode, encode_config, histogram, table

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any, Final

    from verl_logsync.steplog.chain import Known
    from verl_logsync.steplog.store import Format, Fsync, Store

#: Where logs go unless told otherwise; the environment variable wins over the name.
FOLDER_VARIABLE: Final = "VERL_LOGSYNC_STEP_LOG_DIR"
FOLDER: Final = "step_logs"

# verl's whole configuration is about 30 kB.
_LARGEST_CONFIG: Final = 1 << 20

_open: Final[weakref.WeakSet[StepLogger]] = weakref.WeakSet()


class StepLogReport:
    """What became of everything that was logged.

    `dropped` counts records by reason, `left_out` single values of records that were written;
    `unsynced` is how often the system did not force the file to the disk when asked.
    """

    __slots__ = ("dropped", "left_out", "path", "unsynced", "written")

    def __init__(
        self,
        path: str,
        written: int,
        dropped: Mapping[str, int],
        left_out: Mapping[str, int],
        unsynced: int = 0,
    ) -> None:
        self.path = path
        self.written = written
        self.dropped = dropped
        self.left_out = left_out
        self.unsynced = unsynced

    @property
    def complete(self) -> bool:
        """Whether everything that was logged is in the file."""
        return not self.dropped and not self.left_out

    def __str__(self) -> str:
        parts = [f"{self.written} records written to {self.path}"]
        parts += [f"{n} records lost ({why})" for why, n in sorted(self.dropped.items())]
        parts += [f"{n} values left out ({why})" for why, n in sorted(self.left_out.items())]
        if self.unsynced:
            parts.append(f"{self.unsynced} times not forced to the disk")
        return "; ".join(parts)


class StepLogger:
    """Writes one rank's step log.

    Args:
        project: W&B project; slashes make folders.
        experiment: name of the run.
        directory: where the logs go (`VERL_LOGSYNC_STEP_LOG_DIR`, else `step_logs`). The file is
            `DIRECTORY/PROJECT/EXPERIMENT/rank-0000.steps.jsonl`.
        config: the training configuration; secrets in it are masked.
        run_id: W&B run id; else `WANDB_RUN_ID`, else what `checkpoint_dir` is bound to.
        checkpoint_dir: the folder of the job's checkpoints.
        binding_file: the name of the file in it that holds the run id.
        rank: of this process; else `RANK` or `SLURM_PROCID`, else 0.
        world_size: how many processes log; else `WORLD_SIZE` or `SLURM_NTASKS`, else 1.
        attempt_id: of this start of the job, the same on all ranks; else
            `VERL_LOGSYNC_ATTEMPT`, else what torchrun or Slurm calls it.
        format: "jsonl", or "parquet" (needs pyarrow).
        max_bytes: of a JSONL file; beyond it the next step begins a new one.
        fsync: force records to the disk "never", "always", or once in so many seconds.
        flush_records: Parquet only: write after so many records,
        flush_seconds: or when so many seconds have passed.

    Raises:
        UsageError: an argument has no meaning, or pyarrow is missing. Nothing else is raised,
            here or later.
    """

    def __init__(
        self,
        project: str,
        experiment: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        config: Any = None,
        run_id: str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        binding_file: str = "wandb_run_id",
        rank: int | None = None,
        world_size: int | None = None,
        attempt_id: str | None = None,
        format: Format = "jsonl",  # noqa: A002 - the word that pandas and others use
        max_bytes: int | None = None,
        fsync: Fsync = "never",
        flush_records: int = 100,
        flush_seconds: float = 60.0,
    ) -> None:
        import threading

        _check(format, max_bytes, fsync, flush_records)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._written = 0
        self._dropped: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self._warned: set[str] = set()
        self._closed = False
        self._project, self._experiment = str(project), str(experiment)
        self._place = find_place(rank, world_size)
        self._start = find_start(attempt_id)
        self._run_id = run_id or os.environ.get("WANDB_RUN_ID") or ""
        if not self._run_id and checkpoint_dir is not None:
            self._run_id = self._bound_to(checkpoint_dir, binding_file)
        self._config = self._masked(config)
        self._header: dict[str, Any] = {}
        root = directory or os.environ.get(FOLDER_VARIABLE) or FOLDER
        folder = _folder(root, self._project, self._experiment)
        stem = stem_of(self._place.rank)
        self._store = self._make_store(
            format, folder, stem, max_bytes, fsync, flush_records, flush_seconds
        )
        _open.add(self)
        self._begin()

    def _make_store(
        self,
        kind: Format,
        folder: Path,
        stem: str,
        max_bytes: int | None,
        fsync: Fsync,
        flush_records: int,
        flush_seconds: float,
    ) -> Store:
        if kind == "jsonl":
            return JsonlFile(folder, stem, self._make_header, max_bytes=max_bytes, fsync=fsync)
        from verl_logsync.steplog.parquet_file import ParquetFile

        return ParquetFile(
            folder,
            stem,
            self._make_header,
            flush_records=flush_records,
            flush_seconds=flush_seconds,
            fsync=fsync,
        )

    def _begin(self) -> None:
        wanted = self._store.path
        try:
            self._store.begin()
        except OSError as error:
            self._warn(f"{wanted} cannot be written yet: {error}")
        if self._store.path != wanted:
            self._warn(f"another process writes to {wanted}; this one writes {self._store.path}")

    # -- logging ---------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The file that is written to."""
        return self._store.path

    @property
    def run_id(self) -> str:
        """The W&B run id that the log is bound to; empty when it is bound to none."""
        return self._run_id

    @property
    def attempt_id(self) -> str:
        """What this start of the job is called."""
        return str(self._header.get("attempt_id", self._start.attempt_id))

    def log(
        self,
        data: Mapping[str, Any],
        step: int,
        *,
        histograms: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what was measured at a step. Never raises.

        Args:
            data: metric -> number, flag, None, text, list or mapping; numpy and torch scalars
                too. An array of several numbers becomes a histogram.
            step: the training step, 0 or more.
            histograms: metric -> array, or `verl_logsync.steplog.histogram(...)`.
            tables: metric -> (columns, rows), or `verl_logsync.steplog.table(...)`.
            texts: metric -> text.
        """
        now, mono = time.time(), time.monotonic()
        number = _as_step(step)
        if number is None:
            kind = type(step).__name__
            self._count_dropped("no usable step", f"a {kind} that is no step was given as step")
            return
        try:
            text = self._encoded(data, histograms, tables, texts)
        except Exception as error:  # noqa: BLE001 - a mapping may raise anything, see `values.encode`
            reason = f"data: {type(error).__name__}"
            self._count_dropped(reason, f"a record of step {number} is lost: {error!r:.200}")
            return
        line = b'{"step":%d,"time":%r,"mono":%r,"data":%b}\n' % (number, now, mono, text)
        self._append(line, number)

    def _encoded(
        self,
        data: Mapping[str, Any],
        histograms: Mapping[str, Any] | None,
        tables: Mapping[str, Any] | None,
        texts: Mapping[str, str] | None,
    ) -> bytes:
        if not _is_mapping(data):
            raise TypeError(f"{type(data).__name__} is no mapping")
        if histograms or tables or texts:
            data = self._gathered(data, histograms, tables, texts)
        text, left_out = encode(data)
        if left_out:
            self._count_left_out(left_out)
        return text

    def _append(self, line: bytes, step: int) -> None:
        with self._lock:
            reason = self._appended(line, step)
            trouble = self._store.trouble
        if reason:
            self._count_dropped(reason, f"a record of step {step} is lost: {reason}")
        if trouble:
            self._warn(trouble, trouble)

    def _appended(self, line: bytes, step: int) -> str:
        """Hand a record over; returns why that is not possible."""
        if self._closed:
            return "closed"
        if os.getpid() != self._pid:
            return "forked child"
        try:
            self._store.append(line, step)
        except OSError as error:
            return f"{error.strerror or error}"
        self._written += 1
        return ""

    def _gathered(
        self,
        data: Mapping[str, Any],
        histograms: Mapping[str, Any] | None,
        tables: Mapping[str, Any] | None,
        texts: Mapping[str, str] | None,
    ) -> dict[str, Any]:
        """All in one mapping, typed values as objects that say their type."""
        merged = dict(data)
        for key, values in (histograms or {}).items():
            try:
                merged[key] = values if _is_mapping(values) else histogram(values)
            except Exception as error:  # noqa: BLE001 - see `values.encode`
                self._count_left_out({f"histogram: {error}": 1})
        for key, value in (tables or {}).items():
            try:
                made = table(*value) if isinstance(value, tuple) else value
            except Exception as error:  # noqa: BLE001
                self._count_left_out({f"table: {error}": 1})
                continue
            merged[key] = made
            if _is_mapping(made) and made.get("_type") == TABLE and "rows" in made:
                self._count_left_out({"table rows": made["rows"] - len(made["data"])})
        merged.update(texts or {})
        return merged

    # -- ending ----------------------------------------------------------------------------

    @property
    def report(self) -> StepLogReport:
        """What became of everything so far."""
        with self._lock:
            return StepLogReport(
                self._store.path,
                self._written,
                dict(self._dropped),
                dict(self._left_out),
                self._store.unsynced,
            )

    def finish(self, exit_code: int | None = None) -> None:
        """Close the log. The exit code, if given, tells how the training ended."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            try:
                lost = self._store.close(self._end(exit_code))
            except OSError as error:
                lost = -1
                self._warn(f"{self._store.path} could not be ended well: {error}")
            _open.discard(self)
        if lost > 0:
            self._written -= lost
            self._count_dropped("not flushed", f"{lost} records are lost", lost)
        if self._dropped:
            self._warn(str(self.report))

    def close(self) -> None:
        """Close the log without saying how the training ended."""
        self.finish()

    def __enter__(self) -> StepLogger:  # noqa: PYI034 - typing_extensions is not standard library
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def __del__(self) -> None:
        if getattr(self, "_store", None) is not None:
            self.finish()

    def _end(self, exit_code: int | None) -> bytes:
        end = {
            "end": 1,
            "time": time.time(),
            "mono": time.monotonic(),
            "exit_code": exit_code if isinstance(exit_code, int) else None,
            "written": self._written,
            "dropped": self._dropped,
            "left_out": self._left_out,
        }
        return _line(end)

    # -- what goes wrong -------------------------------------------------------------------

    def _count_dropped(self, reason: str, message: str, count: int = 1) -> None:
        with self._lock:
            self._dropped[reason] = self._dropped.get(reason, 0) + count
        self._warn(message, reason)

    def _count_left_out(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            with self._lock:
                self._left_out[reason] = self._left_out.get(reason, 0) + count
            self._warn(f"{count} values are not in the log: {reason}", reason)

    def _warn(self, message: str, reason: str = "") -> None:
        """Say it once a reason. Warnings may be errors in a test run; they are not here."""
        if reason in self._warned:
            return
        if reason:
            self._warned.add(reason)
        import warnings

        try:
            warnings.warn(f"step log: {message}", RuntimeWarning, stacklevel=4)
        except RuntimeWarning:
            return

    # -- the header ------------------------------------------------------------------------

    def _make_header(self, known: Known, *, number: int, continues: bool, previous: str) -> bytes:
        """The header of a new start, or of the next file of this one."""
        if not continues or not self._header:
            self._header = self._new_header(known)
        log = dict(self._header["log"])
        if log["first_step"] is None:
            log["first_step"] = known.first_step
        header = {
            **self._header,
            "log": log,
            "file": number,
            "continues": continues,
            "previous": previous,
            "opened": time.time(),
        }
        return _line(header)

    def _new_header(self, known: Known) -> dict[str, Any]:
        before, start, place = known.header, self._start, self._place
        again = _whole(before.get("attempt_repeat"), 1) + 1
        if before.get("attempt_base") != start.attempt_id:
            again = 1
        return {
            "step_log": SCHEMA,
            "log": _log_of(before) or self._new_log(),
            "project": self._project,
            "experiment": self._experiment,
            "run_id": self._run_id,
            "attempt_id": start.attempt_id if again == 1 else f"{start.attempt_id}#{again}",
            "attempt_base": start.attempt_id,
            "attempt_repeat": again,
            "attempt_shared": start.shared,
            "attempt_number": _whole(before.get("attempt_number"), 0) + 1,
            "rank": place.rank,
            "rank_known": place.known,
            "world_size": place.world_size,
            "local_rank": place.local_rank,
            "host": host_name(),
            "pid": self._pid,
            "started": {"time": start.time, "mono": start.mono},
            "config": self._config,
        }

    def _new_log(self) -> dict[str, Any]:
        """A name for this log, the same on all ranks where they know a common attempt."""
        import hashlib

        start = self._start
        salt = "" if start.shared else os.urandom(8).hex()
        words = f"{self._project}\0{self._experiment}\0{start.attempt_id}\0{salt}"
        name = hashlib.blake2b(words.encode(errors="replace"), digest_size=8).hexdigest()
        return {"id": name, "started_at": start.time, "first_step": None}

    def _masked(self, config: Any) -> dict[str, Any]:
        """The config as plain values without secrets; empty, and counted, if that fails."""
        if config is None:
            return {}
        try:
            text = encode_config(config)
        except ValueError as error:
            self._count_left_out({str(error): 1})
            return {}
        if len(text) > _LARGEST_CONFIG:
            self._count_left_out({"config: too large": 1})
            return {}
        import json

        from verl_logsync.secrets_mask import mask_config

        plain = json.loads(text)
        return mask_config(plain if isinstance(plain, dict) else {"config": plain})

    def _bound_to(self, folder: str | os.PathLike[str], file_name: str) -> str:
        from verl_logsync.binding import read_binding
        from verl_logsync.errors import LogsyncError

        try:
            return read_binding(folder, file_name)
        except LogsyncError as error:
            self._warn(f"the run that the checkpoint belongs to: {error}")
            return ""


def _check(kind: str, max_bytes: int | None, fsync: object, flush_records: int) -> None:
    number = isinstance(fsync, int | float) and not isinstance(fsync, bool) and fsync >= 0
    if kind not in ("jsonl", "parquet"):
        wrong = f'format {kind!r} is neither "jsonl" nor "parquet"'
    elif max_bytes is not None and max_bytes <= 0:
        wrong = "max_bytes must be positive"
    elif fsync not in ("never", "always") and not number:
        wrong = f'fsync {fsync!r} is neither "never", "always" nor seconds'
    elif flush_records <= 0:
        wrong = "flush_records must be positive"
    else:
        return
    from verl_logsync.errors import UsageError

    raise UsageError(wrong)


def _folder(root: str | os.PathLike[str], project: str, experiment: str) -> Path:
    """Names may hold slashes (folders), but do not lead out of the root."""
    from pathlib import Path

    parts = [p for name in (project, experiment) for p in name.split("/")]
    safe = [part.replace("\0", "") for part in parts if part not in ("", ".", "..")]
    return Path(root).absolute().joinpath(*safe)


def _is_mapping(value: object) -> bool:
    if type(value) is dict:
        return True
    from collections.abc import Mapping

    return isinstance(value, Mapping)


def _as_step(step: Any) -> int | None:
    """A step as a whole number of at most 63 bits; None for anything else."""
    if type(step) is int:
        return step if 0 <= step < 2**63 else None
    import operator

    try:
        if hasattr(step, "is_integer") and step.is_integer():
            return _as_step(int(step))
        return _as_step(int(operator.index(step)))
    except Exception:  # noqa: BLE001 - see `values.encode`; a tensor may raise anything
        return None


def _line(record: Mapping[str, Any]) -> bytes:
    import json

    return json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int else default


def _log_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """The log's name and start in an earlier header; empty when it has none."""
    log = header.get("log")
    if not isinstance(log, dict) or not isinstance(log.get("id"), str):
        return {}
    return {"first_step": None, "started_at": None, **log}


def _close_all() -> None:
    for logger in list(_open):
        logger.finish()


def _let_go_in_child() -> None:
    """A forked child must neither write to its parent's file nor wait for its lock."""
    import threading

    for logger in list(_open):
        logger._lock = threading.RLock()  # noqa: SLF001
        logger._store.forget()  # noqa: SLF001


atexit.register(_close_all)
os.register_at_fork(after_in_child=_let_go_in_child)
