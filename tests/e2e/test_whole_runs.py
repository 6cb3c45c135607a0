"""A run that is put together from everything that a job leaves behind."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

import verl_logsync
from verl_logsync.testing.builders import make_offline_run

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """What is left when verl's own log was truncated at the restart: the log of the second start,
    the console of both, Hydra's folder, rollout dumps and checkpoints."""
    folder = tmp_path / "outputs"
    (folder / "grpo_arith").mkdir(parents=True)
    sessions = FIXTURES / "verl_file" / "crash_resume"
    (second,) = sessions.rglob("session2*.jsonl")
    shutil.copy(second, folder / "grpo_arith" / "qwen_small_grpo.jsonl")
    text = gzip.decompress((FIXTURES / "whole_run" / "train.log.gz").read_bytes()).decode()
    for name, ours in (("'verl_examples'", "'grpo_arith'"), ("'gsm8k'", "'qwen_small_grpo'")):
        text = text.replace(name, ours)
    (folder / "train.log").write_text(text)
    hydra = next((FIXTURES / "demo" / "outputs").glob("20*"))
    shutil.copytree(hydra, folder / hydra.name)
    dumps = next((FIXTURES / "rollouts" / "v1_0.9").rglob("1.jsonl")).parent
    shutil.copytree(dumps, folder / "rollout_data")
    checkpoints = next((FIXTURES / "checkpoint").rglob("latest_checkpointed_iteration.txt")).parent
    shutil.copytree(checkpoints, folder / "checkpoints" / "grpo_arith" / "qwen_small_grpo")
    return folder


def _rows(pattern: str) -> dict[int, dict[str, object]]:
    (path,) = (FIXTURES / "verl_file" / "crash_resume").rglob(pattern)
    records = map(json.loads, path.read_text().split("\n")[:-1])
    return {record["step"]: record["data"] for record in records}


def test_nothing_is_missing(outputs):
    """Steps 0..40 once each: up to 20 from the first start, which only the console still has, then
    from the second, whose log says the same as its console."""
    (run,) = verl_logsync.load(outputs)
    history = run.history()
    assert run.name == "qwen_small_grpo"
    assert history.index.tolist() == list(range(41))
    first, second = _rows("session1*"), _rows("session2*")
    for step in range(41):
        data = first[step] if step <= 20 else second[step]
        for key in ("critic/score/mean", "actor/pg_loss", "timing_s/step"):
            if key in data:
                assert history[key][step] == data[key], (step, key)
    assert run.account.superseded == 13
    assert run.account.balanced
    assert run.account.conflict_count == 0
    assert run.config["trainer"]["experiment_name"] == "qwen_small_grpo"


def test_scan_names_the_files_of_every_step(outputs, upload):
    """scan --verbose tells two starts, and which file each stretch of steps comes from."""
    code, text = upload.text(outputs, "--verbose", verb="scan")
    assert code == 0, text
    log, console = outputs / "grpo_arith" / "qwen_small_grpo.jsonl", outputs / "train.log"
    lines = [line.split() for line in text.splitlines() if line.startswith("  steps")]
    assert lines == [
        ["steps", "0..19", "attempt", "1:", str(console)],
        ["steps", "20..20", "attempt", "2:", str(console), "+", str(log)],
        ["steps", "21..40", "attempt", "2:", str(console), "+", str(log)],
    ]
    assert "attempt 1 (recorded start): steps 0..33" in text or "attempt 1" in text
    assert str(outputs / "rollout_data") in text
    assert "checkpoints at steps" in text


def test_uploaded_once(outputs, upload, one_run):
    """It arrives as one run, and again nothing is sent."""
    assert upload.here(outputs, final=True, verify="full").code == 0
    assert [row["_step"] for row in one_run().rows] == list(range(41))
    again = upload.here(outputs, final=True)
    assert (again.code, again.report["totals"]["rows_sent"]) == (0, 0)


def test_the_config_arrives_as_files_and_artifact(outputs, upload, one_run, server):
    """Hydra's files are files of the run and an artifact of type config, without secrets, once."""
    (config,) = outputs.rglob(".hydra/config.yaml")
    config.write_text(config.read_text() + "judge:\n  api_key: sk-very-secret-0123456789abcdef\n")
    overrides = config.with_name("overrides.yaml")
    overrides.write_text(
        overrides.read_text() + "- +judge.api_key=sk-very-secret-0123456789abcdef\n"
    )
    for _ in range(2):
        result = upload.here(outputs, final=True)
        assert result.code == 0, result.report
    run = one_run()
    assert {"hydra/config.yaml", "hydra/overrides.yaml", "hydra/hydra.yaml"} <= run.files.keys()
    (artifact,) = [a for a in server.artifacts if a.type == "config"]
    assert artifact.state == "COMMITTED"
    everything = b"".join(run.files.values()) + repr(run.config).encode()
    assert b"experiment_name" in everything
    assert b"very-secret" not in everything


def test_console_text_that_the_client_kept_too_comes_once(upload, one_run, tmp_path):
    """A run with an offline run and a console log shows the console once, as W&B kept it."""
    make_offline_run(tmp_path / "logs", "abc", range(5), rich=True, name="exp", project="grpo")
    log = tmp_path / "logs" / "train.log"
    log.write_text("".join(f"step:{s} - actor/loss:{s + 0.5}\n" for s in range(5)))
    assert upload.here(tmp_path / "logs", final=True).code == 0
    text = "".join(map(str, one_run().logs))
    assert "attempt:1" in text
    assert "actor/loss" not in text


def test_a_binding_that_cannot_be_written_is_partial(outputs, upload):
    """--bind-checkpoints of a folder that is read-only is said, and ends with exit code 3."""
    (tracker,) = outputs.rglob("latest_checkpointed_iteration.txt")
    tracker.parent.chmod(0o555)
    result = upload(outputs, "--final", "--bind-checkpoints", powers=False)
    tracker.parent.chmod(0o755)
    assert result.code == 3
    assert any("not bound" in note for note in result.only["notes"])
    assert not tracker.with_name("wandb_run_id").exists()
