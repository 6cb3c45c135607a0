"""What the uploader writes for its makers: which answers it got for which run.

It prints "Fatal error" for a key that may not write as for anything else; the answer's status
stands only in its own log. That log is no interface: what is not found in it is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_DENIED: Final = frozenset({401, 403})
#: The ends of the addresses that rows, and what a run is, are sent to.
_ROWS: Final = "/file_stream"
_RUN: Final = "/graphql"


def denied(work: Path, folder: Path, *, rows_only: bool) -> int | None:
    """The status with which the server refused the key for one run; None if it is not known.

    Args:
        work: the uploader's own folder.
        folder: the run folder that it was given.
        rows_only: leave out what was asked about the run itself, which may be denied (a rewind)
            although rows are taken.
    """
    ends = (_ROWS,) if rows_only else (_ROWS, _RUN)
    for entry in _entries(work):
        path = Path(str(entry.get("sync_path", "")))
        here = path.parts[-3:-1] == folder.parts[-2:]
        status = entry.get("status")
        if here and status in _DENIED and str(entry.get("url", "")).endswith(ends):
            return int(status)
    return None


def _entries(work: Path) -> Iterator[Mapping[str, Any]]:
    for log in sorted((work / "wandb" / "logs").glob("debug-sync*.log")):
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
