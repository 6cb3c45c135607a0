"""`verl-logsync upload`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.options import (
    diagnostics_options,
    grouping_options,
    paths_argument,
    settings_from,
)
from verl_logsync.cli.printing import say
from verl_logsync.settings import temporary_state_dir


@click.command()
@paths_argument
@grouping_options
@click.option(
    "--mode",
    type=click.Choice(["online", "offline", "disabled"]),
    help="online sends; offline writes run folders to --output; disabled does "
    "everything but write (default: WANDB_MODE, else online).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Where --mode offline writes run folders (default: ./wandb-fragments).",
)
@click.option("--jobs", "-n", type=click.IntRange(1), help="Runs sent at a time (default: 5).")
@click.option(
    "--dry-run", is_flag=True, default=None, help="Print the plan; write and send nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print only what needs attention.")
@click.option(
    "--verify",
    type=click.Choice(["counts", "full", "none"]),
    help="How to read back: the server's counts, every value, or (for the brave) not "
    "at all (default: counts).",
)
@click.option(
    "--on-rewrite",
    type=click.Choice(["rewind", "keep"]),
    help="When uploaded rows were superseded: rewind the run, or keep the old rows "
    "and send only newer steps (default: rewind).",
)
@click.option(
    "--runtime",
    type=click.Choice(["active", "wall"]),
    help="What `_runtime` counts: the time that the job ran, or all time since its first start "
    "(default: active).",
)
@click.option(
    "--settle",
    type=float,
    metavar="SECONDS",
    help="Hold the newest step back while files changed this recently (default: 60).",
)
@click.option(
    "--stale-after",
    type=float,
    metavar="SECONDS",
    help="A run whose files are older is over (default: 3600).",
)
@click.option(
    "--final",
    is_flag=True,
    default=None,
    help="Everything is complete: send all rows and finish the runs.",
)
@click.option(
    "--diagnostics/--no-diagnostics",
    default=None,
    help="Add GRPO diagnostics and health columns (default: add them).",
)
@click.option(
    "--recompute",
    is_flag=True,
    default=None,
    help="Rewind the runs and send all rows anew, with the diagnostics of this version.",
)
@diagnostics_options
@click.option(
    "--bind-checkpoints",
    is_flag=True,
    default=None,
    help="Write the id of every verified run into its checkpoint folder, so that a resumed job "
    "continues the same run.",
)
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="Seconds from the start after which the network is left alone (default: 3600).",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where the ledger is kept (default: ~/.local/state/verl-logsync).",
)
def upload(paths: tuple[Path, ...], as_json: bool, quiet: bool, **options: Any) -> int:
    """Send everything below PATHS to W&B: only what is new, verified by reading back.

    Run it again at any time, from cron too: runs that did not change cost nothing, and after a
    crash or a network failure the next run continues. The exit code tells whether all is well
    (0), some inputs or runs were left out (3), the read-back disagrees (4), the key is refused
    (5), the server is away (6) or another upload is running (7).
    """
    settings = settings_from(options)
    from verl_logsync.api import run_upload
    from verl_logsync.cli.progress import progress_bar
    from verl_logsync.reports.as_json import report_values

    with progress_bar(hidden=quiet or as_json or not sys.stderr.isatty()) as progress:
        report = run_upload(paths, settings, progress)
    if settings.state_dir is None and not quiet:
        _say_where_state_is(settings.state_folder)
    if as_json:
        import orjson

        click.echo(orjson.dumps(report_values(report), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(report, quiet)
    return int(report.exit_code)


def _say_where_state_is(folder: Path) -> None:
    if folder == temporary_state_dir():
        text = f"state is kept in {folder}: the home folder cannot be written (or: --state-dir DIR)"
        say(text, err=True)


def _print(report: Any, quiet: bool) -> None:
    from verl_logsync.reports.text import outcome_lines, problem_lines, report_lines

    for outcome in report.outcomes:
        if not quiet or int(outcome.exit_code) != 0:
            for line in outcome_lines(outcome):
                say(line)
    for line in problem_lines(report.skips) if quiet else report_lines(report):
        say(line)
