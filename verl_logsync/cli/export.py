"""`verl-logsync export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.options import grouping_options, paths_argument, settings_from
from verl_logsync.cli.printing import say


@click.command()
@paths_argument
@click.option(
    "--to",
    "form",
    type=click.Choice(["parquet", "csv", "jsonl"]),
    default="parquet",
    show_default=True,
    help="The format of the histories.",
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@grouping_options
def export(paths: tuple[Path, ...], form: Any, folder: Path, **options: Any) -> int:
    """Write the aligned history of every run below PATHS into DIR, one file a run.

    No key and no network are needed. Beside each history an account says where every record went.
    Exit code 3 means that some inputs could not be used.
    """
    settings = settings_from(options)
    from verl_logsync import api
    from verl_logsync.model import HARMLESS
    from verl_logsync.reports.text import counted, error_lines, problem_lines

    found, exported = api.export(paths, settings, folder, form)
    bad = any(skip.reason not in HARMLESS for skip in found.skips)
    for run, result in exported:
        if isinstance(result, api.Exported):
            say(f"{result.path}: {counted(result.rows, 'row')}")
            bad = bad or result.partial
        else:
            say(f"FAIL {run.target.project}/{run.name}")
            for line in error_lines(result):
                say(line)
            bad = True
    for line in problem_lines(found.skips):
        say(line)
    if not exported:
        say("nothing to export: no log was recognised")
    return 3 if bad else 0
