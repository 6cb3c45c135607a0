"""What the tests share: a server, the program, files that look old, and real offline runs.

Offline runs are made by the real wandb package once a session and copied for each test.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from verl_logsync.testing import LoopbackServer
from verl_logsync.testing.builders import OfflineRun, make_offline_runs

REPOSITORY = Path(__file__).parents[1]
FIXTURES = REPOSITORY / "fixtures"
#: One training job that ran long ago, its second attempt a day later.
LONG_AGO = 1_750_000_000.0
DAY = 86_400.0


# -- the program ---------------------------------------------------------------------------


# How long an example takes says more of the machine than of the code. What passed once passes
# again: the examples are the same each time, but for who goes looking for new ones.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Most tests wait for programs that they started, so one more than there are cores."""
    return min(8, len(os.sched_getaffinity(0)) + 1)


@dataclass(frozen=True)
class Uploaded:
    """What an upload said: exit code, printed text, and the report as `--json` gives it."""

    code: int
    report: dict[str, Any]
    stdout: str = ""
    stderr: str = ""

    @property
    def runs(self) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = self.report["runs"]
        return runs

    @property
    def only(self) -> dict[str, Any]:
        (run,) = self.runs
        return run

    @property
    def rows_sent(self) -> int:
        return int(self.report["totals"]["rows_sent"])

    @property
    def skipped(self) -> dict[str, str]:
        """Reason by file name."""
        return {
            Path(s["place"].split(" (byte")[0]).name: s["reason"] for s in self.report["skipped"]
        }


class Uploader:
    """Runs `verl-logsync upload` against one server, with an environment of its own.

    Calling it runs the command line in a process; `here` runs the same upload inside the
    tests, which is faster. With `powers=False` permissions count for root too.
    """

    def __init__(self, server: LoopbackServer, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.home = home
        self.state_dir = home / "state"
        self._patch = patch

    def env(self, **more: str) -> dict[str, str]:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("WANDB", "VERL_LOGSYNC", "XDG_", "HTTP_PROXY", "HTTPS_PROXY"))
        }
        return {
            **kept,
            **self.server.env(),
            "HOME": str(self.home),
            "NO_PROXY": "127.0.0.1",
            "VERL_LOGSYNC_STATE_DIR": str(self.state_dir),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def command(self, *arguments: Any, verb: str = "upload") -> list[str]:
        return [sys.executable, "-m", "verl_logsync", verb, *map(str, arguments)]

    def start(self, *arguments: Any, **more: str) -> subprocess.Popen[str]:
        """The program as the leader of a process group of its own, still running."""
        return subprocess.Popen(
            self.command(*arguments),
            env=self.env(**more),
            cwd=self.home,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def text(
        self, *arguments: Any, verb: str = "upload", powers: bool = True, seconds: float = 120
    ) -> tuple[int, str]:
        """Exit code and everything printed, as a person sees it."""
        done = self._run(self.command(*arguments, verb=verb), powers, seconds)
        return done.returncode, done.stdout + done.stderr

    def __call__(self, *arguments: Any, powers: bool = True, seconds: float = 120) -> Uploaded:
        done = self._run(self.command(*arguments, "--json"), powers, seconds)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        try:
            report = json.loads(done.stdout)
        except ValueError:
            report = {}
        return Uploaded(done.returncode, report, done.stdout, done.stderr)

    def _run(
        self, command: Sequence[str], powers: bool, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command if powers else _without_powers(command),
            env=self.env(),
            cwd=self.home,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )

    def here(self, *paths: Path, **settings: Any) -> Uploaded:
        """The same in this process."""
        from verl_logsync.api import run_upload
        from verl_logsync.reports.as_json import report_values
        from verl_logsync.settings import load_settings

        with self._patch.context() as patch:
            for name in [n for n in os.environ if n.startswith(("WANDB", "VERL_LOGSYNC"))]:
                patch.delenv(name)
            for name, value in {**self.server.env(), "HOME": str(self.home)}.items():
                patch.setenv(name, value)
            patch.chdir(self.home)
            given = {"state_dir": self.state_dir, **settings}
            report = run_upload(list(paths), load_settings(given))
        return Uploaded(int(report.exit_code), report_values(report))

    def from_another_machine(self) -> None:
        """Forget everything that is not on the server."""
        self.state_dir = Path(tempfile.mkdtemp(prefix="state-", dir=self.home))
        self.state_dir.chmod(0o777)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as running:
        yield running


@pytest.fixture
def upload(server: LoopbackServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploader:
    home = tmp_path / "home"
    home.mkdir()
    return Uploader(server, home, monkeypatch)


@pytest.fixture
def uploader_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Uploader]:
    """An uploader for a server that the test makes itself."""

    def make(server: LoopbackServer) -> Uploader:
        home = Path(tempfile.mkdtemp(prefix="home-", dir=tmp_path))
        return Uploader(server, home, monkeypatch)

    return make


@pytest.fixture
def one_run(server: LoopbackServer) -> Callable[[], Any]:
    """The only run on the server; fails when there are more."""

    def get() -> Any:
        (run,) = server.runs
        return run

    return get


@pytest.fixture
def logged() -> Callable[[Any], list[dict[str, Any]]]:
    """The rows of a run on the server, without the columns that diagnostics added."""

    def get(run: Any) -> list[dict[str, Any]]:
        added = set(run.config["verl_logsync"]["added"])
        return [{k: v for k, v in row.items() if k not in added} for row in run.rows]

    return get


@pytest.fixture
def kill_group() -> Callable[[subprocess.Popen[str]], None]:
    """SIGKILL for the program and its process group."""

    def kill(process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    return kill


# -- files ---------------------------------------------------------------------------------


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder


@pytest.fixture
def fixture_files() -> Path:
    return FIXTURES


@pytest.fixture
def age() -> Callable[..., None]:
    """Make everything below a path look as if it was written long ago."""

    def make_old(path: Path, seconds: float = 2 * 3600) -> None:
        then = time.time() - seconds
        for item in [path, *path.rglob("*")]:
            os.utime(item, (then, then), follow_symlinks=False)

    return make_old


# Root may read and write everything; without these two capabilities permissions count for it too.
_DROP_POWERS = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) != 0:
        sys.exit("cannot drop capabilities")
os.execv(sys.argv[1], sys.argv[1:])
"""


def _without_powers(command: Sequence[str]) -> list[str]:
    if os.geteuid() != 0:
        return list(command)
    return [sys.executable, "-c", _DROP_POWERS, *command]


@pytest.fixture
def without_powers() -> Callable[[Sequence[str]], list[str]]:
    """A command changed so that permissions count for root too."""
    return _without_powers


@pytest.fixture(scope="session", autouse=True)
def interrupts_count() -> None:
    """A shell has the programs that it runs in the background ignore Ctrl-C; theirs, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def permissions_count(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where a locked file can be read by whatever means we have."""
    locked = tmp_path_factory.mktemp("permissions") / "locked"
    locked.write_text("secret")
    locked.chmod(0)
    tried = subprocess.run(
        _without_powers(["/bin/cat", str(locked)]), capture_output=True, check=False
    )
    if tried.returncode == 0 or b"ermission denied" not in tried.stderr:
        pytest.skip("permissions do not count here")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a real file system of 64 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# -- real offline runs ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def _shelf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that ended by themselves. All names end in their steps."""
    folder = tmp_path_factory.mktemp("offline-runs")

    def run(case: str, run_id: str, steps: range, attempt: int = 1, **more: Any) -> OfflineRun:
        start = more.pop("start", LONG_AGO + (attempt - 1) * DAY)
        return OfflineRun(folder / case, run_id, steps, attempt, start=start, **more)

    specs = [
        run("first_0_29", "resumed1", range(30)),
        run("second_20_49", "resumed1", range(20, 50), 2),
        run("second_allow_20_49", "resumed1", range(20, 50), 2, resume="allow"),
        run("first_0_39", "resumed1", range(40)),
        run("second_30_49", "resumed1", range(30, 50), 2),
        *(run(f"quarter_{n}", "quarters", range(10 * n, 10 * n + 10), n + 1) for n in range(4)),
        run("many_0_1999", "manyrows", range(2000)),
        run("rich_0_29", "richrun1", range(30), rich=True, start=None),
        run("rich_0_19", "richrun2", range(20), rich=True, start=None),
        run("rich_without_rows", "norows01", range(0), rich=True, start=None),
        run("other_0_9", "otherrun", range(10), name="other"),
        run("long_0_1151", "longrun1", range(1152)),
    ]
    made = make_offline_runs(specs)
    return {spec.folder.name: path for spec, path in zip(specs, made, strict=True)}


@pytest.fixture(scope="session")
def _killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[dict[str, Path]]]:
    """Runs whose process was killed, being made."""
    folder = tmp_path_factory.mktemp("killed-runs")
    yesterday = time.time() - DAY - 5 * 3600
    specs = [
        OfflineRun(folder / "killed_0_9", "killed01", range(10), start=LONG_AGO, finish=False),
        OfflineRun(
            folder / "killed_five_hours",
            "killed02",
            range(1, 301),
            start=yesterday,
            step_seconds=60.0,
            finish=False,
        ),
    ]

    def make() -> dict[str, Path]:
        made = make_offline_runs(specs)
        return {spec.folder.name: path for spec, path in zip(specs, made, strict=True)}

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(make)


@pytest.fixture(scope="session", autouse=True)
def _begin_early(request: pytest.FixtureRequest) -> None:
    """Killed runs take 15 s to make: begin with the session, if any test is going to ask."""
    if any("killed_run" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("_killed")


def _copy(kept: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(kept, folder / kept.name))


@pytest.fixture
def offline_run(_shelf: dict[str, Path], outputs: Path) -> Callable[..., Path]:
    """Copy an offline run of the shelf: `offline_run("first_0_29", folder)`; returns the copy."""

    def copy(case: str, folder: Path | None = None) -> Path:
        return _copy(_shelf[case], folder or outputs / "wandb")

    return copy


@pytest.fixture
def killed_run(_killed: Future[dict[str, Path]], outputs: Path) -> Callable[..., Path]:
    """The same for a run whose process was killed."""

    def copy(case: str, folder: Path | None = None) -> Path:
        return _copy(_killed.result(timeout=120)[case], folder or outputs / "wandb")

    return copy


@pytest.fixture
def log_of() -> Callable[[Path], Path]:
    """The `.wandb` file of a run folder."""

    def find(folder: Path) -> Path:
        (path,) = folder.glob("*.wandb")
        return path

    return find
