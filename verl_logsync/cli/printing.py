"""Lines for a terminal: names of files and runs come from outside and must not steer it."""

from __future__ import annotations

import click


def say(line: str, *, err: bool = False) -> None:
    """Print one line; control characters in it are shown as escapes."""
    click.echo(printable(line), err=err)


def printable(line: str) -> str:
    """The same line without anything that moves a cursor, sets a colour or fakes a line."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
