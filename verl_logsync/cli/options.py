"""Options that several commands share. Their defaults live in `settings`, not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from verl_logsync.settings import Settings, load_settings, parse_offset, parse_run

_F = TypeVar("_F", bound=Callable[..., Any])


def paths_argument(function: _F) -> _F:
    """PATHS..., files or folders."""
    return click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))(
        function
    )


_CONFIG: Final = click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings file (default: verl-logsync.toml here, if there is one).",
)
_STEP_KEY: Final = click.option(
    "--step-key",
    metavar="KEY",
    help="The key that holds the step of JSON lines (default: step, as verl writes it).",
)
_GROUPING: Final = (
    _CONFIG,
    click.option(
        "--on-overlap",
        type=click.Choice(["last", "first", "both", "error"]),
        help="Whose row stays where attempts overlap (default: last).",
    ),
    click.option(
        "--keep-tail",
        is_flag=True,
        default=None,
        help="Keep an earlier attempt's rows beyond the end of the later one.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="GLOB",
        help="Files and folders that are not looked at: by their name, or by their path where "
        "GLOB has a slash; may be repeated.",
    ),
    click.option(
        "--run",
        "runs",
        multiple=True,
        metavar="NAME=GLOB",
        help="Files that belong to one run, whatever they say; NAME==GLOB where one of them "
        "holds a =; may be repeated.",
    ),
    click.option(
        "--merge/--no-merge",
        "merge",
        default=None,
        help="Starts of one project and name are always, or never, attempts of one run "
        "(default: where configs agree and steps meet).",
    ),
    click.option(
        "--offset",
        "offsets",
        multiple=True,
        metavar="GLOB=STEPS",
        help="Add so much to the steps of files that counted from 0 again; where that is "
        "inside a file, from there on; may be repeated.",
    ),
    click.option(
        "--on-restart",
        type=click.Choice(["ask", "replace"]),
        help="When a later attempt of a run begins at step 0 again, and may have had a "
        "checkpoint: leave the run out and name the choices, or let it replace the earlier one "
        "(default: ask).",
    ),
    _STEP_KEY,
    click.option(
        "--per-rank",
        multiple=True,
        metavar="PATTERN",
        help="Keep each rank's value of these keys too, as rank3/KEY; may be repeated.",
    ),
    click.option(
        "--rank-spread",
        multiple=True,
        metavar="PATTERN",
        help="Add KEY/spread, largest minus smallest rank, for these keys; may be repeated.",
    ),
    click.option("--project", help="W&B project (default: as the logs say)."),
    click.option("--entity", help="W&B entity (default: as the logs say, else the key's)."),
)

_DIAGNOSTICS: Final = (
    click.option(
        "--rules",
        type=click.Path(path_type=Path),
        help="TOML file with thresholds over the shipped health rules.",
    ),
    click.option(
        "--device-memory-gb",
        type=float,
        metavar="GIB",
        help="Memory of one GPU, for hybrid_engine/gpu_mem_util.",
    ),
    click.option(
        "--success-threshold",
        type=float,
        metavar="SCORE",
        help="Scores from here on are solved prompts (default: 1, where scores are 0 and 1).",
    ),
    click.option(
        "--answer-pattern", metavar="REGEX", help="Finds the final answer in outputs (RE2)."
    ),
    click.option(
        "--format-pattern", metavar="REGEX", help="Found in outputs of the right form (RE2)."
    ),
    click.option(
        "--tables-every",
        type=int,
        metavar="STEPS",
        help="Tables of the best, worst and most split groups (default: 10; 0: never).",
    ),
)


def grouping_options(function: _F) -> _F:
    """How files are grouped into runs, and attempts into a history."""
    return _with(_GROUPING, function)


def recognition_options(function: _F) -> _F:
    """How files are recognised, for commands that do not group them."""
    return _with((_CONFIG, _STEP_KEY), function)


def diagnostics_options(function: _F) -> _F:
    """What the logs do not say, and by which rules a run is judged."""
    return _with(_DIAGNOSTICS, function)


def _with(options: Sequence[Callable[[_F], _F]], function: _F) -> _F:
    for option in options:
        function = option(function)
    return function


def settings_from(options: dict[str, Any]) -> Settings:
    """The settings of a command from its options and everywhere else."""
    config = options.pop("config", None)
    merge = options.pop("merge", None)
    given = {
        **options,
        "runs": tuple(map(parse_run, options.pop("runs", ()))),
        "offsets": tuple(map(parse_offset, options.pop("offsets", ()))),
        "merge": None if merge is None else "always" if merge else "never",
    }
    return load_settings(given, config)
