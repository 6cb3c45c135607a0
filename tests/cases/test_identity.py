"""Cases from public reports: identity, access, environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest

from verl_logsync.testing.builders import OfflineRun, make_offline_runs, write_verl_log


def rows(count, **more):
    return [(s, {"actor/loss": s / 7, "timing_s/step": 1.0, **more}) for s in range(count)]


def hydra(folder, rate, steps=100):
    """A Hydra folder of one start, as far as it matters here."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(
        "trainer:\n  project_name: grpo\n  experiment_name: qwen\n"
        f"  default_local_dir: {folder}\nactor:\n  optim:\n    lr: {rate}\n"
    )


@pytest.fixture
def two_experiments(outputs, age):
    """Equal project and experiment names, different learning rates."""
    for name, rate, n in (("one", 1e-6, 1), ("two", 3e-6, 2)):
        hydra(outputs / name, rate)
        write_verl_log(outputs / name / "grpo" / "qwen.jsonl", rows(5 + n, n=n))
    age(outputs)
    return outputs


def test_i2_equal_names_different_configs(two_experiments, upload, server, tmp_path, age):
    """I2: equal names with different configs are two runs, said aloud, with stable ids."""
    code, text = upload.text(two_experiments)
    assert code == 0
    assert "another run" in text
    assert "actor.optim.lr" in text
    found = {run.id: [r["n"] for r in run.rows] for run in server.runs}
    assert sorted(found.values()) == [[1] * 6, [2] * 7]
    rates = {run.id: run.config["actor"]["optim"]["lr"] for run in server.runs}
    assert sorted(rates.values()) == [1e-6, 3e-6]

    # Another machine, another place, another order of names.
    upload.from_another_machine()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(two_experiments / "one", elsewhere / "z")
    shutil.copytree(two_experiments / "two", elsewhere / "a")
    age(elsewhere)
    again = upload.here(elsewhere)
    assert (again.code, again.rows_sent) == (0, 0)
    assert {run["run_id"] for run in again.runs} == set(found)
    assert {run.id: [r["n"] for r in run.rows] for run in server.runs} == found


def test_i2_ids_do_not_depend_on_what_lies_beside(two_experiments, upload, server):
    """I2: each of the two uploaded alone gets the id that it has beside the other."""
    for name in ("two", "one"):
        assert upload.here(two_experiments / name).code == 0
    ids = {run.id for run in server.runs}
    assert len(ids) == 2
    upload.from_another_machine()
    both = upload.here(two_experiments)
    assert (both.rows_sent, {run["run_id"] for run in both.runs}) == (0, ids)


def test_i2_offline_runs_of_one_name(outputs, upload, server):
    """I2: offline runs of one name whose configs differ keep their own ids and rows."""
    make_offline_runs(
        [
            OfflineRun(outputs, "lowrate1", range(5), 1, config={"actor": {"lr": 1e-6}}),
            OfflineRun(outputs, "highrate", range(3, 9), 2, config={"actor": {"lr": 3e-6}}),
        ]
    )
    code, text = upload.text(outputs)
    assert code == 0
    assert {run.id: [r["_step"] for r in run.rows] for run in server.runs} == {
        "lowrate1": list(range(5)),
        "highrate": list(range(3, 9)),
    }
    assert "actor.lr" in text


def test_i2_restart_with_other_paths_is_one_run(outputs, age, upload, one_run):
    """I2: paths, ports and resume flags do not make another run of a resumed job."""
    make_offline_runs(
        [
            OfflineRun(
                outputs,
                "sameid01",
                range(5),
                1,
                config={"trainer": {"resume_mode": "disable", "default_local_dir": "/a"}},
            ),
            OfflineRun(
                outputs,
                "sameid01",
                range(5, 9),
                2,
                config={"trainer": {"resume_mode": "auto", "default_local_dir": "/b"}},
            ),
        ]
    )
    assert upload.here(outputs).code == 0
    assert [r["_step"] for r in one_run().rows] == list(range(9))


def test_i8_read_only_sources(permissions_count, offline_run, outputs, age, upload, server):
    """I8: sources that cannot be written to are uploaded; state goes to --state-dir alone."""
    offline_run("rich_0_19")
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows(7))
    age(outputs)
    items = [outputs, *outputs.rglob("*")]
    before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in items}
    for path in items:
        path.chmod(0o555 if path.is_dir() else 0o444)
    state = upload.home / "elsewhere"
    try:
        for sent in (27, 0):
            result = upload(outputs, "--state-dir", state, powers=False)
            assert (result.code, result.rows_sent) == (0, sent)
    finally:
        for path in items:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in [outputs, *outputs.rglob("*")]
    } == before
    assert list(state.iterdir())
    assert sorted(len(run.rows) for run in server.runs) == [7, 20]
    assert {a.state for a in server.artifacts} == {"COMMITTED"}


def test_i8_nothing_is_written_beside_writable_sources(offline_run, outputs, age, upload, server):
    """I8: also where it could, the program changes nothing among the sources."""
    offline_run("first_0_29")
    write_verl_log(outputs / "grpo" / "qwen.jsonl", rows(7))
    age(outputs)

    def tree():
        return {
            path: (path.stat().st_size, path.stat().st_mtime_ns)
            for path in [outputs, *outputs.rglob("*")]
        }

    before = tree()
    assert upload.here(outputs).rows_sent == 37
    assert tree() == before


def test_i14_without_key_and_network(outputs, age, upload, tmp_path):
    """I14: with no key and no network what is there is listed, exported and copied all the same."""
    write_verl_log(outputs / "grpo/exp.jsonl", [(s, {"actor/loss": s / 7}) for s in range(5)])
    age(outputs)
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
    commands = {
        "scan": [outputs],
        "export": [outputs, "--to", "csv", tmp_path / "export"],
        "snapshot": [outputs, "--into", tmp_path / "copies"],
    }
    for verb, arguments in commands.items():
        process = subprocess.run(
            upload.command(*arguments, verb=verb),
            env=upload.env(**nowhere),
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
    (table,) = (tmp_path / "export").rglob("*.csv")
    assert len(table.read_text().splitlines()) == 6
    (copy,) = (tmp_path / "copies").rglob("*.jsonl")
    assert copy.read_bytes() == (outputs / "grpo/exp.jsonl").read_bytes()


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_a_log_that_starts_late_takes_no_other_runs_place(state, outputs, upload, server):
    """Two logs of one project and name, neither from the beginning, are two runs, also when one
    is uploaded before the other is looked at, or on another machine: no row is overwritten."""
    late = outputs / "x" / "grpo" / "exp.jsonl"
    write_verl_log(late, [(2048 * n, {"actor/loss": n / 7}) for n in range(1, 9)])
    # So many that the first batches are sent when the last one is looked at.
    others = [outputs / "more" / f"other{n}.jsonl" for n in range(10)]
    for number, path in enumerate(others):
        write_verl_log(path, [(s, {"actor/loss": s / (number + 2)}) for s in range(1, 4)])
    early = outputs / "y" / "grpo" / "exp.jsonl"
    write_verl_log(early, [(1000, {"actor/loss": 0.5})])
    for age, path in enumerate([early, *others, late]):
        os.utime(path, (time.time() - 9000 - age,) * 2)
    assert upload.here(outputs, verify="full").rows_sent == 8 + 10 * 3 + 1
    if state == "lost":
        shutil.rmtree(upload.state_dir)
    assert upload.here(outputs, verify="full").rows_sent == 0
    runs = [[row["_step"] for row in run.rows] for run in server.runs if run.name == "exp"]
    assert sorted(runs) == [[1000], [2048 * n for n in range(1, 9)]]


def test_of_two_logs_that_continue_a_run_one_does(outputs, upload, server):
    """Two logs of one name that both could go on with a run on the server, in batches of their
    own: one does, the other is another run, and no row of either is overwritten."""
    log = outputs / "x" / "grpo" / "exp.jsonl"
    write_verl_log(log, [(step, {"actor/loss": step / 7}) for step in range(1, 31)])
    assert upload.here(outputs, final=True).rows_sent == 30
    shutil.rmtree(upload.state_dir)
    write_verl_log(log, [(step, {"actor/loss": step / 5}) for step in (20, 21, 22)])
    other = outputs / "y" / "grpo" / "exp.jsonl"
    write_verl_log(other, [(step, {"actor/loss": step / 3}) for step in (26, 27)])
    more = [outputs / "more" / f"other{n}.jsonl" for n in range(2)]
    for number, path in enumerate(more):
        write_verl_log(path, [(s, {"actor/loss": s / (number + 2)}) for s in range(1, 4)])
    for age, path in enumerate([other, *more, log]):
        os.utime(path, (time.time() - 9000 - age,) * 2)
    upload.here(outputs, verify="full", final=True)
    assert upload.here(outputs, verify="full", final=True).rows_sent == 0
    found = sorted([row["_step"] for row in run.rows] for run in server.runs if run.name == "exp")
    assert len(found) == 2
    assert {20, 21, 22, 26, 27} <= {step for steps in found for step in steps}
