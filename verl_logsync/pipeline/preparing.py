"""Ask the server about some runs, read them, and plan what to send."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from verl_logsync.catalog import bind, told_apart
from verl_logsync.columns import STEP
from verl_logsync.derived_by import column_set
from verl_logsync.digests import wire_changes
from verl_logsync.errors import RefusedByServer
from verl_logsync.held import Held, held_from_rows, held_rows
from verl_logsync.interfaces import Parcel, Sink
from verl_logsync.model import (
    Confirmed,
    History,
    Outcome,
    RemoteState,
    RunSources,
    Target,
    UploadPlan,
    Verdict,
)
from verl_logsync.pipeline.deriving import diagnosed_or_plain
from verl_logsync.pipeline.engine import Engine, attempted, by_project, failed_outcome, sends
from verl_logsync.pipeline.loading import Loaded, load, stored_attempt
from verl_logsync.plan import Situation, make_plan
from verl_logsync.readiness import Patience, Readiness, judge
from verl_logsync.settings import Settings
from verl_logsync.verl_keys import LATEST_START, is_training_key

#: The config key of a run that says how exact its data are: where times come from, and which keys
#: were printed as 0 although they may only be small.
DATA_KEY: Final = "verl_logsync_data"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run with its plan, what the plan was made from, and what is ready to be sent."""

    loaded: Loaded
    ready: Readiness
    held: Held
    remote: RemoteState | None
    plan: UploadPlan
    parcel: Parcel | None


def prepare_batch(
    engine: Engine, sink: Sink, surveyed: Sequence[RunSources], batch: Sequence[RunSources]
) -> tuple[list[Outcome], list[Prepared]]:
    """Ask the server about some runs of those that were found, read them and plan: those that
    failed, and the others.
    """
    failed: list[Outcome] = []
    prepared: list[Prepared] = []
    for group in by_project(batch, lambda run: run.target):
        bound = attempted(
            engine, group[0], partial(_bound_and_known, engine, sink, surveyed, group)
        )
        if isinstance(bound, Outcome):
            assert bound.error is not None, "a failed run has an error"
            failed.extend(failed_outcome(run, bound.error) for run in group)
            continue
        for run, state in bound:
            result = attempted(engine, run, partial(_prepare, engine, sink, run, state))
            if isinstance(result, Outcome):
                failed.append(result)
            else:
                prepared.append(result)
    return failed, prepared


def _bound_and_known(
    engine: Engine, sink: Sink, surveyed: Sequence[RunSources], runs: Sequence[RunSources]
) -> list[tuple[RunSources, RemoteState | None]]:
    """Runs of one project with the targets that they are bound to, and what is there now."""
    bound = _bound(engine, sink, surveyed, runs)
    states = sink.look([run.target for run in bound])
    return [(run, states.get(run.target)) for run in bound]


def _bound(
    engine: Engine, sink: Sink, surveyed: Sequence[RunSources], runs: Sequence[RunSources]
) -> list[RunSources]:
    """Runs that another machine may have uploaded under another id are found by their marker."""
    known_here = (
        {b.target for b in engine.ledger.bindings()} if engine.ledger is not None else set()
    )
    unknown = [run for run in runs if run.target not in known_here]
    if not unknown:
        return list(runs)
    names, project = {run.names_key for run in unknown}, replace(runs[0].target, run_id="")
    found = sink.find(project, sorted(names))
    # With those of equal names in other batches: of two that fit one run only one may have it.
    alike = [
        run for run in surveyed if run.target.project == project.project and run.names_key in names
    ]
    fresh = [run for run in alike if run.target not in known_here]
    rebound = dict(zip([r.target for r in fresh], bind(fresh, found, surveyed), strict=True))
    told = told_apart([rebound.get(run.target, run) for run in alike])
    final = dict(zip([run.target for run in alike], told, strict=True))
    return [final.get(run.target, run) for run in runs]


def _prepare(engine: Engine, sink: Sink, run: RunSources, remote: RemoteState | None) -> Prepared:
    """Read, align and plan one run."""
    confirmed = engine.ledger.confirmed(run.target) if engine.ledger is not None else None
    loaded = load(engine, run, _pins(remote, confirmed) or sink.pins(run.target))
    if remote is not None and remote.lines and _starts_late(loaded, confirmed):
        rows = _logged(sink.rows(run.target), remote)
        loaded = _with_stored_rows(engine, loaded, rows, _pins(remote, confirmed))
    if engine.settings.diagnostics:
        loaded = diagnosed_or_plain(engine, loaded, _columns_of(engine, remote))
    return planned_with(
        engine, sink, loaded, remote, confirmed, recompute=engine.settings.recompute
    )


def _columns_of(engine: Engine, remote: RemoteState | None) -> str:
    """The version whose set of derived columns the run has, unless it is sent anew."""
    if engine.settings.recompute or remote is None or remote.marker is None or not remote.lines:
        return ""
    return column_set(remote.marker.diagnostics)


def _pins(remote: RemoteState | None, confirmed: Confirmed | None) -> Mapping[str, float]:
    if confirmed is not None:
        return confirmed.clock
    return remote.marker.clock if remote is not None and remote.marker is not None else {}


def _starts_late(loaded: Loaded, confirmed: Confirmed | None) -> bool:
    """Whether the server may hold rows from before the first row that is left on disk."""
    if not len(loaded.history) or loaded.history.steps[0] <= LATEST_START:
        return False
    return confirmed is None or bool(confirmed.steps[0] < loaded.history.steps[0])


def _logged(rows: Iterable[Mapping[str, Any]], remote: RemoteState) -> list[Mapping[str, Any]]:
    """Rows as they were logged, without what was derived from them."""
    if remote.marker is None:
        return list(rows)
    never = dict.fromkeys(remote.marker.added, math.inf)
    derived_to = {**never, **remote.marker.logged_from}
    return [
        {key: row[key] for key in row if row[STEP] >= derived_to.get(key, -math.inf)}
        for row in rows
    ]


def _with_stored_rows(
    engine: Engine,
    loaded: Loaded,
    rows: Sequence[Mapping[str, Any]],
    pins: Mapping[str, float],
) -> Loaded:
    """A log that was truncated at a restart continues the rows that the server holds.

    They are aligned like the attempt that wrote them, so that nothing of it is erased and a
    validation record at the resume step merges into its row.
    """
    first = int(loaded.history.steps[0])
    if not rows or int(rows[0][STEP]) >= first:
        return loaded
    if engine.settings.on_overlap == "last":
        rows = [row for row in rows if row[STEP] < _first_trained(loaded.history)]
    whole = load(engine, loaded.run, pins, (stored_attempt(rows, loaded.run.target),))
    note = (
        f"its log starts at step {first}: the file was replaced at a restart. Rows that only "
        "the server still has stay there (verl-logsync scan shows the files)"
    )
    account = replace(whole.account, notes=(*whole.account.notes, note))
    return replace(whole, account=account, continued=True)


def _first_trained(history: History) -> float:
    """The first step that the history trains; what the server has from there on is superseded."""
    trained = [
        int(history.steps[int(valid.argmax())])
        for name in history.table.schema.names
        if is_training_key(name)
        and (valid := history.table.column(name).is_valid().to_numpy()).any()
    ]
    return min(trained, default=math.inf)


def readiness_of(loaded: Loaded, settings: Settings, now: float) -> Readiness:
    """Which rows of a run may be sent, and the state in which that leaves it."""
    return judge(
        loaded.history,
        loaded.around,
        loaded.run.changed_at,
        now,
        Patience(settings.settle, settings.stale_after, settings.final),
        loaded.dumped_to,
    )


def planned_with(
    engine: Engine,
    sink: Sink,
    loaded: Loaded,
    remote: RemoteState | None,
    confirmed: Confirmed | None,
    *,
    recompute: bool = False,
) -> Prepared:
    """Plan what is to be sent; `recompute` sends all rows anew."""
    settings, run = engine.settings, loaded.run
    ready = readiness_of(loaded, settings, engine.now())
    history = loaded.history.head(ready.rows)
    history = _with_added(history, _added(remote))
    held = held_rows(history, remote, confirmed)
    if held is None:
        assert remote is not None, "without a run nothing is held"
        held = _read_held(sink, run.target, remote, history)
    extra = loaded.around.extra
    if remote is not None and (extra.files or extra.artifacts):
        remote = sink.with_parts(run.target, remote)
    situation = Situation(
        run=run,
        history=history,
        around=loaded.around,
        ready=ready,
        pins=loaded.pins,
        started_at=loaded.started_at or min(f.stamp.mtime for f in run.files),
        remote=remote,
        held=held,
        can_rewind=remote is not None and sink.can_rewind(run.target),
        knows_less=not loaded.continued and _knows_less(run, remote, confirmed),
        held_back=len(loaded.history) - ready.rows,
        on_rewrite=settings.on_rewrite,
        derived=replace(loaded.derived, config={**loaded.derived.config, **_marks(loaded)}),
        recompute=recompute,
        only_there=_only_there(loaded),
    )
    plan = make_plan(situation)
    parcel = sink.pack(plan) if plan.sends and sends(engine) else None
    return Prepared(loaded, ready, held, remote, plan, parcel)


def _only_there(loaded: Loaded) -> int:
    """How many rows at the beginning were read back from the server, since no log has them."""
    if not loaded.continued:
        return 0
    from_files = loaded.history.attempts > 0
    return int(from_files.argmax()) if from_files.any() else len(loaded.history)


def _marks(loaded: Loaded) -> dict[str, Any]:
    """What is not as exact as it looks, for the run's config."""
    marks: dict[str, Any] = {"time": loaded.history.clock}
    if loaded.account.below_precision:
        marks["below_precision"] = list(loaded.account.below_precision)
    return {DATA_KEY: marks}


def _added(remote: RemoteState | None) -> frozenset[str]:
    """The columns on the server that were derived by us."""
    return remote.marker.added if remote is not None and remote.marker is not None else frozenset()


def _with_added(history: History, added: frozenset[str]) -> History:
    """With what was derived once: it is no part of a row's identity, up to where it is logged."""
    logged = {
        name: int(history.steps[int(valid.argmax())])
        for name in added - history.added
        if name in history.table.schema.names
        and (valid := history.table.column(name).is_valid().to_numpy()).any()
    }
    return replace(
        history, added=history.added | added, logged_from={**history.logged_from, **logged}
    )


def _read_held(sink: Sink, target: Target, remote: RemoteState, history: History) -> Held:
    """All rows that the server holds; fewer than it counts prove nothing."""
    held = held_from_rows(sink.rows(target), history.added, history.logged_from)
    if len(held.steps) != remote.lines:
        raise RefusedByServer(
            f"the server counts {remote.lines} rows of this run but gives {len(held.steps)} back, "
            "so what it lacks cannot be told; nothing was sent",
            hint="Run the same command again later",
        )
    return held


def _knows_less(run: RunSources, remote: RemoteState | None, confirmed: Confirmed | None) -> bool:
    """Whether the server's rows were made from more logs than are here.

    Then what differs is no news: these files are an older copy. Unless it was we who sent
    what the server holds.
    """
    if remote is None or remote.marker is None:
        return False
    if confirmed is not None and len(confirmed.steps) == remote.lines:
        return False
    return run.heads < remote.marker.heads


def outcome_of(prepared: Prepared, *, rows_sent: int, verdict: Verdict | None) -> Outcome:
    """What became of a run whose plan was made."""
    plan, loaded = prepared.plan, prepared.loaded
    return Outcome(
        plan.target,
        plan.name,
        plan.action,
        rows_sent=rows_sent,
        rows_total=len(plan.history),
        state=plan.state,
        account=loaded.account,
        verdict=verdict,
        clock=loaded.history.clock,
        notes=(*loaded.run.notes, *loaded.account.notes, *_data_notes(loaded), *plan.notes),
        rows_planned=plan.rows_to_send,
        checkpoints=tuple(file.path for file in loaded.run.checkpoints),
    )


def _data_notes(loaded: Loaded) -> tuple[str, ...]:
    """What is not as the logs say it, although nothing is wrong."""
    notes = []
    if loaded.history.clock == "estimated":
        notes.append("times are estimated from the durations of the steps")
    if rewritten := wire_changes(loaded.history):
        notes.append(
            f"{rewritten} values are written otherwise on W&B's wire (-0.0 as 0, integers of 2^63 "
            "and more as floats, empty objects not at all)"
        )
    return tuple(notes)
