"""What makes two training configurations the same run, or different ones.

Left out is what changes between two starts of one job: paths, hosts and ports, secrets, resume
flags, names that identify the run already, and what verl fills in at run time. A model's path
counts by its last part only, so that a moved model is the same model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from verl_logsync.columns import to_json
from verl_logsync.secrets_mask import is_secret_name, mask_text

_CHANGES_BETWEEN_STARTS: Final = re.compile(
    r"(^|_)(paths?|dirs?|root|files?|folder|ports?|hosts?|hostname|addr|address|ip|urls?|uri|proxy"
    r"|resume\w*|device|pid|rank|time|timestamp|token|secret|password)$|^(resume|wandb)_|^_"
)
_FILLED_IN_OR_NAMES: Final = frozenset(
    {
        "project_name",
        "experiment_name",
        "total_training_steps",
        "logger",
        "val_before_train",
        "verl_logsync",
        "hydra_overrides",
    }
)

Essentials = Mapping[str, str]

#: Keys below `trainer` that name the folders of rollout dumps and of checkpoints.
DUMP_FOLDERS: Final = ("rollout_data_dir", "validation_data_dir")
CHECKPOINT_FOLDER: Final = "default_local_dir"


def essentials(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> JSON text of everything in a config that identifies the training."""
    return dict(sorted(_walk(config, "")))


def _walk(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        name = str(key)
        dotted = f"{prefix}{name}"
        if dotted.endswith("model.path") and isinstance(value, str):
            yield dotted, to_json(value.rstrip("/").rsplit("/", 1)[-1])
        elif name in _FILLED_IN_OR_NAMES or _CHANGES_BETWEEN_STARTS.search(name):
            continue
        elif is_secret_name(name):
            continue  # a rotated key is the same training, and the ledger keeps no secrets
        elif isinstance(value, Mapping):
            yield from _walk(value, f"{dotted}.")
        elif not _is_unresolved(value):
            yield dotted, mask_text(to_json(value))


def data_folders(config: Mapping[str, Any]) -> dict[str, str]:
    """The folders that verl's trainer writes dumps and checkpoints to, by their config key."""
    trainer = config.get("trainer")
    named = trainer if isinstance(trainer, Mapping) else {}
    return {
        key: str(named[key])
        for key in (*DUMP_FOLDERS, CHECKPOINT_FOLDER)
        if isinstance(named.get(key), str) and "${" not in named[key]
    }


def _is_unresolved(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def disagreements(one: Essentials, other: Essentials) -> tuple[str, ...]:
    """The keys that both configs have with different values."""
    return tuple(key for key in one if key in other and one[key] != other[key])


def digest(config: Essentials) -> str:
    """A short name of a configuration; empty for an empty one."""
    if not config:
        return ""
    text = "\n".join(f"{key}={config[key]}" for key in sorted(config))
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()
