"""Logs without a name, rollout dumps and checkpoints find their run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from verl_logsync import api
from verl_logsync.model import Catalog, SkipReason
from verl_logsync.settings import load_settings, parse_run
from verl_logsync.testing.builders import write_verl_log


def rows(first, last, value=0.0):
    return [(s, {"actor/loss": s / 7 + value}) for s in range(first, last + 1)]


def console(path: Path, first, last, value=0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"step:{s} - actor/loss:{s / 7 + value}\n" for s in range(first, last + 1))
    path.write_text("".join(lines))
    return path


def dumps(folder: Path, step: int = 1) -> Path:
    folder.mkdir(parents=True)
    row = {"input": "p", "output": "o", "score": 1.0, "step": step}
    (folder / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def hydra(folder: Path, name: str, **trainer: str) -> None:
    (folder / ".hydra").mkdir(parents=True)
    values = {"project_name": "grpo", "experiment_name": name, **trainer}
    lines = ["trainer:", *(f"  {key}: {value}" for key, value in values.items())]
    (folder / ".hydra/config.yaml").write_text("\n".join(lines) + "\n")


def checkpoints(folder: Path, run_id: str = "") -> Path:
    (folder / "global_step_20").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    if run_id:
        (folder / "wandb_run_id").write_text(run_id)
    return folder


def found(folder: Path, **settings: object) -> Catalog:
    return api.scan([folder], load_settings(settings))[0]


def owners(catalog: Catalog) -> dict[str, list[str]]:
    """By run name: the names of its files."""
    return {
        run.name: sorted(file.path.name for file in (*run.files, *run.checkpoints))
        for run in catalog.runs
    }


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two experiments side by side in one project folder."""
    write_verl_log(tmp_path / "grpo/one.jsonl", rows(0, 9))
    write_verl_log(tmp_path / "grpo/two.jsonl", rows(0, 9, 5.0))
    return tmp_path


# -- consoles ------------------------------------------------------------------------------


def test_a_console_takes_the_name_of_the_only_log_nearby(tmp_path):
    """Each job's console lies beside its log, and becomes part of that run."""
    for value, name in enumerate(("one", "two")):
        write_verl_log(tmp_path / name / "grpo" / f"{name}.jsonl", rows(0, 9, value))
        console(tmp_path / name / f"{name}.log", 0, 12, value)
    assert owners(found(tmp_path)) == {n: [f"{n}.jsonl", f"{n}.log"] for n in ("one", "two")}


def test_a_console_between_two_runs_stays_alone(two):
    """Where two experiments are equally near, an unnamed console is a run of its own."""
    console(two / "train.log", 0, 9)
    catalog = found(two)
    assert owners(catalog) == {"one": ["one.jsonl"], "two": ["two.jsonl"], "train": ["train.log"]}
    (train,) = [run for run in catalog.runs if run.name == "train"]
    (note,) = train.notes
    assert "one or two" in note
    assert f"--run one={two / 'train.log'}" in note
    mine = [("one", str(two / "grpo/one.jsonl")), ("one", str(two / "train.log"))]
    said = owners(found(two, runs=mine))
    assert said == {"one": ["one.jsonl", "train.log"], "two": ["two.jsonl"]}


def test_steps_that_do_not_meet_are_not_one_run(tmp_path):
    """A console whose steps lie far behind those of the log beside it is another run."""
    write_verl_log(tmp_path / "grpo/one.jsonl", rows(0, 9))
    console(tmp_path / "train.log", 50, 60)
    assert owners(found(tmp_path)) == {"one": ["one.jsonl"], "train": ["train.log"]}


def test_a_console_of_every_start(tmp_path):
    """Consoles that only meet one another belong to the log that the last of them meets."""
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows(30, 45, 3.0))
    spans = [(0, 12), (11, 22), (21, 31), (30, 45)]
    for number in (2, 0, 3, 1):
        console(tmp_path / f"slurm-{number}.out", *spans[number], number)
    console(tmp_path / "far.log", 90, 99)
    catalog = found(tmp_path)
    assert owners(catalog) == {
        "exp": ["exp.jsonl", *(f"slurm-{n}.out" for n in range(4))],
        "far": ["far.log"],
    }


def test_a_console_takes_the_name_of_the_only_config_nearby(tmp_path):
    """Without any named log a Hydra folder tells what the console is of."""
    console(tmp_path / "train.log", 0, 9)
    hydra(tmp_path / "outputs/2026-01-01/00-00-00", "exp")
    (run,) = found(tmp_path).runs
    assert (run.target.project, run.name) == ("grpo", "exp")


# -- dumps ---------------------------------------------------------------------------------


def test_dumps_in_the_folder_that_a_config_names(two):
    """`rollout_data_dir` and `validation_data_dir` of a config decide, also when both lie under
    another root on this machine."""
    hydra(two / "outputs/a", "one", rollout_data_dir="/mnt/x/dumps/first")
    hydra(two / "outputs/b", "two", validation_data_dir="/mnt/x/dumps/second")
    dumps(two / "dumps/first")
    dumps(two / "dumps/second")
    told = owners(found(two))
    assert told["one"] == ["config.yaml", "first", "one.jsonl"]
    assert told["two"] == ["config.yaml", "second", "two.jsonl"]


def test_the_configured_folder_counts_more_than_the_name(two):
    """A folder that one run's config names is that run's, even below another's name."""
    hydra(two / "outputs/a", "one", rollout_data_dir="dumps/two")
    dumps(two / "dumps/two")
    assert owners(found(two))["one"] == ["config.yaml", "one.jsonl", "two"]


def test_dumps_below_the_name_of_the_experiment(two):
    """A folder called like the experiment holds its dumps."""
    dumps(two / "dumps/one/rollout")
    dumps(two / "dumps/two/rollout")
    assert owners(found(two)) == {
        "one": ["one.jsonl", "rollout"],
        "two": ["rollout", "two.jsonl"],
    }


def test_dumps_of_the_nearest_run(tmp_path):
    """Of several runs of one name each has the dumps in its own folder."""
    for number in range(3):
        write_verl_log(tmp_path / f"job{number}/grpo/exp.jsonl", rows(0, 9, number))
        dumps(tmp_path / f"job{number}/rollout_data")
    runs = found(tmp_path).runs
    assert len({run.target for run in runs}) == 3
    for run in runs:
        (dump,) = run.rollouts
        assert dump.path.parent == run.attempts[0].files[0].path.parents[1]


def test_ambiguous_dumps_are_left_out_with_a_flag_that_works(two):
    """Dumps that may be of two runs are of none; the flag in the hint, with a name, says whose."""
    folder = dumps(two / "shared dumps [1]")
    catalog = found(two)
    (skip,) = [s for s in catalog.skips if s.reason is SkipReason.NO_OWNER]
    assert all(not run.rollouts for run in catalog.runs)
    assert "one" in skip.detail
    assert "two" in skip.detail
    flag, value = shlex.split(skip.hint.partition("Say whose they are: ")[2])
    assert flag == "--run"
    said = found(two, runs=[parse_run(value.replace("NAME", "two", 1))])
    assert owners(said)["two"] == [folder.name, "two.jsonl"]
    assert not said.skips


def test_dumps_alone(tmp_path):
    """Dumps without any log are left out, and said."""
    dumps(tmp_path / "rollout_data")
    catalog = found(tmp_path)
    assert [s.reason for s in catalog.skips] == [SkipReason.NO_OWNER]
    assert catalog.runs == ()


# -- checkpoints -----------------------------------------------------------------------------


def test_checkpoints_are_found_by_name_or_config_only(two):
    """Checkpoints lie on other disks: they belong to the run they are called or configured for,
    never to the nearest."""
    checkpoints(two / "checkpoints/grpo/one")
    checkpoints(two / "ckpt/mine")
    checkpoints(two / "ckpt/nobodys")
    hydra(two / "outputs/b", "two", default_local_dir="/mnt/y/ckpt/mine")
    catalog = found(two)
    tracker = "latest_checkpointed_iteration.txt"
    assert owners(catalog) == {
        "one": [tracker, "one.jsonl"],
        "two": ["config.yaml", tracker, "two.jsonl"],
    }
    assert [Path(s.place).parent.name for s in catalog.skips] == ["nobodys"]


def test_a_bound_checkpoint_gives_the_run_id(two):
    """The id in a checkpoint folder is that of its run, and of no other."""
    checkpoints(two / "checkpoints/grpo/one", "bound123")
    ids = {run.name: (run.target.run_id, run.id_from) for run in found(two).runs}
    assert ids["one"] == ("bound123", "checkpoint")
    assert ids["two"][1] == "derived"


def test_a_bound_checkpoint_finds_the_run_of_that_id(two):
    """Wherever it lies: a folder that is bound to a run's id is that run's."""
    (run,) = [r for r in found(two).runs if r.name == "two"]
    checkpoints(two / "somewhere", run.target.run_id)
    (again,) = [r for r in found(two).runs if r.name == "two"]
    assert len(again.checkpoints) == 1
    assert again.target == run.target


def test_two_bound_folders_of_one_name(tmp_path):
    """Starts from scratch of one name in two folders have two checkpoint folders and two ids."""
    for number in (1, 2):
        job = tmp_path / f"job{number}"
        write_verl_log(job / "grpo/exp.jsonl", rows(0, 9, number))
        checkpoints(job / "checkpoints/grpo/exp", f"bound{number}")
    runs = found(tmp_path).runs
    assert sorted(run.target.run_id for run in runs) == ["bound1", "bound2"]
    for run in runs:
        job = tmp_path / f"job{run.target.run_id[-1]}"
        assert run.attempts[0].files[0].path.is_relative_to(job)


def two_bound(tmp_path: Path, run_id: str) -> Path:
    """Two experiments; the checkpoints of the second began as a copy of the first one's."""
    for number, name in enumerate(("one", "two")):
        write_verl_log(tmp_path / "logs/grpo" / f"{name}.jsonl", rows(0, 30, number))
        checkpoints(tmp_path / "logs/checkpoints/grpo" / name, run_id)
    return tmp_path / "logs"


def test_a_copied_binding_is_said_and_joins_nothing(tmp_path):
    """A run id in the checkpoint folders of two experiments is followed for neither: they stay two
    runs with ids of their own, each keeps its checkpoints, and both are told."""
    logs = two_bound(tmp_path, "copiedid")
    catalog = found(logs)
    ids = {run.name: run.target.run_id for run in catalog.runs}
    assert set(ids) == {"one", "two"}
    assert len({*ids.values(), "copiedid"}) == 3
    for run in catalog.runs:
        assert len(run.checkpoints) == 1
        (note,) = [note for note in run.notes if "copiedid" in note]
        assert str(logs / "checkpoints/grpo" / ("two" if run.name == "one" else "one")) in note


def test_a_copied_binding_of_a_run_that_has_the_id_anyway(tmp_path):
    """The run whose own id it is keeps it and its checkpoints, and the copy's experiment is told."""
    mine = {run.name: run.target.run_id for run in found(two_bound(tmp_path / "a", "")).runs}
    logs = two_bound(tmp_path / "b", mine["one"])
    catalog = found(logs)
    assert {run.name: run.target.run_id for run in catalog.runs} == mine
    notes = {run.name: [n for n in run.notes if mine["one"] in n] for run in catalog.runs}
    assert not notes["one"]
    assert "copied" in notes["two"][0]
    places = {run.name: [f.path.parent.name for f in run.checkpoints] for run in catalog.runs}
    assert places == {"one": ["one"], "two": ["two"]}


def test_copies_of_one_experiments_checkpoints_stay_bound(tmp_path):
    """A backup of a checkpoint folder under its own name is the same experiment."""
    write_verl_log(tmp_path / "logs/grpo/one.jsonl", rows(0, 30))
    for place in ("checkpoints", "backup"):
        checkpoints(tmp_path / "logs" / place / "grpo/one", "boundid1")
    (run,) = found(tmp_path / "logs").runs
    assert run.target.run_id == "boundid1"
