"""Settings: defaults < verl-logsync.toml < environment < command line."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from verl_logsync.errors import UsageError, quoted

Mode = Literal["online", "offline", "disabled"]
VerifyLevel = Literal["counts", "full", "none"]
OnOverlap = Literal["last", "first", "both", "error"]
OnRewrite = Literal["rewind", "keep"]
Runtime = Literal["active", "wall"]
Merge = Literal["auto", "always", "never"]
OnRestart = Literal["ask", "replace"]

#: Read from the current folder when it exists and no other is named.
CONFIG_NAME: Final = "verl-logsync.toml"

_SETTINGS_PAGE: Final = "All settings and their values: docs/reference/settings.md"
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "mode": get_args(Mode),
    "verify": get_args(VerifyLevel),
    "on_overlap": get_args(OnOverlap),
    "on_rewrite": get_args(OnRewrite),
    "runtime": get_args(Runtime),
    "merge": get_args(Merge),
    "on_restart": get_args(OnRestart),
}
# W&B's own variables that mean the same; ours are read after them and win.
_WANDB_MODES: Final = {
    "dryrun": "offline",
    "run": "online",
    "online": "online",
    "shared": "online",
    "offline": "offline",
    "disabled": "disabled",
}


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/verl-logsync`, else `~/.local/state/verl-logsync`.

    Where the home folder cannot be written (containers), one of this user's among the temporary
    files: state is a cache, and without it the server is asked again.
    """
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "verl-logsync"
    usual = _home() / ".local" / "state" / "verl-logsync"
    if _can_be_made(usual):
        return usual
    instead = temporary_state_dir()
    return instead if _is_ours(instead) and _can_be_made(instead) else usual


def temporary_state_dir() -> Path:
    """Where state is kept when the home folder cannot be written."""
    return Path(tempfile.gettempdir()) / f"verl-logsync-{os.getuid()}"


def _home() -> Path:
    """The home folder; containers run users of whom nobody knows one."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _can_be_made(folder: Path) -> bool:
    """Whether a folder, or the nearest one above that exists, can be written."""
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    return os.access(nearest, os.W_OK | os.X_OK)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else made it: temporary files are anybody's."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. Times are in seconds.

    What `exclude` (shell patterns) matches, files and folders, is not looked at. `runs` holds
    (name, shell pattern) pairs: files that match belong to that run, whatever they say themselves;
    a name may be `PROJECT/NAME`. `offsets` holds (shell pattern, steps) pairs: so much is added to
    every step of the files that match, or, in a file that counts from 0 again, to those from there
    on (the second pair from the second such place on). `step_key` names the key that holds the step
    of JSON lines that are not of verl's own form, or count otherwise. With `bind_checkpoints` the
    run's id is written into its checkpoint folder, as `binding_file`. `diagnostics` says whether
    derived columns are added, `recompute` that all rows are sent anew with them; `rules` is a TOML
    file over the shipped health rules, a score of `success_threshold` and more is a solved prompt,
    and tables of groups are made every `tables_every` steps (0: never). `rank_rules` holds (key
    pattern, rule) pairs: how the values of several ranks become one; keys that match `per_rank`
    keep each rank's value too, and those that match `rank_spread` get the spread.
    """

    entity: str = ""
    project: str = ""
    mode: Mode = "online"
    jobs: int = 5
    dry_run: bool = False
    verify: VerifyLevel = "counts"
    state_dir: Path | None = None
    output: Path = Path("wandb-fragments")
    on_overlap: OnOverlap = "last"
    keep_tail: bool = False
    on_rewrite: OnRewrite = "rewind"
    runtime: Runtime = "active"
    settle: float = 60.0
    stale_after: float = 3600.0
    final: bool = False
    timeout: float = 3600.0
    exclude: tuple[str, ...] = ()
    runs: tuple[tuple[str, str], ...] = ()
    merge: Merge = "auto"
    offsets: tuple[tuple[str, int], ...] = ()
    on_restart: OnRestart = "ask"
    step_key: str = ""
    bind_checkpoints: bool = False
    binding_file: str = "wandb_run_id"
    diagnostics: bool = True
    recompute: bool = False
    rules: Path | None = None
    device_memory_gb: float | None = None
    success_threshold: float | None = None
    answer_pattern: str = ""
    format_pattern: str = ""
    tables_every: int = 10
    rank_rules: tuple[tuple[str, str], ...] = ()
    per_rank: tuple[str, ...] = ()
    rank_spread: tuple[str, ...] = ()

    @property
    def state_folder(self) -> Path:
        """Absolute: the uploader, which works in a folder of its own, is given paths in it."""
        return (self.state_dir or default_state_dir()).absolute()

    @property
    def decisive(self) -> str:
        """The settings that decide what is sent, as text: another choice makes work again.

        Those of diagnostics decide through `pipeline.recipe`, the rules by their content.
        """
        return repr(
            (
                *(self.on_overlap, self.keep_tail, self.on_rewrite, self.on_restart, self.runtime),
                *(self.settle, self.stale_after, self.final),
                *(self.runs, self.merge, self.offsets, self.step_key),
                *(self.rank_rules, self.per_rank, self.rank_spread),
                self.diagnostics,
            )
        )


def load_settings(given: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merge all places where settings come from.

    Args:
        given: from the command line or the caller; None means not given.
        config: the settings file; by default `verl-logsync.toml` in the current folder.

    Raises:
        UsageError: a file or a value cannot be understood.
    """
    merged: dict[str, Any] = {}
    path = config or Path(CONFIG_NAME)
    if config is not None or path.is_file():
        merged |= _from_toml(path)
    merged |= _from_environment()
    merged |= {key: value for key, value in given.items() if value not in (None, ())}
    return _built(merged)


def _built(values: Mapping[str, Any]) -> Settings:
    known = {field.name: str(field.type) for field in fields(Settings)}
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise UsageError(
                f"unknown setting {name!r}", hint=f"Known are: {', '.join(sorted(known))}"
            )
        checked[name] = _converted(name, known[name], value)
    settings = replace(Settings(), **checked)
    if settings.jobs < 1 or settings.timeout <= 0:
        raise UsageError(
            "jobs and timeout must be positive", hint="For example: --jobs 4 --timeout 3600"
        )
    return settings


def _converted(name: str, kind: str, value: Any) -> Any:
    if name in _CHOICES and value not in _CHOICES[name]:
        choices = ", ".join(_CHOICES[name])
        raise UsageError(
            f"{name} must be one of {choices}, not {value!r}",
            hint=_SETTINGS_PAGE,
        )
    try:
        if kind in ("float", "float | None"):
            return float(value)
        if kind == "int":
            return int(value)
        if kind == "bool":
            return _flag(value)
        if "Path" in kind:
            return Path(value).expanduser()
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a {kind}, not {value!r}", hint=_SETTINGS_PAGE) from None
    return value


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
        raise ValueError(value)
    return text in ("1", "true", "yes", "on")


def _from_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as stream:
            values = dict(tomllib.load(stream))
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror}", place=str(path), hint=f"See: ls -l {quoted(path)}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"is not TOML: {error}",
            place=str(path),
            hint=_SETTINGS_PAGE,
        ) from error
    found = {key.replace("-", "_"): value for key, value in values.items()}
    for name in _TABLES & found.keys():
        if not isinstance(found[name], dict):
            raise UsageError(
                f"[{name}] must hold NAME = VALUE lines",
                place=str(path),
                hint=_SETTINGS_PAGE,
            )
        equals = "==" if name == "runs" else "="
        pairs = [
            f"{key}{equals}{item}"
            for key, items in found[name].items()
            for item in (items if isinstance(items, list) else [items])
        ]
        found[name] = tuple(map(_LISTS[name], pairs))
    for name in _LISTS.keys() - _TABLES & found.keys():
        items = found[name] if isinstance(found[name], list) else [found[name]]
        found[name] = tuple(map(_LISTS[name], map(str, items)))
    return found


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if os.environ.get("WANDB_ENTITY"):
        found["entity"] = os.environ["WANDB_ENTITY"]
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in _WANDB_MODES:
        found["mode"] = _WANDB_MODES[mode]
    for field in fields(Settings):
        value = os.environ.get(variable(field.name))
        if value and field.name in _LISTS:
            found[field.name] = tuple(map(_LISTS[field.name], value.split(os.pathsep)))
        elif value:
            found[field.name] = value
    return found


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"VERL_LOGSYNC_{name.upper()}"


def parse_run(text: str) -> tuple[str, str]:
    """`NAME=GLOB` or `NAME==GLOB` as a pair.

    Raises:
        UsageError: it is not of that form.
    """
    # Names and paths of sweeps hold equals signs themselves: two of them are none of those.
    name, equals, pattern = text.partition("==" if "==" in text else "=")
    if not equals or not name or not pattern:
        raise UsageError(
            f"--run needs NAME=GLOB (NAME==GLOB where one of them holds a =), not {text!r}",
            hint="For example: --run 'grpo/qwen=outputs/*/qwen*.jsonl'",
        )
    return name, pattern


def parse_offset(text: str) -> tuple[str, int]:
    """`GLOB=STEPS` as a pair.

    Raises:
        UsageError: it is not of that form.
    """
    pattern, equals, steps = text.rpartition("=")
    try:
        if equals and pattern:
            return pattern, int(steps)
    except ValueError:
        pass
    raise UsageError(
        f"--offset needs GLOB=STEPS, not {text!r}",
        hint="For example: --offset 'outputs/second/*.jsonl=300'",
    )


def parse_rank_rule(text: str) -> tuple[str, str]:
    """`PATTERN=RULE` as a pair.

    Raises:
        UsageError: it is not of that form.
    """
    pattern, _, rule = text.rpartition("=")
    if pattern and rule in _RANK_RULES:
        return pattern, rule
    raise UsageError(
        f"[rank_rules] needs PATTERN = RULE, not {text!r}",
        hint=f"Rules are {', '.join(_RANK_RULES)}; for example: '*count*' = 'sum'",
    )


_RANK_RULES: Final = ("mean", "max", "min", "sum", "same")

#: Settings that are lists, and how one item is read; those that are tables in a settings file.
_LISTS: Final[Mapping[str, Callable[[str], Any]]] = {
    "runs": parse_run,
    "offsets": parse_offset,
    "rank_rules": parse_rank_rule,
    "exclude": str,
    "per_rank": str,
    "rank_spread": str,
}
_TABLES: Final = frozenset({"runs", "offsets", "rank_rules"})
