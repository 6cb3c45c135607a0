"""Cases from public reports: damaged and unfinished files."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log
from verl_logsync.transaction_log import Entry, read_records


def whole_rows(entries, size):
    """How many history records end at or before a byte of the whole file."""
    ends = [entry.offset for entry in entries[1:]] + [size]
    return lambda cut: sum(
        e.kind == "history" and end <= cut for e, end in zip(entries, ends, strict=True)
    )


@pytest.fixture
def entries(offline_run, log_of):
    log = log_of(offline_run("first_0_29"))
    return log, log.read_bytes(), [e for e in read_records(log) if isinstance(e, Entry)]


def test_d1_cut_anywhere(entries, outputs):
    """D1: whatever the end that is cut off, all whole records before it are read."""
    log, whole, found = entries
    rows_before = whole_rows(found, len(whole))
    third = [e for e in found if e.kind == "history"][3]
    inside_header = third.offset + 3
    cuts = [
        len(whole) - 3000,
        inside_header,
        *(third.offset + n for n in range(7)),
        *random.Random(1).sample(range(400, len(whole)), 40),
    ]
    boundaries = {e.offset for e in found} | {len(whole)}
    for cut in cuts:
        log.write_bytes(whole[:cut])
        expected = rows_before(cut)
        runs = verl_logsync.load(outputs)
        frames = [run.history() for run in runs]
        assert sum(map(len, frames)) == expected, cut
        if expected:
            assert frames[0].index.tolist() == list(range(expected)), cut
        if runs and cut not in boundaries:
            reasons = {skip.reason.value for skip in runs[0].account.skips}
            assert "tail incomplete" in reasons, cut


@pytest.mark.parametrize("cut", ["3000 bytes", "inside a header"])
def test_d1_upload_of_a_cut_log(cut, entries, outputs, upload, age, one_run):
    """D1: a cut log's whole rows are uploaded, the tail is called incomplete, exit partial."""
    log, whole, found = entries
    fourth = [e for e in found if e.kind == "history"][4]
    end = len(whole) - 3000 if cut == "3000 bytes" else fourth.offset + 3
    log.write_bytes(whole[:end])
    age(outputs)
    code, text = upload.text(outputs)
    assert code == 3
    assert "tail incomplete" in text
    assert str(log) in text
    assert "byte" in text
    expected = whole_rows(found, len(whole))(end)
    assert [r["_step"] for r in one_run().rows] == list(range(expected))


def records_read_by_wandb(log, env):
    """How many history records W&B's own inspector reads: it resynchronises, unlike its sync."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return sum('"history"' in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("place", ["framing", "payload"])
def test_d2_corrupt_middle(place, offline_run, log_of, outputs, upload, one_run):
    """D2: four bytes overwritten in the middle lose few of 2000 rows, and the lost are listed."""
    log = log_of(offline_run("many_0_1999"))
    found = [e for e in read_records(log) if isinstance(e, Entry) and e.kind == "history"]
    data = bytearray(log.read_bytes())
    start = found[1000].offset + (3 if place == "framing" else 20)
    data[start : start + 4] = b"\xde\xad\xbe\xef"
    log.write_bytes(data)
    readable = records_read_by_wandb(log, upload.env())
    result = upload.here(outputs, verify="full")
    assert result.code == 3
    steps = [r["_step"] for r in one_run().rows]
    assert steps == sorted(set(steps))
    assert 1850 < readable <= len(steps) < 2000, (readable, len(steps))
    account = result.only["account"]
    assert [s["reason"] for s in account["skips"]] == ["corrupt"]
    missing = sorted(set(range(2000)) - set(steps))
    assert missing == list(range(missing[0], missing[-1] + 1))
    span = f"{missing[0]}-{missing[-1]}" if len(missing) > 1 else f"{missing[0]}"
    assert any("no rows for steps" in n and span in n for n in account["notes"]), account["notes"]


@pytest.mark.parametrize("size", [0, 7])
def test_d3_nothing_yet(size, entries, outputs, upload, one_run):
    """D3: a 0-byte or header-only log holds nothing yet: exit 0, and it is read again later."""
    log, whole, _ = entries
    log.write_bytes(whole[:size])
    for _ in range(2):
        code, text = upload.text(outputs)
        assert code == 0
        assert "nothing yet" in text
    assert upload.server.runs == []
    log.write_bytes(whole)
    assert upload.here(outputs).rows_sent == 30
    assert len(one_run().rows) == 30


def test_d4_empty_beside_good(entries, offline_run, outputs, upload, one_run):
    """D4: an empty log beside a good one: the good run is uploaded, the other listed, partial."""
    log, _, _ = entries
    log.write_bytes(b"")
    offline_run("other_0_9")
    result = upload(outputs)
    assert result.code == 3
    assert result.skipped == {log.name: "nothing yet"}
    assert (one_run().id, len(one_run().rows)) == ("otherrun", 10)


@pytest.mark.parametrize("beside", [False, True])
def test_d6_folder_with_files_only(beside, entries, offline_run, outputs, upload, server):
    """D6: a run folder without its log is reported and skipped; the others are uploaded."""
    log, _, _ = entries
    log.unlink()
    if beside:
        offline_run("other_0_9")
    result = upload(outputs)
    assert result.code == 3
    assert result.skipped == {log.parent.name: "no history"}
    assert [run.id for run in server.runs] == (["otherrun"] if beside else [])


@pytest.mark.parametrize("what", ["text", "version"])
def test_d7_not_a_wandb_log(what, entries, offline_run, outputs, upload, one_run):
    """D7: text named .wandb, or another format version, is not a W&B log, and its header is shown."""
    log, whole, _ = entries
    log.write_bytes(b"just some text\n" * 20 if what == "text" else whole[:6] + b"\x09" + whole[7:])
    offline_run("other_0_9")
    code, text = upload.text(outputs)
    assert code == 3
    (line,) = [line for line in text.splitlines() if log.name in line]
    assert "not a W&B log (header" in line, line
    assert one_run().id == "otherrun"


def grow(path, data, seconds=1.5, pieces=150):
    """Append data to a file in pieces that respect no record."""
    rng = random.Random(2)
    cuts = [0, *sorted(rng.sample(range(1, len(data)), pieces)), len(data)]
    with path.open("wb", buffering=0) as stream:
        for start, end in itertools.pairwise(cuts):
            stream.write(data[start:end])
            time.sleep(seconds / pieces)


@pytest.mark.parametrize("kind", ["verl_file", "offline_run"])
def test_d9_live_file_growing(kind, entries, outputs):
    """D9: reading a growing log in a loop never gives a row twice, nor fewer rows than before."""
    log, whole, _ = entries
    count = 30
    if kind == "verl_file":
        shutil.rmtree(log.parent)
        log = write_verl_log(
            outputs / "grpo" / "live.jsonl",
            [(s, {"actor/loss": s / 7, "note": "ü" * s}) for s in range(200)],
        )
        whole, count = log.read_bytes(), 200
    writer = threading.Thread(target=grow, args=(log, whole))
    log.write_bytes(b"")
    writer.start()
    seen = [0]
    while writer.is_alive():
        runs = verl_logsync.load(outputs)
        steps = runs[0].history().index.tolist() if runs else []
        assert steps == list(range(len(steps)))
        seen.append(len(steps))
    writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    (run,) = verl_logsync.load(outputs)
    assert len(run.history()) == count


def test_d9_uploads_of_a_live_file(outputs, upload, one_run, server):
    """D9: uploads while a log grows send every row once."""
    log = write_verl_log(
        outputs / "grpo" / "live.jsonl",
        [(s, {"actor/loss": s / 7, "timing_s/step": 1.0}) for s in range(300)],
    )
    data = log.read_bytes()
    writer = threading.Thread(target=grow, args=(log, data, 4.0))
    log.write_bytes(b"")
    writer.start()
    while writer.is_alive():
        assert upload.here(outputs).code == 0
    writer.join()
    assert upload.here(outputs, final=True).code == 0
    assert [r["_step"] for r in one_run().rows] == list(range(300))
    assert server.lines_received == 300
    assert one_run().overwrites == []


def test_d10_copy_cut_on_a_record_boundary(entries, outputs, upload, one_run, server):
    """D10: a fresh copy cut between records is running, and the whole file later sends the rest."""
    log, whole, found = entries
    middle = [n for n, e in enumerate(found) if e.kind == "history"][15]
    log.write_bytes(whole[: found[middle].offset])
    first = upload.here(outputs, settle=0)
    assert (first.code, first.rows_sent) == (0, 15)
    assert one_run().state == "running"
    log.write_bytes(whole)
    second = upload.here(outputs)
    assert (second.code, second.rows_sent) == (0, 15)
    assert one_run().state == "finished"
    assert [r["_step"] for r in one_run().rows] == list(range(30))
    assert server.lines_received == 30


def test_junk_never_stops_the_good(outputs, upload, server, age):
    """D: every kind of bad input costs itself alone, is named with a next step, and no traceback."""
    folder = outputs / "grpo [1] ü"
    good = [(s, {"actor/loss": s / 7}) for s in range(5)]
    write_verl_log(folder / "good run.jsonl", good)
    (folder / "junk.jsonl").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "dangling.jsonl").symlink_to(folder / "nowhere")
    # A copy that was made while the original was shorter.
    write_verl_log(outputs / "backup" / folder.name / "good run.jsonl", good[:3])
    lines = [json.dumps({"step": s, "data": {"actor/loss": s}}).encode() for s in range(4)]
    lines[1] = lines[1].replace(b"actor", b"act\xff\xfer")
    lines[2] = b'{"step": 2, "data": {"x": "' + b"y" * (17 << 20) + b'"}}'
    (folder / "mixed.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    age(outputs)
    result = upload(outputs)
    assert result.code == 3
    runs = {run.name: [r["_step"] for r in run.rows] for run in server.runs}
    assert runs == {"good run": list(range(5)), "mixed": [0, 3]}
    reasons = {
        Path(s["place"]).relative_to(outputs).as_posix(): s["reason"]
        for s in result.report["skipped"]
    }
    assert reasons == {
        f"backup/{folder.name}/good run.jsonl": "duplicate copy",
        f"{folder.name}/dangling.jsonl": "unreadable",
        f"{folder.name}/empty.jsonl": "nothing yet",
        f"{folder.name}/junk.jsonl": "not a log",
    }
    mixed = next(run for run in result.runs if run["name"] == "mixed")
    lost = [s["reason"] for s in mixed["account"]["skips"]]
    assert lost == ["malformed record", "record too long"]
    assert all(s["hint"] for s in result.report["skipped"] if s["reason"] != "duplicate copy")
