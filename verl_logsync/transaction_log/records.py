"""The records of a fragment other than history, serialised by hand.

Field numbers are those of wandb_internal.proto, whose released ones never change. What is
written here is read back with wandb's own classes in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from verl_logsync.columns import STEP, to_json
from verl_logsync.model import FileRef
from verl_logsync.transaction_log.wire import double, integer, message, text

# Fields of Record.
_SUMMARY, _FILES, _ARTIFACT, _ALERT, _METRIC = 3, 6, 8, 10, 12
_OUTPUT_RAW, _RUN, _EXIT = 13, 17, 18
# The console's streams are STDERR = 0 and STDOUT = 1.
_STDOUT = 1

# Control sequences that do not colour, and what may begin one.
_NO_COLOUR: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]")
_ESCAPE: Final = re.compile(r"\x1b(?!\[[0-9;]*m)")


def run_record(
    *,
    run_id: str,
    entity: str,
    project: str,
    config: Mapping[str, Any],
    started_at: float | None,
    words: bytes = b"",
    tags: Iterable[str] = (),
    branch_step: int | None = None,
) -> bytes:
    """The record that opens a run.

    Args:
        started_at: the run's first start, seconds since 1970.
        words: what only a new run is given, see `run_words`.
        tags: all of the run's; without any those on the server stay.
        branch_step: rewind the run to this step.
    """
    items = b"".join(
        message(1, text(1, key) + text(16, to_json(value))) for key, value in config.items()
    )
    body = [text(1, run_id), text(2, entity), text(3, project), message(4, items), words]
    body.extend(text(10, tag) for tag in tags)
    if started_at is not None:
        seconds = int(started_at)
        nanos = int((started_at - seconds) * 1e9)
        body.append(message(17, integer(1, seconds) + integer(2, nanos)))
    if branch_step is not None:
        body.append(message(23, text(1, run_id) + text(3, STEP) + double(2, branch_step)))
    return message(_RUN, b"".join(body))


def run_words(*, name: str, notes: str, group: str, job_type: str) -> bytes:
    """The part of a run record that people may edit on the server later."""
    return text(6, group) + text(7, job_type) + text(8, name) + text(9, notes)


def summary_record(summary: Mapping[str, Any]) -> bytes:
    """The whole summary of a run."""
    items = (
        message(2, k.encode(errors="replace")) + text(16, to_json(v)) for k, v in summary.items()
    )
    return message(_SUMMARY, b"".join(message(1, item) for item in items))


def console_record(line: str) -> bytes:
    """One line for the Logs tab.

    The uploader draws it on a terminal, which has a line where something was printed. What would
    move its cursor, or swallow the line's end, is left out, and a blank line has a space.
    """
    if "\x1b" in line:
        line = _ESCAPE.sub("", _NO_COLOUR.sub("", line))
    shown = line if line.strip("\r") else " "
    return message(_OUTPUT_RAW, integer(1, _STDOUT) + text(3, f"{shown}\n"))


def files_record(files: Iterable[FileRef]) -> bytes:
    """The files that lie beside the fragment."""
    items = (text(1, f.name) + integer(2, f.policy) + integer(3, f.kind) for f in files)
    return message(_FILES, b"".join(message(1, item) for item in items))


def artifact_record(
    *,
    kind: str,
    name: str,
    digest: str,
    client_id: str,
    sequence_client_id: str,
    entries: Iterable[tuple[str, str, int, str]],
) -> bytes:
    """An artifact that is to be logged and committed.

    Args:
        digest: of its manifest.
        entries: (name, base64 MD5, bytes, local path) of every file, by name.
    """
    contents = (
        text(1, entry) + text(2, md5) + integer(4, size) + text(6, path)
        for entry, md5, size, path in entries
    )
    layout = text(1, "storageLayout") + text(2, '"V2"')
    manifest = integer(1, 1) + text(2, "wandb-storage-policy-v1") + message(3, layout)
    manifest += b"".join(message(4, entry) for entry in contents)
    body = text(4, kind) + text(5, name) + text(6, digest) + text(11, "latest")
    body += message(12, manifest) + integer(14, 1) + text(15, client_id)
    body += text(16, sequence_client_id) + text(20, "MANIFEST_MD5")
    return message(_ARTIFACT, body)


def counter_record(name: str) -> bytes:
    """The definition of a metric that other metrics can be plotted over."""
    defined = integer(3, 1)
    return message(_METRIC, text(1, name) + message(6, defined))


def alert_record(title: str, words: str) -> bytes:
    """Something that W&B tells the run's owners."""
    return message(_ALERT, text(1, title) + text(2, words) + text(3, "WARN"))


def exit_record(exit_code: int, runtime: float) -> bytes:
    """The end of a run; `runtime` in seconds."""
    return message(_EXIT, integer(1, exit_code) + integer(2, int(runtime)))
