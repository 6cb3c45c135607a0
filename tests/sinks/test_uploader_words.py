"""What is quoted of the uploader's output."""

from __future__ import annotations

import pytest

from verl_logsync.sinks.wandb_sync.sink import _messages

TRACEBACK = """Traceback (most recent call last):
  File "cli.py", line 222, in main
    raise BadParameter(message)
click.exceptions.BadParameter: Path 'x' does not exist.
"""


@pytest.mark.parametrize("before", ["", "wandb: Syncing 1 run\n"])
def test_of_a_traceback_only_what_happened(before):
    """Users are told the reason, whether the uploader spoke before or not."""
    assert _messages(before + TRACEBACK, "abc") == (
        "click.exceptions.BadParameter: Path 'x' does not exist.",
    )


def test_secrets_and_other_runs_are_not_quoted():
    output = (
        "wandb: ERROR [a/b/abc] refused for WANDB_API_KEY=" + "ab" * 20 + "\n"
        "wandb: ERROR [a/b/other] refused\n"
    )
    (only,) = _messages(output, "abc")
    assert only.startswith("refused")
    assert "abab" not in only
