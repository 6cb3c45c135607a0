"""Run the loopback server in the foreground: `python -m verl_logsync.testing`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from verl_logsync.testing.loopback import LoopbackServer


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_logsync.testing",
        description="A W&B server on this machine, for tests and benchmarks. "
        "GET /__state__ tells what it holds.",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--entity", default="loopback", help="entity of clients that name none")
    parser.add_argument("--api-key", help="accept only this key (default: any)")
    parser.add_argument("--no-rewind", action="store_true", help="do not offer rewindRun")
    options = parser.parse_args(arguments)
    server = LoopbackServer(
        port=options.port,
        entity=options.entity,
        api_key=options.api_key,
        rewind=not options.no_rewind,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
