"""Masking of secrets in a training config before it leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MASK: Final = "***"

# Names that hold a secret, also as one word of several (`judge_api_keys`, `db_pass`).
_SECRET_NAME: Final = re.compile(
    r"api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|secret|passw(or)?d|passphrase|credential"
    r"|bearer|authorization|webhook|(^|[_.-])(pass|pwd)$|(^|[_.-])tokens?$"
    r"|(^|[_-])(openai|anthropic|azure|aws|gcp|hf|hub|wandb|github|slack|judge|server|client)"
    r"[_-]?keys?$",
    re.IGNORECASE,
)
# verl is full of harmless words with "token" and "key" in them.
_HARMLESS_NAME: Final = re.compile(
    r"(max|min|num|n|total|pad|eos|bos|stop|ignore|special|per|response|prompt)\w*[_-]tokens?$"
    r"|tokens?[_-]|tokeniz|(prompt|reward|reward_fn|image|video|answer|label|input|output|tool"
    r"|messages|response|return_raw|sort|group|cache)[_-]keys?$",
    re.IGNORECASE,
)
_URL_LOGIN: Final = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)[^\s/@'\"]+@")
_LITERAL: Final = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|wandb_v\d_\w{20,})|(?<=hooks\.slack\.com/)\S+"
)
_BEARER: Final = re.compile(r"(?P<word>\b(?:Bearer|Basic)\s+)[^\s'\",]+", re.IGNORECASE)
# `--token VALUE`, `api_key=VALUE` inside command lines and overrides.
_ARGUMENT: Final = re.compile(
    r"(?P<name>(?:^|[\s+.'\"-])(?:[\w.]*(?:api[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d"
    r"|access[_-]?key)|[\w.]*_token|-{0,2}token)[=\s:]+)(?P<value>[^\s'\",]+)",
    re.IGNORECASE,
)


def mask_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with every secret replaced; numbers and flags are never secrets."""
    return {str(key): _masked(value, is_secret_name(str(key))) for key, value in config.items()}


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _masked(value: Any, secret: bool) -> Any:
    """A value without its secrets; below a secret name every text is one."""
    if isinstance(value, Mapping):
        return {
            str(key): _masked(item, secret or is_secret_name(str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [MASK for _ in value] if secret else mask_words(value)
    if isinstance(value, str) and value:
        return MASK if secret else mask_text(value)
    return value


def mask_words(words: Sequence[Any]) -> list[Any]:
    """A list, or the words of a command line, in which a flag and its value are neighbours."""
    masked = [_masked(word, secret=False) for word in words]
    for index, flag in enumerate(masked[:-1]):
        if isinstance(flag, str) and flag.startswith("-") and is_secret_name(flag.lstrip("-")):
            masked[index + 1] = MASK
    return masked


def mask_text(text: str) -> str:
    """Free text without the secrets that can be recognised by their form."""
    text = _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)
    text = _LITERAL.sub(MASK, text)
    text = _BEARER.sub(rf"\g<word>{MASK}", text)
    return _ARGUMENT.sub(rf"\g<name>{MASK}", text)
