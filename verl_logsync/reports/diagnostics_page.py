"""The page of the documentation about diagnostics, from what the code says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from verl_logsync.diagnostics import Described, Rule, described, load_rules
from verl_logsync.diagnostics.parts import CONFIG, FIELDS, MEANINGS, Condition


def diagnostics_page() -> str:
    """Every key that diagnostics add and every rule that judges, as Markdown."""
    return "\n".join((*_keys(described()), *_rules(load_rules()), *_language())) + "\n"


def _keys(all_keys: Iterable[Described]) -> Iterator[str]:
    yield "# Diagnostics\n"
    yield (
        "Keys that are added to a run. Nothing that was logged is renamed or changed, and where a"
        " key is logged it is not computed. What cannot be computed is missing, and the report says"
        ' why. "rule" as source means practice or a derivation, not a published bound.\n'
    )
    yield "## Keys\n"
    yield "| key | formula, in order of preference | unit | needs | healthy | source |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for key in all_keys:
        cells = (f"`{key.key}`", key.formula, key.unit, key.needs, key.healthy, key.source)
        yield f"| {' | '.join(map(_cell, cells))} |"


def _rules(rules: Iterable[Rule]) -> Iterator[str]:
    yield "\n## Rules\n"
    yield (
        "A rule holds at a step when all its conditions do; what it says of a step depends on rows"
        " up to that step only. Hints are rules of thumb or numbers of one source that do not"
        " transfer: they are told, and raise no alarm.\n"
    )
    yield "| code | severity | says | holds when | advice | source |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for rule in rules:
        severity = f"{rule.severity}, critical" if rule.critical else rule.severity
        parts = " and ".join(map(_condition, rule.conditions))
        if rule.critical:
            parts += f"; critical: {' and '.join(map(_condition, rule.critical))}"
        cells = (f"`{rule.code}`", severity, rule.title, parts, rule.advice, rule.source)
        yield f"| {' | '.join(map(_cell, cells))} |"


def _condition(condition: Condition) -> str:
    default = Condition(condition.kind)
    name = condition.config if condition.kind == CONFIG else " or ".join(condition.series)
    shown = [
        f"{field} {_number(value)}"
        for field in Condition.__dataclass_fields__
        if field not in {"kind", "series", "config"}
        and (value := getattr(condition, field)) != getattr(default, field)
    ]
    return (
        f"{condition.kind} of `{name}` ({', '.join(shown)})"
        if shown
        else (f"{condition.kind} of `{name}`")
    )


def _number(value: object) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{item:g}" for item in value)
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _language() -> Iterator[str]:
    yield "\n## Rules of your own\n"
    yield (
        "`verl-logsync diagnose --rules FILE` reads a TOML file over the shipped one, key by"
        " key: name only what you change. `off = true` takes a rule away; a new `[rules.CODE]` adds"
        " one.\n"
    )
    yield (
        "```toml\n[rules.ENTROPY_COLLAPSE]\nparts.fallen.below = 0.2\n\n"
        '[rules.MY_FORMAT]\ntitle = "Answers lose their form"\nseverity = "warning"\n'
        'advice = "Look at the dumps"\n'
        'parts.drop = { kind = "jump", series = "rollout_extra/format/mean", below = 0.5 }\n'
        "```\n"
    )
    yield "| kind of condition | holds when |"
    yield "| --- | --- |"
    yield from (f"| `{kind}` | {meaning} |" for kind, meaning in MEANINGS.items())
    yield "\n| further field | means |"
    yield "| --- | --- |"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in FIELDS.items())
    yield "\nWhat these rules find in simulated runs: [the table](diagnostics-confusion.md)."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
