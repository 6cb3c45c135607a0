"""Masking of secrets in a training config before it leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "***"

# Names that hold a secret; `token` only as the last word, since verl is full of token counts
# (`max_token_len`, `num_memory_tokens`, `token-mean`).
_SECRET_NAME: Final = re.compile(
    r"(api[_-]?key|access[_-]?key|secret|passw(or)?d|passphrase|credentials?|private[_-]?key"
    r"|bearer|authorization|(^|[_-])(auth|hf|hub|access|refresh|wandb|api|bot|github|user)[_-]?token"
    r"|^token)$",
    re.IGNORECASE,
)
_URL_LOGIN: Final = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)[^\s/@:]*:[^\s/@]+@")
_LITERAL: Final = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|wandb_v\d_\w{20,})"
)
# `--token VALUE`, `api_key=VALUE` inside command lines and overrides.
_ARGUMENT: Final = re.compile(
    r"(?P<name>(?:^|[\s+.'\"-])(?:[\w.]*(?:api[_-]?key|secret|password|access[_-]?key)|[\w.]*_token"
    r"|-?-?token)[=\s:]+)(?P<value>[^\s'\",]+)",
    re.IGNORECASE,
)


def mask_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with every secret replaced; numbers and flags are never secrets."""
    return {str(key): _masked(str(key), value) for key, value in config.items()}


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return mask_config(value)
    if isinstance(value, list | tuple):
        return _masked_list(name, value)
    if isinstance(value, str):
        return MASK if value and _SECRET_NAME.search(name) else mask_text(value)
    return value


def _masked_list(name: str, values: Any) -> list[Any]:
    masked = [_masked(name, value) for value in values]
    for index, flag in enumerate(masked[:-1]):
        # An argument list has a flag and its value as neighbours.
        if isinstance(flag, str) and flag.startswith("-") and _SECRET_NAME.search(flag.lstrip("-")):
            masked[index + 1] = MASK
    return masked


def mask_text(text: str) -> str:
    """Free text without the secrets that can be recognised by their form."""
    text = _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)
    text = _LITERAL.sub(MASK, text)
    return _ARGUMENT.sub(rf"\g<name>{MASK}", text)
