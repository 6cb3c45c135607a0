"""What `verl-logsync demo` does: a real upload to a server on this machine."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.printing import say
from verl_logsync.errors import UsageError
from verl_logsync.settings import Settings

#: Where the example logs lie: in the clone one stands in, in an installed package, or in the
#: clone that the package is run from.
_EXAMPLES = (
    Path("fixtures") / "demo",
    Path(__file__).parent.parent / "testing" / "demo_logs",
    Path(__file__).parent.parent.parent / "fixtures" / "demo",
)


def run_demo(path: Path | None, *, keep: bool) -> int:
    """Upload twice to a loopback server, read every value back, show what arrived."""
    from verl_logsync.testing import LoopbackServer

    logs = path or _example_logs()
    with LoopbackServer() as server, tempfile.TemporaryDirectory() as state:
        os.environ.update(server.env())
        click.echo(f"A W&B server listens at {server.url} (this machine only, no account)\n")
        settings = Settings(state_dir=Path(state), verify="full", final=True)
        click.echo(f"$ verl-logsync upload {logs} --final --verify full")
        code = _upload(logs, settings)
        click.echo("\nThe same again, as cron would, sends nothing:")
        click.echo(f"$ verl-logsync upload {logs} --final")
        _upload(logs, Settings(state_dir=Path(state), final=True))
        click.echo("\nWhat the server holds now:")
        _show(server)
        if keep:
            click.echo(
                f"\nThe server goes on until you press Ctrl-C; look at {server.url}/__state__"
            )
            threading.Event().wait()
    return code


def _example_logs() -> Path:
    found = next((place for place in _EXAMPLES if (place / "ORIGIN").is_file()), None)
    if found is None:
        raise UsageError("the example logs are not installed", hint="Give a PATH with logs")
    return found


def _upload(logs: Path, settings: Settings) -> int:
    from verl_logsync.api import run_upload
    from verl_logsync.reports.text import outcome_lines, report_lines

    report = run_upload([logs], settings)
    for outcome in report.outcomes:
        for line in outcome_lines(outcome):
            say(line)
    for line in report_lines(report):
        say(line)
    return int(report.exit_code)


def _show(server: Any) -> None:
    for run in sorted(server.runs, key=lambda run: (run.project, run.name)):
        steps = [row["_step"] for row in run.rows]
        click.echo(
            f"  {run.project}/{run.name}: {len(run.rows)} rows, steps {steps[0]}..{steps[-1]}, "
            f"{len(run.events)} system metrics lines, {len(run.logs)} console lines, "
            f"{len(run.files)} files, {run.state}"
        )
