"""`python -m verl_logsync`."""

from __future__ import annotations

from verl_logsync.cli import main

if __name__ == "__main__":
    main()
