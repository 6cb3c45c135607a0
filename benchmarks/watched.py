"""Run `verl-logsync` and report which files it opened, and which programs it started.

    python -m benchmarks.watched REPORT FOLDER ARGUMENTS...

REPORT gets JSON with the paths below FOLDER that were opened (Python's audit hook sees every
`open` and `os.open` of the interpreter) and the number of child processes.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main(report: str, folder: str, arguments: list[str]) -> None:
    """Become `verl-logsync ARGUMENTS` under observation."""
    opened: list[str] = []
    children: list[str] = []

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], str | bytes):
            path = os.fsdecode(details[0])
            if path.startswith(f"{folder}/"):
                opened.append(path)
        elif event == "subprocess.Popen":
            children.append(str(details[0]))

    sys.addaudithook(watch)
    sys.argv = ["verl-logsync", *arguments]
    try:
        runpy.run_module("verl_logsync", run_name="__main__", alter_sys=True)
    finally:
        Path(report).write_text(json.dumps({"opened": opened, "children": children}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
