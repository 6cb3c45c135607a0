"""Which server, and with which key: as W&B's own client decides, but never by asking."""

from __future__ import annotations

import configparser
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from verl_logsync.errors import AuthError, UsageError

_CLOUD: Final = "https://api.wandb.ai"


@dataclass(frozen=True, slots=True)
class Server:
    """A W&B server and the key for it. The key never appears in the repr."""

    base_url: str = field(repr=False)
    api_key: str = field(repr=False)
    key_from: str

    @property
    def shown_url(self) -> str:
        """The address without a login that it may contain."""
        return _without_login(self.base_url)

    @property
    def account(self) -> str:
        """Names this server and this key in the ledger, giving neither login nor key away."""
        digest = hashlib.blake2b(self.api_key.encode(), digest_size=6).hexdigest()
        return f"{self.shown_url} key {digest}"


def find_server() -> Server:
    """The server and key of this user: environment, then W&B's settings file and `.netrc`.

    Raises:
        AuthError: there is no key; asking for one would hang a cron job.
        UsageError: the base URL is none.
    """
    base_url = (os.environ.get("WANDB_BASE_URL") or _from_settings() or _CLOUD).rstrip("/")
    try:
        host = urlsplit(base_url).hostname
    except ValueError as error:
        raise UsageError(
            f"WANDB_BASE_URL is no address: {error}",
            hint="Set it like: export WANDB_BASE_URL=https://wandb.example.com",
        ) from error
    if not base_url.startswith(("http://", "https://")) or not host:
        raise UsageError(
            f"WANDB_BASE_URL is no http(s) address: {_without_login(base_url)!r}",
            hint="Set it like: export WANDB_BASE_URL=https://wandb.example.com",
        )
    key = os.environ.get("WANDB_API_KEY")
    if key and not key.isascii():
        raise AuthError(
            "WANDB_API_KEY holds characters that no key has",
            hint="Copy it again from the settings page of W&B",
        )
    if key:
        return Server(base_url, key.strip(), "WANDB_API_KEY")
    found = _from_netrc(base_url)
    if found:
        return Server(base_url, found, ".netrc")
    raise AuthError(
        f"there is no API key for {host}: set WANDB_API_KEY, or log in once with: wandb login"
    )


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _from_settings() -> str:
    given = os.environ.get("WANDB_CONFIG_DIR")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        folder = Path(given) if given else Path.home() / ".config" / "wandb"
        parser.read(folder / "settings")
    except (OSError, RuntimeError, configparser.Error, UnicodeDecodeError):
        return ""  # RuntimeError: nobody knows this user's home
    return parser.get("default", "base_url", fallback="")


def _from_netrc(base_url: str) -> str:
    from requests.utils import get_netrc_auth

    # It looks in NETRC, ~/.netrc and ~/_netrc, and keeps silent about unreadable files.
    login = get_netrc_auth(base_url)
    return login[1] if login else ""
