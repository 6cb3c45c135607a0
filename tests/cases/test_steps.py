"""Cases from public reports: steps that do not line up."""

from __future__ import annotations

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
    union = {}
    for record in map(json.loads, path.read_text().splitlines()):
        union.setdefault(record["step"], {}).update(record["data"])
    (run,) = verl_logsync.load(path)
    frame = run.history()
    assert frame.index.tolist() == sorted(union)
    assert run.account.superseded == 0
    assert run.account.balanced
    for step, values in union.items():
        got = frame.loc[step].dropna().to_dict()
        assert {k: v for k, v in got.items() if not k.startswith("_")} == values


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
