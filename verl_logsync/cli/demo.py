"""`verl-logsync demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--keep", is_flag=True, help="Leave the server running until interrupted.")
def demo(path: Path | None, keep: bool) -> int:
    """Show the whole path without an account: upload PATH to a W&B server on this machine.

    Without PATH the example logs of the repository (fixtures/demo) are used. Every value is read
    back and compared.
    """
    from verl_logsync.cli.demo_run import run_demo

    return run_demo(path, keep=keep)
