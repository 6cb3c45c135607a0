"""Masking of secrets in a training config before it leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

MASK: Final = "***"

# Names that hold a secret, also as one word of several (`judge_api_keys`, `db_pass`).
_SECRET_NAME: Final = re.compile(
    r"api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|secret|passw(or)?d|passphrase|credential"
    r"|bearer|authorization|webhook|cookie|(^|[_.-])(pass|pwd|pat|jwt|auth|sig|signature)$|(^|[_.-])tokens?$"
    r"|(^|[_-])(openai|anthropic|azure|aws|gcp|hf|hub|wandb|github|slack|judge|server|client"
    r"|signing|ssh|encryption|account|master|deploy)[_-]?keys?$"
    r"|(^|[_.-])tokens?[_-](hf|hub|huggingface|openai|wandb|github|gitlab|slack|value)$",
    re.IGNORECASE,
)
# verl is full of harmless words with "token" and "key" in them.
_HARMLESS_NAME: Final = re.compile(
    r"(^|[_./-])(max|min|num|n|total|pad|eos|bos|unk|sep|cls|mask|begin|end|stop|ignore|special"
    r"|per|response|prompt|answer|think|image|video|new|gen)(\w*[_-])?tokens?$"
    r"|tokens?[_-](?!(hf|hub|huggingface|openai|wandb|github|gitlab|slack|value)$)|tokeniz|(prompt|reward|reward_fn|image|video|answer|label|input|output|tool"
    r"|messages|response|return_raw|sort|group|cache)[_-]keys?$",
    re.IGNORECASE,
)
_URL_LOGIN: Final = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]{0,40}://)[^\s/'\"]+@")
_LITERAL: Final = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|wandb_v\d_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|(gsk|npm|pypi|sk_live|lsv2_[a-z]{2})[_-][\w-]{20,}|ASIA[A-Z0-9]{16}|ya29\.[\w-]{20,}"
    r"|nvapi-[\w-]{20,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)|(?<=hooks\.slack\.com/)\S+"
)
_BEARER: Final = re.compile(r"(?P<word>\b(?:Bearer|Basic)\s+)[^\s'\",]+", re.IGNORECASE)
# What is typed or printed at a login, and a key in a file's form.
_LOGIN: Final = re.compile(r"\bwandb\s+login\s[^\n;&|]{0,400}")
_LONG_WORD: Final = re.compile(r"(?<!\S)(?!-|https?://)\S{16,}")
_KEY_BLOCK: Final = re.compile(
    r"(?P<begin>-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(?P<end>-----END|\Z)",
    re.DOTALL,
)
# `--token VALUE`, `api_key=VALUE` inside command lines, overrides and addresses.
_ARGUMENT: Final = re.compile(
    r"(?P<name>(?:^|[\s+.'\"?&{(,;-])(?:[\w.]*(?:api[_-]?key|secret(?:[_-]?key)?|passw(?:or)?d"
    r"|access[_-]?key)|[\w.]*_token|-{0,2}token"
    r"|[\w.]*token_(?:hf|hub|huggingface|openai|wandb|github|gitlab|slack|value))[=\s:]+)"
    r"(?P<value>'[^']+'|\"[^\"]+\"|[^\s'\",]+)",
    re.IGNORECASE,
)
# `+a.b.private_key=VALUE`, an override of Hydra: a whole word.
_OVERRIDE: Final = re.compile(r"(?P<name>[+~]{0,2}[\w.@/-]{1,200}=)(?P<value>.+)", re.DOTALL)
# `NAME: VALUE` and `NAME=VALUE` inside a text: JSON, a printed dict, a connection string.
_NAMED: Final = re.compile(r"(?<![\w.-])(?P<name>[\w.-]{1,200})\\?['\"]?\s{0,4}[=:]\s{0,4}")
_VALUE: Final = re.compile(
    r"\\\"[^\"]*\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\[[^\]]*\]|[^\s'\"\[\]{},&;*]+"
)
#: A masked text of so many characters, with a digit in it, is taken for a secret wherever else it
#: occurs; shorter ones and plain words ("EMPTY", "default") may be anything.
_TELLING: Final = 8


def mask_config(config: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The same config with every secret replaced; numbers and flags are never secrets.

    Args:
        config: what is to leave the machine.
        known: secrets that were found elsewhere, see `secrets_in`.
    """
    masked: dict[str, Any] = _masked(config, secret=False)
    # The same secret may stand in a list of overrides, or be interpolated into an address.
    secrets = {*known, *secrets_in(config, masked)}
    return _without(masked, secrets) if secrets else masked


def secrets_in(config: Any, masked: Any = None) -> frozenset[str]:
    """The texts of a config that are secrets wherever they occur."""
    pairs = _replaced(config, _masked(config, secret=False) if masked is None else masked)
    return frozenset(text for text in pairs if _tells(text))


def without_known(text: str, secrets: Collection[str]) -> str:
    """A text in which known secrets are masked."""
    for secret in sorted(secrets, key=lambda s: (-len(s), s)):
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def _replaced(value: Any, masked: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and isinstance(masked, Mapping):
        for key, item in value.items():
            yield from _replaced(item, masked.get(mask_text(str(key))))
    elif isinstance(value, list | tuple) and isinstance(masked, list):
        for item, mask in zip(value, masked, strict=False):
            yield from _replaced(item, mask)
    elif isinstance(value, str) and masked == MASK:
        yield value


def _tells(text: str) -> bool:
    place_or_reference = text.startswith(("/", "./", "~")) or "${" in text
    return len(text) >= _TELLING and any(map(str.isdigit, text)) and not place_or_reference


def _without(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, secrets) for item in value]
    return without_known(value, secrets) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _masked(value: Any, secret: bool, below: str = "") -> Any:
    """A value without its secrets; below a secret name every text is one."""
    if isinstance(value, Mapping):
        # `{"name": "API_KEY", "value": ...}`, as environments of containers are written.
        named = isinstance(value.get("name"), str) and is_secret_name(value["name"])
        return {
            mask_text(str(key)): _masked(
                item,
                secret or _is_secret_key(str(key), below) or (named and key == "value"),
                below=str(key),
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [MASK for _ in value] if secret else mask_words(value)
    if isinstance(value, str) and value:
        return MASK if secret else _mask_setting(value)
    return value


def _is_secret_key(key: str, below: str) -> bool:
    """Whether a value is a secret by its key; `wandb: {key: ...}` is a `wandb_key`."""
    return is_secret_name(key) or is_secret_name(f"{below}_{key}")


def _mask_setting(text: str) -> str:
    """A text of a config: what it says of itself, and what it names."""
    override = _OVERRIDE.fullmatch(text)
    if override and _has_secret_name(override["name"]):
        return f"{override['name']}{MASK}"
    return _without_named(mask_text(text))


def _without_named(text: str) -> str:
    parts, end = [], 0
    for found in _NAMED.finditer(text):
        if found.start() >= end and _has_secret_name(found["name"]):
            value = _VALUE.match(text, found.end())
            if value:
                parts += [text[end : found.end()], MASK]
                end = value.end()
    return "".join([*parts, text[end:]])


def _has_secret_name(dotted: str) -> bool:
    parts = dotted.strip("+~=").split(".")
    return any(map(_is_secret_key, parts, ["", *parts[:-1]]))


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
    text = _KEY_BLOCK.sub(rf"\g<begin>{MASK}\g<end>", text)
    text = _LOGIN.sub(lambda typed: _LONG_WORD.sub(MASK, typed[0]), text)
    text = _BEARER.sub(rf"\g<word>{MASK}", text)
    return _ARGUMENT.sub(rf"\g<name>{MASK}", text)
