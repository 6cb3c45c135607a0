"""A console's lines, and what terminals, Ray and schedulers put around them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Final, NamedTuple

import orjson

#: A longer line is never held in memory; W&B would not take it either.
LONGEST_LINE: Final = (10 << 20) - (100 << 10)

_BOM: Final = b"\xef\xbb\xbf"
_ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Ray's own colours, which are nearly all there are.
_COMMON_ANSI: Final = ("\x1b[36m", "\x1b[0m")

#: A date with a time of day.
STAMP: Final = (
    r"(?P<date>\d{4}-\d{2}-\d{2})[T ](?P<time>\d{2}:\d{2}:\d{2})(?:[.,](?P<part>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d{2}:?\d{2})?"
)
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
# Each takes one separator: what follows may begin with spaces of its own.
_AROUND: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # containerd's files name the stream and whether the line is whole (F) or a piece (P)
        rf"\[?{STAMP}\]?(?: std(?:out|err) (?P<flag>[FP])(?: |$)|[ \t]|: |$)",
        r" {0,3}\d{1,5}: ",  # srun --label
        r"\[?\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?\]?[ \t]",
        rf"{_MONTH} [ \d]?\d \d{{2}}:\d{{2}}:\d{{2}} ",  # syslog, journald, ts
        r"[\w.-]+ [\w@.-]+\[\d+\]: ",  # journald: host unit[pid]:
        r"\[(?:rank|default)?\d+\]: ?",  # torchrun, mpirun
        r"\[pod/[^\]\s]+\] ",  # kubectl logs --prefix
        r"[\w.-]+ +\| ",  # docker compose
    )
)
# What is left of a colour where text was copied from an editor or a web page, or shown by `cat -v`.
_FADED: Final = r"(?:(?:\^\[|[\ufffd\u241b])?\[\d{1,3}(?:;\d{1,3}){0,4}m)?"
#: Ray's prefix.
RAY: Final = (
    rf"{_FADED}\((?P<who>[^()]*?)\bpid=(?P<pid>\d+)(?:, ip=(?P<ip>[^()\s]+))?\){_FADED}(?: |$)"
)
_RAY: Final = re.compile(RAY)
_REPEATED: Final = re.compile(r" \[repeated \d+x across cluster\](?: \(Ray deduplicates.*)?$")
_RECORD: Final = re.compile(r"(?:^|\s)step:\d+ -")
# "2026-12-01 03:33:07,261	INFO worker.py" (Ray), "INFO:2026-12-01 03:33:38,568:" (verl 0.9)
_INNER_STAMP: Final = re.compile(rf"(?:[A-Z]+:)?{STAMP}[\t :]")
_NEVER_MORE: Final = 8


# Docker's json-file driver: one object a line, whose text has a line end unless it is a piece.
_DOCKER: Final = b'{"log":"'


class Stretch(NamedTuple):
    """Whole lines of a file, joined by line feeds.

    `number` and `offset` are those of the first line. `ended` is False for what follows the
    last line feed of the file. Of a first line that was `too_long` only the beginning is here.
    """

    number: int
    offset: int
    data: bytes
    ended: bool = True
    too_long: bool = False


def stretches(pieces: Iterable[bytes]) -> Iterator[Stretch]:
    """Cut a stream of bytes at line feeds; a byte order mark at its start is left out."""
    number, offset, held, dropped, too_long = 1, 0, b"", 0, False
    for piece in _without_mark(pieces):
        cut = piece.rfind(b"\n")
        if cut < 0:
            held += piece
            if len(held) > LONGEST_LINE:
                kept, loss = _shortened(held)
                dropped += len(held) - len(kept)
                held, too_long = kept, too_long or loss
            continue
        data = held + piece[:cut] if held else piece[:cut]
        yield Stretch(number, offset, data, ended=True, too_long=too_long)
        number += data.count(b"\n") + 1
        offset += len(data) + 1 + dropped
        held, dropped, too_long = piece[cut + 1 :], 0, False
    if held:
        yield Stretch(number, offset, held, ended=False, too_long=too_long)


def plain_lines(lines: list[bytes]) -> list[bytes]:
    """The lines of a file without the JSON that Docker wraps each of them in."""
    if not any(line.startswith(_DOCKER) for line in lines):
        return lines
    return [plain_line(line) if line.startswith(_DOCKER) else line for line in lines]


def plain_line(line: bytes) -> bytes:
    """A line of Docker's json-file log as containerd writes it; any other line as it is.

    A damaged one stays wrapped, and gives no record: its last value may be cut.
    """
    if not line.startswith(_DOCKER):
        return line
    try:
        entry = orjson.loads(line)
        text, time = entry["log"], entry.get("time")
    except (ValueError, KeyError):
        return line
    if type(text) is not str:
        return line
    shown = text.rstrip("\n").replace("\n", " ")
    if type(time) is str and re.fullmatch(STAMP, time):
        stream = "stderr" if entry.get("stream") == "stderr" else "stdout"
        shown = f"{time} {stream} {'F' if text.endswith(chr(10)) else 'P'} {shown}"
    return shown.encode(errors="replace")


def still_wrapped(line: bytes) -> bool:
    """Whether a line that was made plain is a damaged or unfinished one of Docker's."""
    return line.startswith(_DOCKER)


def _without_mark(pieces: Iterable[bytes]) -> Iterator[bytes]:
    first = True
    for piece in pieces:
        yield piece.removeprefix(_BOM) if first else piece
        first = first and not piece


def _shortened(line: bytes) -> tuple[bytes, bool]:
    """What stays of a line that is too long, and whether more than progress bars is lost."""
    bar = line.rfind(b"\r", 0, len(line) - 1)
    if len(line) - bar < LONGEST_LINE // 2:
        return line[bar + 1 :], b"step:" in line[:bar]
    return line[:80], True


class Content(NamedTuple):
    """What a program printed in one line.

    `stamp` is the time that a container or scheduler put in front (seconds since 1970, UTC),
    `owner` the process by Ray's prefix. `bare` lines had nothing in front of them; of a
    `partial` one the rest is in the next line. `hidden` is text that a carriage return hides
    although it belongs to a record; `whole` is the text with all that they hide.
    """

    text: str
    stamp: float | None
    owner: str
    bare: bool
    partial: bool
    whole: str
    hidden: str = ""


def shown(text: str) -> str:
    """A line as a terminal shows it: no colours, and what follows the last carriage return."""
    if "\0" in text:
        text = text.replace("\0", "")
    return last_return(without_ansi(text))


def without_ansi(text: str) -> str:
    """The same text without escape sequences."""
    if "\x1b" not in text:
        return text
    for code in _COMMON_ANSI:
        text = text.replace(code, "")
    return _ANSI.sub("", text) if "\x1b" in text else text


def last_return(line: str) -> str:
    """What follows the last carriage return that is not the line's end."""
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line


def content(line: str, prefix: re.Pattern[str] | None = None) -> Content:
    """Take apart a line that has no escape sequences any more.

    Args:
        prefix: what stands in front of this file's lines besides what is known (`prefixes.py`).
    """
    line = line.replace("\0", "").rstrip("\r")
    text, stamp, owner, flag = _freed(line, prefix)
    bare = text is line
    whole, hidden = text, ""
    if "\r" in text:
        whole = text.replace("\r", "")
        text, hidden = _after_return(text)
        text, inner_stamp, inner_owner, _ = _freed(text, prefix)
        stamp, owner = stamp or inner_stamp, owner or inner_owner
    if text.endswith((" cluster]", ")")):
        text = _REPEATED.sub("", text)
    return Content(text, stamp, owner, bare, flag == "P", whole, hidden)


def _after_return(text: str) -> tuple[str, str]:
    """The piece that a terminal shows, unless a record stands in another one."""
    pieces = text.split("\r")
    if not _RECORD.search(pieces[-1]):
        for index in range(len(pieces) - 2, -1, -1):
            if _RECORD.search(pieces[index]):
                return pieces[index], "".join(pieces[index + 1 :])
    return pieces[-1], ""


def _freed(line: str, prefix: re.Pattern[str] | None) -> tuple[str, float | None, str, str]:
    """A line without what stands in front, known and learnt: text, stamp, owner, flag."""
    text, stamp, owner, flag = _unwrapped(line)
    if prefix is None or not (found := prefix.match(text)):
        return text, stamp, owner, flag
    text, inner_stamp, inner_owner, _ = _unwrapped(text[found.end() :])
    return text, stamp or inner_stamp, owner or inner_owner, flag


def _unwrapped(line: str) -> tuple[str, float | None, str, str]:
    """A line without what stands in front: text, stamp, owner, containerd's flag."""
    text, stamp, owner, flag = line, None, "", ""
    for _ in range(_NEVER_MORE):
        found = _RAY.match(text)
        if found:
            owner = f"{found['pid']}@{found['ip'] or ''}"
            text = text[found.end() :]
            if not text.startswith("("):
                break  # what follows Ray's prefix is the program's own
            continue
        found = next((m for p in _AROUND if (m := p.match(text))), None)
        if not found:
            break
        groups = found.groupdict()
        if "date" in groups:
            stamp = stamp or seconds(found)
            flag = groups["flag"] or flag
        text = text[found.end() :]
    return text, stamp, owner, flag


def inner_stamp(text: str) -> float | None:
    """The time at the start of a line of Ray's or verl's own logging, by local time."""
    found = _INNER_STAMP.match(text)
    return seconds(found) if found else None


def seconds(found: re.Match[str]) -> float | None:
    """The time of a stamp, seconds since 1970; one without a zone is local time."""
    try:
        when = datetime.strptime(f"{found['date']} {found['time']}", "%Y-%m-%d %H:%M:%S")
        zone = found["zone"]
        if zone:
            when = when.replace(tzinfo=_zone(zone))
        part = found["part"]
        return when.timestamp() + (float(f"0.{part}") if part else 0.0)
    except (ValueError, OverflowError, OSError):
        return None


def _zone(text: str) -> timezone:
    if text == "Z":
        return timezone.utc
    hours, minutes = int(text[1:3]), int(text[-2:])
    offset = timedelta(hours=hours, minutes=minutes)
    return timezone(-offset if text[0] == "-" else offset)
