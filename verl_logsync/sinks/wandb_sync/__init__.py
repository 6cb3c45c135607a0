"""The W&B sink: fragments go out by the official uploader, answers come back by GraphQL."""

from __future__ import annotations

from verl_logsync.sinks.wandb_sync.credentials import Server, find_server
from verl_logsync.sinks.wandb_sync.sink import WandbSink

__all__ = ["Server", "WandbSink", "find_server"]
