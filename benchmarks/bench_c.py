"""(c) `upload` of many runs, against a log loop and against `wandb sync` of official folders.

Whole processes, wall time, a fresh server in a process of its own for each; afterwards the
server must hold every row.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path

from benchmarks.generate import verl_files
from benchmarks.measure import Line, Session, compared, environment, faster, in_turn, run, server

METRICS = 90
#: What `upload` and `wandb sync` both do by default.
JOBS = 5


def bench(session: Session) -> list[Line]:
    """40 runs of 1,000 steps, default verification included."""
    runs, steps, repeats = (6, 200, 2) if session.quick else (40, 1_000, 5)
    return _Uploads(session, runs, steps).lines(repeats)


class _Uploads:
    """The same runs, sent in three ways."""

    def __init__(self, session: Session, runs: int, steps: int) -> None:
        self._session, self._runs, self._steps = session, runs, steps
        name = f"c-{runs}x{steps}"
        self._logs = session.made(name, lambda p: verl_files(p, runs, steps, metrics=METRICS))
        self._official = session.made(f"{name}-official", self._log_offline)
        self._looped = min(runs, 4)
        self._number = itertools.count()

    def lines(self, repeats: int) -> list[Line]:
        turns = {
            "upload": lambda: self._upload("--no-diagnostics"),
            "diagnosed": self._upload,
            "sync": self._sync,
            "loop": self._loop,
        }
        times = in_turn(turns, repeats)
        name = f"upload {self._runs} runs x {self._steps:,} steps x {METRICS}"
        scaled = f" ({self._looped} runs, scaled)" if self._looped < self._runs else ""
        return [
            faster(
                "c",
                f"{name}, against init/log/finish{scaled}",
                times["upload"],
                times["loop"],
                at_least=4.0,
            ),
            compared(
                "c",
                f"{name}, against wandb sync -n {JOBS}",
                times["upload"],
                times["sync"],
                at_most=1.2,
            ),
            faster(
                "c",
                f"the same with diagnostics, against init/log/finish without any{scaled}",
                times["diagnosed"],
                times["loop"],
            ),
        ]

    def _files(self) -> list[Path]:
        return sorted(self._logs.glob("grpo/*.jsonl"))

    def _log_offline(self, place: Path) -> None:
        env = environment(WANDB_MODE="offline", WANDB_DIR=str(place), WANDB_API_KEY="0" * 40)
        run(["-m", "benchmarks.wandb_loop", "grpo", *map(str, self._files())], env, place)

    def _upload(self, *options: str) -> float:
        work = self._session.fresh(f"c-work-{next(self._number) % 2}")
        with server() as there:
            env = environment(**there.env, VERL_LOGSYNC_STATE_DIR=str(work / "state"))
            command = ["-m", "verl_logsync", "upload", str(self._logs), *options]
            seconds = run(command, env, work).seconds
            there.must_hold(self._runs, self._steps)
        return seconds

    def _sync(self) -> float:
        for marker in self._official.rglob("*.wandb.sync*"):
            marker.unlink()
        folders = [str(folder) for folder in sorted(self._official.glob("wandb/offline-run-*"))]
        with server() as there:
            env = environment(**there.env)
            seconds = run(
                ["-m", "wandb", "sync", "-n", str(JOBS), "--yes", *folders], env, self._official
            ).seconds
            there.must_hold(self._runs, self._steps)
        return seconds

    def _loop(self) -> float:
        """Measured on a few runs; only the loop is scaled, start-up counts once."""
        work = self._session.fresh("c-loop")
        with server() as there:
            env = environment(**there.env, WANDB_DIR=str(work))
            files = map(str, self._files()[: self._looped])
            done = run(["-m", "benchmarks.wandb_loop", "grpo", *files], env, work)
            there.must_hold(self._looped, self._steps)
        found = re.search(r"loop_seconds=([\d.]+)", done.output)
        assert found, "the loop prints its seconds"
        loop = float(found[1])
        with contextlib.suppress(ZeroDivisionError):
            return done.seconds - loop + loop * self._runs / self._looped
        return done.seconds
