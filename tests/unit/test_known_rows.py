"""Lines that are decoded without dicts: what comes out is what the general way gives."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_logsync.columns import MISSING, decode
from verl_logsync.jsonlines import LONGEST_LINE
from verl_logsync.known_rows import KnownRows
from verl_logsync.model import Facts, LogFile, Stamp
from verl_logsync.sources.verl_file import VerlFile
from verl_logsync.table_builder import TableBuilder

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


def assert_logged(table: pa.Table, lines: Iterable[str]) -> None:
    """Every value is the one that JSON itself finds in its line, and there are no others."""
    logged = [json.loads(line)["data"] for line in lines]
    columns = {name: decode(table.column(name)) for name in table.schema.names if name != "_step"}
    for index, row in enumerate(logged):
        there = {name: values[index] for name, values in columns.items()}
        found = {name: value for name, value in there.items() if value is not MISSING}
        assert repr(sorted(found.items())) == repr(
            sorted((key, _as_kept(value, table.column(key).type)) for key, value in row.items())
        )


def _as_kept(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_float64(kind):
        return float(value)
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value  # as W&B's wire writes it


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


_SETS = st.sampled_from(
    [
        {"a": 1.5, "n": 3, "c/d": 2.0},
        {"a": 1.5, "n": 3, "c/d": 2.0, "val/x": 0.5, "val/n": 7},
        {"val/x": 0.25, "val/n": 8},
        {"n": 3, "a": 1.25, "c/d": None, "late": 4},
        {"a": 1.5, "n": 3, "c/d": 2.0, "val/x": None},
    ]
)
_MIXED: Any = st.lists(
    st.one_of(
        st.tuples(_SETS, st.integers(1, 12), st.just({})),
        st.tuples(_SETS, st.integers(1, 3), _CHANGES),
    ),
    min_size=6,
    max_size=25,
)


@given(_MIXED, st.sampled_from([1, 64, 300, 1000, 1 << 16]))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_comes_out_of_mixed_layouts(
    folder: Path, parts: list[tuple[dict[str, Any], int, dict[str, Any]]], block: int
) -> None:
    """Rows of several sets of keys, in stretches and alone, however many are read at once."""
    rows = [row | changed for row, count, changed in parts for _ in range(count)]
    lines = [json.dumps({"step": step, "data": row}) for step, row in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_logsync.jsonlines._BLOCK", block)
        patch.setattr("verl_logsync.table_builder._MOVED", block)
        patch.setattr("verl_logsync.table_builder._TILE", 3)
        table = read(folder, lines)
    assert_equal(table, one_by_one(lines))


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


def test_other_keys_are_learnt_beside_the_usual() -> None:
    """Rows of a second layout are known after a few, and those of the first still are."""
    builder = TableBuilder()
    known = KnownRows(builder, lambda _: None)
    usual, other = b'{"step":1,"data":{"a":0.5}}', b'{"step":1,"data":{"v":1,"a":0.5}}'

    def taken(line: bytes) -> bool:
        if known.take(line):
            return True
        builder.add(orjson.loads(line)["data"], exactly=False)
        known.learn()
        return False

    assert [taken(usual) for _ in range(10)] == [False] * 8 + [True] * 2
    assert [taken(line) for line in (other, usual, other, usual)] == [False, True] * 2
    assert [taken(line) for line in (other, usual, other)] == [True] * 3
    assert len(builder) == 10 + 4 + 3
    columns = builder.columns()
    assert columns["a"].to_pylist() == [0.5] * 17
    assert columns["v"].to_pylist() == [None] * 10 + [1, None, 1, None, 1, None, 1]
    assert columns["v"].type == pa.int64()


def test_ever_new_keys_make_no_decoder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further layout takes twice as many rows, so that few decoders are made."""
    made: list[int] = []
    usual = KnownRows._made

    def counted(self: KnownRows) -> Any:
        made.append(len(made))
        return usual(self)

    monkeypatch.setattr(KnownRows, "_made", counted)
    builder = TableBuilder()
    known = KnownRows(builder, lambda _: None)
    for number in range(2000):
        line = b'{"step":1,"data":{"a":0.5,"k%d":1.0}}' % (number // 10 % 40)
        if not known.take(line):
            builder.add(orjson.loads(line)["data"], exactly=False)
            known.learn()
    assert len(builder) == 2000
    assert 2 < len(made) < 12


# Long rows, so that a few of them fill what is read at once.
_LONG = {f"metric/{number:03}": number + 0.25 for number in range(200)}
_VALIDATED = _LONG | {"val/a": 0.5, "val/n": 3}


def long_lines(count: int = 200) -> list[str]:
    return [
        json.dumps({"step": step, "data": _VALIDATED if step % 7 == 0 else _LONG | {"n": step}})
        for step in range(count)
    ]


@pytest.mark.parametrize(
    "odd",
    [
        '{"step":20,"data":{"metric/000":NaN}}',
        json.dumps({"step": 20, "data": _VALIDATED | {"val/a": None, "n": 1}}),
        json.dumps({"step": 20, "data": _VALIDATED | {"val/a": math.nan, "n": 1}}),
        json.dumps({"step": 20, "data": _VALIDATED | {"val/n": 2.0, "n": 2**60 + 1}}),
        json.dumps({"step": 20, "data": dict(reversed(_VALIDATED.items()))}),
        json.dumps({"step": 20, "data": {"metric/000": "text"}}),
    ],
)
def test_odd_lines_among_many(folder: Path, odd: str) -> None:
    """A line that is unlike the others, within lines that are decoded together."""
    lines = [*long_lines(), *[odd] * 3, *long_lines()]
    for at in range(30, 300, 37):
        lines.insert(at, odd)
    table = read(folder, lines)
    assert_equal(table, one_by_one(lines))
    assert_logged(table, lines)


def test_nulls_among_many(folder: Path) -> None:
    """A metric that is null in most rows, and one that is null in rows that are validated."""
    lines = [
        json.dumps(
            {
                "step": step,
                "data": _LONG
                | {"metric/100": None if step % 3 else 1.0}
                | ({"val/a": None if step % 4 else 2.5} if step % 2 else {}),
            }
        )
        for step in range(300)
    ]
    table = read(folder, lines)
    assert_equal(table, one_by_one(lines))
    assert_logged(table, lines)


@pytest.mark.parametrize(
    ("odd", "records"),
    [
        (["", "   ", ""], 0),
        (['{"step":20,"data":{"a":1}} {"step":21,"data":{"a":1}}'], 1),
        (['{"step":20,"data":', '{"a":1}}'], 2),
        (["}"], 1),
        (["\0\0\0"], 0),
    ],
)
def test_places_after_many_known_lines(folder: Path, odd: list[str], records: int) -> None:
    """However lines were read: each is one record at most, and places are those in the file."""
    before, after = long_lines(), long_lines()
    like = json.loads(before[1])
    one, other = json.dumps(like), json.dumps(like | {"step": 2})
    glued = [f"{one}{other}", "", f"{one} {other}", ""]  # as many lines as records
    broken = one.replace('"data": ', '"data":\n')
    lines = [*before, *odd, *after, *glued, *after, broken, *after, "last"]
    path = folder / "exp.jsonl"
    path.write_text("\n".join(lines) + "\n")
    reading = VerlFile().read(LogFile(path, "verl_file", Stamp(0, 0, 0, 0), Facts()))
    assert reading.rows.num_rows == 4 * len(before)
    assert sum(skip.records for skip in reading.skips) == records + 2 + 2 + 1
    text = path.read_bytes()
    for skip in reading.skips:
        found = re.fullmatch(r".*:(\d+) \(byte (\d+)\)", skip.place)
        assert found
        line, offset = int(found[1]), int(found[2])
        assert text[:offset].count(b"\n") == line - 1
        assert offset == 0 or text[offset - 1 : offset] == b"\n"
    assert reading.skips[-1].place.endswith(f"(byte {len(text) - 5})")


@pytest.mark.parametrize("size", [LONGEST_LINE - 1, LONGEST_LINE, LONGEST_LINE + 1, 12 << 20])
@pytest.mark.parametrize("ended", [True, False])
def test_lines_too_long_among_many(folder: Path, size: int, ended: bool) -> None:
    """A line, its end counted, that is longer than W&B takes is left out; the others are not."""
    path = folder / "exp.jsonl"
    long = '{"step":9,"data":{"a":"' + "x" * (size - 28) + '"}}'
    lines = [*long_lines(50), long + " " * (size - 1 - len(long))]
    lines += [*long_lines(50), "bad"] if ended else []
    path.write_text("\n".join(lines) + ("\n" if ended else " "))
    reading = VerlFile().read(LogFile(path, "verl_file", Stamp(0, 0, 0, 0), Facts()))
    assert reading.rows.num_rows + sum(s.records for s in reading.skips) == len(lines)
    skips = [skip.reason.name for skip in reading.skips]
    assert skips == ["TOO_LONG"] * (size > LONGEST_LINE) + ["MALFORMED"] * ended
    if ended:
        place = f":{len(lines)} (byte {path.stat().st_size - 4})"
        assert reading.skips[-1].place.endswith(place)


def test_keys_that_no_decoder_takes(folder: Path) -> None:
    """Keys that JSON escapes, and many keys, are read the general way."""
    for row in ({'q"\\\n': 1.0}, {f"k{n}": 0.5 for n in range(5000)}, {"": 1.0}):
        lines = [json.dumps({"step": step, "data": row}) for step in range(12)]
        assert_equal(read(folder, lines), one_by_one(lines))
