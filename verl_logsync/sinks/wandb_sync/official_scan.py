"""W&B's own scan of a run's history, for when our plain query does not see all of it.

W&B's cloud moves the history of older runs into Parquet files, which only the official client
knows how to read together with the live rows. It starts a service process, so it is slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from verl_logsync.errors import Unreachable
from verl_logsync.sinks.wandb_sync.credentials import Server


def scan_history(server: Server, path: str) -> Iterator[Mapping[str, Any]]:
    """Every row of a run, ascending.

    Args:
        path: `entity/project/run_id`.

    Raises:
        Unreachable: the client cannot read the run.
    """
    # The client's service takes the address from the environment, not from its arguments.
    os.environ.setdefault("WANDB_BASE_URL", server.base_url)
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from wandb.errors import Error

    try:
        run = wandb.Api(api_key=server.api_key).run(path)
        for row in run.scan_history():
            yield dict(row)
    except (Error, ValueError, OSError) as error:
        raise Unreachable(
            f"the rows of {path} cannot be read back ({type(error).__name__})",
            hint="Run the same command again later, or use --verify counts",
        ) from error
