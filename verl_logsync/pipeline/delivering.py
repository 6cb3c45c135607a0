"""Send what is planned, read it back, remember it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from verl_logsync.errors import LogsyncError, RefusedByServer, RunDeleted
from verl_logsync.held import Held, held_after
from verl_logsync.interfaces import Sent, Sink
from verl_logsync.model import (
    HARMLESS,
    Action,
    Confirmed,
    Outcome,
    RemoteState,
    Target,
    UploadPlan,
    Verdict,
)
from verl_logsync.pipeline.engine import Engine, attempted, by_project
from verl_logsync.pipeline.preparing import Prepared, outcome_of, planned_with
from verl_logsync.verify import verify_counts, verify_rows

#: Seconds that the server is given to index what it accepted; less when the sender complained.
INDEXING, COMPLAINED = 30.0, 3.0

#: A run is sent at most so often in one upload: a rewind, what it could not carry, and once more
#: when the rewind was refused.
_ROUNDS: Final = 3
#: Words of the uploader about a failure that passes, and how its words are quoted in a report.
_PASSING: Final = re.compile(r"\b(408|413|429|500|502|503|504)\b|timeout|connection")
_SAYS: Final = "the uploader says: "


def carry_out(engine: Engine, sink: Sink, prepared: Sequence[Prepared]) -> list[Outcome]:
    """Send what is planned, verify, and plan again where one sending is not enough.

    A rewind carries rows only, so its run's other records follow in a second round; a rewind
    that the server refused is planned again without.
    """
    outcomes: dict[Target, Outcome] = {}
    todo: list[Prepared] = []
    states = _states_now(sink, [item for item in prepared if item.plan.sends])
    for item in prepared:
        refresh = partial(_refreshed, engine, sink, item, states)
        fresh = attempted(engine, item.loaded.run, refresh)
        if isinstance(fresh, Outcome):
            outcomes[item.plan.target] = fresh
        else:
            todo.append(fresh)
    for _ in range(_ROUNDS):
        again: list[Prepared] = []
        for item, outcome in _one_round(engine, sink, todo):
            target = item.plan.target
            outcomes[target] = _combined(outcomes.get(target), outcome)
            more = attempted(
                engine, item.loaded.run, partial(_next_plan, engine, sink, item, outcome)
            )
            if isinstance(more, Outcome):
                outcomes[target] = more
            elif more is not None:
                again.append(more)
        todo = again
        if not todo or engine.stop.is_set():
            break
    return list(outcomes.values())


def _target(item: Prepared) -> Target:
    return item.plan.target


def _states_now(sink: Sink, items: Sequence[Prepared]) -> dict[Target, RemoteState] | None:
    """What the server holds at the moment of sending; None when it does not say."""
    states: dict[Target, RemoteState] = {}
    try:
        for group in by_project(items, _target):
            states.update(sink.look([item.plan.target for item in group]))
    except LogsyncError:
        return None
    return states


def _refreshed(
    engine: Engine, sink: Sink, item: Prepared, states: Mapping[Target, RemoteState] | None
) -> Prepared:
    """The same plan, or a new one if the server changed since it was made."""
    if not item.plan.sends:
        return item
    now = states if states is not None else sink.look([item.plan.target])
    state = now.get(item.plan.target)
    if _holds(state) == _holds(item.remote):
        return item
    recompute = engine.settings.recompute
    return planned_with(engine, sink, item.loaded, state, None, recompute=recompute)


def _holds(state: RemoteState | None) -> tuple[object, ...]:
    if state is None:
        return ()
    return state.lines, state.last_step, state.summary_step, state.events, state.logs


def _combined(first: Outcome | None, second: Outcome) -> Outcome:
    """The outcome of two rounds; rows of a rewind that did not happen were not sent."""
    if first is None:
        return second
    arrived = first.rows_sent if first.verdict is not None and first.verdict.agrees else 0
    action = first.action if second.action is Action.APPEND and arrived else second.action
    notes = tuple(dict.fromkeys((*first.notes, *second.notes)))
    return replace(second, action=action, rows_sent=arrived + second.rows_sent, notes=notes)


def _one_round(
    engine: Engine, sink: Sink, prepared: Sequence[Prepared]
) -> Iterator[tuple[Prepared, Outcome]]:
    sending = [item for item in prepared if item.plan.sends]
    parcels = [item.parcel for item in sending if item.parcel is not None]
    if engine.ledger is not None and sending:
        # Rows that are gone half-way through a rewind were confirmed once.
        engine.ledger.doubt(map(_target, sending))
    sent = sink.send(parcels) if parcels else {}
    complained = any(s.error is not None or s.messages for s in sent.values())
    results = _read_back(engine, sink, sending, complained)
    for item in prepared:
        run, said = item.loaded.run, sent.get(item.plan.target, Sent())
        result = results.get(item.plan.target)
        finish = partial(_concluded, engine, sink, item, said, result)
        yield item, attempted(engine, run, finish)


def _concluded(
    engine: Engine, sink: Sink, item: Prepared, said: Sent, result: Verdict | LogsyncError | None
) -> Outcome:
    """What became of one run in one round; a verified one is remembered."""
    if not item.plan.sends:
        return _left_alone(engine, sink, item)
    verdict = result if isinstance(result, Verdict) else None
    outcome = replace(
        outcome_of(item, rows_sent=_arrived(item, verdict), verdict=verdict),
        url=sink.url(item.plan.target),
    )
    outcome = replace(outcome, notes=(*outcome.notes, *said.notes))
    if verdict is not None and verdict.agrees:
        _remember(engine, item)
        return outcome
    error = said.error or (result if isinstance(result, LogsyncError) else None)
    if isinstance(error, RunDeleted):
        hint = f"Upload it as a new run: {item.loaded.run.as_new_run()}"
        error = RunDeleted(error.message, place=error.place, hint=hint)
    if error is not None:
        outcome = replace(outcome, rows_sent=0, error=error)
    elif verdict is None:
        outcome = replace(outcome, notes=(*outcome.notes, "NOT VERIFIED: --verify none"))
    words = tuple(f"{_SAYS}{m}" for m in said.messages[:5])
    return replace(outcome, notes=(*outcome.notes, *words))


def _arrived(item: Prepared, verdict: Verdict | None) -> int:
    """How many of the rows that were sent are there, as far as was read back."""
    plan = item.plan
    if verdict is None or verdict.agrees:
        return plan.rows_to_send
    if plan.action is Action.REWIND and verdict.lines == len(item.held.steps):
        return 0
    kept = plan.expect.lines - plan.rows_to_send
    return min(max(verdict.lines - kept, 0), plan.rows_to_send)


def _left_alone(engine: Engine, sink: Sink, item: Prepared) -> Outcome:
    """A run for which nothing is sent."""
    verdict = None
    if engine.settings.verify == "full" and item.plan.action is Action.NOTHING and item.remote:
        verdict = verify_rows(item.plan, item.held, sink.rows(item.plan.target))
    if verdict is not None and not verdict.agrees:
        if engine.ledger is not None:
            engine.ledger.doubt([item.plan.target])
    elif item.plan.action is not Action.AHEAD:
        _remember(engine, item)
    return outcome_of(item, rows_sent=0, verdict=verdict)


def _read_back(
    engine: Engine, sink: Sink, items: Sequence[Prepared], complained: bool
) -> dict[Target, Verdict | LogsyncError]:
    """Ask the server until it agrees with every plan, or has had its time to index.

    A question that fails is a question that is asked again; the last failure is the result.
    """
    if engine.settings.verify == "none" or not items:
        return {}
    results: dict[Target, Verdict | LogsyncError] = {}
    end = time.monotonic() + (COMPLAINED if complained else INDEXING)
    pause = 0.1
    open_items = list(items)
    while True:
        for group in by_project(open_items, _target):
            results.update(_asked(engine, sink, group))
        open_items = [i for i in open_items if not _agrees(results[i.plan.target])]
        if not open_items or time.monotonic() + pause > end or engine.stop.wait(pause):
            return results
        pause = min(2 * pause, 5.0)


def _asked(
    engine: Engine, sink: Sink, items: Sequence[Prepared]
) -> dict[Target, Verdict | LogsyncError]:
    try:
        states = sink.look([item.plan.target for item in items])
        return {i.plan.target: _verdict(engine, sink, i, states) for i in items}
    except LogsyncError as error:
        return {item.plan.target: error for item in items}


def _agrees(result: Verdict | LogsyncError) -> bool:
    return isinstance(result, Verdict) and result.agrees


def _verdict(
    engine: Engine, sink: Sink, item: Prepared, states: Mapping[Target, RemoteState]
) -> Verdict:
    target, expect = item.plan.target, item.plan.expect
    state = states.get(target)
    if state is not None and (expect.files or expect.artifacts):
        state = sink.with_parts(target, state)
    verdict = verify_counts(item.plan, state)
    if verdict.agrees and engine.settings.verify == "full":
        return verify_rows(item.plan, held_after(item.plan, item.held), sink.rows(target))
    return verdict


def _next_plan(engine: Engine, sink: Sink, item: Prepared, outcome: Outcome) -> Prepared | None:
    """The plan of a further round; None when this run is done."""
    plan = item.plan
    refused = outcome.error is None or isinstance(outcome.error, RefusedByServer)
    if plan.action is not Action.REWIND or not refused:
        return None
    state = sink.look([plan.target]).get(plan.target)
    agreed = outcome.verdict is not None and outcome.verdict.agrees
    if not agreed:
        if state is None or _was_rewound(plan, item.held, state):
            return None
        if any(n.startswith(_SAYS) and _PASSING.search(n) for n in outcome.notes):
            return None  # it may well rewind next time; adding rows now would only be undone
        sink.refuses_rewind(plan.target)
        return planned_with(engine, sink, item.loaded, state, None)
    confirmed = engine.ledger.confirmed(plan.target) if engine.ledger is not None else None
    more = planned_with(engine, sink, item.loaded, state, confirmed)
    if more.plan.sends:
        return more
    _remember(engine, more)
    return None


def _was_rewound(plan: UploadPlan, held: Held, state: RemoteState) -> bool:
    """Whether the rows on the server are no longer those from before the rewind."""
    return state.lines != len(held.steps) or (
        state.marker is not None and state.marker.digest == plan.marker.digest
    )


def _remember(engine: Engine, item: Prepared) -> None:
    if engine.ledger is None:
        return
    plan, run = item.plan, item.loaded.run
    if plan.action is Action.NOTHING and not len(plan.history) and not len(item.held.steps):
        return
    after = held_after(plan, item.held)
    confirmed = Confirmed(
        plan.target,
        run.names_key,
        plan.marker.heads,
        run.fingerprint,
        after.steps,
        after.digests,
        plan.state,
        plan.marker.clock,
    )
    # The rest of a rewound run (events, files) is still to be sent.
    recheck = 0.0 if plan.action is Action.REWIND else item.ready.recheck_at
    outcome = outcome_of(item, rows_sent=0, verdict=None)
    engine.ledger.confirm(
        run,
        confirmed,
        engine.decisive,
        recheck,
        int(outcome.exit_code),
        _attention(item) if outcome.exit_code else (),
    )


def _attention(item: Prepared) -> list[str]:
    """What a run still lacks, to be said again while its files stay as they are."""
    kept_old = item.plan.notes[:1] if item.plan.action is Action.KEPT_OLD else ()
    skips = (s for s in item.loaded.account.skips if s.reason not in HARMLESS)
    return [*kept_old, *(f"skipped {skip}" for skip in skips)]
