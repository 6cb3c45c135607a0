"""A small GraphQL client: bounded in time, with errors that users can act on.

W&B's own `Api` objects cache what they read and differ between versions; reading back must do
neither. `requests` honours proxies and certificates as W&B's client does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from verl_logsync.errors import AuthError, LogsyncError, RefusedByServer, Unreachable
from verl_logsync.secrets_mask import mask_text
from verl_logsync.sinks.wandb_sync.credentials import Server

_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})
#: Seconds that one request may wait for its answer, at most.
_ANSWER: Final = 60.0
_TRIES: Final = 5


_REFUSED: Final = (
    "Check --entity and --project; nothing is lost, the same command goes on from here"
)


class Deadline:
    """The moment at which all work with the network must end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def exceeded(self, url: str) -> Unreachable:
        """The error to raise when it has passed."""
        return Unreachable(
            f"{url} did not answer in the {self._seconds:.0f} s given",
            hint="Nothing is lost: the next run continues. Give more time with --timeout",
        )


class GraphQL:
    """Asks one server. All methods raise AuthError, RefusedByServer or Unreachable."""

    def __init__(self, server: Server, deadline: Deadline) -> None:
        self._server = server
        self._deadline = deadline
        # Sessions are not made for several threads; reading and sending overlap.
        self._sessions = threading.local()

    def _session(self) -> Any:
        import requests

        if not hasattr(self._sessions, "session"):
            session = requests.Session()
            session.auth = ("api", self._server.api_key)
            session.headers["User-Agent"] = "verl-logsync"
            self._sessions.session = session
        return self._sessions.session

    def ask(self, query: str, variables: Mapping[str, Any], about: str = "") -> Mapping[str, Any]:
        """The `data` of the answer; passing troubles are retried within the deadline.

        `about` is what is asked about, for the message of a refusal.
        """
        pause = 0.25
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                return self._ask_once(query, variables, about)
            except Unreachable:
                if last or self._deadline.left <= pause:
                    raise
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable: the last try returns or raises")

    def _ask_once(self, query: str, variables: Mapping[str, Any], about: str) -> Mapping[str, Any]:
        import requests

        url = f"{self._server.base_url}/graphql"
        left = self._deadline.left
        if left <= 0:
            raise self._deadline.exceeded(self._server.shown_url)
        try:
            response = self._session().post(
                url,
                json={"query": query, "variables": dict(variables)},
                timeout=(min(10.0, left), min(_ANSWER, left)),
            )
        except requests.RequestException as error:
            if self._deadline.left <= 0:
                raise self._deadline.exceeded(self._server.shown_url) from error
            raise Unreachable(
                f"{self._server.shown_url} cannot be reached ({_why(error)})",
                hint="Check the address in WANDB_BASE_URL, the network and the proxy",
            ) from error
        return self._data(response, about)

    def _data(self, response: Any, about: str) -> Mapping[str, Any]:
        if response.status_code in (401, 403):
            raise self._denied(f"answered {response.status_code}", about)
        if response.status_code in _RETRIED:
            raise Unreachable(
                f"{self._server.shown_url} answered {response.status_code}",
                hint="Nothing is lost: run the same command again later",
            )
        if response.status_code != 200:
            raise RefusedByServer(
                f"{self._server.shown_url} answered {response.status_code}: "
                f"{mask_text(response.text[:200])}",
                hint=_REFUSED,
            )
        try:
            answer = response.json()
            data = answer.get("data")
        except (ValueError, AttributeError):
            raise Unreachable(
                f"{self._server.shown_url} does not answer like a W&B server",
                hint="Check WANDB_BASE_URL; a proxy's page may stand in between",
            ) from None
        if answer.get("errors"):
            self._refuse(answer["errors"], about)
        return data if isinstance(data, dict) else {}

    def _refuse(self, errors: Any, about: str) -> None:
        first = errors[0] if isinstance(errors, list) and errors else {}
        text = mask_text(str(first.get("message", first) if isinstance(first, dict) else first))
        if any(word in text.lower() for word in ("permission", "denied", "unauthor", "login")):
            raise self._denied(f'says "{text}"', about)
        raise RefusedByServer(f"{self._server.shown_url} says: {text}", hint=_REFUSED)

    def _denied(self, what: str, about: str) -> LogsyncError:
        where = f", asked about {about}" if about else ""
        return AuthError(
            f"{self._server.shown_url} {what} to the key from {self._server.key_from}{where}",
            hint="Check the key with: wandb login --verify, and the entity with --entity",
        )


def _why(error: Exception) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__ or cause
    return f"{type(cause).__name__}: {cause}"[:120]
