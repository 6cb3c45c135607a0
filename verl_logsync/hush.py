"""Secrets in a console's lines, found fast: most lines of a log differ in their digits only.

A *form* is a line without its digits. Whether a line may hold a secret is told by its form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import pyarrow as pa

from verl_logsync.columns import from_json, to_json
from verl_logsync.model import History
from verl_logsync.secrets_mask import MASK, is_secret_name, mask_config, mask_text

_IN_DICT: Final = rb"\w{0,64}['\"]\s{0,8}:"
# By a word that occurs in it: whatever `mask_text` could change, and names of secrets that are
# printed as a dict's keys. (Words are found faster than patterns.) A number is no secret.
_SUSPECT: Final = {
    b"://": re.compile(rb"://[^\s/]*@"),
    b"hf_": re.compile(rb"hf_"),
    b"sk-": re.compile(rb"sk-"),
    b"gh": re.compile(rb"gh[pousr]_"),
    b"github_pat": re.compile(rb"github_pat_"),
    b"glpat-": re.compile(rb"glpat-"),
    b"nvapi-": re.compile(rb"nvapi-"),
    b"aiza": re.compile(rb"aiza"),
    b"eyj": re.compile(rb"eyj[\w-]*\.eyj"),
    b"akia": re.compile(rb"akia"),
    b"asia": re.compile(rb"asia"),
    b"gsk": re.compile(rb"gsk[_-]"),
    b"npm": re.compile(rb"npm[_-]"),
    b"pypi": re.compile(rb"pypi[_-]"),
    b"sk_live": re.compile(rb"sk_live"),
    b"lsv": re.compile(rb"lsv_"),
    b"ya.": re.compile(rb"\bya\."),
    b"wandb": re.compile(rb"wandb\s+login"),
    b"private key": re.compile(rb"-----begin [a-z ]*private key"),
    b"xox": re.compile(rb"xox[abprs]-"),
    b"wandb_v": re.compile(rb"wandb_v"),
    b"hooks.slack": re.compile(rb"hooks\.slack"),
    b"bearer": re.compile(rb"bearer"),
    b"basic": re.compile(rb"basic\s"),
    b"key": re.compile(rb"(?:api|access)[_-]?key|key" + _IN_DICT),
    b"secret": re.compile(rb"secret"),
    b"pass": re.compile(rb"passw(?:or)?d|pass" + _IN_DICT),
    b"pwd": re.compile(rb"pwd" + _IN_DICT),
    b"token": re.compile(
        rb"token(?!:-?\.?(?:e[+-]?)?(?: - |$)|:np\.float\()[=\s:\x1b]|token" + _IN_DICT
    ),
    b"credential": re.compile(rb"credential" + _IN_DICT),
    b"authorization": re.compile(rb"authorization" + _IN_DICT),
    b"webhook": re.compile(rb"webhook" + _IN_DICT),
}
_NAME: Final = r"(?P<q>['\"])(?P<key>[\w.\-]{1,200})(?P=q)\s{0,8}:\s{0,8}"
_PAIR: Final = re.compile(rf"(?P<name>{_NAME})(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_KEY: Final = re.compile(_NAME)
_OPENED: Final = re.compile(rf"{_NAME}[\[{{(]")
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
# `mask_text` looks at every word as the start of an address, so long text is given in pieces.
_PIECE: Final = 2048
_BETWEEN_WORDS: Final = re.compile(r"(?<![:=\s]) (?![:=\s])")
_LONG_WORD: Final = 6
_KEY_BEGINS: Final = f"PRIVATE KEY-----{MASK}"
_KEY_ENDS: Final = "-----END"
#: Lines of a printed private key; one that never ends costs no more.
_LONGEST_KEY: Final = 200


def suspects(forms: Sequence[bytes]) -> Iterator[bytes]:
    """The forms whose lines may hold a secret."""
    lowered: dict[bytes, list[bytes]] = {}
    for form in forms:
        lowered.setdefault(form.lower(), []).append(form)
    lines = list(lowered)
    for word, pattern in _SUSPECT.items():
        for low in lines_with((word,), lines):
            if pattern.search(low):
                yield from lowered[low]


def hushed_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Lines without the secrets that `hushed` finds; most are not looked at closely."""
    encoded = [line.encode(errors="replace") for line in lines]
    flagged = set(suspects(encoded))
    return tuple(
        hushed(line) if raw in flagged else line for line, raw in zip(lines, encoded, strict=True)
    )


def lines_with(words: Sequence[bytes], lines: Sequence[bytes]) -> Iterator[bytes]:
    """The lines in which one of the words occurs; may give a line more than once."""
    text = b"\n".join(lines)
    for word in words:
        at = text.find(word)
        while at >= 0:
            end = text.find(b"\n", at)
            end = end if end >= 0 else len(text)
            yield text[text.rfind(b"\n", 0, at) + 1 : end]
            at = text.find(word, end)


def hushed(line: str) -> str:
    """A line without the secrets that can be told by their form or by a dict's key."""
    line = _without_named(line)
    if len(line) <= _PIECE:
        return mask_text(line)
    return "".join(
        _hushed_part(part) if any(suspects([part.encode(errors="replace")])) else part
        for part in _parts(line)
    )


def _hushed_part(part: str) -> str:
    # Endless words are no prose, and masking takes the square of their length.
    return mask_text(part) if len(part) <= 2 * _PIECE else f" {MASK}"


def _parts(line: str) -> Iterator[str]:
    """A long line in pieces that end between words, never between a name and its value."""
    start = 0
    for space in _BETWEEN_WORDS.finditer(line):
        if space.start() - start >= _PIECE:
            yield line[start : space.start()]
            start = space.start()
    yield line[start:]


def _without_named(line: str) -> str:
    """Mask what stands behind the name of a secret in a printed dict."""
    for opened in _OPENED.finditer(line):
        if is_secret_name(opened["key"]):
            line = line[: opened.end()] + without_strings(line[opened.end() :])
            break
    return _PAIR.sub(_hushed_pair, line)


def _hushed_pair(found: re.Match[str]) -> str:
    return f"{found['name']}{MASK!r}" if is_secret_name(found["key"]) else found[0]


def without_strings(text: str) -> str:
    """Text in which every quoted string is masked, whatever it is."""
    return _QUOTED.sub(repr(MASK), text)


def secrets_of(config: Mapping[str, Any]) -> frozenset[str]:
    """The texts of a config that are masked before it is sent, as they may be printed."""
    found: set[str] = set()
    _collect(config, mask_config(config), found)
    return frozenset(found)


def _collect(value: Any, masked: Any, found: set[str]) -> None:
    if isinstance(value, Mapping) and isinstance(masked, Mapping):
        for key, item in value.items():
            _collect(item, masked.get(str(key)), found)
    elif isinstance(value, list | tuple) and isinstance(masked, list):
        for item, mask in zip(value, masked, strict=False):
            _collect(item, mask, found)
    elif isinstance(value, str) and value != masked and masked == MASK:
        found.update((value, repr(value)[1:-1]))
        # pprint breaks long strings at their spaces.
        found.update(word for word in value.split() if len(word) >= _LONG_WORD)


def hushing(secrets: frozenset[str]) -> Callable[[str], str]:
    """What masks known secrets in a line."""
    longest_first = sorted((s for s in secrets if len(s) >= _LONG_WORD), key=len, reverse=True)

    def hush(line: str) -> str:
        for secret in longest_first:
            if secret in line:
                line = line.replace(secret, MASK)
        return line

    return hush


class Changeable(Protocol):
    """Lines that can be replaced one by one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> str: ...
    def __setitem__(self, index: int, line: str, /) -> None: ...


def hushed_rows(history: History) -> History:
    """The same history without secrets in metrics that are texts, lists or objects."""
    table = history.table
    for index, field in enumerate(table.schema):
        if field.type == pa.string():
            hushed = _hushed_column(field.name, table.column(index))
            if hushed is not None:
                table = table.set_column(index, field.name, hushed)
    return history if table is history.table else replace(history, table=table)


def _hushed_column(name: str, column: pa.ChunkedArray) -> pa.Array | None:
    """A column of JSON texts without secrets; None where it holds none."""
    texts = column.to_pylist()
    encoded = {text: text.encode(errors="replace") for text in texts if text is not None}
    flagged = set(suspects(list(encoded.values())))
    masked = {
        text: _hushed_value(name, text)
        for text, raw in encoded.items()
        if raw in flagged or is_secret_name(name)
    }
    if all(text == other for text, other in masked.items()):
        return None
    return pa.array([masked.get(text, text) for text in texts], type=pa.string())


def _hushed_value(name: str, text: str) -> str:
    value = from_json(text)
    (masked,) = mask_config({name: value}).values()
    return text if masked == value else to_json(masked)


def begins_key_block(line: str) -> bool:
    """Whether a masked line is the frame of a private key whose other lines follow."""
    return _KEY_BEGINS in line and _KEY_ENDS not in line


def hush_key_blocks(lines: Changeable, begins: Iterable[int]) -> bool:
    """Mask the lines of printed private keys, in place.

    Args:
        begins: the indices of the lines that `begins_key_block`.

    Returns:
        Whether the last of them goes on where the lines end.
    """
    unended = False
    for first in begins:
        unended = first + _LONGEST_KEY >= len(lines)
        for index in range(first + 1, min(first + _LONGEST_KEY, len(lines))):
            if _KEY_ENDS in lines[index]:
                unended = False
                break
            lines[index] = MASK
    return unended


def hush_broken_block(lines: Changeable, entries: Sequence[int]) -> None:
    """Mask the strings of a config that was cut, from its first secret name on, in place."""
    suspicious = False
    for entry in entries:
        names = (found["key"] for found in _KEY.finditer(lines[entry]))
        suspicious = suspicious or any(map(is_secret_name, names))
        if suspicious:
            lines[entry] = without_strings(lines[entry])
