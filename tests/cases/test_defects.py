"""Defects that hostile testing found, kept so that they do not come back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from verl_logsync import api
from verl_logsync.errors import UsageError, quoted
from verl_logsync.jsonlines import read_lines
from verl_logsync.secrets_mask import mask_config
from verl_logsync.settings import Settings
from verl_logsync.sources.hydra import read_config
from verl_logsync.testing import Fault, LoopbackServer
from verl_logsync.testing.builders import write_verl_log

VALIDATION = (0, {"val-core/x": 0.5})


def _log(path: Path, steps: range, value: float, *, first: Any = None, hours: float = 2) -> Path:
    rows = [(step, {"actor/loss": value, "n": step}) for step in steps]
    write_verl_log(path, [first, *rows] if first else rows)
    os.utime(path, (time.time() - hours * 3600,) * 2)
    return path


def _steps(server: LoopbackServer) -> list[list[int]]:
    return sorted([row["_step"] for row in run.rows] for run in server.runs)


def test_two_starts_with_one_first_record(upload, server, tmp_path):
    """Two starts from scratch whose first validation is equal are two runs, each whole."""
    folder = tmp_path / "logs" / "grpo"
    _log(folder / "exp.jsonl.1", range(1, 20), 1.0, first=VALIDATION, hours=4)
    _log(folder / "exp.jsonl", range(1, 11), 2.0, first=VALIDATION)
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(11)), list(range(20))]
    upload.from_another_machine()
    assert upload.here(tmp_path / "logs").rows_sent == 0
    assert len(server.runs) == 2


def test_restart_from_scratch_keeps_the_old_run(upload, server, tmp_path):
    """verl truncated the log and began anew: what was uploaded before stays as it is."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    _log(path, range(1, 20), 1.0, first=VALIDATION, hours=4)
    upload.here(tmp_path / "logs")
    _log(path, range(1, 11), 2.0, first=VALIDATION)
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(11)), list(range(20))]


def test_an_older_copy_rewinds_nothing(upload, server, tmp_path):
    """A machine that has only the first attempt's log leaves the resumed run alone."""
    new, old = tmp_path / "new" / "grpo", tmp_path / "old" / "grpo"
    _log(new / "exp.jsonl.1", range(34), 1.0)
    _log(new / "exp.jsonl", range(21, 41), 2.0)
    _log(old / "exp.jsonl", range(34), 1.0)
    upload.here(tmp_path / "new")
    result = upload.here(tmp_path / "old", state_dir=tmp_path / "other")
    assert result.only["action"] == "remote is ahead"
    assert _steps(server) == [list(range(41))]
    assert server.runs[0].rewinds == []


def test_offline_output_has_one_folder_a_run(upload, tmp_path):
    """A growing run's folder is replaced, and its times do not move."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    seconds = {"timing_s/step": 30.0}
    for count, hours in ((5, 3), (9, 2)):
        write_verl_log(path, [(s, {"actor/loss": 1.0, **seconds}) for s in range(count)])
        os.utime(path, (time.time() - hours * 3600,) * 2)
        upload.here(tmp_path / "logs", mode="offline", output=tmp_path / "out")
    (folder,) = (tmp_path / "out").iterdir()
    (run,) = api.load(folder)
    frame = run.history()
    assert frame.index.tolist() == list(range(9))
    assert set(frame["_timestamp"].diff().dropna().round(3)) == {30.0}


def _restarted_behind_an_air_gap(upload, tmp_path, *, between=lambda: None):
    """verl truncates its log at a resume from step 5; fragments are written before and after."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    path = logs / "grpo" / "exp.jsonl"
    rows = [(s, {"actor/pg_loss": s / 7, "critic/score/mean": 0.5}) for s in range(1, 9)]
    write_verl_log(path, rows)
    os.utime(path, (time.time() - 3 * 3600,) * 2)
    upload.here(logs, mode="offline", output=out)
    between()
    rows = [(s, {"actor/pg_loss": s / 9, "critic/score/mean": 0.25}) for s in range(6, 13)]
    write_verl_log(path, [(5, {"val-core/x": 0.5}), *rows])
    os.utime(path, (time.time() - 2 * 3600,) * 2)
    return logs, out, upload.here(logs, mode="offline", output=out)


def test_a_truncated_log_takes_nothing_from_the_offline_folders(upload, server, tmp_path):
    """The fragment of the start before a truncation stays beside the new one, that is said, and
    the far side makes one run of both."""
    _, out, result = _restarted_behind_an_air_gap(upload, tmp_path)
    first, _ = sorted(folder.name for folder in out.iterdir())
    assert f"{first} stays beside it" in " ".join(result.only["notes"])
    upload.from_another_machine()
    assert upload.here(out).code == 0
    assert _steps(server) == [list(range(1, 13))]
    assert [row["critic/score/mean"] for row in server.runs[0].rows] == [0.5] * 5 + [0.25] * 7


def test_the_machine_of_a_fragment_sends_nothing_again(upload, server, tmp_path):
    """What was sent from fragments is what was logged, and what was derived is known as such: the
    machine that wrote them has nothing to send, also behind a truncation of its log."""

    def far_side() -> None:
        assert upload.here(tmp_path / "out").code == 0

    logs, out, _ = _restarted_behind_an_air_gap(upload, tmp_path, between=far_side)
    far_side()
    assert "reward/mean" in server.runs[0].config["verl_logsync"]["added"]
    received = server.lines_received
    upload.from_another_machine()
    assert upload.here(logs).code == 0
    assert server.lines_received == received
    assert _steps(server) == [list(range(1, 13))]


def test_our_own_fragments_are_no_attempts(upload, server, tmp_path):
    """A fragment that lies below the logs it was made from is not counted again."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(10), 1.0)
    upload.here(tmp_path / "logs", mode="offline", output=tmp_path / "logs" / "frag")
    result = upload.here(tmp_path / "logs", output=tmp_path / "elsewhere")
    assert result.only["account"]["seen"] == 10
    assert _steps(server) == [list(range(10))]


def test_doubled_rows_are_mended(upload, server, tmp_path):
    """Rows that somebody else sent twice are not called up to date; the run is rewound."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(10), 1.0)
    upload.here(tmp_path / "logs")
    run = server.runs[0]
    run.write("wandb-history.jsonl", 10, list(run.lines))
    assert len(run.rows) == 20
    upload.from_another_machine()
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(10))]


def test_rows_beyond_what_was_meant_are_mended(upload, server, tmp_path):
    """Copies under later steps (two uploads at once) are taken away, not called "ahead"."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(10), 1.0)
    upload.here(tmp_path / "logs")
    run = server.runs[0]
    copies = [json.dumps({**row, "_step": row["_step"] + 10}) for row in run.rows]
    run.write("wandb-history.jsonl", 10, copies)
    upload.from_another_machine()
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(10))]
    assert server.runs[0].summary["_step"] == 9


def test_one_project_refused(upload, server, tmp_path):
    """A project that the server refuses costs the runs of that project only."""
    for project in ("aaa", "bbb", "ccc"):
        _log(tmp_path / "logs" / project / "exp.jsonl", range(5), 1.0)
    answer = '{"data": null, "errors": [{"message": "project is archived"}]}'
    refused: list[str] = []

    def only_bbb(request: Any) -> None:
        refused.append(request.path)

    server.faults.add(
        Fault("VerlLogsyncRuns", skip=2, times=1, body=answer, status=200, callback=only_bbb)
    )
    result = upload.here(tmp_path / "logs")
    assert refused
    assert result.code == 3
    assert len(_steps(server)) == 2
    assert sum(run["error"] is not None for run in result.runs) == 1


def test_replaced_between_walk_and_read(upload, server, tmp_path):
    """A log that was replaced while the upload ran is not taken for the one that was found."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    _log(path, range(30), 1.0)
    upload.here(tmp_path / "logs")
    with path.open("ab") as log:
        log.write(b'{"step":30,"data":{"actor/loss":1.0}}\n')

    def restart(_: Any) -> None:
        path.unlink()
        _log(path, range(6), 5.0)

    server.faults.add(Fault("VerlLogsyncRuns", times=1, callback=restart))
    assert upload.here(tmp_path / "logs").code == 3
    assert _steps(server) == [list(range(30))]


def test_same_name_in_two_folders(upload, server, tmp_path):
    """A resumed job continues the run of its own folder, not another's of the same name."""
    first, second = (tmp_path / "logs" / name / "grpo" / "exp.jsonl" for name in ("A", "B"))
    _log(first, range(31), 1.0)
    _log(second, range(41), 5.0)
    upload.here(tmp_path / "logs")
    _log(first, range(21, 51), 2.0)
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(41)), list(range(51))]


@pytest.mark.parametrize("seconds", [1e12, 1e300, -5.0])
def test_absurd_step_times(upload, server, tmp_path, seconds):
    """A step time that no step can take gives no time, not an error."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    write_verl_log(path, [(s, {"actor/loss": 1.0, "timing_s/step": seconds}) for s in range(4)])
    os.utime(path, (time.time() - 7200,) * 2)
    assert upload.here(tmp_path / "logs").code == 0
    assert "_timestamp" not in server.runs[0].rows[0]


def test_appends_with_objects_raise_no_alarm(upload, server, tmp_path):
    """Object values are counted alike in a first upload and in appends."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    for count in (3, 6):
        rows = [(s, {"x/obj": {"a": s, "e": {}}, "y": {}, "z": -0.0}) for s in range(count)]
        write_verl_log(path, rows)
        os.utime(path, (time.time() - 7200 + count,) * 2)
        result = upload.here(tmp_path / "logs", verify="full")
        assert result.code == 0, result.report
    assert any("on W&B's wire" in note for note in result.only["notes"])


def test_a_changed_config_of_the_same_size(upload, server, tmp_path):
    """A later attempt's config replaces the files of the run, and is a new version of the
    artifact, whole, also where a file did not change or kept its size."""
    logs = tmp_path / "logs"
    log = write_verl_log(logs / "grpo" / "exp.jsonl", [(s, {"a": 1.0}) for s in range(4)])
    os.utime(log, (time.time() - 7200,) * 2)
    for day, count in enumerate((2, 4), 1):
        hydra = logs / f"2026-01-0{day}" / "00-00-00" / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "config.yaml").write_text(
            f"trainer: {{project_name: grpo, experiment_name: exp}}\nn: {count}\n"
        )
        (hydra / "overrides.yaml").write_text("[]\n")
        assert upload.here(logs, final=True).code == 0
        (run,) = server.runs
        assert f"n: {count}".encode() in run.files["hydra/config.yaml"]
    assert [(a.state, sorted(a.files)) for a in server.artifacts] == [
        ("COMMITTED", ["hydra/config.yaml", "hydra/overrides.yaml"])
    ] * 2


def test_secrets_below_secret_names():
    """Whatever lies below a secret name is masked; verl's token counts and keys are not."""
    config = {
        "secrets": {"openai": "S1"},
        "api_keys": ["S2"],
        "judge_token": "S3",
        "db_pass": "S4",
        "env": {"AWS_SECRET_KEY": "S5", "SLACK_WEBHOOK": "https://x/S6"},
        "headers": "Authorization: Bearer S7",
        "proxy": "http://S8@proxy:1",
        "args": ["--api-key", "S9"],
        "credentials": {"deep": {"value": "S10"}},
        "wandb": {"key": "S11"},
        "TOKEN_HF": "S12",
        "hf_token_value": "S13",
        "start": "wandb login S14-aaaaaaaaaaaaaaaaaaaa && python",
        "pem": "-----BEGIN PRIVATE KEY-----\nS15\n-----END PRIVATE KEY-----",
        "hydra_overrides": ["+wandb.key=S16"],
    }
    assert not re.search(r"S\d", json.dumps(mask_config(config)))
    harmless = {
        "max_token_len": 5,
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "loss_agg_mode": "token-mean",
        "stop_token": "</s>",
        "num_memory_tokens": 4,
    }
    assert mask_config(harmless) == harmless


def test_secrets_inside_the_texts_of_a_config():
    """Quoted, nested in an override, in an address or behind the words of a container's
    environment: a secret's name is enough."""
    config = {
        "env": {"HUGGING_FACE_HUB_TOKEN": "S1", "AWS_SESSION_TOKEN": "S2"},
        "hydra_overrides": [
            "++env.HF_TOKEN='S3'",
            "judge={api_key:S4,n:2}",
            "+judge.private_key=pa,ssS5",
            '+judge.url="https://host/?a=1&api_key=S6"',
            "+judge.api_keys=[S7,S8]",
        ],
        "envs": [{"name": "WANDB_API_KEY", "value": "S9"}],
        "json": '{"judge": {"api_key": "S10 and more"}}',
        "store": "Server=host;Password=S11;",
        "proxy": "http://user:p@S12@proxy:1",
        "tool": "glpat-S13aaaaaaaaaaaaaaaa",
    }
    assert not re.search(r"S\d", json.dumps(mask_config(config)))
    harmless = {
        "unk_token": "<unk>",
        "generation_token": "<gen>",
        "hydra_overrides": ["data.prompt_key=prompt", "trainer.logger=[console,wandb]"],
        "url": "https://host/c?x=1&y=2",
    }
    assert mask_config(harmless) == harmless


def test_a_secret_is_masked_wherever_it_occurs(upload, server, tmp_path):
    """What one file of Hydra names as a secret does not leave by another, by an interpolation, by
    the console's text or by the artifact."""
    secret = "kwF7-not-for-others"
    folder = tmp_path / "logs" / "2026-01-01" / "00-00-00"
    hydra = folder / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(
        "trainer: {project_name: grpo, experiment_name: exp}\n"
        f"judge: {{api_key: {secret}, header: 'X-K ${{judge.api_key}}', model: {secret}x}}\n"
    )
    (hydra / "overrides.yaml").write_text(f"- +judge.model={secret}x\n")
    (hydra / "hydra.yaml").write_text(f"hydra: {{job: {{override_dirname: 'j={secret}'}}}}\n")
    (folder / "main.log").write_text(
        "{'trainer': {'project_name': 'grpo',\n             'experiment_name': 'exp'}}\n"
        f"asked with {secret}\n"
        + "".join(f"step:{s} - critic/rewards/mean:0.5 - timing_s/step:3.0\n" for s in (1, 2))
    )
    assert upload.here(tmp_path / "logs", final=True).code == 0
    (run,) = server.runs
    (artifact,) = server.artifacts
    assert "asked with ***" in "".join(run.logs)
    assert len(artifact.files) == 3
    everything = [*run.logs, json.dumps(run.config), *run.files.values(), *artifact.files.values()]
    assert not [text for text in everything if secret in str(text)]


def test_secrets_in_metrics_that_are_texts_or_objects(upload, one_run, tmp_path, age):
    """What a trainer logs as text or object is masked like a config: in rows, summary, export."""
    secrets = ["kwF7notforothers", "hf_" + "a1" * 15, "glpat-" + "b" * 20]
    values = {
        "cfg": {"judge": {"api_key": secrets[0]}, "n": 2},
        "note": f"asked with token={secrets[1]}",
        "tools": ["search", secrets[2]],
        "text": "plain",
    }
    log = write_verl_log(tmp_path / "logs/grpo/exp.jsonl", [(s, values) for s in range(3)])
    age(log)
    assert upload.here(tmp_path / "logs", verify="full").code == 0
    assert upload.here(tmp_path / "logs").rows_sent == 0
    run = one_run()
    assert run.rows[1]["cfg"] == {"judge": {"api_key": "***"}, "n": 2}
    assert run.rows[1]["text"] == "plain"
    upload.text(tmp_path / "logs", tmp_path / "out", "--to", "jsonl", verb="export")
    everything = [*run.rows, run.summary, *(p.read_text() for p in tmp_path.rglob("*-*.jsonl"))]
    assert len(everything) > 4
    assert not [text for text in map(str, everything) if any(s in text for s in secrets)]


def test_environment_does_not_leak_into_a_config(tmp_path, monkeypatch):
    """No interpolation, however written, brings this machine's environment into the config."""
    monkeypatch.setenv("MY_SECRET", "hunter2")
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: ${oc.env:MY_SECRET}\nb: ${oc.decode:${oc.env:MY_SECRET}}\nx: oc.env\n"
        "c: ${${x}:MY_SECRET}\nd: ${oc.create:${oc.env:MY_SECRET}}\ne: ${a}\nf: ${x}\n"
    )
    config = read_config(path)
    assert "hunter2" not in str(config)
    assert config["f"] == "oc.env"


def test_holes_and_junk_before_the_first_record(upload, server, tmp_path):
    """A log whose first 64 KiB are damaged is still read from its first good record on."""
    folder = tmp_path / "logs" / "grpo"
    for name, damage in (("hole", b"\0" * 100_000), ("junk", b"x" * 70_000 + b"\n")):
        path = _log(folder / f"{name}.jsonl", range(8), 1.0)
        path.write_bytes(damage + path.read_bytes())
        os.utime(path, (time.time() - 7200,) * 2)
    upload.here(tmp_path / "logs")
    assert [steps[-1] for steps in _steps(server)] == [7, 7]


def test_oversized_rows_are_named_and_left_out(upload, server, tmp_path):
    """A row that W&B does not take is skipped with its place, once and for all."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    rows = [(s, {"text": "x" * 11_000_000 if s == 2 else "y"}) for s in range(4)]
    write_verl_log(path, rows)
    os.utime(path, (time.time() - 7200,) * 2)
    assert upload.here(tmp_path / "logs").code == 3
    assert _steps(server) == [[0, 1, 3]]
    assert upload.here(tmp_path / "logs").rows_sent == 0


def test_skipped_records_are_in_the_account(upload, tmp_path):
    """Promise 2: a record that cannot be read is seen and skipped, and the account balances."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    _log(path, range(6), 1.0)
    lines = path.read_bytes().split(b"\n")
    lines[2] = b"{broken"
    lines[4] = b'{"step": "x", "data": {}}'
    path.write_bytes(b"\n".join(lines))
    (run,) = api.load(path)
    account = run.account
    assert (account.seen, account.kept, account.skipped) == (6, 4, 2)
    assert account.balanced


def test_a_name_that_is_no_text(upload, server, tmp_path):
    """A file whose name is no UTF-8 costs itself only."""
    folder = tmp_path / "logs" / "grpo"
    good = _log(folder / "exp.jsonl", range(5), 1.0)
    bad = os.fsencode(folder) + b"/exp\xff.jsonl"
    try:
        shutil.copyfile(good, bad)
    except OSError:
        pytest.skip("this file system has text names only")
    code, text = upload.text(tmp_path / "logs")
    assert code == 3
    assert "no UTF-8" in text
    assert _steps(server) == [list(range(5))]


def test_a_line_that_is_being_written(tmp_path, monkeypatch):
    """What a writer adds while the end of a log is read is no line of its own."""
    path = tmp_path / "grpo" / "exp.jsonl"
    path.parent.mkdir()
    whole = b"".join(b'{"step":%d,"data":{"a":%d}}\n' % (s, s) for s in range(3))
    path.write_bytes(whole[:-9])
    lines = read_lines(path)
    seen = [next(lines), next(lines), next(lines)]
    with path.open("ab") as log:
        log.write(whole[-9:] + whole)
    assert [line.ended for line in seen] == [True, True, False]
    assert list(lines) == []


def test_memory_is_not_believed_after_another_machine(upload, server, tmp_path):
    """Rows that another machine replaced, as many as before, are read and not sent again."""
    first, both = tmp_path / "first" / "grpo", tmp_path / "both" / "grpo"
    _log(first / "exp.jsonl", range(34), 1.0)
    _log(both / "exp.jsonl.1", range(34), 1.0)
    _log(both / "exp.jsonl", range(21, 34), 2.0)
    upload.here(tmp_path / "first")
    upload.here(tmp_path / "both", state_dir=tmp_path / "other")
    assert upload.here(tmp_path / "both").rows_sent == 0
    assert len(server.runs[0].rewinds) == 1


def test_a_truncated_log_takes_nothing_from_the_server(upload, server, tmp_path):
    """The row at the resume step, whose log is gone, is never taken back to be sent again."""
    path = tmp_path / "logs" / "grpo" / "exp.jsonl"
    _log(path, range(34), 1.0)
    upload.here(tmp_path / "logs")
    _log(path, range(21, 41), 2.0, first=(20, {"val-core/x": 0.7}))
    result = upload.here(tmp_path / "logs")
    assert result.code == 0
    assert _steps(server) == [list(range(41))]
    assert [step for step, _ in server.runs[0].rewinds] == [20]
    assert server.runs[0].rows[20]["actor/loss"] == 1
    assert result.only["account"]["skipped"] == 1
    upload.from_another_machine()
    assert upload.here(tmp_path / "logs").rows_sent == 0


def test_links_are_followed_so_far_and_no_further(tmp_path):
    """Linked folders are entered, but not endlessly many links deep, and that is said."""
    inner = tmp_path / "elsewhere"
    _log(inner / "0" / "grpo" / "exp.jsonl", range(3), 1.0)
    for number in range(1, 4):
        (inner / str(number)).mkdir()
        (inner / str(number) / "next").symlink_to(inner / str(number - 1))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "near").symlink_to(inner / "1")
    assert len(api.load(tmp_path / "logs")) == 1
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to(inner / "3")
    found, _ = api.scan([tmp_path / "far"], Settings())
    assert found.runs == ()
    assert any("links" in skip.detail for skip in found.skips)


def test_a_restart_inside_one_file_names_an_offset_that_moves_the_second_start_only(
    upload, server, tmp_path
):
    """The named offset counts from the restart on: the first start keeps its steps."""
    rows = [*((step, {"actor/loss": 1.0}) for step in range(1, 11)), (1, {"actor/loss": 2.0})]
    log = write_verl_log(tmp_path / "logs" / "grpo" / "exp.jsonl", rows)
    os.utime(log, (time.time() - 7200,) * 2)
    result = upload.here(tmp_path / "logs")
    assert result.code == 3
    hint = result.only["error"]["hint"]
    assert "--on-restart replace" in hint
    assert f"--offset {log}=10;" in hint
    assert upload.here(tmp_path / "logs", offsets=((str(log), 10),)).code == 0
    assert _steps(server) == [list(range(1, 12))]


def test_the_offset_of_a_restart_can_be_pasted(upload, server, tmp_path):
    """The named offset puts the beginning of the later file at the end of the earlier one."""
    folder = tmp_path / "logs" / "grpo"
    _log(folder / "exp.jsonl.1", range(10), 1.0, hours=4)
    later = _log(folder / "exp.jsonl", range(5), 2.0)
    hint = upload.here(tmp_path / "logs", merge="always").only["error"]["hint"]
    (option,) = re.findall(r"--offset (\S+);", hint)
    assert option == f"{later}=9"
    assert upload.here(tmp_path / "logs", merge="always", offsets=((str(later), 9),)).code == 0
    assert _steps(server) == [list(range(14))]


def test_rules_that_cannot_be_read_are_a_usage_error(upload, tmp_path):
    """Rules that are no TOML are said before anything is sent."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(3), 1.0)
    rules = tmp_path / "rules.toml"
    rules.write_text("no = = toml")
    with pytest.raises(UsageError, match="not a TOML file"):
        upload.here(tmp_path / "logs", rules=rules)


def test_a_step_number_is_no_word_of_the_uploader(upload, server, tmp_path):
    """A refused rewind to step 500 is a refusal, not a passing "500"."""
    folder = tmp_path / "logs" / "grpo"
    _log(folder / "exp.jsonl.1", range(1, 510), 1.0, hours=4)
    assert upload.here(tmp_path / "logs").code == 0
    _log(folder / "exp.jsonl", range(501, 520), 2.0)
    no = '{"errors": [{"message": "rewind is not offered here"}]}'
    server.faults.add(Fault("rewindRun", times=None, status=200, body=no))
    result = upload.here(tmp_path / "logs")
    assert (result.code, result.only["action"]) == (3, "kept old rows")
    assert _steps(server) == [list(range(1, 520))]


def test_recompute_never_takes_what_only_the_server_has(upload, server, tmp_path):
    """Rows whose log verl truncated stay where they are when the others are sent anew."""
    log = tmp_path / "logs" / "grpo" / "exp.jsonl"
    _log(log, range(1, 31), 1.0, hours=4)
    assert upload.here(tmp_path / "logs", stale_after=1e9).code == 0
    _log(log, range(21, 41), 2.0)
    assert upload.here(tmp_path / "logs").code == 0
    assert upload.here(tmp_path / "logs", recompute=True).code == 0
    assert [step for step, _ in server.runs[0].rewinds] == [20, 20]
    assert _steps(server) == [list(range(1, 41))]


def test_a_rewind_that_lost_its_rows_is_mended_though_no_file_changed(upload, server, tmp_path):
    """What was confirmed before a rewind is not believed after it."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(1, 11), 1.0)
    assert upload.here(tmp_path / "logs").code == 0
    server.faults.add(Fault("file_stream", times=None, status=400))
    assert upload.here(tmp_path / "logs", recompute=True).code != 0
    assert _steps(server) == [[]]
    server.faults.clear()
    assert upload.here(tmp_path / "logs").code == 0
    assert _steps(server) == [list(range(1, 11))]


def test_the_output_folder_may_hold_the_trainers_own_run(upload, offline_run, outputs):
    """--output never replaces a run folder that the trainer wrote."""
    folder = offline_run("first_0_29", outputs)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = upload.here(folder, mode="offline", output=outputs)
    assert result.code == 2
    assert "--output" in result.only["error"]["hint"]
    assert {path: path.read_bytes() for path in outputs.rglob("*") if path.is_file()} == before


def test_another_patience_looks_again(upload, tmp_path):
    """A run that --stale-after now calls over is finished, though no file changed."""
    _log(tmp_path / "logs" / "grpo" / "exp.jsonl", range(3), 1.0, hours=0.2)
    assert upload.here(tmp_path / "logs").only["state"] == "running"
    assert upload.here(tmp_path / "logs", stale_after=60).only["state"] == "finished"


def test_dumps_that_came_late_are_said(upload, fixture_files, tmp_path):
    """Rows that were sent before their dumps came are not changed, and the flag is named."""
    rows = [(step, {"actor/loss": 1.0}) for step in (1, 2)]
    log = write_verl_log(tmp_path / "logs" / "grpo" / "exp.jsonl", rows)
    os.utime(log, (time.time() - 7200,) * 2)
    assert upload.here(tmp_path / "logs").code == 0
    dumps = next((fixture_files / "rollouts" / "v0_0.8").rglob("1.jsonl")).parent
    shutil.copytree(dumps, tmp_path / "logs" / "grpo" / "rollouts")
    late = upload.here(tmp_path / "logs", final=True)
    assert (late.code, late.rows_sent) == (0, 0)
    assert any("--recompute" in note for note in late.only["notes"])
    assert upload.here(tmp_path / "logs", final=True, recompute=True).rows_sent == 2


ODD_NAMES = ["a\nok   faked run [x] up to date", "b\x1b[31mred", "c\u2028d", "e\u202ef", "g'h\\i\n"]


@pytest.mark.parametrize("verb", ["scan", "upload", "diagnose", "snapshot"])
def test_names_never_fake_a_line_or_steer_the_terminal(upload, tmp_path, verb):
    """Whatever a file or folder is called, its name is printed as text on one line, and what is to
    be pasted into a shell means that very file."""
    for number, name in enumerate(ODD_NAMES):
        folder = tmp_path / "logs" / name / f"grpo{name}"
        _log(folder / f"{name}{number}.jsonl", range(3), float(number))
        (folder / f"{name}.log").write_bytes(b"nothing")
        (folder / f"{name}.parquet").write_bytes(b"PAR1 junk")
    code, text = upload.text(tmp_path / "logs", verb=verb)
    assert code in (0, 3)
    assert all(line.isprintable() for line in text.splitlines())
    assert "faked run" in text or verb == "snapshot"
    assert not [line for line in text.splitlines() if line.startswith("ok   faked")]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_quoted_names_mean_the_same_in_a_shell(name):
    """A quoted path is printable and is that path again in bash."""
    word = quoted(f"dir/{name}")
    assert word.isprintable()
    command = ["bash", "-c", f"printf %s {word}"]
    said = subprocess.run(command, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert said.stdout.decode() == f"dir/{name}"


@pytest.mark.parametrize(
    "name", ["debug.log", "debug-internal.log", "debug-core.log", "core-debug-20260817_090000.log"]
)
def test_the_clients_diaries_are_no_logs_of_training(tmp_path, name):
    """W&B's own diaries, of its core too, give no verdict; another log beside them does."""
    (tmp_path / "wandb" / "logs").mkdir(parents=True)
    (tmp_path / "wandb" / "logs" / name).write_text('{"time":"x","level":"INFO","msg":"started"}\n')
    (tmp_path / "wandb" / "logs" / "core.log").write_text("nothing of ours\n")
    found, _ = api.scan([tmp_path], Settings())
    assert [Path(skip.place).name for skip in found.skips] == ["core.log"]
