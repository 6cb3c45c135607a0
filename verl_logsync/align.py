"""Readings of all attempts -> one History, one row a step, and an account of every record.

Rules (design, section 2): within an attempt later keys win, merged per key. From the first
training step of a later attempt on, the earlier attempt is superseded; a validation-only
record at the resume step merges and erases nothing. Of several sources of one attempt the
more precise wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from verl_logsync.beginnings import Checkpoints, why_anew
from verl_logsync.columns import AXES, MISSING, ROUNDING, STEP, as_numbers, concat, decode, to_json
from verl_logsync.counters import counter_notes
from verl_logsync.errors import OverlapRefused, RestartRefused, as_run, quoted
from verl_logsync.model import Account, AttemptReading, Clock, Conflict, History, Origin
from verl_logsync.verl_keys import LATEST_START, training_rows

OnOverlap = Literal["last", "first", "both", "error"]
OnRestart = Literal["ask", "replace"]

_NONE_KNOWN: Final = Checkpoints()

#: So many conflicts are kept word for word; all are counted.
CONFLICTS_KEPT: Final = 20
#: A log that prints three decimals is less precise than any that does not.
_ROUNDED: Final = 100
#: So many stretches of steps are written out.
_SPANS: Final = 5

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Policy:
    """How overlapping attempts are treated.

    `on_overlap` says whose row a step keeps; with `keep_tail` the rows of an earlier attempt
    beyond the last step of the later one stay. `on_restart` is about attempts that begin at
    step 0 or 1 again.
    """

    on_overlap: OnOverlap = "last"
    keep_tail: bool = False
    on_restart: OnRestart = "ask"


@dataclass(frozen=True, slots=True)
class _Rows:
    """All records of a run, before anything is dropped; the arrays run over its rows."""

    table: pa.Table
    steps: _Ints
    sessions: _Ints
    precisions: _Ints
    training: _Bools
    files: _Ints
    slack: _Floats


def align(
    attempts: Sequence[AttemptReading],
    precisions: Mapping[str, int],
    policy: Policy,
    clock: Clock = "unknown",
    checkpoints: Checkpoints = _NONE_KNOWN,
) -> tuple[History, Account]:
    """Merge the readings of a run.

    Args:
        attempts: in the order in which the job was started.
        precisions: of the sources, by name; the higher wins within an attempt.
        policy: how to treat overlaps.
        clock: where the rows' `_timestamp` comes from.
        checkpoints: what is known of them besides the logs.

    Raises:
        OverlapRefused: attempts overlap and the policy is "error".
        RestartRefused: a later attempt begins at the beginning, and nobody said what that means.
    """
    skips = [skip for attempt in attempts for _, r in attempt.readings for skip in r.skips]
    rows = _gather(attempts, precisions)
    if policy.on_overlap == "last" and policy.on_restart == "ask":
        begun_anew = _judge_restarts(rows, attempts, checkpoints)
    else:
        begun_anew = []
    kept, superseded = _select(rows, policy)
    table, conflicts, count = _merge(rows, kept, first_wins=policy.on_overlap == "first")
    if policy.on_overlap == "both":
        table = _with_superseded(table, rows, superseded)
    steps = table.column(STEP).to_numpy()
    history = History(table, _attempt_of_rows(rows, kept, steps), clock)
    lost_steps = np.unique(rows.steps[superseded])
    records = sum(skip.records for skip in skips)
    merged = sum(reading.merged for attempt in attempts for _, reading in attempt.readings)
    account = Account(
        seen=len(rows.steps) + records + merged,
        kept=len(history),
        merged=int(kept.sum()) - len(history) + merged,
        superseded=int(superseded.sum()),
        skipped=records,
        superseded_steps=tuple(lost_steps.tolist()),
        skips=tuple(skips),
        conflicts=tuple(conflicts),
        conflict_count=count,
        notes=(
            *_reading_notes(attempts),
            *begun_anew,
            *_notes(rows, superseded, history),
            *counter_notes(history),
        ),
        origins=tuple(_origins(attempts, rows, kept)),
        below_precision=tuple(_below_precision(attempts)),
    )
    return history, account


# -- gathering -----------------------------------------------------------------------------


def _gather(attempts: Sequence[AttemptReading], precisions: Mapping[str, int]) -> _Rows:
    tables: list[pa.Table] = []
    sessions: list[_Ints] = []
    precision: list[_Ints] = []
    training: list[_Bools] = []
    slack: list[_Floats] = []
    for number, attempt in enumerate(attempts):
        for file, reading in attempt.readings:
            count = reading.rows.num_rows
            tables.append(reading.rows)
            sessions.append(np.full(count, number, dtype=np.int64))
            rounded = _ROUNDED if reading.rounding else 0
            precision.append(np.full(count, precisions[file.source] - rounded, dtype=np.int64))
            training.append(training_rows(reading.rows))
            slack.append(np.full(count, reading.rounding))
    if not tables:
        none = np.empty(0, dtype=np.int64)
        empty = pa.table({STEP: pa.array([], type=pa.int64())})
        return _Rows(empty, none, none, none, none.astype(bool), none, none.astype(float))
    table = concat(tables)
    return _Rows(
        table,
        table.column(STEP).to_numpy(),
        np.concatenate(sessions),
        np.concatenate(precision),
        np.concatenate(training),
        np.repeat(np.arange(len(tables)), [t.num_rows for t in tables]),
        np.concatenate(slack),
    )


# -- starting over -------------------------------------------------------------------------


def _judge_restarts(
    rows: _Rows, attempts: Sequence[AttemptReading], checkpoints: Checkpoints
) -> list[str]:
    """A job that counts from 0 again may continue the one before it, or replace it.

    Where nothing can have been there to go on from it replaces it; that is told in notes.
    """
    reached, highest, first = LATEST_START, LATEST_START, 0
    anew: dict[int, int] = {}
    notes: list[str] = []
    for session, attempt in enumerate(attempts):
        trained = rows.steps[(rows.sessions == session) & rows.training]
        if not len(trained):
            continue
        begin, last = int(trained.min()), int(trained.max())
        highest_now = max(highest, last)
        if begin <= LATEST_START < reached:
            why = why_anew(checkpoints, attempts[:session], attempt, highest)
            if why:
                anew.clear()  # whatever they were, this one comes after them
                reached = LATEST_START
                notes.append(_begun_anew(attempt, begin, why))
            else:
                first = first if anew else begin
                anew[session] = reached
                last += reached
        reached, highest = max(reached, last), highest_now
    if anew:
        session = min(anew)
        raise RestartRefused(
            f"starts again at step {first} although an earlier attempt of this run "
            f"reached step {anew[session]}",
            place=attempts[session].readings[0][0].place,
            hint=_choices(attempts, anew),
        )
    return notes


def _begun_anew(attempt: AttemptReading, begin: int, why: str) -> str:
    place = attempt.readings[0][0].place
    return (
        f"{place} starts again at step {begin}: {why}, so it replaces what was logged before "
        "(--offset makes it continue, --run another run)"
    )


def _choices(attempts: Sequence[AttemptReading], anew: Mapping[int, int]) -> str:
    """What a user may say about attempts that begin at the beginning.

    Args:
        attempts: all of them.
        anew: these attempts, and the steps that come before each if it goes on.
    """
    begun = [
        (file.place, n) for session, n in anew.items() for file, _ in attempts[session].readings
    ]
    offsets = " ".join(f"--offset {quoted(f'{place}={steps}')}" for place, steps in begun)
    before = {file.place for attempt in attempts[: min(anew)] for file, _ in attempt.readings}
    other = f"--no-merge, or {as_run('NAME', (place for place, _ in begun))}"
    if any(place in before for place, _ in begun):
        other = "cut the file in two there, since a run's name counts for a whole file"
    return (
        f"If it continues: {offsets}; if it replaces what was before: --on-restart replace; "
        f"if it is another run: {other}"
    )


# -- superseding ---------------------------------------------------------------------------


def _select(rows: _Rows, policy: Policy) -> tuple[_Bools, _Bools]:
    """Which rows stay, and which are superseded by another attempt."""
    superseded = np.zeros(len(rows.steps), dtype=bool)
    for session in np.unique(rows.sessions):
        trained = rows.steps[(rows.sessions == session) & rows.training]
        if not len(trained):
            continue
        earlier = (rows.sessions < session) & ~superseded
        if policy.on_overlap == "first":
            superseded |= _later_losers(rows, earlier, int(session))
        else:
            superseded |= earlier & _replaced(rows, trained, policy)
    if policy.on_overlap == "error" and superseded.any():
        _refuse(rows, superseded)
    return ~superseded, superseded


def _replaced(rows: _Rows, trained: _Ints, policy: Policy) -> _Bools:
    replaced: _Bools = rows.steps >= trained.min()
    if policy.keep_tail or policy.on_overlap == "both":
        replaced = replaced & (rows.steps <= trained.max())
    return replaced


def _later_losers(rows: _Rows, earlier: _Bools, session: int) -> _Bools:
    """With "first": the later attempt's rows at steps that an earlier one already trained."""
    done = rows.steps[earlier & rows.training]
    reached = done.max() if len(done) else -1
    losers: _Bools = (rows.sessions == session) & rows.training & (rows.steps <= reached)
    return losers


def _refuse(rows: _Rows, superseded: _Bools) -> None:
    steps = np.unique(rows.steps[superseded])
    raise OverlapRefused(
        f"attempts overlap in {len(steps)} steps ({_span(steps)}) and --on-overlap is error",
        hint="Choose --on-overlap last, first or both",
    )


def _span(steps: _Ints) -> str:
    """Ascending steps as stretches: `3-4, 9`. A stretch may leave out what no attempt logged."""
    usual = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] - usual - 1) > usual)
    ends = np.append(starts[1:], len(steps)) - 1
    texts = [
        f"{steps[a]}" if a == b else f"{steps[a]}-{steps[b]}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return ", ".join(texts[:_SPANS]) + (", ..." if len(texts) > _SPANS else "")


# -- merging -------------------------------------------------------------------------------


def _merge(rows: _Rows, kept: _Bools, *, first_wins: bool) -> tuple[pa.Table, list[Conflict], int]:
    """One row a step from the kept records; the last valid value of a key wins."""
    index = np.flatnonzero(kept)
    steps = rows.steps[index]
    if len(steps) == 0 or bool(np.all(np.diff(steps) > 0)):
        return (rows.table if kept.all() else rows.table.filter(pa.array(kept))), [], 0
    sessions = rows.sessions[index]
    precision = rows.precisions[index]
    earliest_last = np.lexsort((index, precision, -sessions, steps))
    order = index[earliest_last if first_wins else np.lexsort((index, precision, sessions, steps))]
    # A step happened when it was first trained, not when a resumed job validated it again.
    clock_order = index[earliest_last]
    ordered = rows.steps[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    conflicts = _Conflicts(ordered[starts], np.maximum.reduceat(rows.slack[order], starts))
    columns: dict[str, Any] = {STEP: pa.array(ordered[starts])}
    for name in rows.table.schema.names:
        if name == STEP:
            continue
        column = rows.table.column(name).combine_chunks()
        chosen = _last_valid(column, clock_order if name in AXES else order, starts)
        if name not in AXES:
            conflicts.look(name, column, order, starts)
        columns[name] = column.take(pa.array(chosen, mask=chosen < 0))
    return pa.table(columns), conflicts.found, conflicts.count


def _valid(column: pa.Array) -> _Bools:
    if column.null_count == 0:
        return np.ones(len(column), dtype=bool)
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def _last_valid(column: pa.Array, order: _Ints, starts: _Ints) -> _Ints:
    """For every step the row whose value of this column wins; -1 when none has one."""
    places = np.where(_valid(column)[order], np.arange(len(order)), -1)
    last = np.maximum.reduceat(places, starts)
    return np.where(last >= 0, order[last], -1)


class _Conflicts:
    """Finds keys that two records of one step state differently."""

    def __init__(self, steps: _Ints, slack: _Floats) -> None:
        self._steps = steps
        self._slack = slack
        self.found: list[Conflict] = []
        self.count = 0

    def look(self, name: str, column: pa.Array, order: _Ints, starts: _Ints) -> None:
        valid = _valid(column)[order]
        several = np.add.reduceat(valid.astype(np.int64), starts) > 1
        if not several.any():
            return
        ends = np.append(starts[1:], len(order))
        if not pa.types.is_string(column.type):
            several &= _differing(as_numbers(column)[order], valid, starts, self._slack)
        for group in np.flatnonzero(several):
            members = order[starts[group] : ends[group]]
            self._compare(name, int(group), decode(column.take(pa.array(members))))

    def _compare(self, name: str, group: int, values: list[Any]) -> None:
        step, slack = int(self._steps[group]), float(self._slack[group])
        stated = [value for value in values if value is not MISSING]
        kept = stated[-1]
        for dropped in stated[:-1]:
            if not _same(kept, dropped, slack):
                self.count += 1
                if len(self.found) < CONFLICTS_KEPT:
                    self.found.append(Conflict(step, name, to_json(kept), to_json(dropped)))
                return


def _differing(numbers: _Floats, valid: _Bools, starts: _Ints, slack: _Floats) -> _Bools:
    """For every step, whether its numbers may differ by more than rounding."""
    gone = np.isnan(numbers)
    low = np.minimum.reduceat(np.where(valid & ~gone, numbers, np.inf), starts)
    high = np.maximum.reduceat(np.where(valid & ~gone, numbers, -np.inf), starts)
    some_nan = np.logical_or.reduceat(valid & gone, starts)
    with np.errstate(invalid="ignore"):
        apart = ~np.isclose(low, high, rtol=ROUNDING, atol=slack) & (low <= high)
    mixed: _Bools = apart | (some_nan & (low <= high))
    return mixed


def _same(one: Any, other: Any, slack: float) -> bool:
    """Whether two statements of a value agree within rounding (NaN agrees with null)."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return bool(np.isclose(one, other, rtol=ROUNDING, atol=slack, equal_nan=True))
    if one is None or other is None:
        return _says_nothing(one) and _says_nothing(other)
    return bool(one == other)


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _with_superseded(table: pa.Table, rows: _Rows, superseded: _Bools) -> pa.Table:
    """Policy "both": superseded values stay as columns `attempt{n}/KEY` of their step."""
    steps = table.column(STEP).to_numpy()
    for session in np.unique(rows.sessions[superseded]):
        index = np.flatnonzero(superseded & (rows.sessions == session))
        places = np.searchsorted(steps, rows.steps[index])
        fits = (places < len(steps)) & (
            steps[np.minimum(places, len(steps) - 1)] == rows.steps[index]
        )
        source = np.full(len(steps), -1)
        source[places[fits]] = index[fits]
        taken = pa.array(source, mask=source < 0)
        for name in rows.table.schema.names:
            column = rows.table.column(name).combine_chunks().take(taken)
            if name not in AXES and column.null_count < len(column):
                table = table.append_column(f"attempt{session + 1}/{name}", column)
    return table


def _attempt_of_rows(rows: _Rows, kept: _Bools, steps: _Ints) -> _Ints:
    """The attempt (counted from 0) whose training gave each row."""
    numbers = np.zeros(len(steps), dtype=np.int64)
    for mask in (kept, kept & rows.training):
        index = np.flatnonzero(mask)
        order = index[np.argsort(rows.sessions[index], kind="stable")]
        places = np.searchsorted(steps, rows.steps[order])
        numbers[places] = rows.sessions[order]
    return numbers


def _reading_notes(attempts: Sequence[AttemptReading]) -> list[str]:
    """What the sources had to say about their files."""
    notes = [note for attempt in attempts for _, r in attempt.readings for note in r.notes]
    coarse = _below_precision(attempts)
    if coarse:
        more = f" and {len(coarse) - 5} more" if len(coarse) > 5 else ""
        notes.append(
            f"{', '.join(coarse[:5])}{more} were printed as 0 by a log with three decimals: a 0 "
            "there only says that the value is below 0.0005"
        )
    return list(dict.fromkeys(notes))


def _below_precision(attempts: Sequence[AttemptReading]) -> list[str]:
    return sorted({k for a in attempts for _, r in a.readings for k in r.below_precision})


def _origins(attempts: Sequence[AttemptReading], rows: _Rows, kept: _Bools) -> Iterator[Origin]:
    """Stretches of steps whose rows come from the same files."""
    files = [(n, file.place) for n, a in enumerate(attempts) for file, _ in a.readings]
    index = np.flatnonzero(kept)
    if not len(index):
        return
    if len(files) == 1:
        steps = rows.steps[index]
        yield Origin(int(steps.min()), int(steps.max()), files[0][0], (files[0][1],))
        return
    order = index[np.lexsort((rows.files[index], rows.steps[index]))]
    steps, numbers = rows.steps[order], rows.files[order]
    once = np.append(True, (np.diff(steps) != 0) | (np.diff(numbers) != 0))
    steps, numbers = steps[once], numbers[once]
    starts = np.flatnonzero(np.append(True, np.diff(steps) != 0))
    ends = np.append(starts[1:], len(steps))
    # Sums of random words tell sets of files apart.
    words = np.random.default_rng(0).integers(1, 2**62, len(files), dtype=np.uint64)
    sets = np.add.reduceat(words[numbers], starts)
    steps = steps[starts]
    changes = np.flatnonzero(np.append(True, sets[1:] != sets[:-1]))
    for first, after in zip(changes, np.append(changes[1:], len(steps)), strict=True):
        members = numbers[starts[first] : ends[first]].tolist()
        yield Origin(
            int(steps[first]),
            int(steps[after - 1]),
            max(files[m][0] for m in members),
            tuple(dict.fromkeys(files[m][1] for m in members)),
        )


def _notes(rows: _Rows, superseded: _Bools, history: History) -> list[str]:
    notes = []
    if superseded.any():
        steps = np.unique(rows.steps[superseded])
        count = int(superseded.sum())
        what = "1 row" if count == 1 else f"{count} rows"
        where = "step" if len(steps) == 1 else "steps"
        notes.append(f"{what} superseded at {where} {_span(steps)}")
        tail = steps[steps > (history.last_step if history.last_step is not None else -1)]
        if len(tail):
            notes.append(
                f"steps {_span(tail)} are a rolled-back tail: an earlier attempt computed them, "
                "the later one did not reach them. They are dropped; --keep-tail keeps them"
            )
    gaps = missing_steps(history.steps)
    if gaps:
        notes.append(f"no rows for steps {gaps}")
    return notes


def missing_steps(steps: _Ints) -> str:
    """The steps that a densely logged run lacks, as text; empty for none or a regular stride."""
    if len(steps) < 3:
        return ""
    strides = np.diff(steps)
    usual = int(np.median(strides))
    holes = np.flatnonzero(strides > usual)
    texts = [
        f"{steps[i] + usual}-{steps[i + 1] - usual}"
        if strides[i] > 2 * usual
        else f"{steps[i] + usual}"
        for i in holes[:5]
    ]
    return ", ".join(texts) + (", ..." if len(holes) > 5 else "")
