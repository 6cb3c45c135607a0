"""verl's console: the `step:N - key:value - ...` lines in whatever caught standard output.

Written by every verl (0.2 - 0.9.1). Read in this order: `unpack` (bytes of plain and compressed
files), `lines` (what terminals, Ray and schedulers put around a line), `records` (step lines),
`blocks` (what pprint breaks into several lines), `hush` (secrets in lines), `transcript` (a
file as a stream of events), `attempts` (events as rows of one start of the job or several),
`ending` (how the text ends), `source` (the face of it all).
"""

from __future__ import annotations

from verl_logsync.sources.console.source import Console

__all__ = ["Console"]
