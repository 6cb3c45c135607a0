"""Misbehaviour on request: what the loopback server does wrong, where and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Drop: TypeAlias = Literal["before", "after"]


@dataclass
class Request:
    """One HTTP request as the server saw it.

    `operation` is the GraphQL operation name, `file_stream`, `storage` or empty;
    `status` is None while unanswered and stays None when the connection was dropped.
    """

    method: str
    path: str
    operation: str = ""
    status: int | None = None
    bytes: int = 0
    kind: str = ""
    root_fields: tuple[str, ...] = ()
    run_ids: frozenset[str] = frozenset()


@dataclass
class Fault:
    """One thing that goes wrong.

    Args:
        where: `"file_stream"`, `"graphql"` (every operation), `"storage"`, the name of
            a GraphQL operation (`"UpsertBucket"`) or of a root field (`"upsertBucket"`).
        run: only requests about this run id; None means every run.
        status: answer this HTTP status instead of doing the work. None with no other
            answer given lets the request through (after `delay_seconds`, `callback`).
        times: how many requests it hits before it is spent; None means for ever.
        skip: how many matching requests pass unharmed first.
        retry_after: seconds to put into a `Retry-After` header.
        body: body of the answer.
        html: answer an HTML page, as a proxy in between would; status 200 unless given.
        drop: `"before"` closes the connection with nothing done; `"after"` does the
            work, then closes the connection unanswered.
        delay_seconds: wait this long first.
        callback: called with the request before anything else; may stop the world.
    """

    where: str
    run: str | None = None
    status: int | None = None
    times: int | None = 1
    skip: int = 0
    retry_after: float | None = None
    body: bytes | str | None = None
    html: bool = False
    drop: Drop | None = None
    delay_seconds: float = 0.0
    callback: Callable[[Request], object] | None = None
    seen: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)

    def matches(self, request: Request) -> bool:
        """Tell whether the request is one that this fault is about."""
        here = self.where in {request.kind, request.operation, *request.root_fields}
        return here and (self.run is None or self.run in request.run_ids)

    @property
    def spent(self) -> bool:
        """Whether it has hit as often as it was meant to."""
        return self.times is not None and self.hits >= self.times

    @property
    def answers(self) -> bool:
        """Whether it replaces the server's answer by one of its own."""
        return self.html or self.status is not None or self.body is not None


class Faults:
    """The faults in force; of several that match a request the oldest wins."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Put a fault in force and return it, so that its `hits` can be read."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Take one fault out of force."""
        with self._lock:
            self._faults.remove(fault)

    def clear(self) -> None:
        """Behave again."""
        with self._lock:
            self._faults.clear()

    def pick(self, request: Request) -> Fault | None:
        """Return the fault that hits this request, counting the hit."""
        with self._lock:
            for fault in self._faults:
                if fault.spent or not fault.matches(request):
                    continue
                fault.seen += 1
                if fault.seen <= fault.skip:
                    continue
                fault.hits += 1
                return fault
        return None
