"""Who writes: rank, attempt and run of this process, from what its launcher says."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # what `typing` would say, without the time that it takes
if TYPE_CHECKING:
    from collections.abc import Mapping


class Place:
    """This process among those of its job. `known` is False where no launcher says it."""

    __slots__ = ("known", "local_rank", "rank", "world_size")

    def __init__(self, rank: int, world_size: int, local_rank: int | None, *, known: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.known = known


class Start:
    """One start of the job.

    `attempt_id` is the same on all ranks where it is `shared`; `time` is in seconds since 1970,
    `mono` on the clock of `time.monotonic`.
    """

    __slots__ = ("attempt_id", "mono", "shared", "time")

    def __init__(self, attempt_id: str, time: float, mono: float, *, shared: bool) -> None:
        self.attempt_id = attempt_id
        self.shared = shared
        self.time = time
        self.mono = mono


def find_place(
    rank: int | None = None,
    world_size: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> Place:
    """Rank and world size: as given, else torchrun's or Slurm's variables, else 0 of 1."""
    found = _first_int(env, "RANK", "SLURM_PROCID") if rank is None else rank
    size = _first_int(env, "WORLD_SIZE", "SLURM_NTASKS") if world_size is None else world_size
    local = _first_int(env, "LOCAL_RANK", "SLURM_LOCALID")
    number = found if found is not None and found >= 0 else 0
    return Place(number, max(size or 1, number + 1), local, known=found is not None)


def _first_int(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            continue
    return None


def find_start(given: str | None = None, env: Mapping[str, str] = os.environ) -> Start:
    """The attempt: as given, else from the launcher, else made of start time, host and pid."""
    now, mono = time.time(), time.monotonic()
    shared = given or env.get("VERL_LOGSYNC_ATTEMPT") or _launched(env)
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    made = f"{second}-{host_name()}-{os.getpid()}-{os.urandom(2).hex()}"
    return Start(shared or made, now, mono, shared=bool(shared))


def _launched(env: Mapping[str, str]) -> str:
    """What torchrun or Slurm calls this start; empty when neither says it."""
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    if run not in ("", "none"):  # torchrun's default for jobs without --rdzv-id
        return f"torchelastic-{run}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    job = env.get("SLURM_JOB_ID", "")
    if job:
        # Several srun in one job are several starts; all tasks of one srun share its step id.
        step = env.get("SLURM_STEP_ID", "batch")
        return f"slurm-{job}-{step}-{env.get('SLURM_RESTART_COUNT', '0')}"
    return ""


def host_name() -> str:
    """The name of this machine."""
    return os.uname().nodename
