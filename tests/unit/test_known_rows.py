"""Lines that are decoded without dicts: what comes out is what the general way gives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_logsync.columns import TableBuilder
from verl_logsync.known_rows import KnownRows
from verl_logsync.model import Facts, LogFile, Stamp
from verl_logsync.sources.verl_file import VerlFile

_USUAL = {"a": 1.5, "n": 3, "c/d": 2.0, "maybe": None}
_VALUES = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.integers(-5, 5),
    st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63, -0.0]),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
)
_CHANGES = st.dictionaries(
    st.sampled_from(["a", "n", "c/d", "maybe", 'q"\\', "é"]), _VALUES, max_size=3
)
_ROWS = st.lists(
    st.one_of(_CHANGES, st.just({})).map(lambda changed: _USUAL | changed), min_size=20, max_size=40
)


def read(folder: Path, lines: Iterable[str]) -> pa.Table:
    """The table that source `verl_file` makes of these lines."""
    path = folder / "exp.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return VerlFile().read(LogFile(path, "verl_file", Stamp(0, 0, 0, 0), Facts())).rows


def one_by_one(lines: Iterable[str]) -> pa.Table:
    """The table of the same lines, each parsed as a whole and looked at exactly."""
    steps, builder = [], TableBuilder()
    for line in lines:
        try:
            record = orjson.loads(line)
        except ValueError:  # bare NaN and infinities
            record = json.loads(line)
        steps.append(record["step"])
        builder.add(record["data"], exactly=True)
    return pa.table({"_step": pa.array(steps, type=pa.int64())} | builder.columns())


def assert_equal(one: pa.Table, other: pa.Table) -> None:
    assert one.schema.equals(other.schema)
    for name in one.schema.names:
        left, right = one.column(name), other.column(name)
        assert left.is_valid().to_pylist() == right.is_valid().to_pylist(), name
        assert list(map(repr, left.to_pylist())) == list(map(repr, right.to_pylist())), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known")


@given(_ROWS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_comes_out(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Whatever keys and values some rows have: every value, type and missing key is the same."""
    usual = [_USUAL] * 10
    lines = [
        json.dumps({"step": step, "data": row}) for step, row in enumerate([*usual, *rows, *usual])
    ]
    assert_equal(read(folder, lines), one_by_one(lines))


def line_of(step: object, values: str, more: str = "") -> str:
    return f'{{"step":{step},"data":{values}{more}}}'


@pytest.mark.parametrize(
    "odd",
    [
        line_of(20, '{"a":1.0,"b":2,"a":7.5}'),
        line_of(20, '{"b":2,"a":1.0}'),
        line_of(20, '{"a":1.0,"b":2}', ',"more":[1]'),
        line_of(20, '{"a":1.0,"b":2.0}'),
        line_of(20, '{"a":1e999,"b":2}'),
        line_of(20, '{"a":NaN,"b":2}'),
        line_of(20, '{"a":true,"b":2}'),
        line_of(20, '{"a":-0,"b":-0}'),
        line_of(20, '{"a":1.0,"b":123456789012345678901234567890}'),
        line_of(20, '{"\\u0061":1.0,"b":2}'),
        line_of(20, '{"a":1.0}'),
        line_of(20, '{"a":1.0,"b":2,"_step":3}').replace(',"_step":3', ',"c":3'),
    ],
)
def test_a_line_unlike_the_others(folder: Path, odd: str) -> None:
    """A line that differs in order, number kind or spelling gives what it would give alone."""
    usual = [line_of(step, '{"a":0.5,"b":2}') for step in range(20)]
    lines = [*usual, odd, *(line.replace('p":', 'p":1') for line in usual)]
    assert_equal(read(folder, lines), one_by_one(lines))


@pytest.mark.parametrize("step", ["true", "-1", "1.0", "9223372036854775808", '"3"', "null"])
def test_what_is_no_step(folder: Path, step: str) -> None:
    """A record whose step is none is left out and counted, however often its like was read."""
    path = folder / "exp.jsonl"
    lines = [line_of(number, '{"a":0.5}') for number in range(20)]
    path.write_text("\n".join([*lines, line_of(step, '{"a":0.5}'), ""]))
    reading = VerlFile().read(LogFile(path, "verl_file", Stamp(0, 0, 0, 0), Facts()))
    assert reading.rows.num_rows == 20
    assert [(skip.reason.name, skip.records) for skip in reading.skips] == [("NO_STEP", 1)]


@pytest.mark.parametrize("odd", [b',"\xff":1', b',"more":"\xed\xa0\x80"', b',"a\xc3":1.0'])
def test_invalid_utf8_after_known_rows(folder: Path, odd: bytes) -> None:
    """A line of the usual form with bytes that are no text is left out like any such line."""
    lines = [line_of(step, '{"a":0.5}').encode() for step in range(20)]
    path = folder / "exp.jsonl"
    for bad in (lines[0][:-2] + odd + b"}}", lines[0][:-1] + odd + b"}"):
        path.write_bytes(b"\n".join([*lines, bad, *lines, b""]))
        reading = VerlFile().read(LogFile(path, "verl_file", Stamp(0, 0, 0, 0), Facts()))
        assert reading.rows.num_rows == 40
        assert [skip.reason.name for skip in reading.skips] == ["MALFORMED"]


def test_validated_steps_between_do_not_slow_it_down() -> None:
    """After a single row of other keys the next usual one is known again; two change the rule."""
    builder = TableBuilder()
    known = KnownRows(builder)
    usual, other = b'{"step":1,"data":{"a":0.5}}', b'{"step":1,"data":{"a":0.5,"v":1.0}}'

    def taken(line: bytes) -> bool:
        if known.take(line) is not None:
            return True
        builder.add(orjson.loads(line)["data"], exactly=False)
        known.learn()
        return False

    assert [taken(usual) for _ in range(10)] == [False] * 8 + [True] * 2
    assert [taken(line) for line in (other, usual, other, usual)] == [False, True] * 2
    for _ in range(7):
        taken(other)
    assert taken(other)
    assert not taken(usual)
    assert len(builder) == 10 + 4 + 7 + 2


def test_keys_that_no_decoder_takes(folder: Path) -> None:
    """Keys that JSON escapes, and many keys, are read the general way."""
    for row in ({'q"\\\n': 1.0}, {f"k{n}": 0.5 for n in range(5000)}, {"": 1.0}):
        lines = [json.dumps({"step": step, "data": row}) for step in range(12)]
        assert_equal(read(folder, lines), one_by_one(lines))
