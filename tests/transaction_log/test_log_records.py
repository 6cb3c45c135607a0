"""Records written by hand are those that wandb's own classes write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wandb.proto import wandb_internal_pb2 as pb

from verl_logsync.model import FileRef
from verl_logsync.transaction_log.records import (
    artifact_record,
    console_record,
    counter_record,
    exit_record,
    files_record,
    run_record,
    run_words,
    summary_record,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
_VALUES = st.dictionaries(_TEXT, st.none() | st.booleans() | st.integers() | _TEXT, max_size=5)


@given(
    words=st.lists(_TEXT, min_size=7, max_size=7),
    tags=st.lists(_TEXT.filter(bool), max_size=3),
    config=_VALUES,
    start=st.none() | st.floats(0, 4e9),
    branch=st.none() | st.integers(0, 2**53),
)
def test_run(words, tags, config, start, branch):
    """A run record says what it was told, and is no byte different from wandb's."""
    run_id, entity, project, name, notes, group, job_type = words
    said = run_words(name=name, notes=notes, group=group, job_type=job_type)
    payload = run_record(
        run_id=run_id,
        entity=entity,
        project=project,
        config=config,
        started_at=start,
        words=said,
        tags=tags,
        branch_step=branch,
    )
    run = pb.Record.FromString(payload).run
    assert [run.run_id, run.entity, run.project, run.display_name] == words[:4]
    assert [run.notes, run.run_group, run.job_type] == words[4:]
    assert list(run.tags) == tags
    stored = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert stored == {k: _on_wire(v) for k, v in config.items()}
    assert run.HasField("start_time") == (start is not None)
    if start is not None:
        assert abs(run.start_time.seconds + run.start_time.nanos / 1e9 - start) < 1e-6
    assert run.HasField("branch_point") == (branch is not None)
    if branch is not None:
        point = run.branch_point
        assert (point.run, point.metric, point.value) == (run_id, "_step", branch)


def _on_wire(value: object) -> object:
    """Integers beyond 64 bits become floats."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value


@given(_VALUES)
def test_summary(summary):
    """Every key is one element of a path, whatever slashes it has."""
    record = pb.Record.FromString(summary_record(summary))
    stored = {tuple(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
    assert stored == {(k,): _on_wire(v) for k, v in summary.items()}


def _printed(line: str) -> bytes:
    raw = pb.OutputRawRecord(output_type=pb.OutputRawRecord.OutputType.STDOUT, line=f"{line}\n")
    return bytes(pb.Record(output_raw=raw).SerializeToString())


@given(_TEXT.filter(lambda line: "\x1b" not in line and line.strip("\r")))
def test_console(line):
    """A console line goes to standard output with its line end."""
    assert console_record(line) == _printed(line)


@given(
    st.lists(
        st.sampled_from(["\x1b", "[", "A", "B", "2", "m", "K", "\x1b[A", "\x1b[31m", "\r", "x"]),
        max_size=12,
    ).map("".join)
)
def test_console_lines_leave_the_cursor_alone(line):
    """No line moves the uploader's cursor up or down, swallows its end or draws nothing."""
    printed = pb.Record.FromString(console_record(line)).output_raw.line
    assert "\x1b[A" not in printed
    assert "\x1b[B" not in printed
    assert not printed.endswith(("\x1b\n", "\x1b[\n"))
    assert printed.strip("\r\n")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", " "),
        ("\r", " "),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("up\x1b[A", "up"),
        ("\x1b[?25l\x1b[2K", " "),
    ],
)
def test_what_is_left_of_a_console_line(line, shown):
    """Colours stay; what moves the cursor goes; a blank line has a space."""
    assert console_record(line) == _printed(shown)


@given(st.integers(-(2**31), 2**31 - 1), st.floats(0, 1e9))
def test_exit(code, runtime):
    """An exit record is wandb's own, negative codes included."""
    record = pb.Record(exit=pb.RunExitRecord(exit_code=code, runtime=int(runtime)))
    assert exit_record(code, runtime) == record.SerializeToString()


def test_files():
    """Files keep their name, policy and kind."""
    files = (FileRef("media/ü.png", Path("x"), policy=1, kind=2), FileRef("a.txt", Path("y")))
    record = pb.Record()
    for file in files:
        record.files.files.add(path=file.name, policy=file.policy, type=file.kind)
    assert files_record(files) == record.SerializeToString()


def test_counter():
    """A counter is defined as `wandb.define_metric(NAME)` does it."""
    options = pb.MetricOptions(defined=True)
    record = pb.Record(metric=pb.MetricRecord(name="training/epoch", options=options))
    assert counter_record("training/epoch") == record.SerializeToString()


def test_artifact():
    """An artifact is logged as `run.log_artifact` logs one."""
    payload = artifact_record(
        kind="config",
        name="config-abc",
        digest="d" * 32,
        client_id="c",
        sequence_client_id="s",
        entries=[("hydra/config.yaml", "md5==", 7, "files/hydra/config.yaml")],
    )
    artifact = pb.Record.FromString(payload).artifact
    assert (artifact.type, artifact.name, artifact.digest) == ("config", "config-abc", "d" * 32)
    assert (artifact.client_id, artifact.sequence_client_id) == ("c", "s")
    assert artifact.finalize
    assert not artifact.user_created
    assert list(artifact.aliases) == ["latest"]
    (entry,) = artifact.manifest.contents
    assert (entry.path, entry.digest, entry.size) == ("hydra/config.yaml", "md5==", 7)
    assert entry.local_path == "files/hydra/config.yaml"
    assert artifact.manifest.storage_policy == "wandb-storage-policy-v1"
