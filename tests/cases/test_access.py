"""Cases from public reports: keys, permissions, proxies, and nobody at the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

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


def _run(upload, arguments, change=list, **env):
    """The program without terminal and standard input, environment variables of "" left out."""
    return subprocess.run(
        change(upload.command(*arguments)),
        env={k: v for k, v in upload.env(**env).items() if v != ""},
        cwd=upload.home,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def read_only_home(upload, permissions_count):
    """A home folder that cannot be written, with somebody else's unreadable `.netrc`."""
    netrc = upload.home / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    netrc.chmod(0)
    if os.geteuid() == 0:
        os.chown(netrc, 12345, 12345)
    upload.home.chmod(0o555)
    yield upload.home
    upload.home.chmod(0o755)


def test_i5_only_an_api_key(log, upload, one_run, read_only_home, tmp_path, without_powers):
    """I5: with a read-only home, an unreadable .netrc, no terminal and only WANDB_API_KEY it works;
    where the state is kept instead is said, and counts the next time."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"VERL_LOGSYNC_STATE_DIR": "", "TMPDIR": str(temporary)}
    first = _run(upload, [log], without_powers, **env)
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(one_run().rows) == 8
    (state,) = temporary.glob("verl-logsync-*")
    assert str(state) in first.stderr
    assert state.stat().st_mode & 0o077 == 0
    again = _run(upload, [log], without_powers, **env)
    assert (again.returncode, "up to date" in again.stdout) == (0, True)
    assert not any(path.name != ".netrc" for path in read_only_home.iterdir())


def test_i5_without_a_key_one_line(log, upload, read_only_home, without_powers):
    """I5: without any key there is one line and exit code 5, never a question."""
    done = _run(upload, [log], without_powers, WANDB_API_KEY="", VERL_LOGSYNC_STATE_DIR="")
    assert done.returncode == 5
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "no API key" in line
    assert "WANDB_API_KEY" in line


def test_i5_state_of_somebody_else_is_not_used(
    log, upload, read_only_home, tmp_path, without_powers
):
    """I5: what lies among the temporary files under our name but is a link is not written to."""
    temporary, trap = tmp_path / "temporary", tmp_path / "trap"
    temporary.mkdir()
    trap.mkdir()
    (temporary / f"verl-logsync-{os.getuid()}").symlink_to(trap)
    env = {"VERL_LOGSYNC_STATE_DIR": "", "TMPDIR": str(temporary)}
    done = _run(upload, [log], without_powers, **env)
    assert done.returncode == 2
    assert "--state-dir" in done.stderr
    assert not list(trap.iterdir())


@pytest.fixture
def open_folder():
    """A folder that every user may enter and write."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root")
def test_i5_a_user_without_a_home(log, upload, one_run, open_folder):
    """I5: a user whom no one knows and who has no HOME, as in containers, can upload; without a key
    there is one line."""
    shutil.copytree(log.parent, open_folder / "grpo")
    # Python itself may lie where only root looks.
    user = ["setpriv", "--reuid=54321", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    env = {"HOME": "", "VERL_LOGSYNC_STATE_DIR": "", "TMPDIR": str(open_folder)}
    for _ in range(2):
        done = _run(upload, [open_folder / "grpo"], lambda command: [*user, *command], **env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(one_run().rows) == 8
    assert "up to date" in done.stdout
    env["WANDB_API_KEY"] = ""
    done = _run(upload, [open_folder / "grpo"], lambda command: [*user, *command], **env)
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1), done.stderr


class _Proxy(ThreadingHTTPServer):
    """A proxy's address, the server behind it, and what it was asked for."""

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.behind = behind
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[str] = []


class _Recorder(BaseHTTPRequestHandler):
    """A proxy that writes down what it is asked for, and forwards it to one server.

    What is encrypted (CONNECT) it does not forward.
    """

    protocol_version = "HTTP/1.1"
    server: _Proxy

    def do_CONNECT(self):
        self.server.asked.append(f"CONNECT {self.path}")
        self.send_error(502)

    def do_POST(self):
        parts = urlsplit(self.path)
        self.server.asked.append(f"{self.command} {parts.netloc}{parts.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        behind = HTTPConnection(self.server.behind, timeout=30)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {k: v for k, v in self.headers.items() if not k.lower().startswith("proxy-")}
        behind.request(self.command, path, body, headers)
        answer = behind.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        kept = {"content-length", "transfer-encoding", "connection", "date", "server"}
        for key, value in answer.getheaders():
            if key.lower() not in kept:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy(server):
    """A proxy before the server; `asked` is what it was asked for."""
    with _Proxy(urlsplit(server.url).netloc) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_i6_all_questions_and_rows_go_through_the_proxy(name, log, upload, proxy, one_run):
    """I6: a server that only the proxy knows gets everything: our questions, runs, rows."""
    env = {name: proxy.url, "WANDB_BASE_URL": "http://wandb.invalid", "NO_PROXY": ""}
    done = _run(upload, [log], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(one_run().rows) == 8
    assert "POST wandb.invalid/graphql" in proxy.asked
    assert any(asked.endswith("/file_stream") for asked in proxy.asked)


def test_i6_what_needs_no_proxy_goes_straight(log, upload, proxy, one_run):
    """I6: NO_PROXY for the server's host leaves the proxy out of everything."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), proxy.url)
    done = _run(upload, [log], **proxies, NO_PROXY="example.com,127.0.0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(one_run().rows) == 8
    assert proxy.asked == []


def test_i6_encrypted_servers_are_asked_through_the_proxy(log, upload, proxy):
    """I6: HTTPS_PROXY is asked for a server of https; that it does not let us through ends with 6
    and names the proxy."""
    env = {"HTTPS_PROXY": proxy.url, "WANDB_BASE_URL": "https://wandb.invalid", "NO_PROXY": ""}
    done = _run(upload, [log, "--timeout", "5"], **env)
    assert done.returncode == 6
    assert set(proxy.asked) == {"CONNECT wandb.invalid:443"}
    assert "proxy" in (done.stdout + done.stderr).lower()


def test_i6_rows_do_not_need_the_storage_host(log, upload, server, one_run):
    """I6: where files cannot be stored all rows arrive; what is missing is named."""
    server.faults.add(Fault("storage", status=403, times=None))
    result = upload(log)
    assert len(one_run().rows) == 8
    assert result.code in (0, 4)
    if result.code == 4:
        assert all("row" not in difference for difference in result.only["differences"])


def test_rows_that_did_not_arrive_are_not_called_sent(log, upload, server, one_run):
    """Where the server refuses rows none are said to be sent; the next upload sends them all."""
    server.faults.add(Fault("file_stream", status=400, times=None))
    result = upload(log)
    assert (result.code, result.rows_sent, one_run().rows) == (4, 0, [])
    server.faults.clear()
    result = upload(log)
    assert (result.code, result.rows_sent, len(one_run().rows)) == (0, 8, 8)
