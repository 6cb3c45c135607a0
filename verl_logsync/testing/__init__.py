"""Public helpers for tests: a W&B server on this machine that can misbehave."""

from verl_logsync.testing.loopback import Fault, LoopbackServer

__all__ = ["Fault", "LoopbackServer"]
