"""The command line: `verl-logsync COMMAND`. One file a command; heavy imports wait inside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from verl_logsync import __version__
from verl_logsync.cli.demo import demo
from verl_logsync.cli.diagnose import diagnose
from verl_logsync.cli.export import export
from verl_logsync.cli.printing import say
from verl_logsync.cli.scan import scan
from verl_logsync.cli.snapshot import snapshot
from verl_logsync.cli.status import status
from verl_logsync.cli.upload import upload
from verl_logsync.errors import ExitCode, LogsyncError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="verl-logsync")
def cli() -> None:
    """Bring verl's offline training logs into Weights & Biases, complete and verified."""


cli.add_command(upload)
cli.add_command(scan)
cli.add_command(status)
cli.add_command(diagnose)
cli.add_command(export)
cli.add_command(snapshot)
cli.add_command(demo)


def main() -> NoReturn:
    """Run the command line; every way out has its exit code (see the table in the docs)."""
    _open_closed_streams()
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(int(code or 0))
    except click.exceptions.Abort:
        _say("interrupted; nothing is lost, the next run continues")
        sys.stdout.flush()
        # A thread may still wait for an answer of the server, and nobody needs it any more.
        os._exit(ExitCode.INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except LogsyncError as error:
        _say(
            f"verl-logsync: {error.place}: {error.message}"
            if error.place
            else f"verl-logsync: {error.message}"
        )
        if error.hint:
            _say(f"  -> {error.hint}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read us has left (| head); writing on would only raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except Exception as error:
        if os.environ.get("VERL_LOGSYNC_DEBUG"):
            raise
        _say(f"verl-logsync: internal error: {type(error).__name__}: {error}")
        _say("  -> Please report it; VERL_LOGSYNC_DEBUG=1 shows where it happened")
        sys.exit(ExitCode.INTERNAL)


def _open_closed_streams() -> None:
    """Some schedulers start programs without standard streams: what is said there goes nowhere.

    Left closed, the next file that is opened would get the number of one, and what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open until the end


def _say(text: str) -> None:
    say(text, err=True)
