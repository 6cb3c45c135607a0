"""`verl-logsync diagnose`."""

from __future__ import annotations

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


@click.command()
@paths_argument
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--verbose", "-v", is_flag=True, help="Say also what could not be computed, and why.")
@click.option(
    "--fail-on",
    type=click.Choice(["warning", "critical"]),
    help="End with exit code 8 when a finding is as grave as this.",
)
@diagnostics_options
@grouping_options
def diagnose(
    paths: tuple[Path, ...], as_json: bool, verbose: bool, fail_on: str | None, **options: Any
) -> int:
    """Say what went wrong in the runs below PATHS, at which steps, and what to do about it.

    Judged are the logged metrics, what is derived from them, and the rollout dumps. Nothing is
    sent. Exit code 8 is the gate of --fail-on, 3 means that some inputs could not be used.
    """
    settings = settings_from(options)
    from verl_logsync import api
    from verl_logsync.errors import ExitCode, LogsyncError
    from verl_logsync.model import HARMLESS
    from verl_logsync.reports.findings import diagnosis_lines
    from verl_logsync.reports.text import error_lines, left_out_lines, problem_lines

    found, results = api.diagnose_paths(paths, settings)
    if as_json:
        _print_json(found, results)
    else:
        for run, result in results:
            if isinstance(result, LogsyncError):
                lines = [f"FAIL {run.target.project}/{run.name}", *error_lines(result)]
            else:
                rows = len(result.loaded.history)
                lines = list(diagnosis_lines(run, rows, result.diagnosis, verbose=verbose))
                lines.extend(left_out_lines(_problems(result)))
            for line in lines:
                say(line)
        for line in problem_lines(found.skips):
            say(line)
        if not results:
            say("nothing to diagnose: no log was recognised")
    if fail_on and any(_is_as_grave(result, fail_on) for _, result in results):
        return int(ExitCode.GATE)
    bad = any(isinstance(result, LogsyncError) or _problems(result) for _, result in results)
    return 3 if bad or any(skip.reason not in HARMLESS for skip in found.skips) else 0


def _problems(result: Any) -> list[Any]:
    """Records and dumps of a run that could not be used: its findings are not about them."""
    from verl_logsync.model import HARMLESS

    return [skip for skip in result.loaded.account.skips if skip.reason not in HARMLESS]


def _is_as_grave(result: Any, fail_on: str) -> bool:
    findings = result.diagnosis.findings if hasattr(result, "diagnosis") else ()
    grave = {"critical"} if fail_on == "critical" else {"critical", "warning"}
    return any(finding.severity in grave for finding in findings)


def _print_json(found: Any, results: Any) -> None:
    import orjson

    from verl_logsync.errors import LogsyncError
    from verl_logsync.reports.as_json import diagnosis_values, error_values, run_values, skip_values

    runs = []
    for run, result in results:
        entry = run_values(run)
        if isinstance(result, LogsyncError):
            entry["error"] = error_values(result)
        else:
            entry["rows"] = len(result.loaded.history)
            entry |= diagnosis_values(result.diagnosis)
            entry["skips"] = [skip_values(skip) for skip in _problems(result)]
        runs.append(entry)
    values = {"runs": runs, "skipped": [skip_values(skip) for skip in found.skips]}
    option = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    click.echo(orjson.dumps(values, option=option).decode())
