"""One pass over a dump file: what is kept of each row is a few numbers and hashes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from verl_logsync.columns import as_float
from verl_logsync.rollouts.extras import Extras, as_number
from verl_logsync.rollouts.grouping import GroupKeys
from verl_logsync.rollouts.patterns import Texts
from verl_logsync.rollouts.records import Block, key_set
from verl_logsync.rollouts.values import ReductionOptions

_STEPS_KEPT: Final = 100


class Gathered:
    """The rows of a file in compact columns, one item a row of the file."""

    def __init__(self, options: ReductionOptions) -> None:
        self._options = options
        uses = [
            use
            for use, pattern in ((self._form, options.form), (self._last_answer, options.answer))
            if pattern is not None
        ]
        self._texts = Texts(*uses) if uses else None
        self.keys = GroupKeys()
        self.extras = Extras()
        self.scores = array("d")
        self.lengths = array("I")
        self.outputs = array("q")
        self.offsets = array("q")
        self.answers = array("q")
        self.formed = array("b")
        self.answer_key = ""
        self.steps: set[int] = set()
        self.key_sets: set[str] = set()
        self.text_scores = 0

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, block: Block) -> None:
        """Add the rows of a block; their texts are not kept."""
        columns = block.columns
        outputs = columns["output"]
        self.keys.take(columns)
        self._answers(columns, outputs)
        self.extras.take(columns, len(outputs))
        self.scores.extend(self._scores(columns["score"]))
        self.lengths.extend(map(len, outputs))
        self.outputs.extend(map(hash, outputs))
        self.offsets.extend(block.offsets)
        self.key_sets.add(key_set(columns))
        self._steps(columns.get("step", ()))

    def _scores(self, values: Sequence[Any]) -> Iterable[float]:
        if set(map(type, values)) <= {float}:
            return values
        self.text_scores += sum(type(v) is str for v in values)
        return map(_score, values)

    def _steps(self, values: Sequence[Any]) -> None:
        if set(map(type, values)) <= {int} and len(self.steps) < _STEPS_KEPT:
            self.steps.update(set(values))

    def _answers(self, columns: Mapping[str, Sequence[Any]], outputs: Sequence[str]) -> None:
        if self._texts is not None:
            self._texts.take(outputs)
        if self._options.answer is not None:
            return
        if not self.answer_key:
            self.answer_key = next((k for k in self._options.answer_keys if k in columns), "")
            # Rows before the first that has an answer key have none.
            self.answers.extend([0] * len(self) if self.answer_key else [])
        if self.answer_key:
            values = columns.get(self.answer_key)
            self.answers.extend([0] * len(outputs) if values is None else map(_answer, values))

    def _form(self, texts: Any) -> None:
        assert self._options.form is not None
        self.formed.extend(self._options.form.found(texts))

    def _last_answer(self, texts: Any) -> None:
        assert self._options.answer is not None
        self.answers.extend(map(_hash, self._options.answer.last(texts)))

    def finish(self) -> None:
        """All blocks were taken."""
        if self._texts is not None:
            self._texts.finish()

    @property
    def has_answers(self) -> bool:
        """Whether anything says what the final answers are."""
        return self._options.answer is not None or bool(self.answer_key)


def _score(value: Any) -> float:
    if type(value) is int:
        return as_float(value)
    number = as_number(value)
    return math.nan if number is None else number


def _answer(value: Any) -> int:
    if value is None:
        return 0
    return _hash(value if isinstance(value, str) else _as_text(value))


def _as_text(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(type(value))


def _hash(text: str) -> int:
    """Hash of an answer without blanks; 0 when there is none."""
    stripped = text.strip()
    return (hash(stripped) or 1) if stripped else 0
