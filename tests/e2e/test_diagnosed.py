"""Diagnostics on their way to the server."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import verl_logsync
from verl_logsync import diagnostics
from verl_logsync.pipeline import deriving, preparing, recipe
from verl_logsync.testing.simulate import simulate

FIXTURES = Path(__file__).parents[2] / "fixtures"
NOW = diagnostics.DIAGNOSTICS_VERSION


@pytest.fixture
def sick(tmp_path: Path):
    """A run whose gradient is NaN at step 27, of which so many steps are written."""
    run = simulate("nan_gradient", steps=60, onset=27, seed=1)

    def write(last: int) -> Path:
        whole = run.write(tmp_path / "whole")
        log = tmp_path / "logs" / "grpo" / "sick.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = whole.read_bytes().splitlines(keepends=True)
        log.write_bytes(b"".join(x for x in lines if json.loads(x)["step"] <= last))
        os.utime(log, (time.time() - 7200 + last,) * 2)
        return log

    return write


def _alerts(server) -> list[str]:
    return [r.operation for r in server.requests if "Alert" in str(r.operation)]


def test_a_critical_finding_is_told_once(sick, upload, server, one_run):
    """A critical finding tags the run and alerts once, when its step is sent; earlier rows stay as
    they are, and again nothing is sent."""
    assert upload.here(sick(20)).code == 0
    before = [dict(row) for row in one_run().rows]
    assert "health:critical" not in one_run().tags
    assert _alerts(server) == []
    assert upload.here(sick(40)).code == 0
    run = one_run()
    assert run.rewinds == []
    assert [dict(row) for row in run.rows][: len(before)] == before
    assert "health:critical" in run.tags
    alerted = len(_alerts(server))
    assert alerted >= 1
    assert run.rows[-1]["health/worst"] in (0, 1, 2)
    assert max(row.get("health/worst", 0) for row in run.rows) == 2
    for last in (40, 50):
        assert upload.here(sick(last)).code == 0
    assert len(_alerts(server)) == alerted
    summary = one_run().summary
    assert summary["health/worst"] == 2
    assert summary["health/criticals"] == alerted


def test_a_persons_tags_stay(sick, upload, one_run):
    """Tags that somebody gave the run are kept when ours is added."""
    upload.here(sick(20))
    one_run().tags = ["mine"]
    upload.here(sick(40))
    assert one_run().tags == ["mine", "health:critical"]


def test_diagnostics_only_add(sick, upload, one_run):
    """Every logged value arrives under its own name, whatever is derived beside it."""
    log = sick(60)
    assert upload.here(log, final=True, verify="full").code == 0
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    for record, row in zip(logged, one_run().rows, strict=True):
        for key, value in record["data"].items():
            assert repr(row[key]) == repr(value) or row[key] == value, (record["step"], key)
    series = one_run().config["verl_logsync_series"]
    assert series["reward/mean"]["from"]
    assert {"reward/mean", "trainer/step_per_second"} <= one_run().rows[5].keys()


def test_recompute_sends_all_rows_anew(sick, upload, one_run):
    """--recompute rewinds the run and sends the same rows, also when nothing changed; rows that
    were sent without diagnostics have them then."""
    log = sick(60)
    assert upload.here(log, final=True, diagnostics=False).code == 0
    assert not any("health/worst" in row for row in one_run().rows)
    plain = upload.here(log, final=True)
    assert (plain.code, plain.report["totals"]["rows_sent"]) == (0, 0)
    again = upload.here(log, final=True, recompute=True, verify="full")
    assert (again.code, again.report["totals"]["rows_sent"]) == (0, len(one_run().rows))
    assert len(one_run().rewinds) == 1
    assert all("health/worst" in row for row in one_run().rows[1:])
    assert [row["_step"] for row in one_run().rows] == sorted({r["_step"] for r in one_run().rows})


def test_why_something_is_missing_is_told(sick, upload, one_run):
    """What could not be computed stands in the run's config with why, and in the text of diagnose
    when it is asked for."""
    log = sick(60)
    assert upload.here(log, final=True).code == 0
    missing = one_run().config["verl_logsync_missing"]
    assert "--device-memory-gb" in missing["hybrid_engine/gpu_mem_util"]
    assert not set(missing) & set(one_run().rows[-1])
    short, long = (upload.text(log, *more, verb="diagnose")[1] for more in ((), ("-v",)))
    assert f"not computed: {len(missing)}" in short
    assert missing["hybrid_engine/gpu_mem_util"] not in short
    assert all(key in long and why in long for key, why in missing.items())


def test_reasons_in_the_config_are_bounded():
    """A dump with hundreds of keys does not fill the run's config; how many more there are is
    said."""
    told = deriving._missing({f"rollout_extra/{n}": "x" * 1000 for n in range(250)})
    assert len(told) == deriving.MOST_MISSING + 1
    assert told["..."].startswith("150 more")
    assert max(map(len, told.values())) <= deriving.LONGEST_REASON


def _stretches(run) -> list[tuple[str, str, int]]:
    """(version, version of the set of columns, first step) of a run's marker."""
    kept = run.config["verl_logsync"]["diagnostics"]
    return [(by["version"], by["columns_of"], by["first_step"]) for by in kept]


def test_other_rules_change_nothing_that_was_sent(sick, upload, server, one_run, tmp_path):
    """With another content of the same rules file an upload says so, sends no earlier row and
    alerts of no earlier step again; the config says from which step on the new rules hold."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[rules.REWARD_CRASH]\noff = true\n")
    log = sick(40)
    assert upload.here(log, rules=rules).code == 0
    before, alerted = [dict(row) for row in one_run().rows], len(_alerts(server))
    rules.write_text(
        "[rules.STRICT]\nseverity = 'critical'\nparts.any = { kind = 'level',"
        " series = 'actor/grad_norm', above = 0.0 }\n"
    )
    again = upload.here(log, rules=rules)
    assert again.rows_sent == 0
    assert any("other rules" in n and "--recompute" in n for n in again.only["notes"])
    more = upload.here(sick(50), rules=rules, verify="full")
    assert (more.code, more.rows_sent) == (0, 10)
    assert len(_alerts(server)) == alerted
    assert any("from step 41 on" in note for note in more.only["notes"])
    assert [dict(row) for row in one_run().rows][: len(before)] == before
    assert _stretches(one_run()) == [(NOW, NOW, 0), (NOW, NOW, 41)]
    assert len({by["options"] for by in one_run().config["verl_logsync"]["diagnostics"]}) == 2
    assert one_run().rows[-1]["health/STRICT"] == 2
    assert not any("other rules" in n for n in upload.here(sick(50), rules=rules).only["notes"])
    assert upload.here(sick(50), rules=rules, recompute=True, verify="full").code == 0
    assert _stretches(one_run()) == [(NOW, NOW, 0)]
    judged = {row["_step"]: row.get("health/STRICT") for row in one_run().rows}
    assert judged == {0: None, **dict.fromkeys(range(1, 51), 2), 27: None}


def test_a_run_keeps_its_set_of_columns_over_an_update(sick, upload, one_run, monkeypatch):
    """A run that an earlier version began goes on with that version's columns, computed by the new
    one and marked so; a run that is sent anew gets all."""
    with monkeypatch.context() as patch:
        patch.setattr(diagnostics, "DIAGNOSTICS_VERSION", "1")
        patch.setattr(recipe, "DIAGNOSTICS_VERSION", "1")
        patch.setattr(preparing, "_columns_of", lambda *_: "1")
        assert upload.here(sick(20)).code == 0
    before = [dict(row) for row in one_run().rows]
    result = upload.here(sick(40))
    (note,) = [n for n in result.only["notes"] if "version" in n]
    assert f"of version {NOW}, and not of 1 from step 21 on" in note
    assert "--recompute" in note
    assert [dict(row) for row in one_run().rows][: len(before)] == before
    assert _stretches(one_run()) == [("1", "1", 0), (NOW, "1", 21)]
    later = {d.key for d in diagnostics.described() if d.since > 1}
    assert not later & set(one_run().config["verl_logsync"]["added"])
    assert upload.here(sick(40)).rows_sent == 0
    assert upload.here(sick(40), recompute=True, verify="full").code == 0
    assert _stretches(one_run()) == [(NOW, NOW, 0)]
    assert later & set(one_run().config["verl_logsync"]["added"])


@pytest.fixture
def later_logged(tmp_path):
    """A run whose trainer logs reward/mean itself, as an integer, from step 21 on, and in that step
    something that is called as a column of ours."""
    run = simulate(steps=60, seed=1)
    log = tmp_path / "logs" / "grpo" / "later.jsonl"
    log.parent.mkdir(parents=True)

    def write(last: int, *, first: int = 0, changed: int = -1):
        lines = []
        for line in run.write(tmp_path / "whole").read_text().splitlines():
            row = json.loads(line)
            step = row["step"]
            if step > 20:
                row["data"]["reward/mean"] = 1000 + step + (step == changed)
            if step == 21:
                row["data"]["health/worst"] = 7
            if first <= step <= last:
                lines.append(json.dumps(row))
        log.write_text("".join(f"{line}\n" for line in lines))
        os.utime(log, (time.time() - 7200 + last,) * 2)
        return log

    return write


def _rewards(run) -> dict[int, float]:
    return {row["_step"]: row["reward/mean"] for row in run.rows if "reward/mean" in row}


def test_a_key_that_is_derived_first_and_logged_later(later_logged, upload, one_run):
    """Logged values arrive as they are and derived ones stay, no row is sent twice, also from a
    machine without memory, with or without diagnostics, and every value is verified."""
    assert upload.here(later_logged(20)).code == 0
    derived = _rewards(one_run())
    assert list(derived) == list(range(1, 21))
    log = later_logged(40)
    more = upload.here(log, verify="full")
    assert (more.code, more.rows_sent) == (0, 20)
    assert _rewards(one_run()) == derived | {step: 1000 + step for step in range(21, 41)}
    judged = {row["_step"]: row.get("health/worst") for row in one_run().rows}
    assert judged == {0: None, **dict.fromkeys(range(1, 41), 0), 21: 7} | dict.fromkeys(
        range(22, 41)
    )
    for settings in ({}, {"diagnostics": False}):
        upload.from_another_machine()
        again = upload.here(log, verify="full", **settings)
        assert (again.code, again.rows_sent) == (0, 0)
    assert one_run().rewinds == []


def test_what_is_logged_later_is_part_of_its_rows(later_logged, upload, one_run):
    """A logged value that changes after it was sent is noticed, although the key was derived
    before; a run that is sent whole has the same values as one that was sent in pieces."""
    upload.here(later_logged(20))
    upload.here(later_logged(40))
    upload.here(later_logged(41, changed=30))
    pieces = _rewards(one_run())
    assert one_run().rewinds
    assert pieces[30] == 1031
    again = upload.here(later_logged(41, changed=30), recompute=True, verify="full")
    assert (again.code, again.rows_sent) == (0, 42)
    assert _rewards(one_run()) == pieces


def test_rows_that_only_the_server_has_keep_what_they_logged(later_logged, upload, one_run):
    """When the log was truncated at a restart, logged values of a key that was derived before are
    not taken for derived ones."""
    upload.here(later_logged(20))
    upload.here(later_logged(40))
    whole = [dict(row) for row in one_run().rows]
    result = upload.here(later_logged(50, first=35), verify="full")
    assert (result.code, result.rows_sent) == (0, 10), result.report
    assert [dict(row) for row in one_run().rows][:41] == whole
    assert _rewards(one_run())[50] == 1050
    assert one_run().rewinds == []


def test_another_machine_sends_nothing(sick, upload, one_run, tmp_path):
    """Without the ledger, and with other diagnostics, the rows on the server are still ours."""
    log = sick(60)
    assert upload.here(log, final=True).code == 0
    others: list[dict[str, Any]] = [{}, {"diagnostics": False}, {"device_memory_gb": 80.0}]
    for number, settings in enumerate(others):
        result = upload.here(log, final=True, state_dir=tmp_path / f"state{number}", **settings)
        assert (result.code, result.report["totals"]["rows_sent"]) == (0, 0), settings
    assert one_run().rewinds == []


@pytest.fixture
def live(tmp_path):
    """A run that is being written (steps 0 to 5), whose config names a folder of dumps, and where
    they will be."""
    logs = tmp_path / "logs"
    shutil.copytree(FIXTURES / "demo" / "outputs", logs)
    shutil.rmtree(logs / "wandb")
    for other in (logs / "grpo_arith").iterdir():
        if other.name != "qwen_small_grpo.jsonl.1":
            other.unlink()
    log = logs / "grpo_arith" / "qwen_small_grpo.jsonl.1"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:6]))
    dumps = next((FIXTURES / "rollouts" / "v1_0.9").rglob("1.jsonl")).parent

    def dump(step: int) -> None:
        (logs / "rollouts").mkdir(exist_ok=True)
        shutil.copy(dumps / f"{step}.jsonl", logs / "rollouts")

    return logs, dump


def test_a_step_waits_for_its_dump(live, upload, one_run):
    """Where the config asks for rollout dumps, a step of a live run is sent when its dump is there,
    with its statistics, and tables of groups to look at."""
    logs, dump = live
    (config,) = logs.rglob(".hydra/config.yaml")
    assert "rollout_data_dir" in config.read_text()
    for step in (1, 2):
        dump(step)
    result = upload.here(logs, tables_every=2, settle=3600)
    assert result.code == 0, result.report
    rows = {row["_step"]: row for row in one_run().rows}
    assert max(rows) == 2
    assert rows[1]["grpo/zero_spread_share"] == 0.5
    assert rows[2]["grpo/zero_spread_share"] == 0
    assert rows[2]["grpo/samples"]["_type"] == "table-file"
    assert rows[2]["grpo/samples"]["path"] in one_run().files
    for step in (3, 4, 5):
        dump(step)
    assert upload.here(logs, final=True, tables_every=2).code == 0
    rows = {row["_step"]: row for row in one_run().rows}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert all("grpo/zero_spread_share" in rows[step] for step in range(1, 6))
    assert one_run().rewinds == []


def test_the_first_steps_wait_for_their_dumps_too(live, upload, one_run):
    """Before any dump is there nothing but the validation of step 0 is sent, and all steps that
    wait are named; they come with their dumps, and then nothing more."""
    logs, dump = live
    first = upload.here(logs, settle=3600)
    assert (first.code, [row["_step"] for row in one_run().rows]) == (0, [0])
    (note,) = [n for n in first.only["notes"] if "held back" in n]
    assert note.startswith("steps 1-5 are held back")
    assert "dump of step 1 is not there yet" in note
    for step in (1, 2):
        dump(step)
    assert upload.here(logs, settle=3600).rows_sent == 2
    assert upload.here(logs, settle=3600).rows_sent == 0
    for step in (3, 4, 5):
        dump(step)
    assert upload.here(logs, settle=3600).rows_sent == 2
    last = upload.here(logs, final=True, verify="full")
    assert (last.code, last.rows_sent) == (0, 1)
    assert all("grpo/zero_spread_share" in row for row in one_run().rows[1:])
    assert one_run().rewinds == []
    assert upload.here(logs, final=True).rows_sent == 0


def test_what_was_logged_is_sent_also_when_diagnostics_fail(
    sick, upload, one_run, logged, monkeypatch
):
    """A fault of a diagnostic costs its columns, is told, and is made good by --recompute."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    log = sick(20)
    with monkeypatch.context() as patch:
        patch.setattr(deriving, "diagnose", fails)
        result = upload.here(log, final=True, verify="full")
        assert (result.code, result.rows_sent) == (3, len(one_run().rows))
    assert "a fault" in str(result.report)
    plain = [dict(row) for row in one_run().rows]
    assert upload.here(log, final=True, recompute=True).code == 0
    assert upload.here(log, final=True).code == 0
    assert logged(one_run()) == plain
    assert "health/worst" in one_run().rows[-1]


@pytest.mark.parametrize(
    "rules",
    [
        b"[rules.X",
        b"\xff",
        b"[rules.X]\nparts.a = {kind = 'level', series = 'x', above = " + b"9" * 400 + b"}",
        b"[rules.X]\nparts.a = {kind = 'level', series = 'x', above = " + b"9" * 5000 + b"}",
        b"[rules.X]\nparts.a = {kind = 'level', series = 'x', above = '1'}",
    ],
)
def test_rules_that_cannot_be_used_are_a_usage_error(rules, sick, upload, server, tmp_path):
    """Nothing is sent without the rules that were asked for, and the exit code says so."""
    file = tmp_path / "rules.toml"
    file.write_bytes(rules)
    for verb in ("upload", "diagnose"):
        code, text = upload.text(sick(20), "--rules", file, verb=verb)
        assert code == 2, text
        assert "rules.toml" in text
    assert server.runs == []


def test_python_face(sick):
    """diagnose(run) gives findings and series, without sending anything."""
    (run,) = verl_logsync.load(sick(60))
    result = verl_logsync.diagnose(run)
    assert "GRADIENT_NON_FINITE" in [f.code for f in result.findings]
    (finding,) = [f for f in result.findings if f.code == "GRADIENT_NON_FINITE"]
    assert finding.first_step == 27
    series = result.series()
    assert series.index.tolist() == run.history().index.tolist()
    assert series["reward/mean"][30] == run.history()["critic/rewards/mean"][30]


def test_the_gate(sick, upload):
    """diagnose ends with 8 when a finding is as grave as --fail-on says, else with 0."""
    log = sick(60)
    code, text = upload.text(log, verb="diagnose")
    assert code == 0, text
    assert "GRADIENT_NON_FINITE" in text
    assert "step 27" in text
    assert upload.text(log, "--fail-on", "critical", verb="diagnose")[0] == 8
    healthy = sick(20)
    assert upload.text(healthy, "--fail-on", "critical", verb="diagnose")[0] == 0


def test_what_diagnose_could_not_use_is_said(sick, upload):
    """Damaged records of a log are named by diagnose, and its exit code tells, as with scan."""
    log = sick(20)
    with log.open("ab") as file:
        file.write(b"\x00\xff no record\n")
    code, text = upload.text(log, verb="diagnose")
    assert code == 3, text
    assert f"skipped {log}:" in text
    (run,) = json.loads(upload.text(log, "--json", verb="diagnose")[1])["runs"]
    assert [skip["reason"] for skip in run["skips"]] == ["malformed record"]
