"""`verl-logsync status`."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from verl_logsync.cli.options import settings_from
from verl_logsync.cli.printing import say


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Settings file.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Where the ledger is kept.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Time for --remote.")
@click.option("--remote", is_flag=True, help="Ask the server too.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def status(remote: bool, as_json: bool, **options: Any) -> int:
    """Show what the ledger says was uploaded and verified, and with --remote what the server says.

    Exit code 4 means that the server no longer holds what was confirmed.
    """
    settings = settings_from(options)
    from verl_logsync import api

    rows = api.status(settings, remote=remote)
    if as_json:
        import orjson

        click.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(rows)
    return 4 if any(row.get("agrees") is False for row in rows) else 0


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        at = datetime.fromtimestamp(row["confirmed_at"], tz=timezone.utc)
        line = (
            f"{row['project']}/{row['name']} [{row['run_id']}] {row['rows']} rows to step "
            f"{row['last_step']}, {row['state']}, verified {at:%Y-%m-%d %H:%M:%S} UTC"
        )
        if "agrees" in row:
            line += f"; server: {row['server']}" + ("" if row["agrees"] else "  DISAGREES")
        say(line)
        for note in row["attention"]:
            say(f"    {note}")
    if not rows:
        click.echo("nothing was uploaded with this state yet (see: verl-logsync upload --help)")
