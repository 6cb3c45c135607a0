"""How the benches measure: side by side, in turn, again and again.

A shared machine is faster or slower from one second to the next. What is compared therefore
runs alternately, and a ratio is the median of the ratios of neighbours, not the ratio of two
medians that may come from different moments.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import verl_logsync

_PACKAGES = Path(verl_logsync.__file__).parents[1]
_BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; `aim` is empty for what is only reported."""

    bench: str
    what: str
    measured: str
    aim: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """What a bench is given: a folder for its data, and whether to be quick, or to be large."""

    folder: Path
    quick: bool
    large: bool = False

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The data of this name, made unless an earlier run left it whole."""
        place = self.folder / name
        whole = self.folder / f"{name}.whole"
        if not whole.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            make(place)
            whole.touch()
        return place

    def fresh(self, name: str) -> Path:
        """An empty folder; what was in it is gone."""
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place


def in_turn(works: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Do every work so many times, one after the other, and return their seconds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(work())
    return times


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratios of neighbours, ascending."""
    return sorted(a / b for a, b in zip(ours, theirs, strict=True))


def _seconds(ours: Sequence[float], theirs: Sequence[float]) -> str:
    digits = 2 if median(ours) >= 0.1 else 4
    return f"{median(ours):.{digits}f} s : {median(theirs):.{digits}f} s"


def compared(
    bench: str, what: str, ours: Sequence[float], theirs: Sequence[float], *, at_most: float
) -> Line:
    """A line that says how many times as long ours takes as theirs."""
    each = ratios(ours, theirs)
    times = median(each)
    return Line(
        bench,
        what,
        f"{times:.2f} times as long, {each[0]:.2f} to {each[-1]:.2f} ({_seconds(ours, theirs)})",
        f"at most {at_most:g} times",
        times <= at_most,
    )


def faster(
    bench: str,
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    at_least: float | None = None,
) -> Line:
    """A line that says how many times faster ours is than theirs."""
    each = ratios(theirs, ours)
    times = median(each)
    return Line(
        bench,
        what,
        f"{times:.1f} times faster, {each[0]:.1f} to {each[-1]:.1f} ({_seconds(ours, theirs)})",
        f"at least {at_least:g} times" if at_least else "",
        times >= at_least if at_least else None,
    )


# -- whole programs ------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """An environment in which the packages are found and no setting of the user's counts."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "VERL_LOGSYNC_"))}
    path = [str(_PACKAGES), str(_BENCHMARKS), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        **more,
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """A program that ended well: its wall time and what it printed."""

    seconds: float
    output: str


def run(arguments: Sequence[str], env: Mapping[str, str], folder: Path) -> Ran:
    """Run `python ARGUMENTS` in a folder.

    Raises:
        RuntimeError: it failed; a time of something else would be no measurement.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        env=dict(env),
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        said = f"{done.stdout}\n{done.stderr}"[-3000:]
        raise RuntimeError(f"python {' '.join(arguments[:6])}: exit {done.returncode}\n{said}")
    return Ran(seconds, done.stdout)


@dataclass(frozen=True, slots=True)
class Server:
    """A loopback server in a process of its own."""

    url: str

    @property
    def env(self) -> dict[str, str]:
        """What points a client to it."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40}

    def state(self) -> dict[str, Any]:
        """What it holds, and what it was asked."""
        with urlopen(f"{self.url}/__state__", timeout=60) as answer:
            state: dict[str, Any] = json.loads(answer.read())
        return state

    def must_hold(self, runs: int, rows: int) -> None:
        """Refuse a measurement of a sender that lost something."""
        held = [run["history"] for run in self.state()["runs"].values()]
        if len(held) != runs or any(count != rows for count in held):
            raise RuntimeError(f"{runs} runs of {rows} rows meant, the server holds {held}")


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Start an empty server, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_logsync.testing"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait()
