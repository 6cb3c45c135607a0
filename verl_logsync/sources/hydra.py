"""Hydra's output folder: `.hydra/config.yaml` and `overrides.yaml` of one start of the job.

Hydra writes the config before interpolations are resolved. They are resolved here as far as
the file itself allows; what depends on the environment or the clock of the training machine
(`${oc.env:...}`, `${now:...}`) stays as written, since this machine would give another answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from verl_logsync.columns import STEP
from verl_logsync.errors import NotALog, UnreadableInput, quoted, unreadable
from verl_logsync.fingerprint import data_folders, essentials
from verl_logsync.interfaces import Candidate
from verl_logsync.model import (
    Facts,
    FileRef,
    LogFile,
    PassThrough,
    Reading,
    Skip,
    SkipReason,
)
from verl_logsync.regular import read_start
from verl_logsync.secrets_mask import mask_config, secrets_in

#: The config key of a run under which the overrides are kept.
OVERRIDES: Final = "hydra_overrides"

_LARGEST: Final = 8 << 20
_STARTED: Final = re.compile(r"(\d{4}-\d{2}-\d{2})/(\d{2}-\d{2}-\d{2})$")
_ALIAS: Final = re.compile(r"^[^#\n]*[:\-]\s*\*\w", re.MULTILINE)
# A call of a resolver, or a name that is itself computed: what it gives may depend on this
# machine. `oc.select` only reads the config itself.
_CALLS: Final = re.compile(r"\$\{(?!\s*oc\.select:)[^}]*:|\$\{[^}]*\$\{")


class Hydra:
    """Source `hydra`: gives a run its config, no history."""

    name = "hydra"
    precision = 0
    patterns = ("config.yaml",)

    def recognise(self, candidate: Candidate) -> LogFile | Skip | None:
        path = candidate.path
        if (
            candidate.names is not None
            or path.name != "config.yaml"
            or path.parent.name != ".hydra"
        ):
            return None
        try:
            config = read_config(path)
        except (NotALog, UnreadableInput) as error:
            return Skip(SkipReason.NOT_A_LOG, str(path), error.message, error.hint)
        trainer = config.get("trainer")
        names = trainer if isinstance(trainer, dict) else {}
        facts = Facts(
            project=_text(names.get("project_name")),
            name=_text(names.get("experiment_name")),
            config=essentials(config),
            dirs=data_folders(config),
            started_at=_started_at(path),
        )
        return LogFile(path, self.name, candidate.stamp, facts, role="config")

    def read(self, file: LogFile) -> Reading:
        import pyarrow as pa

        no_rows = pa.table({STEP: pa.array([], type=pa.int64())})
        config = read_config(file.path)
        overrides = read_overrides(file.path.with_name("overrides.yaml"))
        if overrides:
            config[OVERRIDES] = overrides
        files = PassThrough(files=tuple(_files(file.path.parent)))
        return Reading(no_rows, config=config, extra=files, started_at=file.facts.started_at)


def _files(folder: Path) -> Iterator[FileRef]:
    """Hydra's files without secrets; comments are lost with them.

    A secret that one file names is masked in the others too.
    """
    import yaml

    names = ("config.yaml", "overrides.yaml", "hydra.yaml")
    contents = {name: _content(folder / name) for name in names}
    known = frozenset[str]().union(*map(secrets_in, contents.values()))
    for name, content in contents.items():
        if content is not None:
            masked = mask_config({"content": content}, known)["content"]
            text = yaml.safe_dump(masked, sort_keys=False, allow_unicode=True)
            yield FileRef(f"hydra/{name}", folder / name, content=text.encode())


def _content(path: Path) -> dict[Any, Any] | list[Any] | None:
    import yaml

    try:
        data = read_start(path, _LARGEST + 1)
        value = yaml.safe_load(data) if len(data) <= _LARGEST else None
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) and "${" not in value else ""


def _started_at(path: Path) -> float | None:
    found = _STARTED.search(path.absolute().parent.parent.as_posix())
    if not found:
        return None
    try:
        # Hydra names the folder by the training machine's local time; zones are not recorded.
        return datetime.strptime(f"{found[1]} {found[2]}", "%Y-%m-%d %H-%M-%S").timestamp()
    except ValueError:
        return None


def read_config(path: Path) -> dict[str, Any]:
    """The config of a `.hydra` folder as plain dicts, resolved where possible.

    Raises:
        NotALog: it is no YAML mapping.
        UnreadableInput: the operating system refuses.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    hint = f"Look at it with: head {quoted(path)}"
    try:
        text = read_start(path, _LARGEST + 1).decode("utf-8")
        if len(text) > _LARGEST or _ALIAS.search(text):
            raise NotALog("is too large, or uses YAML aliases", place=str(path), hint=hint)
        config = OmegaConf.create(text)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise NotALog(
            f"is no Hydra config: {_first_line(error)}", place=str(path), hint=hint
        ) from (error)
    if not isinstance(config, DictConfig):
        raise NotALog("is no mapping", place=str(path), hint=hint)
    return _resolved(config)


def read_overrides(path: Path) -> list[str]:
    """The words of the command line that changed the config; empty when they are not there.

    They are applied in the config already, and kept because they say what was meant.
    """
    import yaml

    try:
        words = yaml.safe_load(read_start(path, _LARGEST))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return []
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _resolved(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    literal = _escaped(OmegaConf.to_container(config, resolve=False))
    return {str(key): value for key, value in _plain(OmegaConf.create(literal)).items()}


def _escaped(value: Any) -> Any:
    """The same tree, in which interpolations that depend on this machine are plain text."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str) and _CALLS.search(value):
        return value.replace("${", "\\${")
    return value


def _plain(node: Any) -> Any:
    """A config node as plain values."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(node, DictConfig):
        return {str(key): _plain_item(node, key) for key in node}
    if isinstance(node, ListConfig):
        return [_plain_item(node, index) for index in range(len(node))]
    return node


def _plain_item(node: Any, key: Any) -> Any:
    """One item, resolved; the text of its interpolation where that fails."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _plain(node[key])
    except OmegaConfBaseException:
        return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
