"""`verl-logsync scan`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.options import grouping_options, paths_argument, settings_from
from verl_logsync.cli.printing import say
from verl_logsync.settings import Settings


@click.command()
@paths_argument
@grouping_options
@click.option("--verbose", "-v", is_flag=True, help="Name the files that each step comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def scan(paths: tuple[Path, ...], verbose: bool, as_json: bool, **options: Any) -> int:
    """Show what is below PATHS: runs, attempts, steps, gaps, and what was left out and why.

    Nothing is written or sent. Exit code 3 means that some inputs cannot be used.
    """
    settings = settings_from(options)
    from verl_logsync import api
    from verl_logsync.model import HARMLESS

    found, loaded = api.scan(paths, settings)
    if as_json:
        _print_json(found, loaded, settings)
    else:
        _print_text(found, loaded, settings, verbose)
    skips = list(found.skips)
    for _, result in loaded:
        skips.extend(result.account.skips if hasattr(result, "account") else ())
    failed = any(not hasattr(result, "account") for _, result in loaded)
    return 3 if failed or any(skip.reason not in HARMLESS for skip in skips) else 0


def _print_text(found: Any, loaded: Any, settings: Settings, verbose: bool) -> None:
    from verl_logsync.errors import LogsyncError
    from verl_logsync.pipeline import readiness_of
    from verl_logsync.reports.text import counted, error_lines, run_lines, skip_lines

    for run, result in loaded:
        if isinstance(result, LogsyncError):
            lines = [*run_lines(run, "unreadable", "no rows", None), *error_lines(result)]
        else:
            history = result.history
            rows = f"{len(history)} rows" + (
                f", steps {history.steps[0]}..{history.last_step}" if len(history) else ""
            )
            ready = readiness_of(result, settings, time.time())
            state = f"{ready.state}, time {history.clock}"
            lines = list(
                run_lines(run, state, rows, result.account, result.attempts, verbose=verbose)
            )
            lines.extend(f"  {note}" for note in ready.notes)
        for line in lines:
            say(line)
    for line in skip_lines(found.skips):
        say(line)
    left_out = counted(len(found.skips), "path")
    click.echo(f"{counted(len(found.runs), 'run')}, {left_out} left out")


def _print_json(found: Any, loaded: Any, settings: Settings) -> None:
    import orjson

    from verl_logsync.align import missing_steps
    from verl_logsync.errors import LogsyncError
    from verl_logsync.pipeline import readiness_of
    from verl_logsync.reports.as_json import (
        account_values,
        attempts_values,
        catalog_values,
        error_values,
    )

    values = catalog_values(found)
    for entry, (_, result) in zip(values["runs"], loaded, strict=True):
        if isinstance(result, LogsyncError):
            entry["error"] = error_values(result)
            continue
        history = result.history
        entry["rows"] = len(history)
        entry["first_step"] = int(history.steps[0]) if len(history) else None
        entry["last_step"] = history.last_step
        entry["missing_steps"] = missing_steps(history.steps)
        entry["clock"] = history.clock
        ready = readiness_of(result, settings, time.time())
        entry["state"], entry["state_notes"] = ready.state, list(ready.notes)
        entry["account"] = account_values(result.account)
        entry["attempts"] = attempts_values(result.attempts)
    click.echo(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
