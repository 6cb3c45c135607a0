"""The official uploader as a bounded child process.

Run as a module it is that child: it ties its life to its parent's, then becomes
`python -m wandb`. A sender that outlived a killed parent would add rows while the next upload
already plans.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verl_logsync.errors import StateError
from verl_logsync.sinks.wandb_sync.credentials import Server

_PR_SET_PDEATHSIG: Final = 1

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])

# Of the user's W&B settings only those about the connection reach the uploader.
_CONNECTION: Final = (
    "WANDB__EXTRA_HTTP_HEADERS",
    "WANDB_INSECURE_DISABLE_SSL",
    "WANDB_X_EXTRA_HTTP_HEADERS",
    "WANDB_HTTP_TIMEOUT",
)


@dataclass(frozen=True, slots=True)
class ChildResult:
    """What the uploader printed, and whether it had to be killed. Its exit code says nothing."""

    output: str
    timed_out: bool


def environment(
    server: Server, folder: Path, *, resume: bool, finish: bool, seconds: float
) -> dict[str, str]:
    """The child's environment: clean, bounded, with the key (never on a command line)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") or k in _CONNECTION}
    wait = str(max(1, int(min(10.0, seconds / 10))))
    kept |= {
        "WANDB_BASE_URL": server.base_url,
        "WANDB_API_KEY": server.api_key,
        "WANDB_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_X_UPDATE_FINISH_STATE": "true" if finish else "false",
        # A server that is away for ten seconds is waited for, a dead one not for days.
        "WANDB_X_FILE_STREAM_RETRY_MAX": "6",
        "WANDB_X_FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
        "WANDB_X_FILE_STREAM_RETRY_WAIT_MAX_SECONDS": wait,
        "WANDB_X_FILE_TRANSFER_RETRY_MAX": "4",
        "WANDB_X_FILE_TRANSFER_RETRY_WAIT_MAX_SECONDS": wait,
        "WANDB_X_GRAPHQL_RETRY_MAX": "5",
        "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": wait,
        # It runs in another folder; a package that is not installed must be found from there.
        "PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH")))),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
    }
    if resume:
        kept["WANDB_RESUME"] = "allow"
    return kept


def run_sync(
    folders: Sequence[Path],
    env: Mapping[str, str],
    work: Path,
    *,
    jobs: int,
    seconds: float,
    held: Sequence[int] = (),
) -> ChildResult:
    """Send run folders with `wandb sync`, for so many seconds at most.

    Args:
        held: file descriptors that the child keeps open (the lock must outlive us with it).
    """
    log = work / "sync.log"
    command = [sys.executable, "-m", __name__, str(os.getpid()), "sync", "--yes", "-n", str(jobs)]
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, *map(str, folders)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=work,
                start_new_session=True,
                pass_fds=tuple(held),
            )
    except OSError as error:
        raise StateError(
            f"the uploader cannot be started: {error.strerror}",
            place=str(work),
            hint=f"Check its free space: df -h {str(work)!r}",
        ) from error
    timed_out = _wait(child, seconds)
    return ChildResult(log.read_text(errors="replace"), timed_out)


def _wait(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        return True
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return False


def become_uploader(arguments: Sequence[str]) -> None:
    """Die with the parent whose process id comes first, and run W&B's command line."""
    parent, *rest = arguments
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)  # it died before we could ask to die with it
    sys.argv = ["wandb", *rest]
    runpy.run_module("wandb", run_name="__main__")


if __name__ == "__main__":
    become_uploader(sys.argv[1:])
