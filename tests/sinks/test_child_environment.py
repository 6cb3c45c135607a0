"""What the official uploader is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_logsync.sinks.wandb_sync.child import environment
from verl_logsync.sinks.wandb_sync.credentials import Server


def started_with(folder: Path) -> dict[str, str]:
    return environment(Server("http://127.0.0.1:9", "k" * 40, "the test"), folder, 60.0)


def test_settings_of_the_user_do_not_reach_the_uploader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of W&B's settings only those about the connection are passed on; all others stay."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    monkeypatch.setenv("WANDB_INSECURE_DISABLE_SSL", "true")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:3128")
    found = started_with(tmp_path)
    assert not {"WANDB_MODE", "WANDB_RUN_ID"} & found.keys()
    assert found["WANDB_INSECURE_DISABLE_SSL"] == "true"
    assert found["HTTPS_PROXY"] == "http://127.0.0.1:3128"
    assert found["WANDB_API_KEY"] == "k" * 40
    assert found["WANDB_DIR"] == str(tmp_path)


def test_who_sets_how_garbage_is_collected_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service collects its garbage rarely, unless the user says how often."""
    monkeypatch.delenv("GOGC", raising=False)
    assert int(started_with(tmp_path)["GOGC"]) > 100
    monkeypatch.setenv("GOGC", "50")
    assert started_with(tmp_path)["GOGC"] == "50"
