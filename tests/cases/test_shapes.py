"""Cases from public reports: shapes and limits of values."""

from __future__ import annotations

import json
import math

import pytest

import verl_logsync
from verl_logsync.testing.builders import write_verl_log

LINES = [
    '{"step":1,"data":{"null":null,"nan":NaN,"inf":Infinity,"neg":-Infinity,"text":"nan",'
    '"always":NaN,"ok":1.5,"sometimes":2.5}}',
    '{"step":2,"data":{"null":0.5,"nan":0.5,"inf":0.5,"neg":0.5,"text":"x","always":NaN,"ok":2}}',
    '{"step":3,"data":{"always":NaN,"ok":3,"nan":NaN,"sometimes":null}}',
]


def same(one, other):
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    numbers = all(isinstance(v, int | float) for v in (one, other))
    return one == other and (numbers or type(one) is type(other))


@pytest.fixture
def odd(outputs, age):
    log = outputs / "grpo" / "odd.jsonl"
    log.parent.mkdir()
    log.write_text("\n".join(LINES) + "\n")
    age(outputs)
    return outputs


def test_g2_null_nan_infinity_text_and_missing(odd, upload, one_run):
    """G2: null, NaN, infinities, the text "nan" and a missing key stay five different things."""
    result = upload.here(odd, verify="full")
    assert (result.code, result.only["verified"]) == (0, True)
    for got, line in zip(one_run().rows, LINES, strict=True):
        logged = json.loads(line)["data"]
        values = {k: v for k, v in got.items() if not k.startswith("_")}
        assert values.keys() == logged.keys()
        for key, value in logged.items():
            assert same(values[key], value), (key, values[key], value)
    assert upload.here(odd).rows_sent == 0
    upload.from_another_machine()
    assert upload.here(odd).rows_sent == 0


def test_g2_every_line_on_the_wire_is_json(odd, upload, one_run):
    """G2: every line on the wire is JSON, with NaN in the bare form that W&B itself writes."""
    upload.here(odd)
    for line in one_run().lines:
        assert isinstance(json.loads(line), dict)
    assert '"always":NaN' in one_run().lines[0]
    assert '"null":null' in one_run().lines[0]


def test_g2_in_the_data_frame(odd):
    """G2: in a history's frame a missing value is <NA>, NaN is NaN and null is None."""
    (run,) = verl_logsync.load(odd)
    frame = run.history()
    assert all(math.isnan(value) for value in frame["always"])
    assert frame["nan"].isna().tolist() == [False] * 3
    assert math.isnan(frame["nan"].iloc[0])
    assert frame["null"].iloc[0] is None
    assert frame["null"].iloc[1] == 0.5
    assert frame["text"].tolist()[:2] == ["nan", "x"]
    assert frame["inf"].iloc[0] == math.inf
    assert str(frame["inf"].iloc[2]) == "<NA>"


def test_g2_odd_values_of_the_real_logger(fixture_files, outputs, age, upload, one_run, logged):
    """G2: what verl's own logger makes of odd values reaches W&B: bool, text, list, dict, 2**63."""
    source = fixture_files / "verl_file" / "odd_values" / "odd_values_0.9.jsonl"
    log = outputs / "grpo" / "odd.jsonl"
    log.parent.mkdir()
    log.write_bytes(source.read_bytes())
    age(outputs)
    result = upload.here(outputs, verify="full")
    assert (result.code, result.only["verified"]) == (0, True)
    for got, line in zip(logged(one_run()), source.read_text().splitlines(), strict=True):
        meant = json.loads(line)["data"]
        values = {k: v for k, v in got.items() if not k.startswith("_")}
        assert values == meant
        assert {k for k, v in values.items() if isinstance(v, bool)} == {
            k for k, v in meant.items() if isinstance(v, bool)
        }
    assert upload.here(outputs).rows_sent == 0


def _broken_from_70(step, bad):
    good = step < 70
    return {
        "actor/pg_loss": 0.1,
        "actor/grad_norm": 0.3 + 0.01 * (step % 7) if good else bad,
        "critic/score/mean": 0.4 + 0.01 * (step % 5) if good else 0.0,
    }


def _as_console(path, bad):
    lines = []
    for step in range(1, 101):
        values = _broken_from_70(step, bad).items()
        lines.append(" - ".join([f"step:{step}", *(f"{key}:{value}" for key, value in values)]))
    path.write_text("\n".join(f"(TaskRunner pid=42) {line}" for line in lines) + "\n")


@pytest.mark.parametrize(
    ("form", "bad"),
    [
        ("file", math.nan),
        ("file", math.inf),
        ("file", None),
        ("console", "nan"),
        ("console", "np.float64(nan)"),
        ("console", "inf"),
    ],
)
def test_g3_the_first_bad_step_is_named(form, bad, outputs, upload, age):
    """G3, verl case 23: of a gradient that is not finite from step 70 on, with a reward of 0 after
    it, key and first step are named first, whichever way the log writes such numbers."""
    if form == "file":
        rows = [(s, _broken_from_70(s, bad)) for s in range(1, 101)]
        write_verl_log(outputs / "grpo" / "qwen.jsonl", rows)
    else:
        _as_console(outputs / "train.log", bad)
    age(outputs)
    (run,) = verl_logsync.load(outputs)
    findings = run.diagnose().findings
    first = findings[0]
    assert (first.code, first.severity) == ("GRADIENT_NON_FINITE", "critical")
    assert (first.key, first.first_step, first.last_step) == ("actor/grad_norm", 70, 100)
    (crash,) = [finding for finding in findings if finding.code == "REWARD_CRASH"]
    assert (crash.key, crash.last_step) == ("reward/mean", 100)
    assert crash.first_step in (70, 71)
    code, text = upload.text(outputs, "--fail-on", "critical", verb="diagnose")
    assert code == 8
    assert "steps 70-100  actor/grad_norm" in text
