"""GRPO groups from uids or prompts, and what a dump leaves open."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from verl_logsync.rollouts import grouping
from verl_logsync.rollouts.grouping import Grouping, GroupKeys

PAD = "pad0f5c1e7a9b3d4c6e8f00112233445566"


def grouped(rows: Sequence[dict[str, Any]], size: int | None = None, block: int = 3) -> Grouping:
    keys = GroupKeys()
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        names = part[0].keys()
        assert all(row.keys() == names for row in part)
        keys.take({name: [row[name] for row in part] for name in names})
    return keys.resolve(size)


def members(found: Grouping) -> set[frozenset[int]]:
    ends = found.starts + found.sizes
    spans = zip(found.starts.tolist(), ends.tolist(), strict=True)
    return {frozenset(found.rows[start:end].tolist()) for start, end in spans}


def kinds(found: Grouping) -> dict[str, int]:
    return {a.kind: a.count for a in found.ambiguities}


def uid_rows(uids: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"input": "same", "uid": uid} for uid in uids]


def test_uid_without_its_last_two_parts() -> None:
    """The group of `a_b_3_0` is `a_b`, whatever the prompts are; order does not matter."""
    found = grouped(uid_rows(["a_b_0_0", "c_0_0", "a_b_1_0", "c_1_0"]), 2)
    assert members(found) == {frozenset({0, 2}), frozenset({1, 3})}
    assert found.by_uid
    assert found.ambiguities == ()


def test_padding_is_dropped_first() -> None:
    """`pad` and 32 hexadecimal digits, with or without numbers; other uids in pad... are groups."""
    uids = [f"{PAD}_0_0", "a_0_0", PAD, "a_1_0", "padding_0_0", "padding_1_0"]
    found = grouped(uid_rows(uids), 2)
    assert found.padding == 2
    assert members(found) == {frozenset({1, 3}), frozenset({4, 5})}
    assert found.ambiguities == ()


def test_the_last_trajectory_of_a_session_counts() -> None:
    """Of indices 0, 2 and 1 of a session only 2 counts; other sessions are not touched."""
    found = grouped(uid_rows(["a_0_0", "a_0_2", "a_0_1", "a_1_0"]), 2)
    assert found.earlier == 2
    assert members(found) == {frozenset({1, 3})}
    assert found.kept.tolist() == [False, True, False, True]


def test_sessions_are_numbers() -> None:
    """Session 10 is not session 1, and uid parts are compared as numbers."""
    found = grouped(uid_rows([f"a_{s}_0" for s in range(12)]), 12)
    assert (found.earlier, found.sizes.tolist()) == (0, [12])


@pytest.mark.parametrize("block", [1, 2, 100])
def test_uids_of_one_shape_or_many(block: int) -> None:
    """Uids that are read at once give what single ones do."""
    uids = ["a_0_0", "a_1_0", "b_0_0", "b_1_x", "b", None, 7, "²_²_²", "c_1234567890_0", ""]
    rows = [{"input": "x" if i in (5, 6, 9) else str(i), "uid": uid} for i, uid in enumerate(uids)]
    found = grouped(rows, block=block)
    assert members(found) == {
        frozenset({0, 1}),
        frozenset({2, 4}),
        frozenset({3}),
        frozenset({5, 6, 9}),
        frozenset({7}),
        frozenset({8}),
    }
    assert kinds(found)["uid missing"] == 3


def test_prompts_where_there_is_no_uid() -> None:
    """Equal inputs are a group; rows need not be neighbours."""
    rows = [{"input": text} for text in "abcabcab"]
    found = grouped(rows, 3)
    assert members(found) == {frozenset({0, 3, 6}), frozenset({1, 4, 7}), frozenset({2, 5})}
    assert not found.by_uid
    assert kinds(found) == {"smaller groups": 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "2"), (None, "1"), (["x"], ["y"]), ({"a": 1}, {"a": 2}), (1.5, 2.5), (float("nan"), 1)],
)
def test_gts_tells_prompts_apart(one: Any, other: Any) -> None:
    """Image prompts may have equal text: rows of another ground truth are another group."""
    rows = [{"input": "<image>", "gts": gts} for gts in (one, other, one, other)]
    assert members(grouped(rows)) == {frozenset({0, 2}), frozenset({1, 3})}


def test_order_of_keys_in_gts_does_not_matter() -> None:
    """An object is the same whatever the order of its keys."""
    rows = [{"input": "p", "gts": {"a": 1, "b": 2}}, {"input": "p", "gts": {"b": 2, "a": 1}}]
    assert members(grouped(rows)) == {frozenset({0, 1})}


def test_merged_groups_are_reported() -> None:
    """Of 2n equal prompts nobody can say which belong together; with uid there is no question."""
    rows = [{"input": text} for text in "aaaabbcc"]
    assert kinds(grouped(rows, 2)) == {"merged groups": 1}
    named = [{"input": "a", "uid": f"{g}_{s}_0"} for g in "xy" for s in range(2)]
    assert kinds(grouped(named, 2)) == {}


def test_named_groups_are_never_merged() -> None:
    """With uids a group of twice the size is too large, not two groups."""
    named = [{"input": "a", "uid": f"x_{session}_0"} for session in range(4)]
    assert kinds(
        grouped([*named, {"input": "a", "uid": "y_0_0"}, {"input": "a", "uid": "y_1_0"}], 2)
    ) == {"larger groups": 1}


def test_sizes_that_fit_nothing() -> None:
    """Larger groups that are no multiple are reported as such."""
    assert kinds(grouped([{"input": text} for text in "aaabb"], 2)) == {"larger groups": 1}


def test_the_most_frequent_size() -> None:
    """Without configuration it is the modal size, and said to be."""
    found = grouped([{"input": text} for text in "aabbccc"])
    assert found.expected == 2
    assert kinds(found) == {"size unknown": 3, "larger groups": 1}


@pytest.mark.parametrize(
    ("prompts", "expected"), [("aaaabb", 2), ("aaaaabbb", 5), ("aaaabbbbccdd", 2)]
)
def test_equally_frequent_sizes(prompts: str, expected: int) -> None:
    """A multiple gives way to its divisor (merged groups), else the smaller to the larger."""
    found = grouped([{"input": text} for text in prompts])
    assert found.expected == expected
    assert "sizes tied" in kinds(found)


def test_the_configuration_wins_and_disagreement_is_said() -> None:
    """The given size is used although most groups have another."""
    found = grouped([{"input": text} for text in "aabbcc"], 3)
    assert found.expected == 3
    assert kinds(found) == {"other size": 3, "smaller groups": 3}


def test_uids_that_name_single_rows() -> None:
    """Uids without structure, each once, over repeated prompts tell nothing: prompts count."""
    rows = [{"input": text, "uid": f"id{i}"} for i, text in enumerate("abab")]
    found = grouped(rows)
    assert members(found) == {frozenset({0, 2}), frozenset({1, 3})}
    assert kinds(found)["uid of no use"] == 4
    assert not found.by_uid


def test_uids_that_name_groups_plainly() -> None:
    """Uids without structure that repeat are the groups."""
    rows = [{"input": "p", "uid": uid} for uid in ("x", "y", "x", "y")]
    assert members(grouped(rows)) == {frozenset({0, 2}), frozenset({1, 3})}


def test_a_uid_twice_is_reported() -> None:
    """Two rows of one trajectory are both kept, and said."""
    found = grouped(uid_rows(["a_0_0", "a_0_0", "a_1_0"]), 3)
    assert kinds(found) == {"uid twice": 1}
    assert len(found.rows) == 3


def test_uid_in_later_rows_only() -> None:
    """Rows before the first uid are grouped by input."""
    keys = GroupKeys()
    keys.take({"input": ["p", "p"]})
    keys.take({"input": ["q", "r"], "uid": ["g_0_0", "g_1_0"]})
    keys.take({"input": ["p"]})
    found = keys.resolve(None)
    assert members(found) == {frozenset({0, 1, 4}), frozenset({2, 3})}
    assert kinds(found)["uid missing"] == 3


def test_order_does_not_matter() -> None:
    """The same rows in any order are in the same groups."""
    rows = [{"input": f"p{i % 7}", "uid": f"g{i % 7}_{i // 7}_{i % 2}"} for i in range(40)]
    wanted = {frozenset(rows[i]["uid"] for i in group) for group in members(grouped(rows))}
    random.Random(1).shuffle(rows)
    assert {frozenset(rows[i]["uid"] for i in group) for group in members(grouped(rows))} == wanted


def test_no_rows() -> None:
    """A dump without rows has no groups, and no size unless it is given."""
    assert grouped([]).expected is None
    assert grouped([], 4).expected == 4
    only_padding = grouped(uid_rows([PAD]))
    assert (len(only_padding.rows), only_padding.padding) == (0, 1)


def test_prompts_beyond_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are found all the same; the missing digests are admitted."""
    monkeypatch.setattr(grouping, "MOST_PROMPTS", 2)
    keys = GroupKeys()
    keys.take({"input": ["a", "b", "c", "c"]})
    found = keys.resolve(None)
    assert sorted(found.sizes.tolist()) == [1, 1, 2]
    assert not keys.digests_whole
    assert min(map(keys.prompt_digest, found.prompts.tolist())) == ""
