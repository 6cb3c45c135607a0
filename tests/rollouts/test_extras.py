"""What reward functions returned: numbers, numbers written as text, and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from verl_logsync.rollouts import extras
from verl_logsync.rollouts.extras import Extra, Extras


def taken(*blocks: Sequence[Any], key: str = "bonus") -> Extra:
    gathered = Extras()
    for values in blocks:
        gathered.take({"input": values, key: values}, len(values))
    return gathered.finish()[key]


@pytest.mark.parametrize(
    ("values", "numbers", "coerced"),
    [
        ([1, 0.5, True, None], [1, 0.5, 1, math.nan], ""),
        (["True", "False", None], [1, 0, math.nan], "booleans"),
        (["3", "-0.5", "1e-3", "nan", ".5", "+2."], [3, -0.5, 1e-3, math.nan, 0.5, 2], "numbers"),
        ([None, None], [math.nan, math.nan], ""),
        ([10**400], [math.inf], ""),
    ],
)
def test_numbers(values: list[Any], numbers: list[float], coerced: str) -> None:
    """Numbers, booleans and text that verl 0.8 wrote for them; null is no number."""
    extra = taken(values)
    assert extra.values is not None
    np.testing.assert_array_equal(extra.values, numbers)
    assert extra.coerced == coerced


@pytest.mark.parametrize(
    "values",
    [
        ["3", "x"],
        ["3", ""],
        [["a"]],
        [{"a": 1}],
        ["1_000"],
        [" 3"],
        ["٣"],
        ["true"],
        ["3", 4],
        ["True", "3"],
        ["9" * 50],
    ],
)
def test_what_is_no_column_of_numbers(values: list[Any]) -> None:
    """One value of another kind makes the whole column no numbers, and it is said why."""
    extra = taken(values)
    assert extra.values is None
    assert extra.why_not


@pytest.mark.parametrize(
    "key", ["pred", "answer", "model_answer", "Pred", "final-pred", "data_source", "ground_truth"]
)
def test_columns_of_answers_stay_text(key: str) -> None:
    """`pred: "17"` is an answer, not a number."""
    assert taken(["17", "18"], key=key).values is None


@pytest.mark.parametrize("key", ["prediction_reward", "answer_length", "acc"])
def test_numbers_about_answers_are_numbers(key: str) -> None:
    """Only a last word that means text keeps text."""
    assert taken(["17", "18"], key=key).values is not None


def test_text_in_a_later_block_settles_it() -> None:
    """All values of a column must be such text, wherever in the file they stand."""
    assert taken(["1", "2"], ["3", "four"]).values is None
    assert taken(["True"], [1.0]).values is None


def test_rows_without_the_key() -> None:
    """Values stay with their rows when only some rows have the key."""
    gathered = Extras()
    gathered.take({"input": "ab"}, 2)
    gathered.take({"input": "a", "bonus": [2.0]}, 1)
    gathered.take({"input": "a"}, 1)
    values = gathered.finish()["bonus"].values
    np.testing.assert_array_equal(values, [math.nan, math.nan, 2, math.nan])


def test_too_many_keys_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump with other keys in every row does not fill the memory, and it is said."""
    monkeypatch.setattr(extras, "MOST_EXTRAS", 3)
    gathered = Extras()
    for index in range(5):
        gathered.take({f"k{index}": [1.0]}, 1)
    assert sorted(gathered.finish()) == ["k0", "k1", "k2"]
    assert gathered.beyond == 2
