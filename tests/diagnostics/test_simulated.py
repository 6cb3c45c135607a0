"""Known diseases are found by the right rule at the right steps, healthy runs raise nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_logsync.diagnostics import diagnose
from verl_logsync.testing.confusion import HEALTHY, Trial, confusion_page, try_disease, try_healthy
from verl_logsync.testing.simulate import DISEASES, simulate
from verl_logsync.testing.tables import column, verl_file

ROOT = Path(__file__).parents[2]


def told(trial: Trial) -> str:
    return "; ".join(f"{f.code} {f.severity} {f.first_step}-{f.last_step}" for f in trial.findings)


@pytest.mark.parametrize("name", DISEASES)
def test_diseases_are_found(name: str) -> None:
    """In each of five runs, within the steps the disease allows, and nothing else is said."""
    for seed in range(100, 105):
        trial = try_disease(DISEASES[name], seed)
        assert trial.hit, f"seed {seed}: {told(trial)}"
        assert trial.false_alarms == (), f"seed {seed}: {told(trial)}"


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_raise_nothing(kind: str) -> None:
    """Ten runs of each kind, nothing above a hint."""
    for seed in range(100, 110):
        assert try_healthy(kind, seed).findings == (), seed


def test_the_table_is_that_of_the_documentation() -> None:
    """The page is generated; it is what the rules do now."""
    page = (ROOT / "docs/reference/diagnostics-confusion.md").read_text(encoding="utf-8")
    assert page.endswith(confusion_page(range(10)))


def test_simulated_runs_are_the_same_each_time() -> None:
    """Equal arguments, equal runs; another seed is another run."""
    assert simulate(seed=3, steps=20).table.equals(simulate(seed=3, steps=20).table)
    assert not simulate(seed=3, steps=20).table.equals(simulate(seed=4, steps=20).table)


def test_simulated_runs_are_written_as_verl_does(tmp_path: Path) -> None:
    """A line a step, and the table comes back from them with the same findings."""
    run = simulate("nan_gradient", steps=30, onset=27)
    path = run.write(tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 31
    assert set(json.loads(lines[0])) == {"step", "data"}
    again = verl_file(path)
    assert column(again, "critic/score/mean") == column(run.table, "critic/score/mean")
    one, other = (diagnose(rows, run.config).findings for rows in (run.table, again))
    assert [f.as_dict() for f in one] == [f.as_dict() for f in other]


def test_simulated_metrics_agree_with_each_other() -> None:
    """The first row is a validation only, rewards lie in 0 to 1, the steps ascend by one."""
    table = simulate(steps=50, seed=1).table
    assert column(table, "_step") == list(range(51))
    assert column(table, "critic/score/mean")[0] is None
    assert all(0 <= score <= 1 for score in column(table, "critic/score/mean")[1:])
    assert column(simulate(steps=9, without=frozenset({3})).table, "_step") == [
        0,
        1,
        2,
        4,
        5,
        6,
        7,
        8,
        9,
    ]
