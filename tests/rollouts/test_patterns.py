"""Patterns of users: what they find, and that none takes for ever."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from verl_logsync.errors import UsageError
from verl_logsync.rollouts.patterns import TextPattern, Texts
from verl_logsync.rollouts.reduce import reduce_file
from verl_logsync.rollouts.values import ReductionOptions

TEXTS = [
    "",
    "no answer",
    "#### 12",
    "first #### 3 then #### 4\n",
    "<think>a</think>\n<answer> é☃ </answer>",
    "\\boxed{1} and \\boxed{\\frac{1}{2}}",
    "#### \x00\n#### ",
    "Answer: b, answer: C",
]
PATTERNS = [
    r"#### (.+)",
    r"####\s*(-?\d+)",
    r"\\boxed\{([^}]*)\}",
    r"(?s)<answer>(.*?)</answer>",
    r"(?i)answer: ?([a-z])",
    r"\d+",
    r"(x)|(\d)",
    r"^first",
    r"(?P<last>[0-9])\s*$",
]


def applied(pattern: str, texts: list[str]) -> tuple[list[bool], list[str]]:
    found: list[bool] = []
    last: list[str] = []
    one = TextPattern(pattern)
    pieces = Texts(lambda a: found.extend(one.found(a)), lambda a: last.extend(one.last(a)))
    pieces.take(texts[:3])
    pieces.take(texts[3:])
    pieces.finish()
    return found, last


@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_find_what_python_finds(pattern: str) -> None:
    """The last match counts, its first bracket if it has one; a text without a match gives none."""
    compiled = re.compile(pattern)
    everything = [list(compiled.finditer(text)) for text in TEXTS]
    group = min(compiled.groups, 1)
    found, last = applied(pattern, TEXTS)
    assert found == [bool(matches) for matches in everything]
    assert last == [(m[-1][group] or "") if m else "" for m in everything]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*b", "(.*a){20}b", "a*a*a*a*a*a*b"])
def test_no_pattern_takes_for_ever(pattern: str, tmp_path: Path) -> None:
    """Patterns on which Python's `re` does not end within a lifetime end, and find nothing."""
    dump = tmp_path / "1.jsonl"
    rows = [{"input": "q", "output": "a" * 20_000, "score": 1.0, "step": 1} for _ in range(4)]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ReductionOptions(answer_pattern=pattern, format_pattern=pattern)
    found = reduce_file(dump, options).statistics
    assert (found["no_answer_share"], found["format_share"]) == (1.0, 0.0)


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?=a)", "(?<!a)b", "a{9999}", "\udcff", "*"])
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    """Look-around, references back, and what is no pattern: an error that says which syntax is."""
    with pytest.raises(UsageError) as error:
        ReductionOptions(format_pattern=pattern)
    assert "RE2" in error.value.hint
    assert error.value.message.startswith(repr(pattern))


def test_halves_of_surrogate_pairs_do_no_harm() -> None:
    """A text that UTF-8 cannot hold is looked at all the same."""
    assert applied(r"#### (.+)", ["\ud800 #### 5", "x"]) == ([True, False], ["5", ""])
