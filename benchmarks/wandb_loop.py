"""What people do without verl-logsync: `wandb.init`, `run.log` a row, `finish`, run by run.

    python -m benchmarks.wandb_loop PROJECT FILE...

Online, it is the loop that `upload` is compared with; with WANDB_MODE=offline it leaves the run
folders that `wandb sync` is given. Prints the seconds of the loop, imports left out.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import wandb

from benchmarks.generate import read_rows


def main(project: str, files: list[str]) -> None:
    """Log every verl file as a run."""
    start = time.perf_counter()
    for number, file in enumerate(map(Path, files)):
        run = wandb.init(project=project, id=f"loop{number:04}", name=file.stem)
        for step, values in read_rows(file):
            run.log(values, step=step)
        run.finish()
    print(f"loop_seconds={time.perf_counter() - start}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
