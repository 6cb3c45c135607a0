"""What was meant against what was found. Nothing else may call a run uploaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from verl_logsync.columns import AXES, MISSING, STEP, decode
from verl_logsync.digests import canonical
from verl_logsync.held import Held, differing_counts, held_from_rows
from verl_logsync.model import RemoteState, UploadPlan, Verdict

#: Differences that are named; more are counted.
NAMED: Final = 8
COUNTS_READ: Final = "line count, last step, summary, row count of every key"
ROWS_READ: Final = "every value, unsampled scan"


def verify_counts(plan: UploadPlan, found: RemoteState | None) -> Verdict:
    """Compare a plan's expectation with the server's own counts."""
    if found is None:
        return Verdict(False, COUNTS_READ, ("the run is not on the server",))
    meant = plan.expect
    wrong: list[str] = []
    for what, want, got in (
        ("rows", meant.lines, found.lines),
        ("system metrics lines", meant.events, found.events),
        ("console lines", meant.logs, found.logs),
        ("last step", meant.last_step, found.last_step),
    ):
        if want != got:
            wrong.append(f"{what}: {want} meant, {got} found")
    if meant.key_counts is not None:
        counts = differing_counts(meant.key_counts, found.key_counts)
        wrong.extend(f"{key}: {text}" for key, text in counts.items())
    wrong.extend(_summary_differences(plan, found.summary))
    wrong.extend(_state_difference(plan, found))
    wrong.extend(_missing_parts(plan, found))
    notes = () if found.key_counts or not meant.lines else ("the server gives no counts per key",)
    return Verdict(not wrong, COUNTS_READ, _shortened(wrong), notes, found.lines)


def _summary_differences(plan: UploadPlan, found: Mapping[str, Any]) -> list[str]:
    wrong = []
    for key, value in plan.summary.items():
        want = canonical(value)
        if key == "_wandb" or want is MISSING or (key == STEP and not plan.rows_to_send):
            continue
        got = canonical(found.get(key))
        # Objects may come back with entries that the server adds to media.
        if not isinstance(want, dict) and want != got:
            wrong.append(f"summary {key}: {want!r} meant, {got!r} found")
        elif isinstance(want, dict) and not isinstance(got, dict):
            wrong.append(f"summary {key}: an object meant, {got!r} found")
    return wrong


def _state_difference(plan: UploadPlan, found: RemoteState) -> list[str]:
    # A server calls a silent running run crashed after a while.
    fitting = {"running": {"running", "crashed"}, "failed": {"failed", "crashed"}}
    if found.state in fitting.get(plan.state, {plan.state}):
        return []
    return [f"state: {plan.state} meant, {found.state} found"]


def _missing_parts(plan: UploadPlan, found: RemoteState) -> list[str]:
    wrong = [
        f"artifact {name} is not committed"
        for name, digest in sorted(plan.expect.artifacts - found.artifacts)
    ]
    wrong += [f"file {name} is missing" for name in sorted(plan.expect.files - set(found.files))]
    return wrong


def _shortened(wrong: list[str]) -> tuple[str, ...]:
    if len(wrong) <= NAMED:
        return tuple(wrong)
    return (*wrong[:NAMED], f"and {len(wrong) - NAMED} more")


def verify_rows(plan: UploadPlan, meant: Held, rows: Iterable[Mapping[str, Any]]) -> Verdict:
    """Compare every value that the server was meant to hold with the rows read back.

    An empty answer means that nothing could be verified, not that nothing is there.
    """
    stored = list(rows)
    if not stored and plan.expect.lines:
        why = "the server returned no rows: values not verified"
        return Verdict(False, ROWS_READ, (why,), lines=plan.expect.lines)
    found = held_from_rows(stored, plan.marker.added, plan.history.logged_from)
    sent = (*AXES[1:], *sorted(plan.history.added))
    wrong = list(_sent_differences(plan, stored, sent))
    length = min(len(meant.steps), len(found.steps))
    differ = (meant.steps[:length] != found.steps[:length]) | (
        meant.digests[:length] != found.digests[:length]
    )
    if differ.any():
        wrong.insert(0, _difference(plan, stored[int(differ.argmax())]))
    elif len(meant.steps) != len(found.steps):
        wrong.insert(0, f"{len(meant.steps)} rows meant, {len(found.steps)} read")
    return Verdict(not wrong, ROWS_READ, _shortened(wrong), lines=len(stored))


def _difference(plan: UploadPlan, row: Mapping[str, Any]) -> str:
    """What is wrong with a stored row, in words."""
    step = row.get(STEP)
    places = np.flatnonzero(plan.history.steps == step)
    if not len(places):
        return f"step {step} found, which was not meant"
    for name in plan.history.table.schema.names:
        want = canonical(decode(plan.history.table.column(name).slice(int(places[0]), 1))[0])
        got = canonical(row[name]) if name in row else MISSING
        if name not in AXES and want != got:
            return f"step {step}, {name}: {want!r} meant, {got!r} found"
    return f"step {step} in the wrong place, or with keys that were not meant"


def _sent_differences(
    plan: UploadPlan, stored: list[Mapping[str, Any]], names: Iterable[str]
) -> Iterable[str]:
    """Columns that are no part of a row's identity, in the rows that this plan sent."""
    by_step = {row.get(STEP): row for row in stored}
    steps = plan.history.steps[plan.first_row :].tolist()
    for axis in names:
        if axis not in plan.history.table.schema.names:
            continue
        for step, want in zip(
            steps, decode(plan.history.table.column(axis).slice(plan.first_row)), strict=True
        ):
            got = by_step.get(step, {}).get(axis, MISSING)
            if canonical(want) != canonical(got):
                yield f"step {step}, {axis}: {want!r} meant, {got!r} found"
