"""A progress bar for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl_logsync.pipeline import Progress, no_progress


@contextmanager
def progress_bar(*, hidden: bool) -> Iterator[Progress]:
    """A bar on standard error while the block runs; nothing when nobody is looking."""
    if hidden:
        yield no_progress
        return
    from tqdm import tqdm

    with tqdm(unit="run", leave=False) as bar:

        def show(stage: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description(stage)
            bar.update(done - bar.n)

        yield show
