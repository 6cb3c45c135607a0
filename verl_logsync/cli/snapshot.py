"""`verl-logsync snapshot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.options import paths_argument, recognition_options, settings_from
from verl_logsync.cli.printing import say


@click.command()
@paths_argument
@click.option(
    "--into",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("verl-logsync-snapshots"),
    show_default=True,
    help="The folder for the copies; give it to upload as one more path.",
)
@recognition_options
@click.option("--quiet", is_flag=True, help="Print only what was copied.")
def snapshot(paths: tuple[Path, ...], folder: Path, quiet: bool, **options: Any) -> int:
    """Keep copies of verl's own log files below PATHS, which a restarted job truncates.

    Run it from cron every few minutes. A log that grew is copied further; one that was begun anew
    gets a new copy, and the old one stays. JSON lines of other writers are copied when --step-key
    names what counts their steps. Exit code 3 means that some could not be copied.
    """
    from verl_logsync import api
    from verl_logsync.errors import LogsyncError
    from verl_logsync.reports.text import counted, error_lines

    failed = False
    for log, result in api.snapshot(paths, folder, settings_from(options)):
        if isinstance(result, LogsyncError):
            failed = True
            say(f"FAIL {log}")
            for line in error_lines(result):
                say(line)
        elif result.what != "unchanged" or not quiet:
            say(f"{result.what}: {counted(result.added, 'byte')} of {log} to {result.copy}")
    return 3 if failed else 0
