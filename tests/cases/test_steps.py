"""Cases from public reports: steps that do not line up."""

from __future__ import annotations

import json
from typing import Any

import pytest

import verl_logsync
from verl_logsync import api
from verl_logsync.settings import Settings
from verl_logsync.testing.builders import write_verl_log


def test_b1_train_and_validation_records_of_one_step(outputs, age, upload, one_run):
    """B1: a train and a validation record of step 50 are one row with the keys of both."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [
            (49, {"actor/loss": 0.5}),
            (50, {"actor/loss": 0.25}),
            (50, {"val-core/x/acc/mean@1": 0.75}),
        ],
    )
    age(outputs)
    result = upload.here(outputs)
    assert result.code == 0
    rows = one_run().rows
    assert [r["_step"] for r in rows] == [49, 50]
    assert (rows[1]["actor/loss"], rows[1]["val-core/x/acc/mean@1"]) == (0.25, 0.75)
    assert result.only["account"]["merged"] == 1


def test_b1_several_records_a_step_of_a_fully_async_trainer(fixture_files):
    """B1: the 2 or 3 records that a fully asynchronous trainer logs a step are their union."""
    path = fixture_files / "verl_file" / "fully_async" / "fully_async_multi_record_per_step.jsonl"
    union: dict[int, dict[str, Any]] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        union.setdefault(record["step"], {}).update(record["data"])
    (run,) = verl_logsync.load(path)
    frame = run.history()
    assert frame.index.tolist() == sorted(union)
    assert run.account.superseded == 0
    assert run.account.balanced
    for step, values in union.items():
        got = frame.loc[step].dropna().to_dict()
        assert {k: v for k, v in got.items() if not str(k).startswith("_")} == values


def test_b6_step_0_has_validation_keys_only(outputs, age, upload, one_run, logged):
    """B6: a validation before training is a row of step 0 with its keys and no others."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [
            (0, {"val-core/x/acc/mean@1": 0.1, "val-aux/x/reward/mean@1": 0.2}),
            (1, {"actor/loss": 0.5, "timing_s/step": 10.0}),
            (2, {"actor/loss": 0.4, "timing_s/step": 10.0, "val-core/x/acc/mean@1": 0.3}),
        ],
    )
    age(outputs)
    assert upload.here(outputs).code == 0
    rows = [
        {k: v for k, v in r.items() if k not in ("_timestamp", "_runtime")}
        for r in logged(one_run())
    ]
    assert rows[0] == {"_step": 0, "val-core/x/acc/mean@1": 0.1, "val-aux/x/reward/mean@1": 0.2}
    assert rows[1] == {"_step": 1, "actor/loss": 0.5, "timing_s/step": 10}
    assert len(rows) == 3


def test_b3_fully_async_steps_are_not_corrected(outputs, age):
    """B3, verl case 10: three records a step (timing, aggregate, validation) are one row at the
    logged step; the trainer's finer counter stays a metric."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [
            record
            for step in range(1, 6)
            for record in (
                (step, {"timing_s/timing_s/param_sync": 2.0 + step}),
                (step, {"actor/loss": step / 7, "training/global_step": 4 * step}),
                (step, {"val-core/x/acc/mean@1": step / 10}),
            )
        ],
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    frame = run.history()
    assert frame.index.tolist() == [1, 2, 3, 4, 5]
    assert frame["training/global_step"].tolist() == [4, 8, 12, 16, 20]
    assert frame["timing_s/timing_s/param_sync"].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert frame["val-core/x/acc/mean@1"].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert (run.account.merged, run.account.superseded) == (10, 0)
    (note,) = [note for note in run.account.notes if "global_step" in note]
    assert note.startswith("training/global_step is another counter than the step: 4 to a step.")


@pytest.mark.parametrize(
    ("counter", "relation"),
    [
        (lambda step: step + 3, "always 3 more"),
        (lambda step: step - 1, "always 1 less"),
        (lambda step: 4 * step - 4, "4 to a step, 4 less (one step late, as verl 0.8.0 logs"),
        (lambda step: 4 * step + 1, "4 to a step, 1 more. Both stay"),
        (lambda step: step**2, "1 at step 1, 64 at step 8"),
    ],
)
def test_b3_a_counter_that_disagrees_is_said_once(outputs, age, counter, relation):
    """B3: how another counter goes with the steps is said in one note; no step is changed."""
    rows = [(s, {"actor/loss": 1 / s, "training/global_step": counter(s)}) for s in range(1, 9)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    assert run.history().index.tolist() == list(range(1, 9))
    (note,) = [note for note in run.account.notes if "global_step" in note]
    assert relation in note
    assert note.endswith("to count by it: --step-key training/global_step")


def test_a_counter_that_agrees_is_not_worth_a_note(outputs, age):
    """A global step that is the step, where it was logged, gives no note."""
    rows = [(s, {"a": 1.5, **({"training/global_step": s} if s % 2 else {})}) for s in range(9)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    assert not [note for note in run.account.notes if "global_step" in note]


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("global_step", lambda s: {"global_step": s, "actor/loss": s / 7}),
        ("_step", lambda s: {"actor/loss": s / 7, "_step": s, "_timestamp": 1.75e9 + s}),
        ("iteration", lambda s: {"iteration": float(s), "actor/loss": s / 7}),
        ("step", lambda s: {"step": s, "actor/loss": s / 7}),
        (
            "training/global_step",
            lambda s: {"data": {"training/global_step": s, "actor/loss": s / 7}},
        ),
    ],
)
def test_b4_json_lines_without_a_step_name_the_flag_that_reads_them(outputs, age, key, record):
    """B4: JSON lines that count by another key are not recognised, and the verdict ends with the
    option; with it their steps are that key's values, and their metrics are the others."""
    write_lines(outputs / "grpo" / "qwen.jsonl", map(record, range(3, 11)))
    age(outputs)
    found, _ = api.scan([outputs], Settings())
    assert not found.runs
    assert [skip.hint for skip in found.skips] == [f"If {key} counts its steps: --step-key {key}"]
    (run,) = verl_logsync.load(outputs, step_key=key)
    frame = run.history()
    assert frame.index.tolist() == list(range(3, 11))
    assert frame["actor/loss"].tolist() == [s / 7 for s in range(3, 11)]
    assert set(frame.columns) - {"_timestamp", "_runtime", "training/global_step"} == {"actor/loss"}
    if key == "_step":
        assert frame["_timestamp"].tolist() == [1.75e9 + s for s in range(3, 11)]


def test_b4_the_step_key_reaches_the_server_and_counts_as_a_change(outputs, age, upload, one_run):
    """B4: what was remembered of a file by `step` is not the answer when the user names a key.
    Rows at other steps come to those that the server has."""
    rows = [(s, {"actor/loss": s / 7, "training/global_step": 10 * s}) for s in range(1, 6)]
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    age(outputs)
    upload.here(outputs)
    assert [row["_step"] for row in one_run().rows] == [1, 2, 3, 4, 5]
    again = upload(outputs, "--step-key", "training/global_step")
    assert again.only["rows_sent"] == 5
    assert [row["_step"] for row in one_run().rows][-5:] == [10, 20, 30, 40, 50]
    assert upload(outputs, "--step-key", "training/global_step").rows_sent == 0


def test_b4_records_without_the_key_are_named_and_counted(outputs, age):
    """B4: of a log that counts by another key, records that lack it are skipped with their line."""
    write_lines(
        outputs / "grpo" / "qwen.jsonl",
        [{"it": 1, "a": 1.5}, {"a": 2.5}, {"it": "x", "a": 3}, {"it": True}, {"it": 4, "a": 4.5}],
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs, step_key="it")
    assert run.history().index.tolist() == [1, 4]
    assert [(s.place.split(":")[-1].split()[0], s.detail) for s in run.account.skips] == [
        ("2", 'no "it"'),
        ("3", "step is 'x'"),
        ("4", "step is 'True'"),
    ]
    assert run.account.balanced


def test_b4_keys_of_different_densities(outputs, age):
    """B4: keys that are logged at every fifth step, and a global step that disagrees, are kept as
    they are: a missing value is missing, and `_step` is the logged step."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [
            (s, {"a": s, "training/global_step": 10 * s, **({"b": s} if s % 5 == 0 else {})})
            for s in range(1, 21)
        ],
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    frame = run.history()
    assert frame.index.tolist() == list(range(1, 21))
    assert frame["b"].dropna().index.tolist() == [5, 10, 15, 20]
    assert frame["training/global_step"].tolist() == [10 * s for s in range(1, 21)]


def test_b5_final_validation_on_the_console_only(outputs, age):
    """B5, verl case 4: a JSONL up to 99, a console up to 100 with the final validation behind it:
    its values belong to the last step, and no step comes twice."""
    write_verl_log(outputs / "grpo" / "qwen.jsonl", [(s, {"a": s + 0.5}) for s in range(1, 100)])
    console = "".join(f"step:{s} - a:{s + 0.5}\n" for s in range(1, 101))
    block = '("Final validation metrics: {\'val-core/x/acc/mean@1\': "\n "np.float64(0.75)}")\n'
    (outputs / "train.log").write_text(console + block)
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    frame = run.history()
    assert frame.index.tolist() == list(range(1, 101))
    assert frame["a"].tolist() == [s + 0.5 for s in range(1, 101)]
    assert frame["val-core/x/acc/mean@1"].dropna().to_dict() == {100: 0.75}
    last = run.account.origins[-1]
    assert (last.first_step, last.last_step) == (100, 100)
    assert [place.rpartition("/")[2] for place in last.places] == ["train.log"]


def test_b9_rows_without_a_global_step(outputs, age, upload, one_run):
    """B9, verl case 8: rows without `training/global_step` have the step of their record."""
    write_verl_log(outputs / "dapo" / "qwen.jsonl", [(s, {"train/loss": s}) for s in range(1, 6)])
    age(outputs)
    assert upload.here(outputs).code == 0
    rows = one_run().rows
    assert [(r["_step"], r["train/loss"]) for r in rows] == [(s, s) for s in range(1, 6)]
    assert all(isinstance(r["_step"], int) for r in rows)


def test_v13_the_last_record_of_0_2_validates_only(outputs, age):
    """Verl case 13: verl 0.2 logs a validation at the last step without training it: the row has
    these keys alone, and takes no step's time."""
    write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [
            *((s, {"mfu/actor": 0.1, "timing_s/step": 10.0}) for s in range(1, 10)),
            (10, {"val/test_score/x": 0.5}),
        ],
    )
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    frame = run.history()
    assert frame.index.tolist() == list(range(1, 11))
    assert frame.loc[10].dropna().drop(["_timestamp", "_runtime"]).to_dict() == {
        "val/test_score/x": 0.5
    }
    assert frame["_runtime"][10] == frame["_runtime"][9]
