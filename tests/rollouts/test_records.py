"""Rows of dump files: whole, cut, damaged, of all versions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from verl_logsync.errors import UnreadableInput
from verl_logsync.model import SkipReason
from verl_logsync.rollouts import records
from verl_logsync.rollouts.records import DumpReader, Record, key_set, read_records, read_row

ROW = {"input": "a", "output": "b", "score": 1.0, "step": 1}


def read(path: Path) -> tuple[list[Record], DumpReader]:
    reader = DumpReader(path)
    sizes = [len(block.offsets) for block in reader.blocks()]
    rows = list(read_records(path))
    assert sum(sizes) == len(rows)
    return rows, reader


@pytest.mark.parametrize(
    ("case", "extras", "keys"),
    [
        ("v1_0.9", set(), "v1 0.9"),
        ("v0_0.8", {"acc", "format_ok"}, "v0 0.8-0.9"),
        ("v0_0.6", {"acc", "pred"}, "v0 0.6-0.9"),
        ("v0_0.4", {"acc"}, "v0 0.4-0.5"),
    ],
)
def test_key_sets(fixture_files: Path, case: str, extras: set[str], keys: str) -> None:
    """Every key set gives 40 rows; what verl itself does not write is an extra."""
    path = fixture_files / f"rollouts/{case}/grpo_arith/rollout_data/1.jsonl"
    rows, reader = read(path)
    assert len(rows) == 40
    assert set(rows[0].extras) == extras
    assert rows[0].reward is None
    assert {r.step for r in rows} == {1}
    assert key_set(json.loads(path.read_bytes().split(b"\n")[0])) == keys
    assert reader.skips == ()


def test_request_id_of_0_5_is_not_an_extra() -> None:
    """0.5 may write request_id without gts."""
    assert key_set({**ROW, "request_id": "x"}) == "v0 0.5"


@pytest.mark.parametrize("case", ["val_v1_0.9", "val_v0_0.6"])
def test_validation_rows_have_a_reward(fixture_files: Path, case: str) -> None:
    """The key reward of validation dumps is apart from the extras."""
    rows, _ = read(fixture_files / f"rollouts/{case}/grpo_arith/validation_data/10.jsonl")
    assert len(rows) == 96
    assert all(r.reward == r.score and set(r.extras) == {"acc"} for r in rows)


def test_line_separators_inside_strings(fixture_files: Path) -> None:
    """U+2028 and U+0085 are no line ends: 41 rows, where splitlines would give 43."""
    path = fixture_files / "rollouts/v1_0.9_edge/grpo_arith/rollout_data/6.jsonl"
    assert len(path.read_text(encoding="utf-8").splitlines()) == 43
    assert len(read(path)[0]) == 41


def test_cut_anywhere(fixture_files: Path, tmp_path: Path) -> None:
    """A file cut anywhere gives the rows before the cut; the cut line is partial, not lost."""
    data = (fixture_files / "rollouts/v0_0.8/grpo_arith/rollout_data/1.jsonl").read_bytes()
    rng = random.Random(0)
    path = tmp_path / "1.jsonl"
    for size in [0, 1, *(rng.randrange(len(data)) for _ in range(100))]:
        path.write_bytes(data[:size])
        rows, reader = read(path)
        whole, _, rest = data[:size].rpartition(b"\n")
        is_row = rest.endswith(b"}") and data[size : size + 1] == b"\n"
        assert len(rows) == (whole.count(b"\n") + 1 if whole else 0) + is_row
        assert reader.partial == (bool(rest) and not is_row)
        assert reader.malformed == 0
        assert [s.reason for s in reader.skips] == [SkipReason.PARTIAL_LINE] * reader.partial


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"junk", "not JSON"),
        (b"[1, 2]", "no JSON object"),
        (b"3", "no JSON object"),
        (b'{"input": "a"}', "no output and no score"),
        (b'{"input": 1, "output": "b", "score": 1}', "input is no text"),
        (b'{"input": "a", "output": null, "score": 1}', "output is no text"),
        (b'{"input": "a\xff", "output": "b", "score": 1}', "UTF-8"),
        (b'{"input": "a", "output": "\\ud800", "score": 1}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_costs_one_line(tmp_path: Path, line: bytes, why: str) -> None:
    """It is counted and named with line, byte and what is wrong; all others are read."""
    good = json.dumps(ROW).encode() + b"\n"
    path = tmp_path / "1.jsonl"
    path.write_bytes(good + line + b"\n" + good * 2)
    rows, reader = read(path)
    assert len(rows) == 3
    assert reader.malformed == 1
    (skip,) = reader.skips
    assert skip.reason is SkipReason.MALFORMED
    assert skip.place == f"{path}:2 (byte {len(good)})"
    assert why in skip.detail
    assert "sed -n 2p" in skip.hint


def test_lines_are_counted_through_the_whole_file(tmp_path: Path) -> None:
    """A bad line far into a file is named by its own number and byte."""
    good = json.dumps({**ROW, "output": "x" * 500}).encode() + b"\n"
    path = tmp_path / "1.jsonl"
    path.write_bytes(good * 2000 + b"junk\n" + good)
    rows, reader = read(path)
    assert len(rows) == 2001
    assert reader.skips[0].place == f"{path}:2001 (byte {2000 * len(good)})"


def test_blank_lines_are_nothing(tmp_path: Path) -> None:
    """Empty lines, blanks and holes of zero bytes are neither rows nor damage."""
    good = json.dumps(ROW).encode() + b"\n"
    path = tmp_path / "1.jsonl"
    path.write_bytes(good + b"\n\n   \n" + b"\0" * 100 + b"\n" + good)
    rows, reader = read(path)
    assert (len(rows), reader.skips) == (2, ())


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    """Of thousands of bad lines the first hundred are named, and all are counted."""
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"{}\n" * 5000)
    rows, reader = read(path)
    assert rows == []
    assert reader.malformed == 5000
    assert len(reader.skips) == 101
    assert sum(skip.records for skip in reader.skips) == 5000


def test_a_line_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows around a line over the limit are read, with their places."""
    monkeypatch.setattr(records, "LONGEST_ROW", 1 << 19)
    good = json.dumps(ROW).encode() + b"\n"
    path = tmp_path / "1.jsonl"
    long = json.dumps({**ROW, "output": "x" * (3 << 20)}).encode() + b"\n"
    path.write_bytes(good + long + good * 3)
    reader = DumpReader(path)
    offsets = [offset for block in reader.blocks() for offset in block.offsets]
    after = len(good) + len(long)
    assert offsets == [0, after, after + len(good), after + 2 * len(good)]
    (skip,) = reader.skips
    assert (skip.reason, skip.records) == (SkipReason.TOO_LONG, 1)
    assert skip.place == f"{path}:2 (byte {len(good)})"
    path.write_bytes(long[:-1])
    assert list(DumpReader(path).blocks()) == []


def test_offsets_lead_to_rows(fixture_files: Path, tmp_path: Path) -> None:
    """Every offset is where its row starts, also over many chunks and rows of mixed keys."""
    source = fixture_files / "rollouts"
    data = b"".join(
        (source / f"{case}/grpo_arith/rollout_data/1.jsonl").read_bytes()
        for case in ("v0_0.4", "v1_0.9", "v0_0.8") * 5
    )
    path = tmp_path / "1.jsonl"
    path.write_bytes(data)
    count = 0
    with path.open("rb") as stream:
        for block in DumpReader(path).blocks():
            for offset, output in zip(block.offsets, block.columns["output"], strict=True):
                row = read_row(stream, offset)
                assert row is not None
                assert row.output == output
                count += 1
    assert count == 600


def test_nothing_where_no_row_starts(tmp_path: Path) -> None:
    """A place inside a line is no row."""
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps(ROW))
    with path.open("rb") as stream:
        assert read_row(stream, 5) is None
        assert read_row(stream, 500) is None


def test_bare_nan_is_a_score(tmp_path: Path) -> None:
    """A token that strict JSON does not know costs no row."""
    path = tmp_path / "1.jsonl"
    path.write_text('{"input": "a", "output": "b", "score": NaN}\n')
    rows, reader = read(path)
    assert len(rows) == 1
    assert rows[0].score != rows[0].score
    assert reader.skips == ()


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """It is an input error that names the file."""
    with pytest.raises(UnreadableInput, match=r"1\.jsonl"):
        list(DumpReader(tmp_path / "1.jsonl").blocks())


_USUAL = {"input": "a", "output": "b" * 40, "score": 1.0, "step": 1, "extra": None}


@pytest.mark.parametrize(
    "odd",
    [
        b'{"input":"a","output":"b","score":true,"step":1,"extra":[1,{"x":null}]}',
        b'{"output":"b","input":"a","extra":"\xe2\x80\xa8 \\u00e9","score":"1","step":2}',
        b'{"input":"a","input":"z","output":"b","score":-0,"step":1,"extra":null}',
        b'{"input":"a","output":"b","score":12345678901234567890,"step":1,"extra":1e308}',
        b'{"input":"a","output":"b","score":123456789012345678901234567890,"step":1,"extra":0}',
        b'{"input":"a","output":"b","score":-9223372036854775809,"step":18446744073709551616,"extra":0}',
        b'{"input":"a","output":"b","score":0,"step":1,"extra":[{"x":18446744073709551616}]}',
        b'{"input":"a","output":"b","score":NaN,"step":1,"extra":-Infinity}',
        b'{"input":"a","output":"b","score":1e999,"step":1,"extra":0}',
        b'{"input":"a","output":"b","score":1.0,"step":1}',
        b'{"input":"a","output":"b","score":1.0,"step":1,"extra":0,"uid":"u_0_0"}',
        b'{"input":null,"output":"b","score":1.0,"step":1,"extra":0}',
        b'{"input":"\\ud800","output":"b","score":1.0,"step":1,"extra":0}',
        b'{"input":"\xff","output":"b","score":1.0,"step":1,"extra":"\xff"}',
        b'{"input":"a","output":"b","score":1.0,"step":1,"extra":0} x',
        b'{"input":"a","output":"b"}{"input":"a","output":"b"}',
        b"[1]",
        b"",
        b" \r",
    ],
)
def test_a_row_unlike_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    """Among many usual rows every line gives what it gives in a file of its own."""
    monkeypatch.setattr(records, "_CHUNK", 256)
    usual = json.dumps(_USUAL).encode()
    path, alone = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    path.write_bytes(b"\n".join([*[usual] * 10, odd, *[usual] * 10, b""]))
    alone.write_bytes(odd + b"\n")
    rows, reader = read(path)
    expected, one = read(alone)
    whole = Record("a", "b" * 40, None, 1.0, 1, None, None, None, {"extra": None})
    assert sorted(map(repr, rows)) == sorted([*map(repr, expected), *[repr(whole)] * 20])
    assert [skip.detail for skip in reader.skips] == [skip.detail for skip in one.skips]
    offsets = [offset for block in DumpReader(path).blocks() for offset in block.offsets]
    lines = path.read_bytes()
    assert all(lines[at:].startswith((b"{",)) and lines[:at][-1:] in (b"", b"\n") for at in offsets)


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \n"])
def test_a_lost_line_end_and_an_empty_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes
) -> None:
    """Two rows on one line are no row, though as many rows as lines could be counted."""
    monkeypatch.setattr(records, "_CHUNK", 1024)
    usual = json.dumps(_USUAL).encode()
    lines = [usual + b"\n"] * 40
    path = tmp_path / "1.jsonl"
    for other in (blank, usual.replace(b", ", b",\n", 1) + b"\n"):
        path.write_bytes(b"".join([*lines, usual, *lines[:2], other, *lines]))
        rows, reader = read(path)
        assert len(rows) == 81
        assert {skip.reason for skip in reader.skips} == {SkipReason.MALFORMED}
        text = path.read_bytes()
        offsets = [offset for block in DumpReader(path).blocks() for offset in block.offsets]
        assert all(text[at:].startswith(lines[0]) for at in offsets)
