"""Groups to look at, as W&B tables: best, worst and most split, with prompt and outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from verl_logsync.columns import to_json
from verl_logsync.model import FileRef
from verl_logsync.rollouts.values import StepReduction

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The key of the history under which the tables are.
SAMPLES: Final = "grpo/samples"

_COLUMNS: Final = ("why", "group mean", "group spread", "size", "gts", "prompt", "score", "output")


def sample_tables(
    reductions: Iterable[StepReduction], steps: NDArray[np.int64], every: int
) -> tuple[tuple[FileRef, ...], pa.Array]:
    """Tables of the training dumps of every n-th step.

    Args:
        steps: of the history, ascending.
        every: 0 for no tables.

    Returns:
        The files that hold them, and the column of the history that shows them, shape (steps,).
    """
    rows = {int(step): row for row, step in enumerate(steps.tolist())}
    values: list[str | None] = [None] * len(steps)
    files: list[FileRef] = []
    for reduction in reductions:
        row = rows.get(reduction.step)
        wanted = bool(every) and reduction.step % every == 0 and bool(reduction.samples)
        if row is not None and wanted and reduction.kind != "validation":
            file, value = _table(reduction.step, list(_lines(reduction)))
            files.append(file)
            values[row] = to_json(value)
    return tuple(files), pa.array(values, type=pa.string())


def _lines(reduction: StepReduction) -> Iterator[Sequence[Any]]:
    for group in reduction.samples:
        for output in group.outputs:
            yield (
                *(group.why, group.mean, group.spread, group.size, group.gts, group.prompt),
                *(output.score, output.text),
            )


def _table(step: int, lines: Sequence[Sequence[Any]]) -> tuple[FileRef, dict[str, Any]]:
    """A table as wandb's own client stores one: its file, and what stands in the history."""
    content = json.dumps(
        {"columns": list(_COLUMNS), "data": [list(line) for line in lines]}, separators=(",", ":")
    ).encode(errors="replace")
    digest = hashlib.sha256(content).hexdigest()
    name = f"media/table/{SAMPLES}_{step}_{digest[:20]}.table.json"
    value = {
        "_type": "table-file",
        "path": name,
        "sha256": digest,
        "size": len(content),
        "ncols": len(_COLUMNS),
        "nrows": len(lines),
    }
    return FileRef(name, Path(name), content=content), value
