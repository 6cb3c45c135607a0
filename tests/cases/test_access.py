"""Cases from public reports: keys, permissions, proxies, and nobody at the terminal."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from verl_logsync.testing import Fault
from verl_logsync.testing.builders import write_verl_log

KEY = "b1" * 20


@pytest.fixture
def log(outputs, age):
    """One run of eight rows."""
    path = write_verl_log(
        outputs / "grpo" / "qwen.jsonl",
        [(s, {"actor/loss": s / 7, "timing_s/step": 1.0}) for s in range(8)],
    )
    age(outputs)
    return path


@pytest.mark.parametrize("where", ["VerlLogsyncViewer", "VerlLogsyncRuns", "UpsertBucket"])
@pytest.mark.parametrize("status", [401, 403])
def test_i4_the_server_refuses_the_key(where, status, log, upload, server, one_run):
    """I4: 401 and 403, whatever is asked, end with 5 and name entity, project and where the key is
    from; nothing counts as sent, and a good key sends it all."""
    server.faults.add(Fault(where, status=status, times=None))
    code, text = upload.text(log)
    assert code == 5
    entity = "default entity" if where == "VerlLogsyncViewer" else "loopback"
    assert f"{entity}/grpo" in text
    assert "key from WANDB_API_KEY" in text
    assert str(status) in text
    assert " 0 rows sent" in text
    assert "Traceback" not in text
    server.faults.clear()
    assert upload.here(log).code == 0
    assert len(one_run().rows) == 8


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("body", [None, "", "<html>no</html>"])
def test_i4_rows_are_refused(status, body, log, upload, server, one_run):
    """I4: a key that may read and make runs but not write rows ends with 5 all the same."""
    server.faults.add(Fault("file_stream", status=status, times=None, body=body))
    result = upload(log)
    assert (result.code, result.only["rows_sent"]) == (5, 0)
    assert "key from WANDB_API_KEY" in str(result.only["error"])
    assert "loopback/grpo" in str(result.only["error"])
    server.faults.clear()
    assert upload.here(log).rows_sent == 8
    assert len(one_run().rows) == 8


def test_i4_a_key_from_netrc_is_named_so(log, upload, server):
    """I4: a refused key of .netrc is told as that, and never printed."""
    (upload.home / ".netrc").write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    server.faults.add(Fault("graphql", status=401, times=None))
    done = _run(upload, [log], WANDB_API_KEY="")
    assert done.returncode == 5
    assert "key from .netrc" in done.stdout
    assert KEY not in done.stdout + done.stderr


def _run(upload, arguments, verb="upload", cwd=None, prefix=(), **env):
    """The program without terminal and standard input, environment variables of "" left out."""
    known = {k: v for k, v in upload.env(**env).items() if v != ""}
    return subprocess.run(
        [*prefix, *upload.command(*arguments, verb=verb)],
        env=known,
        cwd=cwd or upload.home,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=120,
        check=False,
    )
