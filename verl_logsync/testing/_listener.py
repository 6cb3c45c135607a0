"""The sockets of the loopback server."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

from verl_logsync.testing._application import Application, Reply

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_Connection: TypeAlias = socket.socket | tuple[bytes, socket.socket]


class Listener:
    """Listens on one port of this machine; can go away and come back to the same port."""

    def __init__(self, application: Application, port: int) -> None:
        self._application = application
        self._server: _HTTPServer | None = None
        self._reserved: socket.socket | None = self._reserve(port)
        self.port: int = self._reserved.getsockname()[1]

    @staticmethod
    def _reserve(port: int) -> socket.socket:
        # A socket that is bound but does not listen refuses connections, yet keeps
        # other programs off the port.
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((_HOST, port))
        return reserved

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._server is not None

    def start(self) -> None:
        """Accept connections."""
        if self._reserved is None:
            return
        self._server = _HTTPServer(self._reserved, self._application)
        self._reserved = None
        threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="loopback-listener",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """Cut all connections and refuse new ones, but keep the port."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()
        self._server = None
        self._reserved = self._reserve(self.port)

    def close(self) -> None:
        """Give the port away."""
        self.stop()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def _stream_of(request: _Connection) -> socket.socket:
    # The base class is typed for datagram servers too, whose requests are pairs.
    return request[1] if isinstance(request, tuple) else request


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, bound: socket.socket, application: Application) -> None:
        super().__init__(bound.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.application = application
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self.server_activate()

    def process_request(self, request: _Connection, client_address: object) -> None:
        with self._open_lock:
            self._open.add(_stream_of(request))
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Connection) -> None:
        with self._open_lock:
            self._open.discard(_stream_of(request))
        super().shutdown_request(request)

    def handle_error(self, request: _Connection, client_address: object) -> None:
        # Clients that are killed in the middle of a request are part of the tests.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def cut(self) -> None:
        """Cut every connection, idle or busy."""
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HTTPServer

    def do_GET(self) -> None:
        self._exchange()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - http.server looks for these names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Stay silent; `server.requests` is the log."""

    def _exchange(self) -> None:
        headers = {name.title(): value for name, value in self.headers.items()}
        if "Content-Md5" in headers:
            headers["Content-MD5"] = headers.pop("Content-Md5")
        body = self._body()
        reply = self.server.application.handle(self.command, self.path, headers, body)
        if reply is None:
            self.close_connection = True
        else:
            self._send(reply)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        body = b"" if self.command == "HEAD" else reply.body
        # Headers and body leave in one packet: with two, a client waits for both.
        self._headers_buffer.append(b"\r\n" + body)  # type: ignore[attr-defined]
        self.flush_headers()
