"""Which rows of a step are answers to the same prompt: verl's GRPO groups, recovered.

v1 dumps name them: `uid` is `{group}_{session}_{index}`. v0 dumps do not, and
`trainer.balance_batch` reorders their rows, so rows with the same input (and `gts`, which tells
image prompts of equal text apart) are one group. Whatever the dump does not settle is an
`Ambiguity`.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np

from verl_logsync.rollouts.values import Ambiguity

#: So many different prompts of one step are remembered by a digest.
MOST_PROMPTS: Final = 200_000

_PADDING: Final = re.compile(r"pad[0-9a-f]{32}(_\d+_\d+)?")
# A float is not among them: two NaN have different hashes.
_HASHABLE: Final = frozenset({str, int, bool, type(None)})

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which rows count, and where they belong.

    `kept` has one flag a row of the file. Of the rows that are kept, sorted by group: `rows` are
    their indices, `starts` where each group begins among them, `sizes` how many each has.
    `expected` is the group size (None: there is no group); `by_uid` whether the dump names its
    groups.
    """

    kept: _Flags
    rows: _Ints
    starts: _Ints
    sizes: _Ints
    prompts: _Ints
    padding: int
    earlier: int
    expected: int | None
    by_uid: bool
    ambiguities: tuple[Ambiguity, ...]


class GroupKeys:
    """Gathers what tells groups apart, block by block, in a few bytes a row."""

    def __init__(self) -> None:
        self._prompts = array("q")
        self._groups = array("q")
        self._sessions = array("q")
        self._indices = array("i")
        self._digests: dict[int, bytes] = {}
        self.digests_whole = True

    def take(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add the rows of a block."""
        inputs = columns["input"]
        truths = columns.get("gts")
        keys = list(inputs) if truths is None else list(zip(inputs, _hashable(truths), strict=True))
        prompts = list(map(hash, keys))
        self._prompts.extend(prompts)
        self._remember(prompts, keys)
        uids = columns.get("uid")
        if uids is None:
            self._pad_uids()
            return
        self._pad_uids(without=len(prompts))
        groups, sessions, indices = _all_parts(uids)
        self._groups.extend(groups)
        self._sessions.extend(sessions)
        self._indices.extend(indices)

    def _pad_uids(self, without: int = 0) -> None:
        lacking = len(self._prompts) - without - len(self._groups)
        if lacking and (self._groups or without):
            self._groups.extend([0] * lacking)
            self._sessions.extend([0] * lacking)
            self._indices.extend([_NO_UID] * lacking)

    def _remember(self, prompts: Sequence[int], keys: Sequence[Any]) -> None:
        known = self._digests
        if known.keys() >= set(prompts):
            return
        for prompt, key in dict(zip(prompts, keys, strict=True)).items():
            if prompt not in known:
                if len(known) >= MOST_PROMPTS:
                    self.digests_whole = False
                    return
                known[prompt] = _digest(key)

    def prompt_digest(self, prompt: int) -> str:
        """What identifies a prompt on every machine; empty when it was not remembered."""
        return self._digests[prompt].hex() if prompt in self._digests else ""

    def resolve(self, group_size: int | None) -> Grouping:
        """The groups. `group_size` is what the configuration says, None when nobody knows.

        What told them apart is forgotten: no rows can be added any more.
        """
        prompts = np.frombuffer(self._prompts, dtype=np.int64) if self._prompts else _NOTHING
        ambiguities: list[Ambiguity] = []
        if not self._groups:
            kept = np.ones(len(prompts), dtype=bool)
            labels, by_uid, counts = prompts, False, _Counts()
        else:
            uids = _Uids(*map(np.asarray, (self._groups, self._sessions, self._indices)))
            self._groups, self._sessions, self._indices = array("q"), array("q"), array("i")
            kept, counts = uids.kept()
            labels, by_uid = uids.labels(prompts, kept, ambiguities)
            if counts.twice:
                text = f"{counts.twice} rows repeat the uid of another row"
                ambiguities.append(Ambiguity("uid twice", counts.twice, text))
            del uids
        rows = np.flatnonzero(kept)
        order = np.argsort(labels[rows], kind="stable")
        rows = rows[order]
        _, starts, sizes = np.unique(labels[rows], return_index=True, return_counts=True)
        expected = _expected(sizes, group_size, ambiguities)
        ambiguities += _odd_sizes(sizes, expected, by_uid)
        return Grouping(
            kept,
            rows,
            starts,
            sizes,
            prompts[rows[starts]] if len(rows) else _NOTHING,
            counts.padding,
            counts.earlier,
            expected,
            by_uid,
            tuple(ambiguities),
        )


_NOTHING: Final[_Ints] = np.empty(0, dtype=np.int64)
# Marks in the column of indices; a real index is never negative.
_UNSTRUCTURED: Final = -1
_PADDED: Final = -2
_NO_UID: Final = -3


def _all_parts(uids: Sequence[Any]) -> Sequence[Iterable[int]]:
    """Hashes of groups, sessions, indices (or marks) of many uids; at once if they are alike."""
    try:
        groups, *numbers = zip(*map(str.rsplit, uids, repeat("_"), repeat(2)), strict=True)
    except (TypeError, ValueError):
        return tuple(zip(*map(_parts, uids), strict=True))
    digits = "".join(map("".join, numbers))
    whole = len(numbers) == 2 and digits.isascii() and digits.isdecimal()
    if not whole or not all(0 < len(text) < 10 for column in numbers for text in set(column)):
        return tuple(zip(*map(_parts, uids), strict=True))
    if "\0pad" in "\0".join(("", *groups)):
        return tuple(zip(*map(_parts, uids), strict=True))
    return tuple(map(hash, groups)), tuple(map(int, numbers[0])), tuple(map(int, numbers[1]))


def _parts(uid: object) -> tuple[int, int, int]:
    """Hash of the group, session, index (or a mark) of a uid."""
    if type(uid) is not str or not uid:
        return 0, 0, _NO_UID
    if uid.startswith("pad") and _PADDING.fullmatch(uid):
        return 0, 0, _PADDED
    parts = uid.rsplit("_", 2)
    if len(parts) == 3 and _is_count(parts[1]) and _is_count(parts[2]):
        return hash(parts[0]), int(parts[1]), int(parts[2])
    return hash(uid), 0, _UNSTRUCTURED


def _is_count(text: str) -> bool:
    return len(text) < 10 and text.isascii() and text.isdecimal()


class _Counts(NamedTuple):
    padding: int = 0
    earlier: int = 0
    twice: int = 0


@dataclass(frozen=True, slots=True)
class _Uids:
    groups: _Ints
    sessions: _Ints
    indices: _Ints

    def kept(self) -> tuple[_Flags, _Counts]:
        """Which rows count, and how many do not or stand there twice."""
        padding = self.indices == _PADDED
        named = np.flatnonzero(self.indices >= 0)
        order = named[np.lexsort((self.indices[named], self.sessions[named], self.groups[named]))]
        groups, sessions, indices = (
            column[order] for column in (self.groups, self.sessions, self.indices)
        )
        ends = np.ones(len(order), dtype=bool)
        ends[:-1] = (groups[1:] != groups[:-1]) | (sessions[1:] != sessions[:-1])
        last_of_each = indices[np.flatnonzero(ends)][np.cumsum(ends) - ends]
        earlier = indices < last_of_each
        twice = ~ends[:-1] & (indices[1:] == indices[:-1])
        kept = ~padding
        kept[order[earlier]] = False
        return kept, _Counts(int(padding.sum()), int(earlier.sum()), int(twice.sum()))

    def labels(
        self, prompts: _Ints, kept: _Flags, ambiguities: list[Ambiguity]
    ) -> tuple[_Ints, bool]:
        """What each row's group is called, and whether the uids say so."""
        lacking = kept & (self.indices == _NO_UID)
        plain = kept & (self.indices == _UNSTRUCTURED)
        if plain.any() and self._tells_nothing(plain, prompts):
            text = "uids without session and index, each of them once: grouped by input"
            ambiguities.append(Ambiguity("uid of no use", int(plain.sum()), text))
            lacking = lacking | plain
        elif lacking.any():
            text = f"{int(lacking.sum())} rows have no uid, and are grouped by input"
            ambiguities.append(Ambiguity("uid missing", int(lacking.sum()), text))
        return np.where(lacking, prompts, self.groups), not bool(lacking[kept].all())

    def _tells_nothing(self, plain: _Flags, prompts: _Ints) -> bool:
        groups = self.groups[plain]
        return len(np.unique(groups)) == len(groups) > len(np.unique(prompts[plain]))


def _expected(sizes: _Ints, group_size: int | None, ambiguities: list[Ambiguity]) -> int | None:
    """The size of a whole group: as given, else the most frequent."""
    if not len(sizes):
        return group_size
    counts = Counter(sizes.tolist())
    most = max(counts.values())
    tied = sorted(size for size, count in counts.items() if count == most)
    modal: int = max(s for s in tied if not any(s % t == 0 for t in tied if t < s))
    if group_size is None:
        text = f"the group size is not known: {modal} is the most frequent"
        ambiguities.append(Ambiguity("size unknown", len(sizes), text))
        if len(tied) > 1:
            text = f"sizes {', '.join(map(str, tied))} are equally frequent: {modal} was taken"
            ambiguities.append(Ambiguity("sizes tied", len(tied) * most, text))
        return modal
    if group_size not in tied:
        text = f"most groups have {modal} rows, the configuration says {group_size}"
        ambiguities.append(Ambiguity("other size", counts[modal], text))
    return group_size


def _odd_sizes(sizes: _Ints, expected: int | None, by_uid: bool) -> list[Ambiguity]:
    if expected is None:
        return []
    smaller = int((sizes < expected).sum())
    multiple = (sizes > expected) & (sizes % expected == 0) & (not by_uid)
    larger = int(((sizes > expected) & ~multiple).sum())
    found = []
    if smaller:
        text = f"{smaller} groups have fewer than {expected} rows: samples failed or were dropped"
        found.append(Ambiguity("smaller groups", smaller, text))
    if multiple.any():
        count = int(multiple.sum())
        text = (
            f"{count} groups have a multiple of {expected} rows: the same prompt occurred more"
            " than once, and the dump cannot tell its groups apart"
        )
        found.append(Ambiguity("merged groups", count, text))
    if larger:
        text = f"{larger} groups have more than {expected} rows"
        found.append(Ambiguity("larger groups", larger, text))
    return found


def _hashable(values: Sequence[Any]) -> Sequence[Any]:
    """The values, of which floats, lists and objects become text."""
    if set(map(type, values)) <= _HASHABLE:
        return values
    return [v if type(v) in _HASHABLE else _text(v) for v in values]


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:
        return "nested too deeply"


def _digest(key: str | tuple[str, Any]) -> bytes:
    text = key if isinstance(key, str) else f"{key[0]}\0{key[1]}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
