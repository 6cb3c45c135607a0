"""W&B's own offline runs: folders `wandb/offline-run-DATE_TIME-ID` with a `.wandb` file.

History becomes rows; everything else (system metrics, console, metric definitions, files,
artifacts) is passed on as it was recorded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from verl_logsync.columns import RUNTIME, STEP, TIMESTAMP
from verl_logsync.errors import LogsyncError, NotALog, quoted
from verl_logsync.fingerprint import data_folders, essentials
from verl_logsync.hush import (
    begins_key_block,
    hush_key_blocks,
    hushed,
    hushed_lines,
    hushing,
    secrets_of,
)
from verl_logsync.interfaces import Candidate
from verl_logsync.model import (
    MARKER_KEY,
    ArtifactRef,
    Ending,
    Facts,
    FileRef,
    LogFile,
    PassThrough,
    Reading,
    Skip,
    SkipReason,
    Stamp,
)
from verl_logsync.regular import is_file, read_start
from verl_logsync.secrets_mask import mask_config, mask_words
from verl_logsync.table_builder import TableBuilder
from verl_logsync.transaction_log import (
    BLOCK_SIZE,
    UNKNOWN,
    Damage,
    Entry,
    HeaderState,
    check_header,
    config_updates,
    history_row,
    read_records,
    summary_updates,
    timestamp,
)
from verl_logsync.verl_keys import is_validation_only

_FOLDER: Final = re.compile(r"^(offline-)?run-(\d{8})_(\d{6})-(.+)$")
_RUN_ID: Final = re.compile(r"[^/\\#?%:.\x00-\x20][^/\\#?%:\x00-\x1f]{0,127}")
# The run record comes first; the first row follows what is printed until then: the config, how the
# model is loaded, a validation. So far into a file it is looked for.
_SEARCHED: Final = 16 << 20
# The uploader makes these of the run's records, in which secrets are masked.
_WRITTEN_ANEW: Final = frozenset({"config.yaml", "output.log", "wandb-summary.json"})
_METADATA: Final = "wandb-metadata.json"
_CURSOR_MOVES: Final = re.compile(r"(\n|\r|\x1b\[[AB])")
# The height of the terminal that W&B draws console text on: the cursor moves up no further.
_SCREEN: Final = 32
_TAIL_BYTES: Final = 4 * BLOCK_SIZE
# Where no row is in that, so many times as much is looked at.
_WIDER: Final = 8
_PASSED_ON: Final = frozenset({"alert", "use_artifact", "tbrecord", "preempting", "telemetry"})


class OfflineRun:
    """Source `offline_run`."""

    name = "offline_run"
    precision = 30
    patterns = ("*.wandb",)

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        path = candidate.path
        if candidate.names is None:
            return self._judge(path, candidate.stamp, candidate.head) if _is_log(path) else None
        logs = [name for name in candidate.names if name.endswith(".wandb")]
        if not logs:
            return _folder_without_log(candidate) if _FOLDER.match(path.name) else None
        return self._recognise_folder(path, sorted(logs))

    def _recognise_folder(self, folder: Path, names: list[str]) -> LogFile | Skip | None:
        path = folder / names[0]
        if len(names) > 1:
            return None  # not a run folder; its files are looked at one by one
        try:
            stat = path.stat()
            head = read_start(path, 64)
        except OSError as error:
            return _unreadable(path, error)
        stamp = Stamp(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev)
        return self._judge(path, stamp, head)

    def _judge(self, path: Path, stamp: Stamp, head: bytes) -> LogFile | Skip:
        header = check_header(head)
        if header.state is HeaderState.EMPTY:
            return Skip(
                SkipReason.NOTHING_YET, str(path), header.reason, "It is read again next time."
            )
        if header.state is HeaderState.FOREIGN:
            hint = f"Look at its first bytes: head -c 64 {quoted(path)} | xxd"
            return Skip(SkipReason.NOT_A_LOG, str(path), header.reason, hint)
        try:
            facts = _facts(path, stamp)
        except LogsyncError as error:
            return Skip(SkipReason.UNREADABLE, str(path), error.message, error.hint)
        return LogFile(path, self.name, stamp, facts)

    def read(self, file: LogFile) -> Reading:
        contents = _Contents(file)
        for entry in read_records(file.path):
            contents.take(entry)
        return contents.reading()


def _is_log(path: Path) -> bool:
    return path.suffix.lower() == ".wandb"


def _folder_without_log(candidate: Candidate) -> Skip:
    return Skip(
        SkipReason.NO_HISTORY,
        str(candidate.path),
        "a run folder without its .wandb file, so there is no history in it",
        "Copy the whole folder from the machine that trained",
    )


def _unreadable(path: Path, error: OSError) -> Skip:
    hint = f"Check it with: ls -l {quoted(path)}"
    return Skip(SkipReason.UNREADABLE, str(path), error.strerror or str(error), hint)


# -- the quick look ------------------------------------------------------------------------


def _facts(path: Path, stamp: Stamp) -> Facts:
    facts = _facts_of_name(path)
    for entry in read_records(path):
        if isinstance(entry, Damage) or entry.offset > _SEARCHED:
            break
        if entry.kind == "run":
            facts = _facts_of_run(entry.record, facts)
        elif entry.kind == "history":
            facts = _with_row(facts, entry)
            if facts.training_digest:
                break
    return replace(facts, last_step=_last_step(path, stamp, facts.first_step))


def _facts_of_name(path: Path) -> Facts:
    named = _FOLDER.match(path.parent.name)
    if not named:
        return Facts(run_id=usable_run_id(path.stem.removeprefix("run-")))
    try:
        started = datetime.strptime(f"{named[2]}{named[3]}", "%Y%m%d%H%M%S").timestamp()
    except ValueError:
        return Facts(run_id=usable_run_id(named[4]))
    return Facts(run_id=usable_run_id(named[4]), started_at=started)


def _facts_of_run(record: Any, known: Facts) -> Facts:
    run = record.run
    started = _sane(timestamp(run.start_time)) if run.HasField("start_time") else None
    try:
        config = config_updates(record)
    except ValueError:
        config = {}  # said when the file is read
    return replace(
        known,
        entity=run.entity,
        project=run.project,
        name=run.display_name,
        run_id=usable_run_id(run.run_id) or known.run_id,
        started_at=started if started is not None else known.started_at,
        config=essentials(config),
        dirs=data_folders(config),
        carries=_marked(config.get(MARKER_KEY), "heads"),
        derived=_marked(config.get(MARKER_KEY), "added"),
    )


def _marked(marker: object, what: str) -> tuple[str, ...]:
    """A list in the marker of a fragment of our own: its logs, the columns that were derived."""
    found = marker.get(what) if isinstance(marker, dict) else None
    return tuple(map(str, found)) if isinstance(found, list) else ()


def usable_run_id(text: str) -> str:
    """A run id as W&B takes it, else nothing: it becomes part of paths and addresses."""
    return text if _RUN_ID.fullmatch(text) else ""


def _sane(seconds: float) -> float | None:
    """A time between 1990 and 2100; a damaged one is none."""
    return seconds if 631152000 <= seconds <= 4102444800 else None


def _with_row(facts: Facts, entry: Entry) -> Facts:
    try:
        step, row = history_row(entry.record)
    except ValueError:
        return facts
    digest = hashlib.blake2b(entry.payload, digest_size=8).hexdigest()
    validates = is_validation_only(row)
    if not facts.head_digest:
        facts = replace(facts, first_step=step, opens_with_validation=validates, head_digest=digest)
    return facts if validates else replace(facts, training_digest=digest)


def _last_step(path: Path, stamp: Stamp, first: int | None) -> int | None:
    """The last row's step, from the end of the file: as much of it as it takes to find a row."""
    if first is None:
        return None
    looked_at, start = _TAIL_BYTES, stamp.size
    while start > 0:
        start = max(0, (stamp.size - looked_at) // BLOCK_SIZE * BLOCK_SIZE)
        entries = (e for e in read_records(path, start=start) if isinstance(e, Entry))
        steps = [step for e in entries if e.kind == "history" and (step := _step_of(e)) is not None]
        if steps:
            return steps[-1]
        looked_at *= _WIDER
    return first


def _step_of(entry: Entry) -> int | None:
    try:
        return history_row(entry.record)[0]
    except ValueError:
        return None


# -- the whole file ------------------------------------------------------------------------


class _Contents:
    """Collects everything that one file holds."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._folder = file.path.parent
        self._skips: list[Skip] = []
        self._steps: list[int] = []
        self._times: dict[str, list[float | None]] = {TIMESTAMP: [], RUNTIME: []}
        self._rows = TableBuilder()
        self._config: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._run: Any = None
        self._started_at = file.facts.started_at
        self._ending: Ending | None = None
        self._ended_at: float | None = None
        self._events: list[bytes] = []
        self._console: list[str] = []
        self._records: dict[str, list[bytes]] = {"metric": [], "other": []}
        self._artifacts: list[ArtifactRef] = []
        self._files: dict[str, FileRef] = {}
        self._unknown = 0

    def take(self, entry: Entry | Damage) -> None:
        if isinstance(entry, Damage):
            self._take_damage(entry)
            return
        handler = getattr(self, f"_take_{entry.kind}", None)
        if handler is not None:
            try:
                handler(entry)
            except (ValueError, RecursionError) as error:
                place = f"{self._file.place} (byte {entry.offset})"
                detail = f"{entry.kind} record: {error}"[:300]
                self._skips.append(Skip(SkipReason.MALFORMED, place, detail))
        elif entry.kind in _PASSED_ON:
            self._records["other"].append(entry.payload)
        elif entry.kind == UNKNOWN:
            self._unknown += 1

    def _take_damage(self, damage: Damage) -> None:
        reason = SkipReason.TORN_TAIL if damage.tail else SkipReason.CORRUPT
        what = "at the end" if damage.tail else "in the middle"
        self._skips.append(
            Skip(
                reason,
                f"{self._file.place} (byte {damage.offset})",
                f"{damage.reason}, {damage.length} bytes {what}; everything else was read",
                "Copy the file again from the training machine if it is whole there",
            )
        )

    def _take_run(self, entry: Entry) -> None:
        run = entry.record.run
        self._run = run
        self._config.update(config_updates(entry.record))
        self._summary.update(summary_updates(entry.record))
        if run.HasField("start_time"):
            self._started_at = _sane(timestamp(run.start_time)) or self._started_at

    def _take_config(self, entry: Entry) -> None:
        self._config.update(config_updates(entry.record))
        for item in entry.record.config.remove:
            self._config.pop(item.key or ".".join(item.nested_key), None)

    def _take_summary(self, entry: Entry) -> None:
        _merge(self._summary, summary_updates(entry.record))
        for item in entry.record.summary.remove:
            self._summary.pop(item.key or ".".join(item.nested_key), None)

    def _take_history(self, entry: Entry) -> None:
        try:
            step, row = history_row(entry.record)
        except ValueError as error:
            self._skip_row(entry, SkipReason.MALFORMED, str(error))
            return
        if step is None or not 0 <= step < 2**63:
            self._skip_row(entry, SkipReason.NO_STEP, "no usable _step")
            return
        seen = {axis: row.pop(axis, None) for axis in self._times}
        row.pop(STEP, None)
        try:
            self._rows.add(row)
        except ValueError as error:
            self._skip_row(entry, SkipReason.MALFORMED, str(error))
            return
        self._steps.append(step)
        for axis, value in seen.items():
            self._times[axis].append(float(value) if isinstance(value, int | float) else None)

    def _skip_row(self, entry: Entry, reason: SkipReason, detail: str) -> None:
        place = f"{self._file.place} (byte {entry.offset})"
        self._skips.append(Skip(reason, place, detail, records=1))

    def _take_environment(self, entry: Entry) -> None:
        words = entry.record.environment.args
        if words:
            masked = mask_words(list(words))
            del words[:]
            words.extend(masked)
        self._records["other"].append(bytes(entry.record.SerializeToString()))

    def _take_stats(self, entry: Entry) -> None:
        self._events.append(entry.payload)
        self._ended_at = max(self._ended_at or 0.0, timestamp(entry.record.stats.timestamp))

    def _take_output_raw(self, entry: Entry) -> None:
        self._console.append(entry.record.output_raw.line)

    def _take_output(self, entry: Entry) -> None:
        self._console.append(entry.record.output.line)

    def _take_metric(self, entry: Entry) -> None:
        self._records["metric"].append(entry.payload)

    def _take_artifact(self, entry: Entry) -> None:
        payload = self._with_present_files(entry)
        if payload is not None:
            artifact = entry.record.artifact
            self._artifacts.append(ArtifactRef(artifact.name, artifact.digest, payload))

    def _take_files(self, entry: Entry) -> None:
        for item in entry.record.files.files:
            found = list(self._matching(item.path))
            for path in found:
                name = path.relative_to(self._folder / "files").as_posix()
                if name not in _WRITTEN_ANEW:
                    content = _masked_metadata(path) if name == _METADATA else None
                    self._files[name] = FileRef(name, path, item.policy, item.type, content)
            if not found and not any(c in item.path for c in "*?["):
                place = f"{self._file.place} (byte {entry.offset})"
                hint = f"Copy it to {quoted(self._folder / 'files')} if it still exists"
                self._skips.append(
                    Skip(SkipReason.FILE_GONE, place, f"the run's file {item.path!r}", hint)
                )

    def _take_exit(self, entry: Entry) -> None:
        code = entry.record.exit.exit_code
        self._ending = Ending(code, f"exit record, code {code}")

    def _matching(self, name: str) -> Iterator[Path]:
        """Existing files of the run folder; a name that leads out of it matches nothing.

        `wandb.save` puts links to the user's files there, which are followed.
        """
        root = self._folder / "files"
        wanted = Path(name)
        if wanted.is_absolute() or ".." in wanted.parts:
            return
        paths = root.glob(name) if any(c in name for c in "*?[") else [root / name]
        yield from (path for path in paths if is_file(path))

    def _with_present_files(self, entry: Entry) -> bytes | None:
        """The artifact's record with paths that exist here; None (and a Skip) if one is lost.

        The manifest points into a staging folder of the machine that logged. A table's file
        also lies in the run folder, where it is found again by size and digest.
        """
        record = entry.record
        for item in record.artifact.manifest.contents:
            if not item.local_path or is_file(item.local_path):
                continue
            found = self._carried(item.local_path) or self._same_file(item.size, item.digest)
            if found is None:
                place = f"{self._file.place} (byte {entry.offset})"
                detail = f"artifact {record.artifact.name}: its file {item.path} is not here"
                hint = f"W&B staged it on the training machine; copy it to {item.local_path}"
                self._skips.append(Skip(SkipReason.FAILED, place, detail, hint))
                return None
            item.local_path = str(found)
        return bytes(record.SerializeToString())

    def _carried(self, place: str) -> Path | None:
        """A file that came along in the run folder, under a path relative to it."""
        path = self._folder / place
        inside = not Path(place).is_absolute() and ".." not in Path(place).parts
        return path.absolute() if inside and is_file(path) else None

    def _same_file(self, size: int, digest: str) -> Path | None:
        for path in sorted((self._folder / "files").rglob("*")):
            try:
                if is_file(path) and path.stat().st_size == size and _md5(path) == digest:
                    return path.absolute()
            except OSError:
                continue  # closed to us, or gone since: it is none that could be sent
        return None

    def reading(self) -> Reading:
        if not self._steps and not self._events and self._run is None and not self._skips:
            raise NotALog(
                "holds no record yet", place=self._file.place, hint="It is read again next time."
            )
        if not self._steps:
            self._skips.append(_no_history(self._file.place))
        if self._unknown:
            detail = f"{self._unknown} records of kinds that this version of wandb does not know"
            self._skips.append(Skip(SkipReason.UNKNOWN_KIND, self._file.place, detail))
        console, unfinished = console_lines(self._console)
        # What verl prints of its config names keys in clear, and programs print them anywhere.
        hush = hushing(secrets_of(self._config))
        lines = [hush(line) for line in (*hushed_lines(console), hushed(unfinished))]
        hush_key_blocks(lines, [n for n, line in enumerate(lines) if begins_key_block(line)])
        console, unfinished = tuple(lines[:-1]), lines[-1]
        return Reading(
            self._table(),
            tuple(self._skips),
            self._config,
            PassThrough(
                events=tuple(self._events),
                console=console,
                unfinished=unfinished,
                metrics=tuple(self._records["metric"]),
                artifacts=tuple(self._artifacts),
                others=tuple(self._records["other"]),
                files=tuple(self._files.values()),
                summary=self._summary,
                **self._run_words(),
            ),
            self._ending,
            self._started_at,
            self._ended_at,
        )

    def _run_words(self) -> dict[str, Any]:
        run = self._run
        if run is None:
            return {}
        return {
            "tags": tuple(run.tags),
            "notes": run.notes,
            "group": run.run_group,
            "job_type": run.job_type,
        }

    def _table(self) -> pa.Table:
        columns: dict[str, Any] = {STEP: pa.array(self._steps, type=pa.int64())}
        for axis, times in self._times.items():
            if any(time is not None for time in times):
                columns[axis] = pa.array(times, type=pa.float64())
        return pa.table(columns | self._rows.columns())


def _masked_metadata(path: Path) -> bytes:
    """What W&B noted of the machine and the command line, without secrets."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return b"{}"
    return json.dumps(mask_config(value) if isinstance(value, dict) else {}).encode()


def _no_history(place: str) -> Skip:
    return Skip(
        SkipReason.NO_HISTORY,
        place,
        "no history records in this run",
        "Add the job's JSONL or console log to the paths: its metrics are there",
    )


def _merge(target: dict[str, Any], updates: Mapping[str, Any]) -> None:
    for key, value in updates.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _md5(path: Path) -> str:
    """Digest as W&B's manifests have it (base64 of MD5; an identifier, not a protection)."""
    hasher = hashlib.md5(path.read_bytes(), usedforsecurity=False)
    return base64.b64encode(hasher.digest()).decode()


def console_lines(chunks: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Whole lines of console text as a terminal shows them, and what follows the last line end.

    A progress bar rewrites its line after a carriage return, and nested ones move up to theirs.
    """
    text = "".join(chunks).replace("\r\n", "\n")
    if "\x1b[A" in text:
        shown = _on_screen(text)
    else:  # the same, faster
        shown = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    return tuple(shown[:-1]), shown[-1]


def _on_screen(text: str) -> list[str]:
    """The lines of a terminal whose cursor was moved up and down."""
    lines, row, rewrites = [""], 0, False
    for piece in _CURSOR_MOVES.split(text):
        if piece in ("\n", "\x1b[B"):
            row += 1
            if row == len(lines):
                lines.append("")
        elif piece == "\x1b[A":
            row = max(row - 1, len(lines) - _SCREEN, 0)
        elif piece and piece != "\r":
            lines[row] = piece if rewrites else lines[row] + piece
        rewrites = piece in ("\n", "\r") or (rewrites and piece in ("", "\x1b[A", "\x1b[B"))
    return lines
