"""Recognising and reading a console."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from verl_logsync.columns import to_json
from verl_logsync.errors import InputError, NotALog
from verl_logsync.fingerprint import data_folders, essentials
from verl_logsync.interfaces import Candidate
from verl_logsync.model import Facts, LogFile, PassThrough, Reading, Skip, SkipReason
from verl_logsync.regular import is_there
from verl_logsync.sources.console.attempts import collect
from verl_logsync.sources.console.blocks import names_of
from verl_logsync.sources.console.ending import ending
from verl_logsync.sources.console.lines import content, plain_line, stretches, without_ansi
from verl_logsync.sources.console.prefixes import learn_prefix
from verl_logsync.sources.console.records import Record, parse_record
from verl_logsync.sources.console.transcript import (
    Began,
    Config,
    Event,
    Named,
    Notebook,
    Step,
    Transcript,
)
from verl_logsync.sources.console.unpack import NoDecompressor, Unpacked, packing
from verl_logsync.verl_keys import is_validation_only

#: So far into a file a first step is looked for.
SEARCHED: Final = 64 << 20

_TAIL_BYTES: Final = 1 << 20
# A compressed file has no tail: it is unpacked, up to here, to know its last step.
_UNPACKED_BYTES: Final = 1 << 30
_OTHERS: Final = re.compile(
    r"\.(jsonl?|ndjson|ya?ml|toml|csv|tsv|parquet|wandb|py|md|html?|tar|tgz|zip)(\.\w+)*$",
    re.IGNORECASE,
)
_CONSOLE_NAME: Final = re.compile(
    r"\.(log|out|err|txt|console)(\.\d+)?(\.(gz|zst))?$", re.IGNORECASE
)
# What only a trainer's console says; each is printed before the first step.
_TRAINER: Final = re.compile(
    rb"'actor_rollout_ref': |Total training steps: \d|Size of train dataloader: \d"
    rb"|Initial validation metrics: |Training Progress: "
)
_PROGRESS: Final = re.compile(rb"Training Progress: +\d+%\|[^|\n]*\| *([1-9]\d*)/")


class Console:
    """Source `console`."""

    name = "console"
    precision = 16
    patterns = ("*.log", "*.log.*", "*.out", "*.out.*", "*.err", "*.txt", "*.gz", "*.zst")

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        if candidate.names is not None or _OTHERS.search(candidate.path.name):
            return None
        if not candidate.head.strip(b"\0\r\n ") or not _is_text(candidate.head):
            return None
        look, named_so = _Look(candidate), _CONSOLE_NAME.search(candidate.path.name)
        try:
            look.search()
            if look.first is not None and (prefix := learn_prefix(Unpacked(candidate.path))):
                look = _Look(candidate, prefix)
                look.search()
        except NoDecompressor as error:
            return _unusable(candidate, SkipReason.UNREADABLE, error) if named_so else None
        except NotALog as error:
            ours = named_so or look.is_ours or look.first is not None
            return _unusable(candidate, SkipReason.CORRUPT, error) if ours else None
        except InputError as error:
            return _unusable(candidate, SkipReason.UNREADABLE, error)
        if look.first is None:
            return look.nothing()
        return LogFile(candidate.path, self.name, candidate.stamp, look.facts())

    def read(self, file: LogFile) -> Reading:
        content_of = Unpacked(file.path)
        notes = _notebook(file.path)
        prefix = learn_prefix(Unpacked(file.path))
        transcript = Transcript(notes, keep=True, prefix=prefix)
        began: list[Began] = []
        attempts = collect(_heard(_events(content_of, transcript), began), notes)
        if content_of.cut:
            detail = "the compressed file ends too early"
            hint = f"Copy it again, or test it with: gzip -t {file.place!r}"
            notes.skips.append(Skip(SkipReason.TORN_TAIL, file.place, detail, hint))
        if content_of.trailing:
            detail = f"{content_of.trailing} bytes behind its compressed data"
            notes.skips.append(Skip(SkipReason.CORRUPT, file.place, detail))
        rows, skips = attempts.table, notes.all()
        if not rows.num_rows and not skips:
            hint = "It is read again next time."
            raise NotALog("holds no step", place=file.place, hint=hint)
        return Reading(
            rows,
            skips,
            config=attempts.config,
            extra=PassThrough(console=transcript.console, unfinished=transcript.unfinished),
            ending=ending(attempts, transcript.console, prefix),
            started_at=began[0].stamp if began else None,
            restarts=tuple(attempts.restarts),
            rounding=attempts.rounding,
            below_precision=attempts.below_precision,
            earlier_configs=tuple(attempts.earlier_configs),
        )


def _events(pieces: Unpacked, transcript: Transcript) -> Iterator[Event]:
    for stretch in stretches(pieces):
        yield from transcript.feed(stretch)
    yield from transcript.close()


def _heard(events: Iterator[Event], began: list[Began]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Began):
            began.append(event)
        yield event


def _notebook(path: Path) -> Notebook:
    try:
        with path.open("rb") as stream:
            kind = packing(stream.read(8))
    except OSError:
        kind = ""  # it will be said when the file is read
    return Notebook(str(path), {"gzip": "zcat", "zstd": "zstdcat"}.get(kind, ""))


def _is_text(head: bytes) -> bool:
    """Whether a file may be text: compressed ones are judged when they are unpacked."""
    if packing(head):
        return True
    sample = head[:4096].replace(b"\0", b"")
    controls = sum(byte < 32 and byte not in b"\t\n\r\x1b\x08\x0c\x07" for byte in sample)
    return controls * 50 <= len(sample)


def _unusable(candidate: Candidate, reason: SkipReason, error: InputError) -> Skip:
    return Skip(reason, str(candidate.path), error.message, error.hint)


# -- a quick look --------------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    """What the beginning and the end of a file tell."""

    candidate: Candidate
    prefix: re.Pattern[str] | None = None
    first: Record | None = None
    trained: Record | None = None
    last: Record | None = None
    began: Began | None = None
    config: dict[str, Any] = field(default_factory=dict)
    names: Named = field(default_factory=Named)
    is_ours: bool = False
    progressed: bool = False

    def search(self) -> None:
        """Read on until the first training step is found, or it is too far away."""
        path = self.candidate.path
        pieces = Unpacked(path)
        packed = bool(packing(self.candidate.head))
        notes = Notebook(str(path), "")
        transcript = Transcript(notes, keep=False, prefix=self.prefix)
        limit = _UNPACKED_BYTES if packed else SEARCHED
        for stretch in stretches(pieces):
            if stretch.number == 1 and packed and not _is_text(stretch.data):
                return
            self._signs(stretch.data)
            for event in transcript.feed(stretch):
                self._hear(event)
            if stretch.offset > limit or (self.trained is not None and not packed):
                break
            if self.first is None and stretch.offset > SEARCHED:
                return
        else:
            for event in transcript.close():
                self._hear(event)
        if self.first is not None and not packed:
            self.last = _last_record(self.candidate, self.prefix) or self.last

    def _signs(self, data: bytes) -> None:
        if self.first is None:
            self.is_ours = self.is_ours or _TRAINER.search(data) is not None
            self.progressed = self.progressed or _PROGRESS.search(data) is not None

    def _hear(self, event: Event) -> None:
        if isinstance(event, Step):
            record = event.record
            self.first = self.first or record
            self.last = record
            if self.trained is None and not is_validation_only(record.values):
                self.trained = record
        elif isinstance(event, Config):
            self.config = self.config or event.values
        elif isinstance(event, Began):
            self.began = self.began or event
        elif isinstance(event, Named) and self.trained is None:
            mine = self.names
            self.names = Named(
                mine.project or event.project,
                mine.name or event.name,
                mine.entity or event.entity,
                mine.run_id or event.run_id,
            )

    def facts(self) -> Facts:
        """The facts of a file in which a step was found."""
        assert self.first is not None
        project, name = names_of(self.config)
        return Facts(
            entity=self.names.entity,
            project=project or self.names.project,
            name=name or self.names.name,
            run_id=self.names.run_id,
            config=essentials(self.config),
            started_at=self.began.stamp if self.began else None,
            first_step=self.first.step,
            last_step=max((self.last or self.first).step, self.first.step),
            opens_with_validation=is_validation_only(self.first.values),
            head_digest=_digest(self.first),
            training_digest=_digest(self.trained) if self.trained else "",
            tail_digest=_digest(self.last) if self.last else "",
            dirs=data_folders(self.config),
        )

    def nothing(self) -> Skip | None:
        """The verdict on a file without a step."""
        if not self.is_ours:
            return None
        place = str(self.candidate.path)
        if not self.progressed:
            detail = "a trainer's console without a step yet"
            return Skip(SkipReason.NOTHING_YET, place, detail, "It is read again next time.")
        other = self.candidate.path.with_suffix(".out")
        if self.candidate.path.suffix.lower() == ".err" and is_there(other):
            detail = f"progress bars only; what was logged is in {other.name}"
            return Skip(SkipReason.NOT_RECOGNISED, place, detail)
        hint = (
            "Keep standard output too (COMMAND > train.log 2>&1) and name console in trainer.logger"
        )
        return Skip(SkipReason.NO_HISTORY, place, "progress bars, but no step: lines", hint)


def _digest(record: Record) -> str:
    """Of what was logged, whatever stood around it in the file."""
    text = to_json([record.step, *([key, record.values[key]] for key in sorted(record.values))])
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _last_record(candidate: Candidate, prefix: re.Pattern[str] | None) -> Record | None:
    """The last record of a plain file, looking back from its end."""
    size, window = candidate.stamp.size, _TAIL_BYTES
    while True:
        start = max(0, size - window)
        try:
            with candidate.path.open("rb") as stream:
                stream.seek(start)
                tail = stream.read(window)
        except OSError:
            return None
        for line in reversed(tail.split(b"\n")[:-1]):  # what follows the last line end may be cut
            if b"step:" in line:
                text = without_ansi(plain_line(line).decode(errors="replace"))
                record = parse_record(content(text, prefix).text)
                if record is not None:
                    return record
        if start == 0 or window >= SEARCHED:
            return None
        window *= 8
