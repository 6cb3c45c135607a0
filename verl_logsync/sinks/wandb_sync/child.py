"""The official uploader as a bounded child process.

Run as a module it is that child: it ties its life to its parent's, imports wandb while the
parent still reads logs, then runs `wandb sync` for every list of folders that it is given. A
sender that outlived a killed parent would add rows while the next upload already plans.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verl_logsync.errors import WriteError, quoted
from verl_logsync.sinks.wandb_sync.credentials import Server

_PR_SET_PDEATHSIG: Final = 1
#: Written by the child when a list of folders is done; nothing that wandb prints begins so.
_DONE: Final = "\x1everl-logsync: done"
#: How often the child's output is looked at, in seconds.
_LOOK: Final = 0.05

# Of the user's W&B settings only those about the connection reach the uploader.
_CONNECTION: Final = (
    "WANDB__EXTRA_HTTP_HEADERS",
    "WANDB_INSECURE_DISABLE_SSL",
    "WANDB_X_EXTRA_HTTP_HEADERS",
    "WANDB_HTTP_TIMEOUT",
)
# wandb's service process (a Go program) makes much garbage of small values: collecting it less
# often saves a fifth of its processor time for about 100 MB of memory.
_GARBAGE_COLLECTION: Final = "300"
_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True, slots=True)
class ChildResult:
    """What the uploader printed, and whether it had to be killed. Its exit code says nothing."""

    output: str
    timed_out: bool


def environment(server: Server, folder: Path, seconds: float) -> dict[str, str]:
    """The child's environment: clean, bounded, with the key (never on a command line)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") or k in _CONNECTION}
    kept.setdefault("GOGC", _GARBAGE_COLLECTION)
    wait = str(max(1, int(min(10.0, seconds / 10))))
    return kept | {
        "WANDB_BASE_URL": server.base_url,
        "WANDB_API_KEY": server.api_key,
        "WANDB_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        # A server that is away for ten seconds is waited for, a dead one not for days.
        "WANDB_X_FILE_STREAM_RETRY_MAX": "6",
        "WANDB_X_FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
        "WANDB_X_FILE_STREAM_RETRY_WAIT_MAX_SECONDS": wait,
        "WANDB_X_FILE_TRANSFER_RETRY_MAX": "4",
        "WANDB_X_FILE_TRANSFER_RETRY_WAIT_MAX_SECONDS": wait,
        # Some refusals (a deleted run's 409) are retried like failures: keep that short.
        "WANDB_X_GRAPHQL_RETRY_MAX": "6",
        "WANDB_X_GRAPHQL_RETRY_WAIT_MIN_SECONDS": "1",
        "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "2",
        # It runs in another folder; a package that is not installed must be found from there.
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
    }


def kind_environment(*, resume: bool, finish: bool) -> dict[str, str]:
    """What distinguishes fragments in the environment: append or not, end the run or not."""
    kind = {"WANDB_X_UPDATE_FINISH_STATE": "true" if finish else "false"}
    return kind | {"WANDB_RESUME": "allow"} if resume else kind


class Uploader:
    """One child process.

    Args:
        env: its environment.
        work: a folder for its output and its own files.
        jobs: runs that it sends at a time.
        held: file descriptors that it keeps open (the lock must outlive us with it).

    Raises:
        WriteError: it cannot be started.
    """

    def __init__(
        self, env: Mapping[str, str], work: Path, *, jobs: int, held: Sequence[int] = ()
    ) -> None:
        self._jobs = jobs
        self.fragments = 0
        self.work = work
        try:
            work.mkdir(parents=True, exist_ok=True)
            self._log = work / "sync.log"
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    cwd=work,
                    start_new_session=True,
                    pass_fds=tuple(held),
                )
        except OSError as error:
            raise WriteError(
                f"the uploader cannot be started: {error.strerror}",
                place=str(work),
                hint=f"Check its free space: df -h {quoted(work)}",
            ) from error

    @property
    def alive(self) -> bool:
        """Whether it can be given work."""
        return self._process.poll() is None

    def sync(self, folders: Sequence[Path], env: Mapping[str, str], seconds: float) -> ChildResult:
        """Send run folders with `wandb sync`, for so many seconds at most."""
        start = self._size()
        order = {"folders": [str(folder) for folder in folders], "jobs": self._jobs, "env": env}
        self.fragments += len(folders)
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return ChildResult(self._printed(start), timed_out=False)
        timed_out = not self._wait_done(start, seconds)
        if timed_out:
            self.close()
        return ChildResult(self._printed(start), timed_out)

    def _wait_done(self, start: int, seconds: float) -> bool:
        """Wait for the child's mark or its end; False when the time is over first."""
        end = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < end:
            alive = self.alive
            if self._size() != seen or not alive:
                seen = self._size()
                if not alive or _DONE in self._printed(start):
                    return True
            time.sleep(_LOOK)
        return False

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _printed(self, start: int) -> str:
        try:
            with self._log.open("rb") as stream:
                stream.seek(start)
                return stream.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.stdin is not None:
            with suppress(OSError):  # it may have gone already
                self._process.stdin.close()
        if self.alive:
            # What it was given is done or out of time; its service process ends with it.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# -- inside the child ----------------------------------------------------------------------


def serve(parent: int) -> None:
    """Run `wandb sync` for every order on standard input, until it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return  # it died before we could ask to die with it
    from wandb.cli.cli import cli

    for line in sys.stdin:
        order = json.loads(line)
        os.environ.update(order["env"])
        arguments = ["sync", "--yes", "-n", str(order["jobs"]), *order["folders"]]
        try:
            cli.main(arguments, prog_name="wandb", standalone_mode=False)
        finally:
            print(_DONE, flush=True)  # noqa: T201 - the parent waits for it


if __name__ == "__main__":
    serve(int(sys.argv[1]))
