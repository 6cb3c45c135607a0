"""Run the benches and print what they measured."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import (
    bench_a,
    bench_b,
    bench_c,
    bench_d,
    bench_diagnose,
    bench_rollouts,
    bench_steplog,
)
from benchmarks.measure import Line, Session

BENCHES: dict[str, Callable[[Session], list[Line]]] = {
    "a": bench_a.bench,
    "b": bench_b.bench,
    "c": bench_c.bench,
    "d": bench_d.bench,
    "diagnose": bench_diagnose.bench,
    "rollouts": bench_rollouts.bench,
    "start": bench_d.start_up,
    "steplog": bench_steplog.bench,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benches", nargs="*", metavar="|".join(BENCHES), help="default: all")
    parser.add_argument(
        "--quick", action="store_true", help="small data, few repeats: does it run at all?"
    )
    parser.add_argument(
        "--large", action="store_true", help="a rollout dump of 2 GB besides that of 200 MB"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the data here for another run (default: a temporary folder)",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.benches) - set(BENCHES)
    if unknown:
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="verl-logsync-bench-") as temporary:
        session = Session(
            (options.folder or Path(temporary)).absolute(), options.quick, options.large
        )
        session.folder.mkdir(parents=True, exist_ok=True)
        _print_machine()
        for name in options.benches or BENCHES:
            start = time.perf_counter()
            _print_table(BENCHES[name](session))
            print(f"bench {name} took {time.perf_counter() - start:.0f} s", file=sys.stderr)


def _print_machine() -> None:
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("wandb", "pandas", "pyarrow", "orjson", "numpy")
    )
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {packages}\n")
    print("| bench | what | measured | aim | met |")
    print("| --- | --- | --- | --- | --- |", flush=True)


def _print_table(lines: Sequence[Line]) -> None:
    for line in lines:
        met = {True: "yes", False: "NO", None: ""}[line.met]
        print(f"| {line.bench} | {line.what} | {line.measured} | {line.aim} | {met} |", flush=True)


if __name__ == "__main__":
    main()
