"""What `pprint` breaks into several lines: the resolved config, and validation metrics."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["config", "initial", "final"]

_METRICS: Final = re.compile(r"\(?[\"']?(Initial|Final) validation metrics: ")
_METRICS_WITHIN: Final = re.compile(r"(?:Initial|Final) validation metrics: \{['\"]")
_CONFIG: Final = re.compile(r"\{'\w+':")
# pprint indents; what else stands between (another stream of the same process) does not.
_MORE_CONFIG: Final = re.compile(r" +(?:['\"\[\](){}\d-]|None\b|True\b|False\b|nan\b|inf\b)")
_MORE_METRICS: Final = re.compile(r" [\"']")
_MOST_LINES: Final = 20_000
_MOST_FOREIGN: Final = 2_000
_MOST_TEXT: Final = 4 << 20
_MOST_TRIES: Final = 50
_NUMPY: Final = frozenset({"np", "numpy"})
_NUMBERS: Final = {"nan": math.nan, "inf": math.inf}


def block_start(text: str) -> Kind | None:
    """Which kind of block begins with a line, if any."""
    found = _METRICS.match(text)
    if found:
        return "initial" if found[1] == "Initial" else "final"
    return "config" if _CONFIG.match(text) else None


def hides_metrics(text: str) -> bool:
    """Whether validation metrics begin behind words that no known writer puts in front."""
    return bool(_METRICS_WITHIN.search(text))


@dataclass(slots=True)
class Block:
    """One block while its lines come in.

    `first` is the number of its first line; `entries` are where its lines are kept by the
    transcript.
    """

    kind: Kind
    first: int
    lines: list[str] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    foreign: int = 0
    size: int = 0
    tries: int = 0

    def add(self, text: str, entry: int) -> dict[str, Any] | None:
        """Add a line; what the block says if it was the last one."""
        self.lines.append(text)
        self.entries.append(entry)
        self.size += len(text)
        if not self._may_end or self.hopeless:
            return None
        self.tries += 1
        return self.values()

    def belongs(self, text: str) -> bool:
        """Whether a line of the same process is one of this block."""
        pattern = _MORE_CONFIG if self.kind == "config" else _MORE_METRICS
        return pattern.match(text) is not None

    @property
    def _may_end(self) -> bool:
        """Whether its last line looks like the last of a block."""
        last = self.lines[-1].rstrip()
        if self.kind == "config":
            return last.endswith("}")
        return not self.lines[0].startswith("(") or last.endswith(("')", '")'))

    @property
    def hopeless(self) -> bool:
        """Whether the end of the block will not come any more."""
        return (
            len(self.lines) > _MOST_LINES
            or self.foreign > _MOST_FOREIGN
            or self.size > _MOST_TEXT
            or self.tries > _MOST_TRIES
        )

    def values(self) -> dict[str, Any] | None:
        """What it says, or None while it is not whole."""
        text = "\n".join(self.lines)
        if self.kind == "config":
            return _config(text)
        return _metrics(text)


def _config(text: str) -> dict[str, Any] | None:
    value = _literal(text)
    return value if isinstance(value, dict) else None


def _metrics(text: str) -> dict[str, Any] | None:
    if text.startswith(("(", "'", '"')):
        text = _literal(text) or ""
    value = _literal(text.partition(" metrics: ")[2]) if isinstance(text, str) else None
    if not isinstance(value, dict):
        return None
    return {str(k): v for k, v in value.items() if isinstance(v, int | float)}


def is_training_config(values: Mapping[str, Any]) -> bool:
    """Whether a printed dict is the config of a verl trainer."""
    trainer = values.get("trainer")
    return isinstance(trainer, dict) and (
        "project_name" in trainer or "actor_rollout_ref" in values or "data" in values
    )


class _NotLiteral(ValueError):
    """Code where a value should be."""


def _literal(text: str) -> Any:
    """The value of a Python literal in which numpy scalars, nan and inf may stand; else None."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key): _value(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.Call) and _is_numpy(node.func) and len(node.args) == 1:
        return _value(node.args[0])
    raise _NotLiteral


def _is_numpy(called: ast.expr) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id in _NUMPY
    )


def names_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Project and experiment name of a trainer's config."""
    trainer = config.get("trainer")
    names = trainer if isinstance(trainer, dict) else {}
    project, name = names.get("project_name"), names.get("experiment_name")
    return (
        project if isinstance(project, str) else "",
        name if isinstance(name, str) else "",
    )
