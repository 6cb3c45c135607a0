"""The writer produces what the official client reads, and never half a file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_logsync.errors import WriteError
from verl_logsync.transaction_log import (
    BLOCK_SIZE,
    Damage,
    Entry,
    TransactionLogWriter,
    encode_history,
    encode_key,
    history_row,
    read_records,
)

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=200).filter(
    lambda name: name != "_step"
)


def entries(path: Path) -> list[Entry]:
    items = list(read_records(path))
    assert not [item for item in items if isinstance(item, Damage)]
    return [item for item in items if isinstance(item, Entry)]


@given(
    st.integers(0, 2**63 - 1),
    st.lists(st.tuples(NAMES, st.text("0123456789.eE-", max_size=400)), max_size=20),
)
@example(127, [("x" * 100, "1" * 31), ("y", "1" * 32)])
@example(128, [("x" * 120, "1"), ("y", "1" * 20_000)])
def test_hand_encoding_equals_protobuf(step: int, items: list[tuple[str, str]]) -> None:
    """The hand-encoded row is the message that protobuf itself would write."""
    record = pb.Record()
    for name, value in items:
        record.history.item.add(nested_key=[name], value_json=value)
    record.history.item.add(nested_key=["_step"], value_json=str(step))
    record.history.step.num = step
    keys = [encode_key(name) for name, _ in items]
    encoded = encode_history(step, keys, [value.encode() for _, value in items])
    parsed = pb.Record.FromString(encoded)
    assert parsed == record
    assert parsed.history.step.num == step


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    """NaN, infinities, null, text and numbers keep their value and their step."""
    values = [b"NaN", b"-Infinity", b"null", b'"t\\u00fc"', b"0.1", b"9007199254740993", b"false"]
    keys = [encode_key(name) for name in ("a/b", "i", "n", "t ü", "x.y", "big", "flag")]
    with TransactionLogWriter(tmp_path / "run-a.wandb") as writer:
        writer.write_payload(encode_history(0, keys, values))
        writer.write_payload(encode_history(7, keys[:1], [b"1"]))
    (first, second) = [history_row(entry.record) for entry in entries(writer.path)]
    assert second == (7, {"a/b": 1})
    assert first[0] == 0
    assert repr(first[1]) == repr(
        {
            "a/b": float("nan"),
            "i": float("-inf"),
            "n": None,
            "t ü": "tü",
            "x.y": 0.1,
            "big": 2**53 + 1,
            "flag": False,
        }
    )


def test_the_step_cannot_be_given_twice() -> None:
    """`_step` as a metric, a negative step, or keys without values are errors of the caller."""
    with pytest.raises(ValueError, match="_step"):
        encode_key("_step")
    with pytest.raises(ValueError, match="negative"):
        encode_history(-1, [], [])
    with pytest.raises(ValueError, match="1 keys but 0 values"):
        encode_history(1, [encode_key("a")], [])


def test_other_records_pass_through_unchanged(tmp_path: Path) -> None:
    """A record built by protobuf, and the payload of an entry read before, are kept as they are."""
    record = pb.Record(exit=pb.RunExitRecord(exit_code=3))
    for name in ("one.wandb", "two.wandb"):
        with TransactionLogWriter(tmp_path / name) as writer:
            writer.write_payload(record.SerializeToString())
    (first,), (second,) = entries(tmp_path / "one.wandb"), entries(tmp_path / "two.wandb")
    assert first.record == second.record == record
    assert first.payload == record.SerializeToString()


def test_the_name_appears_only_at_the_end(tmp_path: Path) -> None:
    """Until the block ends there is no file of that name, and none ending in .wandb."""
    path = tmp_path / "run-a.wandb"
    with TransactionLogWriter(path) as writer:
        writer.write_payload(b"x" * BLOCK_SIZE)
        (temporary,) = tmp_path.iterdir()
        assert temporary.suffix != ".wandb"
        assert writer.size > BLOCK_SIZE
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    """An exception inside the block removes the temporary file and keeps an older log."""
    path = tmp_path / "run-a.wandb"
    path.write_bytes(b"older")
    with pytest.raises(KeyError), TransactionLogWriter(path) as writer:
        writer.write_payload(b"x")
        raise KeyError
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"older"


KILLED = """
import os, signal, sys
from verl_logsync.transaction_log import TransactionLogWriter
with TransactionLogWriter(sys.argv[1]) as writer:
    for _ in range(3000):
        writer.write_payload(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_log(tmp_path: Path) -> None:
    """After kill -9 nothing in the folder is named like a log, and an older log is whole."""
    path = tmp_path / "run-a.wandb"
    path.write_bytes(b"older")
    child = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.wandb")) == [path]
    assert path.read_bytes() == b"older"


def recorded(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    return call


def test_the_file_is_on_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File sync, rename, folder sync: in this order a power cut never shows half a log."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", recorded(calls, "fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", recorded(calls, "rename", Path.replace))
    with TransactionLogWriter(tmp_path / "run-a.wandb") as writer:
        writer.write_payload(b"x")
    assert calls == ["fsync", "rename", "fsync"]


def test_a_full_disk_is_a_state_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system refuses the bytes the error names the file, and no file is left."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(WriteError, match=r"run-a\.wandb: cannot be written \(No space left"),
        TransactionLogWriter(tmp_path / "run-a.wandb") as writer,
    ):
        writer.write_payload(b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_a_state_error(tmp_path: Path) -> None:
    """A folder that is not there is reported by name."""
    with (
        pytest.raises(WriteError, match="nowhere"),
        TransactionLogWriter(tmp_path / "nowhere" / "run-a.wandb"),
    ):
        pass


def test_writing_outside_the_block_is_refused(tmp_path: Path) -> None:
    """A payload after the end would be lost, so it is an error."""
    with TransactionLogWriter(tmp_path / "run-a.wandb") as writer:
        writer.write_payload(b"x")
    with pytest.raises(ValueError, match="inside the `with` block"):
        writer.write_payload(b"y")


def official_records(path: Path) -> list[dict[str, Any]]:
    """What wandb's own reader makes of a file, one dict a record."""
    command = shutil.which("wandb", path=str(Path(sys.executable).parent)) or shutil.which("wandb")
    if command is None:
        pytest.skip("no wandb command")
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [command, "leet", "inspect", "--json", str(path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "No such command" in done.stderr or "no such option" in done.stderr.lower():
        pytest.skip("this wandb has no `leet inspect`")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_official_reader_accepts_our_files(tmp_path: Path) -> None:
    """wandb reads every row, whatever is left of a block when a record begins."""
    path = tmp_path / "run-a.wandb"
    key, filler = encode_key("actor/pg_loss"), encode_key("filler")
    step = 0
    with TransactionLogWriter(path) as writer:
        for leftover in range(24):
            room = BLOCK_SIZE - writer.size % BLOCK_SIZE - 7 - leftover
            rest = room - len(encode_history(step, [filler], [b"1" * 1000])) + 1000
            payload = encode_history(step, [filler], [b'"' + b"x" * (rest - 2 - 2) + b'"'])
            # A longer value has a longer length prefix, so aim in two goes.
            rest += room - len(payload) - 2 - 2
            payload = encode_history(step, [filler], [b'"' + b"x" * rest + b'"'])
            writer.write_payload(payload)
            assert -writer.size % BLOCK_SIZE == leftover
            writer.write_payload(encode_history(step + 1, [key], [b"0.5"]))
            step += 2
        writer.write_payload(encode_history(step, [key], [b"NaN"]))
        writer.write_payload(pb.Record(exit=pb.RunExitRecord(exit_code=0)).SerializeToString())
    ours = [history_row(entry.record) for entry in entries(path)[:-1]]
    *theirs, last = official_records(path)
    assert last["type"] == "exit"
    assert [row["history"]["item"]["_step"] for row in theirs] == list(range(step + 1))
    assert [row for row, _ in ours] == list(range(step + 1))
    for (_, row), official in zip(ours[:-1], theirs, strict=False):
        item = official["history"]["item"]
        assert {name: item[name] for name in row} == row
