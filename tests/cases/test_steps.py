"""Cases from public reports: steps that do not line up."""

from __future__ import annotations

from typing import Any

import verl_logsync
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
    import json

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
