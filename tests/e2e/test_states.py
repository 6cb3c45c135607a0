"""When rows are ready, and in which state a run is left."""

from __future__ import annotations

import json
import os
import time

import pytest

from verl_logsync.testing.builders import write_verl_log


@pytest.fixture
def log(outputs):
    return write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [(s, {"actor/loss": s / 10, "timing_s/step": 10.0}) for s in range(6)],
    )


def test_the_newest_step_of_a_fresh_log_is_held_back(log, upload, age, one_run):
    """A fresh log's newest step waits; settled it is sent, running; stale it is finished."""
    first = upload.here(log.parent)
    assert (first.code, first.rows_sent, one_run().state) == (0, 5, "running")
    age(log.parent, 600)
    second = upload.here(log.parent)
    assert (second.code, second.rows_sent, one_run().state) == (0, 1, "running")
    age(log.parent)
    third = upload.here(log.parent)
    assert (third.code, third.rows_sent, one_run().state) == (0, 0, "finished")
    assert one_run().summary["_step"] == 5
    assert [r["_step"] for r in one_run().rows] == list(range(6))


def test_final_sends_everything_now(log, upload, one_run):
    """`--final` holds nothing back and finishes the run."""
    assert upload(log.parent, "--final").rows_sent == 6
    assert one_run().state == "finished"


def test_a_finished_run_grows_again(log, upload, age, one_run):
    """A run that was finished and gets new rows re-opens, appends and finishes again."""
    age(log.parent)
    upload.here(log.parent)
    with log.open("a") as stream:
        stream.writelines(
            json.dumps({"step": s, "data": {"actor/loss": 0.5, "timing_s/step": 10.0}}) + "\n"
            for s in (6, 7)
        )
    then = time.time() - 7000
    os.utime(log, (then, then))
    result = upload.here(log.parent)
    assert (result.code, result.rows_sent, one_run().state) == (0, 2, "finished")
    assert [r["_step"] for r in one_run().rows] == list(range(8))
    times = [r["_timestamp"] for r in one_run().rows]
    assert times == sorted(times)


def test_the_hydra_config_arrives_and_ends_the_run(fixture_files, outputs, upload, one_run):
    """Config and `total_training_steps` come from Hydra: step 40 of 40 is the end, however fresh."""
    import shutil

    shutil.copytree(fixture_files / "hydra" / "grpo_arith" / "outputs", outputs / "hydra")
    (outputs / "grpo_arith").mkdir()
    shutil.copy(
        fixture_files / "verl_file" / "whole_run" / "qwen_small_grpo.jsonl", outputs / "grpo_arith"
    )
    result = upload(outputs)
    assert (result.code, result.rows_sent) == (0, 41)
    run = one_run()
    assert run.state == "finished"
    config = run.config
    assert config["algorithm"]["adv_estimator"] == "grpo"
    assert config["actor_rollout_ref"]["rollout"]["response_length"] == 512  # was interpolated
