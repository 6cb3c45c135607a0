"""The command line as a program: start-up, usage errors, exit codes, output forms."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_logsync.ledger import locked
from verl_logsync.testing import Fault, LoopbackServer
from verl_logsync.testing.builders import write_verl_log

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "fixtures" / "demo"


def _run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("WANDB_", "VERL_LOGSYNC_", "NETRC"))
    }
    return subprocess.run(
        [sys.executable, "-m", "verl_logsync", *map(str, arguments)],
        env=clean | env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=180,
        check=False,
    )


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers without pandas, pyarrow, wandb or numpy."""
    code = (
        "import sys; sys.argv = ['verl-logsync', 'upload', '--help']\n"
        "from verl_logsync.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'pandas', 'pyarrow', 'wandb', 'numpy', 'requests'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ("upload",),
        ("upload", "no/such/path"),
        ("upload", DEMO, "--mode", "sideways"),
        ("upload", DEMO, "--run", "nonsense"),
        ("upload", DEMO, "--config", "no-such.toml"),
        ("upload", DEMO, "--jobs", "0"),
        ("frobnicate",),
    ],
)
def test_usage_errors(arguments: tuple[object, ...], home: dict[str, str]) -> None:
    """A wrong option, path or file is exit code 2, a sentence and no traceback."""
    result = _run(*arguments, WANDB_API_KEY="k" * 40, WANDB_BASE_URL="http://127.0.0.1:9", **home)
    assert result.returncode == 2, result.stderr
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_no_key_is_no_question(home: dict[str, str]) -> None:
    """Without an API key the program stops with exit code 5 and says how to give one."""
    result = _run("upload", DEMO, WANDB_BASE_URL="http://127.0.0.1:9", **home)
    assert result.returncode == 5
    assert "WANDB_API_KEY" in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_key(home: dict[str, str]) -> None:
    """A key that the server does not know is exit code 5, and is not printed."""
    with LoopbackServer(api_key="a" * 40) as server:
        secret = "b" * 40
        env = server.env() | {"WANDB_API_KEY": secret}
        result = _run("upload", DEMO, "--final", **env, **home)
    assert result.returncode == 5
    assert secret not in result.stdout + result.stderr
    assert "WANDB_API_KEY" in result.stdout


def test_key_is_never_on_a_command_line(home: dict[str, str]) -> None:
    """While the uploader runs, no process shows the key in its arguments."""
    from verl_logsync.testing import Fault

    secret, seen = "c3" * 20, []

    def look(_: object) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                seen.append((process / "cmdline").read_bytes())
            except OSError:
                continue

    with LoopbackServer() as server:
        server.faults.add(Fault(where="file_stream", times=1, callback=look))
        env = server.env() | {"WANDB_API_KEY": secret}
        assert _run("upload", DEMO, "--final", **env, **home).returncode == 0
    assert any(b"wandb_sync.child" in words for words in seen)
    assert not any(secret.encode() in words for words in seen)


def test_closed_port_and_silent_server(home: dict[str, str]) -> None:
    """No server, or one that never answers, ends within the timeout with exit code 6."""
    result = _run(
        "upload",
        DEMO,
        "--timeout",
        "4",
        WANDB_API_KEY="k" * 40,
        WANDB_BASE_URL="http://127.0.0.1:9",
        **home,
    )
    assert result.returncode == 6
    with LoopbackServer() as server:
        server.hang()
        start = time.monotonic()
        result = _run("upload", DEMO, "--timeout", "4", **server.env(), **home)
        assert time.monotonic() - start < 20
    assert result.returncode == 6, result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_second_upload_waits_or_leaves(home: dict[str, str], tmp_path: Path) -> None:
    """Two uploads with one state folder never run together; the second leaves with code 7."""
    from verl_logsync.ledger import locked

    with locked(tmp_path / "here"):
        result = _run(
            "upload",
            DEMO,
            "--state-dir",
            tmp_path / "here",
            WANDB_API_KEY="k" * 40,
            WANDB_BASE_URL="http://127.0.0.1:9",
            **home,
        )
    assert result.returncode == 7
    assert "--state-dir" in result.stderr


def test_modes(home: dict[str, str], tmp_path: Path) -> None:
    """offline writes folders that are uploaded in full later; disabled and --dry-run write
    nothing at all; WANDB_MODE means the same as --mode."""
    out = tmp_path / "out"
    result = _run("upload", DEMO, "--final", "--output", out, WANDB_MODE="offline", **home)
    assert result.returncode == 0, result.stdout + result.stderr
    folders = sorted(path.name for path in out.iterdir())
    assert len(folders) == 3
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.wandb")}
    assert (
        _run("upload", DEMO, "--final", "--output", out, "--mode", "offline", **home).returncode
        == 0
    )
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.wandb")} == before
    with LoopbackServer() as server:
        env = server.env() | home
        for flag in ("--dry-run", "--mode=disabled"):
            result = _run("upload", DEMO, "--final", flag, "--output", tmp_path / "no", **env)
            assert result.returncode == 0, result.stdout + result.stderr
            assert server.lines_received == 0
            assert not (tmp_path / "no").exists()
        result = _run("upload", out, "--json", **env)
        assert result.returncode == 0, result.stdout
        assert json.loads(result.stdout)["totals"] == {"runs": 3, "rows_sent": 83, "failed": 0}
        # The far side may have the logs themselves as well: they are the same runs.
        result = _run("upload", DEMO, "--final", "--json", "--state-dir", tmp_path / "s2", **env)
        assert json.loads(result.stdout)["totals"]["rows_sent"] == 0, result.stdout
        assert len(server.runs) == 3


def test_wandb_sync_takes_offline_folders(home: dict[str, str], tmp_path: Path) -> None:
    """Plain `wandb sync` sends what --mode offline wrote."""
    out = tmp_path / "out"
    assert (
        _run("upload", DEMO, "--final", "--mode", "offline", "--output", out, **home).returncode
        == 0
    )
    with LoopbackServer() as server:
        env = os.environ | server.env() | home | {"WANDB_DIR": str(tmp_path)}
        folders = [str(path) for path in out.iterdir()]
        subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--yes", *folders],
            env=env,
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        assert sorted(len(run.rows) for run in server.runs) == [12, 30, 41]
        assert {run.state for run in server.runs} == {"finished"}


def test_status(home: dict[str, str]) -> None:
    """status tells what was verified; --remote finds a run that vanished from the server."""
    with LoopbackServer() as server:
        env = server.env() | home
        assert "nothing was uploaded" in _run("status", **env).stdout
        assert _run("upload", DEMO, "--final", "-q", **env).stdout == ""
        result = _run("status", "--remote", **env)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "qwen_small_grpo [" in result.stdout
        server.delete_run("demowandb")
        result = _run("status", "--remote", "--json", **env)
        assert result.returncode == 4
        assert [r["run_id"] for r in json.loads(result.stdout) if not r["agrees"]] == ["demowandb"]


@pytest.mark.parametrize(
    ("given", "env"),
    [
        (["--exclude", "*killed*", "--exclude", "offline-run-*"], {}),
        ([], {"VERL_LOGSYNC_EXCLUDE": "*killed*:offline-run-*"}),
        (["--exclude", "*/demo/*killed*", "--exclude", "wandb"], {}),
    ],
)
def test_exclude(home: dict[str, str], given: list[str], env: dict[str, str]) -> None:
    """What --exclude matches, by name or path, is not looked at; a given path always is."""
    everything = json.loads(_run("scan", DEMO, "--json", **home).stdout)
    names = {run["name"] for run in everything["runs"]}
    assert names == {"qwen_small_grpo", "qwen_small_killed", "qwen_small_wandb"}
    left = json.loads(_run("scan", DEMO, "--json", *given, **home, **env).stdout)
    assert {run["name"] for run in left["runs"]} == {"qwen_small_grpo"}
    above = ["--exclude", "demo", "--exclude", "*fixture*"]
    whole = json.loads(_run("scan", DEMO, "--json", *above, **home).stdout)
    assert {run["name"] for run in whole["runs"]} == names


def test_scan(home: dict[str, str]) -> None:
    """scan needs neither key nor network, and tells runs, attempts, steps and gaps."""
    result = _run("scan", DEMO, **home)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "attempt 2" in result.stdout
    values = json.loads(_run("scan", DEMO, "--json", **home).stdout)
    resumed = next(r for r in values["runs"] if r["name"] == "qwen_small_grpo")
    assert [a["first_step"] for a in resumed["attempts"]] == [0, 20]
    assert resumed["account"]["superseded_steps"] == list(range(21, 34))


def test_settings_file_and_environment(home: dict[str, str], tmp_path: Path) -> None:
    """The settings file counts, the environment wins over it, the command line over both."""
    config = tmp_path / "my.toml"
    config.write_text('project = "from-file"\n[runs]\n"p/joined" = "*qwen_small_killed*"\n')
    values = json.loads(_run("scan", DEMO, "--config", config, "--json", **home).stdout)
    assert {r["project"] for r in values["runs"]} == {"from-file"}
    assert "joined" in {r["name"] for r in values["runs"]}
    env = home | {"VERL_LOGSYNC_PROJECT": "from-env"}
    values = json.loads(_run("scan", DEMO, "--config", config, "--json", **env).stdout)
    assert {r["project"] for r in values["runs"]} == {"from-env"}
    args = ("scan", DEMO, "--config", config, "--project", "given", "--json")
    values = json.loads(_run(*args, **env).stdout)
    assert {r["project"] for r in values["runs"]} == {"given"}


def test_secrets_in_a_config_stay_here(home: dict[str, str], tmp_path: Path) -> None:
    """Promise 10: a key or password inside a training config never reaches the server."""
    hydra = tmp_path / "o" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(
        "trainer: {project_name: p, experiment_name: e, api_key: SECRET1}\n"
        "proxy: http://user:SECRET2@proxy:3128\nargs: ['--token', SECRET3]\nnum_memory_tokens: 4\n"
    )
    log = tmp_path / "o" / "p" / "e.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 1, "data": {"a": 1}}\n')
    with LoopbackServer() as server:
        result = _run("upload", tmp_path / "o", "--final", **server.env(), **home)
        assert result.returncode == 0, result.stdout
        run = server.runs[0]
        everything = json.dumps(run.config) + str(run.files) + result.stdout
    assert "SECRET" not in everything
    assert run.config["num_memory_tokens"] == 4


def test_full_disk(home: dict[str, str], small_disk: Path) -> None:
    """A full state folder is one clear sentence; after making room everything arrives."""
    with LoopbackServer() as server:
        env = server.env() | home
        result = _run("upload", DEMO, "--final", "--state-dir", small_disk / "s", **env)
        assert result.returncode in (2, 3), result.stdout + result.stderr
        assert "space" in result.stdout + result.stderr
        assert "Traceback" not in result.stdout + result.stderr
        result = _run("upload", DEMO, "--final", "--json", **env)
        assert json.loads(result.stdout)["exit_code"] == 0
        assert sorted(len(run.rows) for run in server.runs) == [12, 30, 41]


def test_dry_run_leaves_no_trace(home: dict[str, str]) -> None:
    """--dry-run neither makes a state folder nor waits for another upload's lock."""
    with LoopbackServer() as server:
        env = server.env() | home
        state = Path(home["XDG_STATE_HOME"])
        assert _run("upload", DEMO, "--final", "--dry-run", **env).returncode == 0
        assert not state.exists()
        assert _run("upload", DEMO, "--final", **env).returncode == 0
        before = {p: p.stat().st_mtime_ns for p in state.rglob("*")}
        with locked(state / "verl-logsync"):
            result = _run("upload", DEMO, "--final", "--dry-run", **env)
        assert result.returncode == 0, result.stderr
        assert {p: p.stat().st_mtime_ns for p in state.rglob("*")} == before


def test_names_do_not_steer_the_terminal(home: dict[str, str], tmp_path: Path) -> None:
    """Control characters in names of files are shown, never sent to the terminal."""
    folder = tmp_path / "logs" / "grpo"
    write_verl_log(folder / "a\x1b[2Jb\rc.jsonl", [(0, {"a": 1.0})])
    result = _run("scan", folder, **home)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Jb" in result.stdout


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_interrupt_ends_at_once(home: dict[str, str], asked: int) -> None:
    """Ctrl-C is not kept waiting by a server that stops to answer, whichever thread asked it."""
    hung = threading.Event()

    def hang(_: object) -> None:
        server.hang()
        hung.set()

    with LoopbackServer() as server:
        server.faults.add(Fault("VerlLogsyncRuns", skip=asked, times=1, callback=hang))
        env = os.environ | server.env() | home
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_logsync", "upload", str(DEMO), "--final"],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert hung.wait(60)
        time.sleep(0.5)  # now it waits for the answer
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 130, said
        assert "interrupted" in said
        assert "Traceback" not in said
