"""History minus what the server holds -> an UploadPlan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from verl_logsync.assemble import Surroundings, summarise
from verl_logsync.columns import STEP
from verl_logsync.derived_by import changed, continued, of_others
from verl_logsync.digests import canonical, overall_digest, row_digests
from verl_logsync.held import Comparison, Held, compare, countable_keys, key_counts
from verl_logsync.lacking import Lacking, lacking, nothing_but_rows
from verl_logsync.limits import cut_notes
from verl_logsync.model import (
    SENDING,
    Action,
    Alert,
    DerivedBy,
    Expectation,
    History,
    Marker,
    PassThrough,
    RemoteState,
    RunSources,
    UploadPlan,
)
from verl_logsync.readiness import Readiness

OnRewrite = Literal["rewind", "keep"]
_Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Derived:
    """What was derived from the history besides columns.

    `by` says which diagnostics derived them; `config` goes into the run's config, `summary`
    into its summary, `tags` are added to the run's, `alerts` are told once each, `notes` are for
    the report.
    """

    by: DerivedBy = field(default_factory=DerivedBy)
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_DERIVED: Final = Derived()


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a plan depends on.

    `history` holds the rows that are ready, `held_back` more wait. `knows_less` says that the
    server's rows came from logs of which only some are here; `recompute` asks for rows to be sent
    anew, for the sake of the derived columns, but never the first `only_there`: these are nowhere
    but on the server.
    """

    run: RunSources
    history: History
    around: Surroundings
    ready: Readiness
    pins: Mapping[str, float]
    started_at: float | None
    remote: RemoteState | None
    held: Held
    can_rewind: bool
    knows_less: bool = False
    held_back: int = 0
    on_rewrite: OnRewrite = "rewind"
    derived: Derived = NOTHING_DERIVED
    recompute: bool = False
    only_there: int = 0


def make_plan(situation: Situation) -> UploadPlan:
    """Decide what to send for one run."""
    meant = Held(situation.history.steps, row_digests(situation.history))
    relation = compare(meant, situation.held)
    decision = _decide(situation, relation)
    along = _along(situation, decision)
    if decision.action is Action.NOTHING and _has_more(situation, along.extra):
        decision = replace(decision, action=_more(situation, along.extra))
    decision = replace(decision, notes=(*decision.notes, *along.notes))
    return _filled(situation, relation, decision, along, meant.digests)


def _along(situation: Situation, decision: _Decision) -> Lacking:
    if decision.action is Action.REWIND:
        return nothing_but_rows(situation.around, situation.remote)
    ended = situation.ready.state != "running"
    return lacking(situation.around, situation.remote, situation.run.target.run_id, ended=ended)


@dataclass(frozen=True, slots=True)
class _Decision:
    """The action, the first row to send, a rewind's branch step, and what to say about it."""

    action: Action
    first_row: int
    branch_step: int | None = None
    notes: tuple[str, ...] = ()


def _decide(situation: Situation, relation: Comparison) -> _Decision:
    history, remote = situation.history, situation.remote
    if remote is None:
        something = len(history) or any(e.events for _, e in situation.around.streams)
        return _Decision(Action.NEW if something else Action.NOTHING, 0)
    kept = min(situation.only_there, relation.shared)
    if situation.recompute and len(history) > kept:
        branch = int(history.steps[kept - 1]) if kept else None
        anew = replace(relation, shared=kept, branch_step=branch)
        which = "all rows that the logs here hold" if kept else "all rows"
        return _rewind(situation, anew, f"{which} are sent anew because of --recompute")
    to_send = len(history) - relation.shared
    if relation.extra == 0:
        if to_send and _would_shift(history, relation, remote):
            return _rewind(situation, relation, "an earlier rewind lost its rows on the way")
        return _Decision(Action.APPEND if to_send else Action.NOTHING, relation.shared)
    if relation.repeated:
        return _without_repeats(situation, relation)
    if to_send == 0:
        return _ahead(situation, relation)
    if situation.knows_less:
        note = (
            f"the server holds rows of attempts whose logs are not here (up to step "
            f"{relation.last_held}): these files are an older copy. Nothing was changed",
        )
        return _Decision(Action.AHEAD, len(history), None, note)
    return _rewind(situation, relation, "rows changed after they were uploaded")


def _without_repeats(situation: Situation, relation: Comparison) -> _Decision:
    """Nothing from the first repeated step on counts as shared.

    Rows that only the server has are not rewound: if that failed half-way they would be gone.
    """
    why = "the server holds rows twice"
    first = int(np.searchsorted(situation.history.steps, relation.repeated[0]))
    shared = min(first, relation.shared)
    if shared < situation.only_there:
        because = "no log here has the rows from there on; put the earlier logs beside these"
        return _kept(situation, relation, why, because)
    branch = int(situation.history.steps[shared - 1]) if shared else None
    return _rewind(situation, replace(relation, shared=shared, branch_step=branch), why)


def _ahead(situation: Situation, relation: Comparison) -> _Decision:
    """The server holds rows that follow all of ours."""
    marker = situation.remote.marker if situation.remote is not None else None
    last = situation.history.last_step
    if (
        marker is not None
        and last is not None
        and marker.last_step <= last
        and not (situation.held_back)
    ):
        why = "the server holds rows beyond those that were ever meant (two uploads at once?)"
        shared = len(situation.history) - 1  # the last row goes again, to set the summary right
        branch = int(situation.history.steps[shared - 1]) if shared else None
        return _rewind(situation, replace(relation, shared=shared, branch_step=branch), why)
    if situation.held_back and relation.extra <= situation.held_back:
        return _Decision(Action.NOTHING, len(situation.history))
    note = (
        f"the server holds {relation.extra} rows more than the files, up to step "
        f"{relation.last_held}; nothing was changed",
    )
    return _Decision(Action.AHEAD, len(situation.history), None, note)


def _would_shift(history: History, relation: Comparison, remote: RemoteState) -> bool:
    """Whether the client would renumber an append: a rewind lost its rows, or a step has two."""
    return int(history.steps[relation.shared]) < _next_step(remote)


def _next_step(remote: RemoteState) -> int:
    """The lowest step that the client does not renumber, besides the last row's.

    It starts at the highest of the summary's step + 1, the last row's step + 1 and the line count.
    """
    summary_step = remote.summary_step if remote.summary_step is not None else -1
    return max(summary_step + 1, remote.lines)


def _rewind(situation: Situation, relation: Comparison, why: str) -> _Decision:
    if situation.can_rewind and situation.on_rewrite == "rewind":
        branch = relation.branch_step if relation.branch_step is not None else -1
        step = _first_differing(situation.history, relation)
        note = (f"rewind to step {branch}: {why} (from step {step} on)",)
        return _Decision(Action.REWIND, relation.shared, branch, note)
    keeps = situation.on_rewrite == "keep"
    because = "--on-rewrite keep" if keeps else "this server cannot rewind a run"
    return _kept(situation, relation, why, because)


def _kept(situation: Situation, relation: Comparison, why: str, because: str) -> _Decision:
    """The server's rows stay; of ours go those that the client will not renumber."""
    history, remote = situation.history, situation.remote
    last = relation.last_held if relation.last_held is not None else -1
    taken = max(last, _next_step(remote) - 1) if remote is not None else last
    first_new = int(np.searchsorted(history.steps, taken, side="right"))
    changed = relation.changed or relation.repeated or (_first_differing(history, relation),)
    note = (
        f"OLD ROWS KEPT: {why}, but {because}. Steps {changed[0]}-{changed[-1]} on the server are "
        f"not those of the files; only steps above {taken} are sent. To get the whole history, "
        f"upload it as a new run: {situation.run.as_new_run()}",
    )
    return _Decision(Action.KEPT_OLD, first_new, None, note)


def _first_differing(history: History, relation: Comparison) -> int:
    start = min(relation.shared, max(len(history) - 1, 0))
    return int(history.steps[start]) if len(history) else 0


def _has_more(situation: Situation, extra: PassThrough) -> bool:
    remote = situation.remote
    if remote is None or extra.carries:
        return extra.carries
    wanted = situation.ready.state
    fitting = {"finished": {"finished"}, "failed": {"failed", "crashed"}}
    return wanted != "running" and remote.state not in fitting[wanted]


def _more(situation: Situation, extra: PassThrough) -> Action:
    """What sending something without rows is."""
    if situation.remote is None:
        return Action.NEW
    return Action.APPEND if extra.carries else Action.FINISH


def _filled(
    situation: Situation,
    relation: Comparison,
    decision: _Decision,
    along: Lacking,
    digests: _Hashes,
) -> UploadPlan:
    run, history, ready = situation.run, situation.history, situation.ready
    recorded = situation.around.extra
    summary = summarise(history, recorded.summary, defined=bool(recorded.metrics))
    summary |= situation.derived.summary
    tags = _tags(situation)
    plan = UploadPlan(
        target=run.target,
        name=run.name,
        action=decision.action,
        history=history,
        digests=digests,
        first_row=decision.first_row,
        branch_step=decision.branch_step,
        extra=along.extra,
        summary=summary,
        sends_summary=_sends_summary(situation, decision.first_row, summary),
        config={**situation.around.config, **situation.derived.config},
        marker=_marker(situation, decision, along, digests),
        state=ready.state,
        exit_code=ready.exit_code,
        started_at=situation.started_at,
        new_run=situation.remote is None,
        expect=_NO_EXPECTATION,
        notes=(
            *decision.notes,
            *ready.notes,
            *_version_note(situation, decision),
            *_late_note(situation, decision),
            *_cut_notes(situation, tags),
            *situation.derived.notes,
        ),
        alerts=_alerts(situation, decision),
        tags=tags,
    )
    return replace(plan, expect=_expectation(situation, relation, plan))


def _cut_notes(situation: Situation, tags: Sequence[str] | None) -> Iterator[str]:
    """What W&B is too narrow for, of the words that go along."""
    if situation.remote is not None:
        return cut_notes(tags=tags or ())
    extra = situation.around.extra
    return cut_notes(
        name=situation.run.name, group=extra.group, job_type=extra.job_type, tags=tags or ()
    )


def _alerts(situation: Situation, decision: _Decision) -> tuple[Alert, ...]:
    """What was not told yet; the marker that says so goes first, so that nothing is told twice.

    Steps that other diagnostics were about already are told nothing new of.
    """
    remote, last, by = situation.remote, situation.history.last_step, situation.derived.by
    marker = remote.marker if remote is not None else None
    told, stretches = (marker.alerts, marker.diagnostics) if marker is not None else ((), ())
    sent_from = _first_sent(situation, decision)
    return tuple(
        alert
        for alert in situation.derived.alerts
        if alert.key not in told
        and last is not None
        and alert.step <= last
        and (
            (sent_from is not None and alert.step >= sent_from)
            or not of_others(stretches, by, alert.step)
        )
    )


def _first_sent(situation: Situation, decision: _Decision) -> int | None:
    """The step of the first row that goes over the wire."""
    steps = situation.history.steps
    sends = decision.action in SENDING and decision.first_row < len(steps)
    return int(steps[decision.first_row]) if sends else None


def _tags(situation: Situation) -> tuple[str, ...] | None:
    """All tags of the run, when there are new ones; else None: people may have changed them."""
    wanted, remote = situation.derived.tags, situation.remote
    if remote is None:
        return (*situation.around.extra.tags, *wanted)
    new = [tag for tag in wanted if tag not in remote.tags]
    return (*remote.tags, *new) if new else None


def _version_note(situation: Situation, decision: _Decision) -> tuple[str, ...]:
    """Earlier rows keep the derived columns that they were sent with."""
    remote, by = situation.remote, situation.derived.by
    known = remote.marker.diagnostics if remote is not None and remote.marker is not None else ()
    if not known or not known[-1].version or not by.version or decision.first_row == 0:
        return ()
    if not (what := changed(known[-1], by)):
        return ()
    sent_from = _first_sent(situation, decision)
    since = f" from step {sent_from} on" if sent_from is not None else ""
    return (
        f"diagnostics are {what}{since}; earlier rows keep theirs, and the run its set of columns: "
        "--recompute sends all rows anew",
    )


def _late_note(situation: Situation, decision: _Decision) -> tuple[str, ...]:
    """Dumps that came after their rows were sent give those rows nothing any more."""
    remote, history = situation.remote, situation.history
    if remote is None or not remote.key_counts or decision.action is Action.REWIND:
        return ()
    names = countable_keys(history) & history.added
    here = key_counts(history.head(decision.first_row))
    late = sorted(n for n in names if here.get(n, 0) > remote.key_counts.get(n, 0))
    if not late:
        return ()
    return (
        f"{len(late)} derived columns ({', '.join(late[:2])}, ...) came after their rows: "
        "--recompute sends these rows anew",
    )


def _marker(situation: Situation, decision: _Decision, along: Lacking, digests: _Hashes) -> Marker:
    run, history, remote = situation.run, situation.history, situation.remote
    before = remote.marker if remote is not None else None
    known = before.heads if before is not None else ()
    return Marker(
        run.names_key,
        # Logs that are gone by now made rows that are still there.
        run.heads.union(known),
        run.fingerprint,
        # Rows that differ on the server must never be taken for these by another machine.
        "" if decision.action is Action.KEPT_OLD else overall_digest(digests),
        history.last_step if history.last_step is not None else -1,
        situation.pins,
        along.events,
        along.logs,
        continued(
            before.diagnostics if before is not None else (),
            situation.derived.by,
            _first_sent(situation, decision),
        ),
        history.added | (before.added if before is not None else frozenset()),
        tuple(
            dict.fromkeys((*(before.alerts if before else ()), *_alert_keys(situation, decision)))
        ),
        history.logged_from,
    )


def _alert_keys(situation: Situation, decision: _Decision) -> Iterator[str]:
    return (alert.key for alert in _alerts(situation, decision))


def _sends_summary(situation: Situation, first_row: int, summary: Mapping[str, Any]) -> bool:
    """Whether the summary must go along.

    Without rows the uploader sends it without its `_step`, so then only when it changed.
    """
    remote = situation.remote
    if remote is None or first_row < len(situation.history):
        return True
    return any(
        canonical(value) != canonical(remote.summary.get(key))
        for key, value in summary.items()
        if key not in (STEP, "_wandb") and not isinstance(value, dict)
    )


_NO_EXPECTATION: Final = Expectation(0, 0, 0, None, {}, None, "running")


def _expectation(situation: Situation, relation: Comparison, plan: UploadPlan) -> Expectation:
    remote, history = situation.remote, situation.history
    rewinds = plan.action is Action.REWIND
    countable = countable_keys(history)
    if rewinds and plan.first_row:
        # Kept rows have the derived columns that they were sent with.
        countable -= plan.marker.added
    if rewinds or remote is None:
        base_lines, base_counts, first_counted = plan.first_row if rewinds else 0, {}, 0
    else:
        base_lines, base_counts, first_counted = (
            remote.lines,
            dict(remote.key_counts),
            plan.first_row,
        )
    base_counts = {k: n for k, n in base_counts.items() if k in countable}
    for key, count in key_counts(history, first_counted).items():
        if key in countable:
            base_counts[key] = base_counts.get(key, 0) + count
    comparable = rewinds or remote is None or bool(remote.key_counts) or not remote.lines
    return Expectation(
        lines=base_lines + plan.rows_to_send,
        events=(remote.events if remote else 0) + len(plan.extra.events),
        logs=(remote.logs if remote else 0) + len(plan.extra.console),
        last_step=history.last_step if plan.rows_to_send else relation.last_held,
        summary=plan.summary,
        key_counts=base_counts if comparable else None,
        state=plan.state,
        artifacts=frozenset(a.key for a in plan.extra.artifacts),
        files=frozenset(f.name for f in plan.extra.files),
    )
