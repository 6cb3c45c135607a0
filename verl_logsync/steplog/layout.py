"""How step logs are named and marked: what the writer and the source must agree on.

The format is public: see docs/reference/step-log-format.md.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    import re
    from typing import Final

#: Version of the format. Readers refuse a higher one; new optional fields do not raise it.
SCHEMA: Final = 1

#: How every header line begins.
HEADER_START: Final = b'{"step_log":'
#: How the last record of a logger that was closed begins.
END_START: Final = b'{"end":'

#: The key of a Parquet file's metadata under which its header is kept as JSON text.
METADATA_KEY: Final = b"verl_logsync.step_log"
#: The same for a digest of the column names and types, which a damaged footer does not match.
SCHEMA_KEY: Final = b"verl_logsync.step_log.schema"
#: Columns of a Parquet file that are no metrics: step, seconds since 1970, monotonic seconds.
STEP, TIME, MONO = "_step", "_timestamp", "_monotonic"

#: A longer record is not written: W&B does not take rows of more than 10 MB.
LONGEST_RECORD: Final = 8 << 20

#: The `_type` of a histogram (W&B's own) and of a table (ours).
HISTOGRAM, TABLE = "histogram", "table"

EXTENSIONS: Final = {"jsonl": ".jsonl", "parquet": ".parquet"}
_SEALED: Final = r"^(?P<stem>.+\.steps)\.(?P<number>\d+)(?P<end>\.(jsonl|parquet))$"


def stem_of(rank: int) -> str:
    """The name of a rank's log without its extension."""
    return f"rank-{rank:04d}.steps"


def live_name(stem: str, kind: str) -> str:
    """The name of the file that is written to."""
    return f"{stem}{EXTENSIONS[kind]}"


def sealed_name(stem: str, number: int, kind: str) -> str:
    """The name that the file of this number gets when the next one is begun."""
    return f"{stem}.{number}{EXTENSIONS[kind]}"


def names_after(name: str) -> tuple[str, ...]:
    """What the file after a sealed one may be called: sealed itself by now, or the live one."""
    found = _sealed(name)
    if not found:
        return ()
    following = f"{found['stem']}.{int(found['number']) + 1}{found['end']}"
    return following, f"{found['stem']}{found['end']}"


def _sealed(name: str) -> re.Match[str] | None:
    import re

    return re.match(_SEALED, name, re.IGNORECASE)


def sealed_number(name: str, stem: str, kind: str) -> int:
    """The number of a sealed file of this log; 0 for any other name."""
    found = _sealed(name)
    ours = found and found["stem"] == stem and found["end"] == EXTENSIONS[kind]
    return int(found["number"]) if found and ours else 0
