"""What the headers of a step log say, whatever stands in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from verl_logsync.jsonlines import parse_line
from verl_logsync.steplog.layout import HEADER_START, SCHEMA

_VERSION: Final = re.compile(rb'\{"step_log":(\d{1,9})')


@dataclass(frozen=True, slots=True)
class Header:
    """One start of a job in one rank's log, or the continuation of one in another file.

    `log_id` names the log (the same on all ranks that know a common attempt), `number` the file
    among those of the log, `previous` the file before it. `log_started_at` and `log_first_step`
    are those of the whole log.
    """

    log_id: str = ""
    log_started_at: float | None = None
    log_first_step: int | None = None
    number: int = 1
    continues: bool = False
    previous: str = ""
    project: str = ""
    experiment: str = ""
    run_id: str = ""
    attempt_id: str = ""
    rank: int | None = None
    world_size: int | None = None
    host: str = ""
    started_at: float | None = None
    config: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None


def header_of(line: bytes) -> Header | None:
    """The header on a line; None when there is none that can be understood."""
    if not line.startswith(HEADER_START):
        return None
    try:
        found = parse_line(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("step_log") != SCHEMA:
        return None
    log, started = _mapping(found.get("log")), _mapping(found.get("started"))
    return Header(
        log_id=_text(log.get("id")),
        log_started_at=_number(log.get("started_at")),
        log_first_step=_whole(log.get("first_step")),
        number=_whole(found.get("file")) or 1,
        continues=found.get("continues") is True,
        previous=_file_name(found.get("previous")),
        project=_text(found.get("project")),
        experiment=_text(found.get("experiment")),
        run_id=_text(found.get("run_id")),
        attempt_id=_text(found.get("attempt_id")),
        rank=_whole(found.get("rank")),
        world_size=_whole(found.get("world_size")),
        host=_text(found.get("host")),
        started_at=_number(started.get("time")),
        config=_mapping(found.get("config")),
        end=_mapping(found.get("end")) or None,
    )


def newer_version(head: bytes) -> int:
    """The version of a format that is newer than ours; 0 for ours and for anything else."""
    found = _VERSION.match(head)
    return int(found[1]) if found and int(found[1]) > SCHEMA else 0


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    """A time: finite, and not before 1970 or after 2100."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 4.2e9
    return float(value) if usable and isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _file_name(value: object) -> str:
    """A name in the same folder; nothing that leads out of it."""
    text = _text(value)
    return text if text and "\0" not in text and Path(text).name == text else ""
