"""Cases from public reports: it says synced, but was it?"""

from __future__ import annotations

import shutil

from verl_logsync.testing import Fault
from verl_logsync.testing.builders import write_verl_log


def rows(count, **more):
    return [(s, {"actor/loss": s / 7, "timing_s/step": 1.0, **more}) for s in range(count)]


def test_e1_refused_with_413(outputs, age, upload, server, one_run):
    """E1: a server that answers 413 to every row: nothing is marked, the exit code tells, rows stay."""
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows(20))
    age(outputs)
    refusal = server.faults.add(Fault("file_stream", status=413, times=None))
    refused = upload(outputs)
    assert refusal.hits > 0
    assert refused.code in (3, 4)
    assert not refused.only["verified"]
    assert server.lines_received == 0
    _code, text = upload.text(verb="status")
    assert "qwen" not in text or "20" not in text, text
    server.faults.clear()
    later = upload.here(outputs)
    assert (later.code, later.rows_sent, later.only["verified"]) == (0, 20, True)
    assert [r["_step"] for r in one_run().rows] == list(range(20))


def test_e4_verification_reads_unsampled(offline_run, outputs, upload, one_run):
    """E4: 1152 rows are verified by an unsampled read, which is named, without a false alarm."""
    offline_run("long_0_1151")
    for level, how in (("full", "unsampled"), ("counts", "line count")):
        result = upload.here(outputs, verify=level)
        assert result.code == 0
        if result.only["verified_by"] is not None:
            assert result.only["verified"] is True
            assert how in result.only["verified_by"]
        else:
            assert (level, result.rows_sent) == ("counts", 0)
    assert len(one_run().rows) == 1152


def test_e4_full_verification_sees_one_changed_value(offline_run, outputs, upload, one_run):
    """E4: one changed value among 1152 rows with equal counts is found and put right or told."""
    offline_run("long_0_1151")
    upload.here(outputs)
    run = one_run()
    history = run.history
    line = history.lines[700]
    assert '"attempt":1' in line
    history.put(700, [line.replace('"attempt":1', '"attempt":7')])
    run._index.forget()
    result = upload.here(outputs, verify="full")
    assert result.code == 4 or [r["attempt"] for r in one_run().rows] == [1] * 1152
    if result.code == 4:
        assert "step 700" in " ".join(result.only["differences"])


def test_e9_one_of_ten_unreadable(permissions_count, outputs, upload, server, age):
    """E9: one unreadable run of ten is named with its path; the nine others are uploaded."""
    for n in range(10):
        write_verl_log(outputs / "grpo" / f"run{n}.jsonl", rows(3, n=n))
    age(outputs)
    bad = outputs / "grpo" / "run3.jsonl"
    bad.chmod(0)
    result = upload(outputs, powers=False)
    assert result.code == 3
    assert {run.name for run in server.runs} == {f"run{n}" for n in range(10)} - {"run3"}
    assert all(len(run.rows) == 3 for run in server.runs)
    assert result.skipped == {"run3.jsonl": "unreadable"}
    (skip,) = result.report["skipped"]
    assert skip["place"] == str(bad)
    assert "ermission" in skip["detail"]
    assert skip["hint"]


def test_e9_an_offline_run_that_cannot_be_opened(
    permissions_count, outputs, upload, server, offline_run, log_of
):
    """E9: an offline run whose log or whose folder is locked costs that run alone."""
    log_of(offline_run("other_0_9")).chmod(0)
    offline_run("quarter_0")
    locked = offline_run("first_0_29")
    locked.chmod(0)
    result = upload(outputs, powers=False)
    locked.chmod(0o755)
    assert result.code == 3
    assert [run.id for run in server.runs] == ["quarters"]
    assert sorted(result.skipped.values()) == ["unreadable", "unreadable"]


def test_e10_three_times_once_from_another_machine(
    offline_run, outputs, upload, server, one_run, tmp_path
):
    """E10: uploads again, elsewhere and without memory: one run, same rows, no new versions."""
    folder = offline_run("rich_0_19")
    assert upload.here(outputs).code == 0

    def counts():
        run = one_run()
        return (
            run.id,
            len(run.rows),
            len(run.events),
            len(run.logs),
            sorted(run.files),
            sorted((a.name, a.version_index, a.created_times) for a in server.artifacts),
        )

    before, received = counts(), server.lines_received
    assert upload(outputs).rows_sent == 0
    assert counts() == before
    upload.from_another_machine()
    elsewhere = tmp_path / "copied" / "here"
    shutil.copytree(folder, elsewhere / folder.name)
    again = upload(elsewhere)
    assert (again.code, again.rows_sent) == (0, 0)
    assert counts() == before
    assert server.lines_received == received == 20


def test_e10_derived_run_id(outputs, age, upload, server, one_run, tmp_path):
    """E10: a JSONL run is found again from another machine, where it lies in another folder."""
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows(12))
    age(outputs)
    upload.here(outputs)
    upload.from_another_machine()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(outputs, elsewhere)
    age(elsewhere, 3 * 3600)
    again = upload.here(elsewhere)
    assert (again.code, again.rows_sent, server.lines_received) == (0, 0, 12)
    assert len(one_run().rows) == 12
