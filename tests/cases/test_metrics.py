"""Cases from public reports: metrics of verl that are not what they seem."""

from __future__ import annotations

import json
import math
import shutil

import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log


@pytest.fixture
def configured(outputs):
    """Write the Hydra folder of the run `grpo/qwen`, as far as it matters here."""

    def write(text):
        folder = outputs / "hydra" / ".hydra"
        folder.mkdir(parents=True, exist_ok=True)
        names = "trainer: {project_name: grpo, experiment_name: qwen}\n"
        (folder / "config.yaml").write_text(names + text)
        (folder / "overrides.yaml").write_text("[]\n")

    return write


@pytest.fixture
def derived(outputs, age, upload, one_run):
    """The values of a key in the training rows on the server, and all findings."""

    def get(key):
        age(outputs)
        assert upload.here(outputs).code == 0
        (run,) = verl_logsync.load(outputs)
        rows = [row.get(key) for row in one_run().rows if row["_step"]]
        return rows, {finding.code for finding in run.diagnose().findings}

    return get


@pytest.mark.parametrize("limit", [512, None])
def test_v17_the_clip_ratio_of_v1_is_no_truncation(
    limit, outputs, configured, derived, fixture_files
):
    """Verl case 17: the v1 sample's clip ratio of 2.5 % below the limit is a truncation of 0, or
    none is told where the limit is not known; at the limit it is believed."""
    log = outputs / "grpo" / "qwen.jsonl"
    log.parent.mkdir()
    shutil.copy(fixture_files / "verl_file/whole_run/qwen_small_grpo.jsonl", log)
    configured(f"data: {{max_response_length: {limit}}}\n" if limit else "data: {}\n")
    found, codes = derived("rollout/truncation_ratio")
    for line, ratio in zip(log.read_text().splitlines()[1:], found, strict=True):
        data = json.loads(line)["data"]
        logged, longest = data["response_length/clip_ratio"], data["response_length/max"]
        assert logged > 0
        assert ratio == (None if limit is None else logged if longest == limit else 0)
    assert (found[0], found[4]) == ((0, pytest.approx(0.025)) if limit else (None, None))
    assert not any(code.startswith("TRUNCATION") for code in codes)


@pytest.mark.parametrize("limit", [512, None])
def test_v17_without_a_key_of_v1(limit, outputs, configured, derived):
    """Verl case 17: also where no key tells of the v1 trainer, nothing was cut below the limit; and
    without a limit, answers that are "cut" at two lengths were not cut."""
    rows = [
        (s, {"response_length/clip_ratio": 0.3, "response_length/max": 374 + s % 3})
        for s in range(1, 31)
    ]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    configured(f"data: {{max_response_length: {limit}}}\n" if limit else "data: {}\n")
    found, codes = derived("rollout/truncation_ratio")
    assert found == ([0] * 30 if limit else [0.3] + [None] * 29)
    assert not any(code.startswith("TRUNCATION") for code in codes)


@pytest.mark.parametrize("config", ["data: {max_response_length: 512}\n", "data: {}\n"])
def test_v17_true_truncation_is_told(config, outputs, configured, derived):
    """Verl case 17: answers that were cut at the one limit that there is are told as such."""
    rows = [
        (s, {"response_length/clip_ratio": 0.3 * (s > 2), "response_length/max": min(400 + s, 512)})
        for s in range(1, 3)
    ] + [(s, {"response_length/clip_ratio": 0.3, "response_length/max": 512}) for s in range(3, 31)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    configured(config)
    found, codes = derived("rollout/truncation_ratio")
    assert found == [0, 0] + [0.3] * 28
    assert "TRUNCATION" in codes


def falls(step):
    """An entropy that collapses."""
    return 0.8 * math.exp(-step / 8) + 0.001 * (step % 3)


ENTROPIES = {
    "actor/entropy_loss only": lambda s: {"actor/entropy_loss": falls(s)},
    "actor/entropy only": lambda s: {"actor/entropy": falls(s)},
    "both": lambda s: {"actor/entropy": falls(s), "actor/entropy_loss": 0.7},
    "a resume under a verl with both": lambda s: (
        {"actor/entropy_loss": falls(s)}
        if s <= 50
        else {"actor/entropy": falls(s), "actor/entropy_loss": 0.7}
    ),
}


@pytest.mark.parametrize("keys", ENTROPIES)
def test_v19_one_canonical_entropy(keys, outputs, derived, one_run):
    """Verl case 19: whichever name a version gave it, the rules see one entropy and find the same;
    where there are two actor/entropy counts and the other stays under its name."""
    rows = [(s, {"actor/pg_loss": 0.1, **ENTROPIES[keys](s)}) for s in range(1, 101)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    found, codes = derived("actor/entropy")
    assert found == [falls(s) for s in range(1, 101)]
    assert {"ENTROPY_COLLAPSE", "ENTROPY_SUDDEN_DROP", "ENTROPY_GONE"} <= codes
    other = [row.get("actor/entropy_loss") for row in one_run().rows]
    assert other == [data.get("actor/entropy_loss") for _, data in rows]


def test_v19_the_entropy_of_the_update_alone_raises_nothing(outputs, derived):
    """Verl case 19: beside an actor/entropy that stands still, what happens to the other is not
    taken for it."""
    rows = [(s, {"actor/entropy": 0.8, "actor/entropy_loss": falls(s)}) for s in range(1, 101)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    found, codes = derived("actor/entropy")
    assert found == [0.8] * 100
    assert not any(code.startswith("ENTROPY") for code in codes)


def test_v20_memory_and_loss_in_both_spellings(outputs, derived, one_run):
    """Verl case 20: the memory and the loss of engine workers and those of earlier ones are the
    same canonical series, also where a run goes on under the other; nothing logged is changed."""

    def data(step):
        if step <= 10:
            return {
                "actor/pg_loss": 0.5,
                "actor/kl_loss": 2.0,
                "actor/kl_coef": 0.1,
                "perf/max_memory_allocated_gb": 30.0 + step,
                "perf/max_memory_reserved_gb": 60.0,
            }
        return {
            "actor/pg_loss": 0.5,
            "actor/loss": 0.75,
            "actor/perf/max_memory_allocated_gb": 30.0 + step,
            "actor/perf/max_memory_reserved_gb": 60.0,
        }

    write_verl_log(outputs / "grpo" / "qwen.jsonl", [(s, data(s)) for s in range(1, 21)])
    found, _ = derived("hybrid_engine/gpu_mem_allocated_gb")
    assert found == [30.0 + s for s in range(1, 21)]
    rows = one_run().rows
    assert [row["actor/loss"] for row in rows] == [pytest.approx(0.7)] * 10 + [0.75] * 10
    for row in rows:
        logged = data(row["_step"])
        assert {key: row[key] for key in logged} == logged
