"""Reading a run whose files change, or cannot be used, at that very moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import verl_logsync
from verl_logsync import pipeline
from verl_logsync.errors import InputWarning, UnreadableInput
from verl_logsync.fingerprint import essentials
from verl_logsync.settings import Settings
from verl_logsync.sources import SOURCES
from verl_logsync.testing.builders import write_verl_log

DEMO_RUN = Path(__file__).parents[2] / "fixtures/demo/outputs/wandb"


def test_first_record_comes_while_it_is_read(tmp_path):
    """A log that had no record when it was found, and has some when it is read, is the same log."""
    shutil.copytree(DEMO_RUN, tmp_path / "wandb")
    (log,) = tmp_path.rglob("*.wandb")
    whole = log.read_bytes()
    log.write_bytes(whole[:300])
    engine = pipeline.Engine(Settings(), SOURCES)
    (run,) = pipeline.survey(engine, [tmp_path]).runs
    assert run.files[0].facts.head_digest == ""
    log.write_bytes(whole)
    assert len(pipeline.load(engine, run).history) > 0


def test_another_log_came_while_it_is_read(tmp_path):
    """A log that was truncated and begun anew is not taken for the one that was found."""
    log = write_verl_log(tmp_path / "grpo" / "exp.jsonl", [(s, {"a": 1.0}) for s in range(5)])
    engine = pipeline.Engine(Settings(), SOURCES)
    (run,) = pipeline.survey(engine, [tmp_path]).runs
    write_verl_log(log, [(s, {"a": 2.0}) for s in range(9)])
    with pytest.raises(UnreadableInput, match="replaced"):
        pipeline.load(engine, run)


def test_load_leaves_out_what_cannot_be_read(tmp_path, monkeypatch):
    """A run that cannot be read costs `load` that run; a warning says which."""
    rows = [(s, {"actor/loss": float(s)}) for s in range(3)]
    bad = write_verl_log(tmp_path / "grpo" / "bad.jsonl", rows)
    write_verl_log(tmp_path / "grpo" / "good.jsonl", rows)
    survey = pipeline.survey

    def survey_then_remove(*arguments):
        found = survey(*arguments)
        bad.unlink()
        return found

    monkeypatch.setattr(pipeline, "survey", survey_then_remove)
    with pytest.warns(InputWarning, match="bad is left out"):
        runs = verl_logsync.load(tmp_path)
    assert [run.name for run in runs] == ["good"]


def test_a_rotated_key_is_the_same_training():
    """Secrets are no part of what identifies a configuration, nor kept with it."""
    one = essentials({"judge": {"api_key": "sk-one", "url": "https://u:secret@host/v1", "n": 3}})
    two = essentials({"judge": {"api_key": "sk-two", "url": "https://u:other@host/v1", "n": 3}})
    assert one == two
    assert "secret" not in repr(one)
    listed = essentials({"reward": {"endpoints": ["https://u:secret@host/v1"]}})
    assert "secret" not in repr(listed)
