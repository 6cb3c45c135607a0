"""Inputs that nobody meant: each costs itself at most, is named, and stops nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verl_logsync
from verl_logsync import StepLogger, api
from verl_logsync.errors import LogsyncError
from verl_logsync.pipeline import Loaded
from verl_logsync.settings import load_settings
from verl_logsync.testing.builders import write_verl_log

REPOSITORY = Path(__file__).parents[2]
SECRET = "0123456789abcdef0123456789abcdef01234567"


def rows(first=0, last=9, value=0.0):
    return [
        (s, {"actor/loss": s / 7 + value, "timing_s/step": 5.0}) for s in range(first, last + 1)
    ]


def scanned(*paths: Path, **settings: object) -> tuple[list[Loaded], dict[str, str]]:
    """The runs that can be read, and by path what was left out and why."""
    found, results = api.scan(list(paths), load_settings(settings))
    assert not [r for _, r in results if isinstance(r, LogsyncError)]
    loaded = [r for _, r in results if isinstance(r, Loaded)]
    skips = [*found.skips, *(s for r in loaded for s in r.account.skips)]
    assert all(r.account.balanced for r in loaded)
    return loaded, {s.place: f"{s.reason.value}: {s.detail}" for s in skips}


@pytest.fixture
def good(tmp_path):
    """A log of ten rows, beside which bad things are put."""
    write_verl_log(tmp_path / "grpo/exp.jsonl", rows())
    return tmp_path


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


PIPES = (
    "checkpoints/grpo/exp/wandb_run_id",
    "checkpoints/grpo/two/latest_checkpointed_iteration.txt",
    "outputs/.hydra/config.yaml",
    "hydra/.hydra/overrides.yaml",
    "hydra/.hydra/hydra.yaml",
    "dumps/2.jsonl",
    "wandb/offline-run-20250101_000000-abc/run-abc.wandb",
    "events.out.tfevents.1.a",
    "rank-0000.steps.jsonl",
    "train.log",
)


def test_pipes_do_not_stop_us(good):
    """A pipe in the place of any file that is looked at is no file: nobody waits for its writer."""
    for name in ("exp", "two"):
        (good / f"checkpoints/grpo/{name}/global_step_5").mkdir(parents=True)
    (good / "hydra/.hydra").mkdir(parents=True)
    (good / "hydra/.hydra/config.yaml").write_text(
        "trainer: {project_name: grpo, experiment_name: exp}\n"
    )
    (good / "dumps").mkdir()
    (good / "dumps/1.jsonl").write_text('{"input": "p", "output": "o", "score": 1.0, "step": 1}\n')
    for place in PIPES:
        pipe(good / place)
    code = f"import verl_logsync; print(len(verl_logsync.load({str(good)!r})[0].history()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "10\n", done.stderr


def step_logs(folder: Path, ranks: int, **header: object) -> list[Path]:
    """Step logs of some ranks; `header` changes what their first lines say."""
    for rank in range(ranks):
        with StepLogger(
            "grpo", "exp", directory=folder, rank=rank, world_size=ranks, attempt_id="a"
        ) as logger:
            for step in range(1, 11):
                logger.log({"actor/loss": float(step + rank)}, step)
    paths = sorted(folder.rglob("*.jsonl"))
    for path in paths if header else ():
        first, newline, rest = path.read_bytes().partition(b"\n")
        changed = json.dumps({**json.loads(first), **header}, separators=(",", ":")).encode()
        path.write_bytes(changed + newline + rest)
    return paths


def test_one_rank_of_garbage(tmp_path):
    """Of eight ranks one file is garbage: the seven others are the run, and the eighth is named."""
    paths = step_logs(tmp_path, 8)
    paths[3].write_bytes(os.urandom(4000))
    ((run,), skips) = scanned(tmp_path)
    expected = [sum(s + r for r in range(8) if r != 3) / 7 for s in range(1, 11)]
    assert run.history.table.column("actor/loss").to_pylist() == pytest.approx(expected)
    assert skips[str(paths[3])].startswith("not a log")
    assert any("rank 3 of 8" in note for note in run.account.notes)


def test_ranks_with_damage_of_every_kind(tmp_path):
    """Cut in the header, empty, junk between the lines, a copy and a link: each costs itself."""
    paths = step_logs(tmp_path, 8)
    paths[1].write_bytes(paths[1].read_bytes()[:50])
    paths[2].write_bytes(b"")
    lines = paths[3].read_bytes().split(b"\n")
    paths[3].write_bytes(b"\n".join([*lines[:4], b'{"step":', b"[]", *lines[4:]]))
    (tmp_path / "copy.jsonl").write_bytes(paths[4].read_bytes())
    (tmp_path / "link.jsonl").symlink_to(paths[5])
    ((run,), skips) = scanned(tmp_path)
    kept = [r for r in range(8) if r not in (1, 2)]
    expected = [sum(s + r for r in kept) / len(kept) for s in range(1, 11)]
    assert run.history.table.column("actor/loss").to_pylist() == pytest.approx(expected)
    assert run.account.skipped == 2
    assert sum("rank-0003" in place for place in skips) == 2


@pytest.mark.parametrize(
    "header",
    [
        {"rank": 10**12, "world_size": 10**12 + 1},
        {"rank": -1, "world_size": "x"},
        {"started": {"time": 1e300, "mono": None}},
        {"project": ["x"], "experiment": {"a": 1}},
        {"log": None, "host": "\x1b[2J", "config": [1], "attempt_id": ""},
    ],
)
def test_headers_that_lie(tmp_path, header):
    """Whatever a header says, the rows below it are read, at once."""
    step_logs(tmp_path, 1, **header)
    ((run,), _) = scanned(tmp_path)
    assert len(run.history) == 10


@pytest.mark.parametrize("size", [70_000, 3_000_000])
def test_a_header_larger_than_the_first_look(tmp_path, size):
    """A config that fills the head of a file, and more, hides no step log."""
    step_logs(tmp_path, 1, config={"data": {"files": "x" * size}})
    ((run,), skips) = scanned(tmp_path)
    assert len(run.history) == 10
    assert skips == {}


@pytest.mark.parametrize("run_id", ["../../etc", "a/b", "", "x" * 500, ".hidden", "a b", "a\nb"])
def test_run_ids_that_are_none(tmp_path, run_id):
    """A recorded id that W&B would not take, and that may lead out of a folder, is not used."""
    step_logs(tmp_path / "logs", 1, run_id=run_id)
    ((run,), skips) = scanned(tmp_path / "logs")
    assert run.run.id_from == "derived"
    assert run.run.target.run_id.isalnum()
    assert bool(skips) == bool(run_id)


def test_secrets_of_every_source(good, upload):
    """No key, password or token of config, console or step log is printed, exported or sent."""
    (good / "train.log").write_text(
        f"WANDB_API_KEY={SECRET}\nhttps://user:{SECRET}@host/x --api_key={SECRET}\n"
        + "".join(f"step:{s} - actor/loss:{s / 7}\n" for s in range(10))
    )
    (good / "o/.hydra").mkdir(parents=True)
    (good / "o/.hydra/config.yaml").write_text(
        f"trainer: {{project_name: grpo, experiment_name: exp}}\nhf_token: {SECRET}\n"
    )
    (good / "o/.hydra/overrides.yaml").write_text(f"[+hf_token={SECRET}]\n")
    out = good / "out"
    done = [
        upload.text(good, "-v", verb="scan"),
        upload.text(good, "--json", verb="scan"),
        upload.text(good, "--to", "jsonl", out / "export", verb="export"),
        upload.text(good, "--final", "--mode", "offline", "--output", out / "fragments"),
    ]
    for code, text in done:
        assert code == 0, text
        assert SECRET[:20] not in text
    written = [path for path in out.rglob("*") if path.is_file()]
    assert len(written) > 3
    assert [path for path in written if SECRET[:20].encode() in path.read_bytes()] == []


def test_ten_thousand_files_of_checkpoints(good):
    """A checkpoint folder is claimed, not searched: what lies in it is never opened."""
    folder = good / "checkpoints/grpo/exp/global_step_5/actor"
    folder.mkdir(parents=True)
    for number in range(10_000):
        (folder / f"rank_{number}.jsonl").touch()
    for step in range(100, 400):
        (folder.parents[1] / f"global_step_{step}").mkdir()
    (folder.parents[1] / "latest_checkpointed_iteration.txt").write_text("5")
    ((run,), skips) = scanned(good)
    assert skips == {}
    assert len(run.history) == 10
    assert all(len(note) < 300 for note in run.account.notes)


def test_links_in_circles(good):
    """Links to each other, to themselves, and to the folder they lie in lead nowhere twice."""
    (good / "a").symlink_to("b")
    (good / "b").symlink_to("a")
    (good / "self.jsonl").symlink_to("self.jsonl")
    (good / "here").symlink_to(".", target_is_directory=True)
    (good / "grpo/up").symlink_to("..", target_is_directory=True)
    ((run,), skips) = scanned(good)
    assert len(run.history) == 10
    assert [Path(place).name for place in skips] == ["self.jsonl"]


NAMES = ["with space", "brackets[1]", "star*?", "эксп", "two\nlines", "it's", '"q"', "--run", "a=b"]


@pytest.mark.parametrize("name", [*NAMES, "\x1b[31mred", "x" * 200])
def test_names_of_every_kind(tmp_path, name):
    """Spaces, brackets, unicode, newlines and escapes in names: log, console and dumps are one run
    under that very name; what is printed cannot touch the terminal."""
    write_verl_log(tmp_path / "logs/grpo" / f"{name}.jsonl", rows())
    console = "".join(f"step:{s} - actor/loss:{s / 7}\n" for s in range(13))
    (tmp_path / "logs" / f"{name}.log").write_text(console)
    dumps = tmp_path / "logs" / name / "rollouts"
    dumps.mkdir(parents=True)
    (dumps / "1.jsonl").write_text('{"input": "p", "output": "o", "score": 1.0, "step": 1}\n')
    ((run,), skips) = scanned(tmp_path / "logs")
    assert run.run.name == name
    assert (len(run.history), len(run.run.rollouts)) == (13, 1)
    assert skips == {}


def test_escapes_in_names_are_not_printed(tmp_path, upload):
    """What is printed of a name cannot command a terminal."""
    write_verl_log(tmp_path / "gr\x1b[31mpo/e\x1b]0;x\x07.jsonl", rows())
    (tmp_path / "bad\x1b[2J.jsonl").write_bytes(b"\0\1\2")
    code, text = upload.text(tmp_path, "-v", verb="scan")
    assert code == 3
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "Traceback" not in text


def test_logs_of_one_name_in_three_folders(tmp_path):
    """Three starts from scratch of one name: three runs, each with what lies beside its log."""
    for number in range(3):
        folder = tmp_path / f"job {number}"
        write_verl_log(folder / "grpo/exp.jsonl", rows(value=number))
        text = "".join(f"step:{s} - actor/loss:{s / 7 + number}\n" for s in range(13))
        (folder / "train.log").write_text(text)
    runs, _ = scanned(tmp_path)
    assert len({run.run.target.run_id for run in runs}) == 3
    for run in runs:
        assert len(run.history) == 13
        assert run.account.conflict_count == 0
        assert len({file.path.parts[len(tmp_path.parts)] for file in run.run.files}) == 1


def test_growing_files_of_every_source(good, upload, one_run):
    """Console and JSONL of one job grow in turns, in pieces that respect no line: after every
    piece an upload sends what is whole, no row twice, and in the end everything."""
    log, console = good / "grpo/exp.jsonl", good / "train.log"
    json_lines = log.read_bytes()
    text = "".join(f"step:{s} - actor/loss:{s / 7} - extra:{s}\n" for s in range(10)).encode()
    log.write_bytes(b"")
    counts = []
    for part in (137, 251, 380):
        log.write_bytes(json_lines[:part])
        console.write_bytes(text[: part - 90])
        result = upload.here(good, settle=0)
        assert result.code == 0, result.report
        counts.append(len(one_run().rows))
    log.write_bytes(json_lines)
    console.write_bytes(text)
    assert upload.here(good, final=True, verify="full").code == 0
    assert counts == sorted(counts)
    assert [(r["_step"], r["extra"]) for r in one_run().rows] == [(s, s) for s in range(10)]
    assert upload.here(good, final=True).rows_sent == 0


def test_a_console_that_is_replaced_by_another_job(good, upload, server):
    """A console under the same name that tells of another job does not change what was uploaded
    of the first, and is not lost."""
    console = good / "train.log"
    (good / "grpo/exp.jsonl").unlink()
    for value in (0.0, 50.0):
        data = rows(value=value)
        console.write_text("".join(f"step:{s} - actor/loss:{d['actor/loss']}\n" for s, d in data))
        old = time.time() - 7200
        os.utime(console, (old, old))
        assert upload.here(good, final=True).code == 0
    losses = sorted(run.rows[0]["actor/loss"] for run in server.runs)
    assert losses == [0.0, 50.0]
    assert [len(run.rows) for run in server.runs] == [10, 10]


def test_where_rows_come_from(good):
    """Every stretch of steps names its attempt and files, all rows are covered, none twice."""
    text = "".join(f"step:{s} - actor/loss:{s / 7}\n" for s in range(5, 15))
    second = "".join(f"step:{s} - actor/loss:{s / 3}\n" for s in range(12, 21))
    (good / "train.log").write_text(text + second)
    (run,) = verl_logsync.load(good)
    told = [
        (o.first_step, o.last_step, o.attempt, sorted(Path(p).name for p in o.places))
        for o in run.account.origins
    ]
    assert told == [
        (0, 4, 0, ["exp.jsonl"]),
        (5, 9, 0, ["exp.jsonl", "train.log"]),
        (10, 11, 0, ["train.log"]),
        (12, 20, 1, ["train.log"]),
    ]
