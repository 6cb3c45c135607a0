"""Records and their values come out as they were logged, or are accounted for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_logsync.errors import NotALog, UnreadableInput
from verl_logsync.transaction_log import (
    BLOCK_SIZE,
    FILE_HEADER,
    UNKNOWN,
    Damage,
    Entry,
    HeaderState,
    TransactionLogWriter,
    config_updates,
    encode_history,
    encode_key,
    history_row,
    probe,
    read_records,
    stats_row,
    summary_updates,
)

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")


def write(path: Path, payloads: list[bytes]) -> Path:
    with TransactionLogWriter(path) as writer:
        for payload in payloads:
            writer.write_payload(payload)
    return path


def row(*items: dict[str, Any], num: int = 0) -> tuple[int | None, dict[str, object]]:
    record = pb.Record()
    for item in items:
        record.history.item.add(**item)
    if num:
        record.history.step.num = num
    return history_row(record)


def test_nan_null_and_missing_are_three_things() -> None:
    """NaN is a float, null is None, and what was not logged is not there."""
    _, values = row(
        {"nested_key": ["nan"], "value_json": "NaN"},
        {"nested_key": ["null"], "value_json": "null"},
        {"nested_key": ["up"], "value_json": "Infinity"},
        {"nested_key": ["down"], "value_json": "-Infinity"},
    )
    assert set(values) == {"nan", "null", "up", "down"}
    assert isinstance(values["nan"], float)
    assert math.isnan(values["nan"])
    assert values["null"] is None
    assert (values["up"], values["down"]) == (math.inf, -math.inf)


def test_paths_are_rebuilt_and_slashes_are_not_separators() -> None:
    """Only several path elements make an object; a name may hold slashes and dots."""
    _, values = row(
        {"nested_key": ["actor/pg_loss"], "value_json": "1"},
        {"nested_key": ["h", "_type"], "value_json": '"histogram"'},
        {"nested_key": ["h", "bins"], "value_json": "[0,1]"},
        {"nested_key": ["d", "a.b", "c/d"], "value_json": "2"},
    )
    assert values == {
        "actor/pg_loss": 1,
        "h": {"_type": "histogram", "bins": [0, 1]},
        "d": {"a.b": {"c/d": 2}},
    }


def test_old_items_have_a_key_and_whole_objects() -> None:
    """0.16 and 0.17 wrote `key`, with nested dicts as one JSON object."""
    items = [{"key": "a/b", "value_json": "1"}, {"key": "d", "value_json": '{"x":{"y":NaN}}'}]
    step, values = row(*items, {"key": "_step", "value_json": "4"})
    assert step == 4
    assert repr(values) == "{'a/b': 1, 'd': {'x': {'y': nan}}}"


@pytest.mark.parametrize(
    ("item", "num", "step", "kept"),
    [
        ("7", 9, 7, {}),
        ("0", 9, 0, {}),
        ("7.0", 0, 7, {}),
        (None, 9, 9, {}),
        (None, 0, None, {}),
        ('"x"', 9, None, {"_step": "x"}),
        ("true", 0, None, {"_step": True}),
        ("1.5", 0, None, {"_step": 1.5}),
        ("NaN", 0, None, {"_step": math.nan}),
    ],
)
def test_the_step_is_the_item(
    item: str | None, num: int, step: int | None, kept: dict[str, object]
) -> None:
    """The `_step` item rules; `step.num` counts only without one, and only above 0."""
    items = [] if item is None else [{"key": "_step", "value_json": item}]
    got, values = row(*items, num=num)
    assert got == step
    assert repr(values) == repr(kept)


TYPED = [
    (["n"], "none", 0, None),
    (["t"], "boolean", True, True),
    (["f"], "boolean", False, False),
    (["i"], "integer", -(2**63), -(2**63)),
    (["z"], "integer", 0, 0),
    (["j"], "integer", 2**53 + 1, 2**53 + 1),
    (["x"], "number", 0.1, 0.1),
    (["nan"], "number", math.nan, math.nan),
    (["inf"], "number", -math.inf, -math.inf),
    (["s"], "text", 'a "ü" \n', 'a "ü" \n'),
    (["e"], "text", "", ""),
    (["l"], "json", '[1,{"a":NaN}]', [1, {"a": math.nan}]),
    (["d", "a"], "number", 1.0, 1.0),
]
EXPECTED_TYPED = {path[0]: value for path, _, _, value in TYPED} | {"d": {"a": 1.0}}


def typed_items() -> list[dict[str, Any]]:
    if "none" not in pb.HistoryItem.DESCRIPTOR.fields_by_name:
        pytest.skip("this wandb's protobuf has no typed values")
    return [{"nested_key": path, field: value} for path, field, value, _ in TYPED]


def test_typed_values_are_understood() -> None:
    """Items that carry only a typed value give that value."""
    _, values = row(*typed_items())
    assert repr(values) == repr(EXPECTED_TYPED)


def test_typed_values_are_understood_without_their_definition() -> None:
    """A protobuf definition older than the typed fields still gives their values."""
    history = pb.HistoryRecord()
    for item in typed_items():
        history.item.add(**item)
    # A summary item is a history item without the typed fields.
    summary = pb.SummaryRecord.FromString(history.SerializeToString())
    assert repr(summary_updates(pb.Record(summary=summary))) == repr(EXPECTED_TYPED)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=20), JSON_VALUES, max_size=10))
def test_any_json_value_comes_back(values: dict[str, object]) -> None:
    """Whatever JSON can say, NaN included, comes back equal, beside any other value."""
    values.pop("_step", None)
    items = [
        {"nested_key": [key], "value_json": json.dumps(value)} for key, value in values.items()
    ]
    assert repr(row(*items)[1]) == repr(values)


@pytest.mark.parametrize("text", ["", "{", "1,2", "nan", "]["])
def test_a_value_that_is_not_json_names_its_metric(text: str) -> None:
    """Damage inside a value is never guessed at: the error says which metric and what it holds."""
    with pytest.raises(ValueError, match=r"'d\.bad' is not JSON"):
        row(
            {"nested_key": ["ok"], "value_json": "1"},
            {"nested_key": ["d", "bad"], "value_json": text},
        )


def test_config_and_summary_come_from_their_records_or_the_run() -> None:
    """The run record holds the first config; later records update it."""
    run = pb.Record()
    run.run.config.update.add(key="trainer", value_json='{"nnodes":1}')
    run.run.summary.update.add(key="best", value_json="1")
    assert config_updates(run) == {"trainer": {"nnodes": 1}}
    assert summary_updates(run) == {"best": 1}
    later = pb.Record()
    later.config.update.add(nested_key=["trainer", "nnodes"], value_json="2")
    assert config_updates(later) == {"trainer": {"nnodes": 2}}


def test_system_metrics_have_their_time() -> None:
    """A stats record gives its own time and flat names."""
    record = pb.Record()
    record.stats.timestamp.seconds, record.stats.timestamp.nanos = 1_700_000_000, 250_000_000
    record.stats.item.add(key="gpu.0.temp", value_json="61.5")
    assert stats_row(record) == (1_700_000_000.25, {"gpu.0.temp": 61.5})


def test_unknown_kinds_are_counted(tmp_path: Path) -> None:
    """A record type of a newer wandb is an entry of kind unknown, its payload untouched."""
    newer = bytes([0xFA, 0x06, 0x01, 0x00])  # field 111, one byte
    path = write(tmp_path / "a.wandb", [encode_history(1, [], []), newer, b""])
    kinds = [item.kind for item in read_records(path) if isinstance(item, Entry)]
    assert kinds == ["history", UNKNOWN, UNKNOWN]
    payloads = [item.payload for item in read_records(path) if isinstance(item, Entry)]
    assert payloads[1:] == [newer, b""]


def test_a_frame_that_is_not_protobuf_is_damage(tmp_path: Path) -> None:
    """A checksum that is right over bytes that are no record costs that record only."""
    path = write(tmp_path / "a.wandb", [encode_history(1, [], []), b"\xff" * 9, b"\x08\x01"])
    kinds = [type(item) for item in read_records(path)]
    assert kinds == [Entry, Damage, Entry]
    (damage,) = [item for item in read_records(path) if isinstance(item, Damage)]
    assert "not a protobuf record" in damage.reason
    assert not damage.tail


def big_log(path: Path, rows: int = 2000) -> Path:
    keys = [encode_key(f"actor/metric_{index}") for index in range(40)]
    values = [b"0.12345678901234567"] * len(keys)
    return write(path, [encode_history(step, keys, values) for step in range(rows)])


def test_four_bad_bytes_in_2000_rows(tmp_path: Path) -> None:
    """At least the 1,905 rows that wandb's reader finds come out, and the lost place is named."""
    path = big_log(tmp_path / "a.wandb")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4] = b"\xff\xfe\xfd\xfc"
    path.write_bytes(data)
    items = list(read_records(path))
    steps = [history_row(item.record)[0] for item in items if isinstance(item, Entry)]
    assert len(steps) >= 1905
    assert len(steps) >= 1998
    assert steps == sorted(set(map(int, filter(None, steps))) | {0})
    (damage,) = [item for item in items if isinstance(item, Damage)]
    assert damage.offset <= middle < damage.offset + damage.length
    assert damage.length < BLOCK_SIZE
    assert not damage.tail


def test_a_growing_file_gives_more_rows_and_none_twice(tmp_path: Path) -> None:
    """Read again and again while it grows, a file gives the old rows and then new ones."""
    data = big_log(tmp_path / "a.wandb", rows=100).read_bytes()
    live = tmp_path / "live.wandb"
    before: list[Entry] = []
    for size in [*range(0, len(data), 4999), len(data)]:
        live.write_bytes(data[:size])
        now = [item for item in read_records(live) if isinstance(item, Entry)]
        assert now[: len(before)] == before
        before = now
    assert len(before) == 100


def test_the_end_of_a_file_can_be_read_alone(tmp_path: Path) -> None:
    """From the last block border on come the last rows, with the offsets of a full read."""
    path = big_log(tmp_path / "a.wandb")
    start = path.stat().st_size // BLOCK_SIZE * BLOCK_SIZE
    end = list(read_records(path, start=start))
    assert 0 < len(end) < 2000
    assert end == list(read_records(path))[-len(end) :]


def test_nothing_yet_is_no_error(tmp_path: Path) -> None:
    """A 0-byte file and one with only its header give nothing; `probe` says which it is."""
    path = tmp_path / "a.wandb"
    for content, reason in ((b"", "empty"), (FILE_HEADER, "header only")):
        path.write_bytes(content)
        assert list(read_records(path)) == []
        assert (probe(path).state, probe(path).reason) == (HeaderState.EMPTY, reason)


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    """The error names the file, shows its header and says what to type."""
    path = tmp_path / "a.wandb"
    path.write_text("step:1 - loss:0.5")
    with pytest.raises(NotALog) as caught:
        list(read_records(path))
    assert caught.value.place == str(path)
    assert "not a W&B log (header 73 74 65 70" in caught.value.message
    assert "head -c 64" in caught.value.hint


@pytest.mark.parametrize("name", ["missing.wandb", "."])
def test_an_unreadable_file_is_reported(tmp_path: Path, name: str) -> None:
    """A vanished file or a folder in its place is an unreadable input, named."""
    for read in (lambda path: list(read_records(path)), probe):
        with pytest.raises(UnreadableInput) as caught:
            read(tmp_path / name)
        assert caught.value.place == str(tmp_path / name)


def test_an_io_error_half_way_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails while reading gives the records before it, then an unreadable input."""
    from verl_logsync.transaction_log import framing

    path = big_log(tmp_path / "a.wandb")
    real, calls = framing._read_fully, []

    def failing(stream: Any, size: int) -> bytes:
        calls.append(size)
        if len(calls) > 3:
            raise OSError(5, "Input/output error")
        return real(stream, size)

    monkeypatch.setattr(framing, "_read_fully", failing)
    entries: list[Entry | Damage] = []
    with pytest.raises(UnreadableInput, match="Input/output error"):
        entries.extend(read_records(path))
    assert len(entries) > 10


def test_importing_the_package_does_not_import_wandb() -> None:
    """`--help` must stay fast: protobuf and wandb are imported when a file is read."""
    code = (
        "import sys, verl_logsync.transaction_log\n"
        "print([name for name in ('wandb', 'google.protobuf', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
