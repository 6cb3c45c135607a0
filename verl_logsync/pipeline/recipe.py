"""What decides derived columns besides the files: rules and options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from verl_logsync.diagnostics import DIAGNOSTICS_VERSION, Rule, load_rules
from verl_logsync.errors import UsageError
from verl_logsync.settings import Settings


@dataclass(frozen=True, slots=True)
class Recipe:
    """The rules as they were read, and a digest of them and of all options that decide values."""

    rules: tuple[Rule, ...]
    options: str

    @property
    def key(self) -> str:
        """Another one makes work again on runs whose files are as they were."""
        return f"{DIAGNOSTICS_VERSION}/{self.options}"


def read_recipe(settings: Settings) -> Recipe:
    """The recipe of an upload; the file of rules is read once, so that all its runs have the same.

    Raises:
        UsageError: the file of rules cannot be read or means nothing.
    """
    rules = load_rules()
    if settings.rules is not None:
        try:
            rules = load_rules(settings.rules.read_text(encoding="utf-8"), str(settings.rules))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot be read: {error}", place=str(settings.rules)) from error
    # Words (title, advice, source) change no column.
    judged = [(r.code, r.severity, r.conditions, r.critical, r.merge) for r in rules]
    options = (
        *(settings.device_memory_gb, settings.success_threshold, settings.tables_every),
        *(settings.answer_pattern, settings.format_pattern),
    )
    text = repr((judged, options)).encode(errors="surrogatepass")
    return Recipe(rules, hashlib.blake2b(text, digest_size=6).hexdigest())
