"""Reports as text for people and for cron's mail: one line a run, then what needs attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from verl_logsync.errors import LogsyncError
from verl_logsync.model import (
    HARMLESS,
    Account,
    Action,
    Attempt,
    Catalog,
    LogFile,
    Outcome,
    Report,
    RunSources,
    Skip,
    SkipReason,
)

#: Harmless verdicts are summed up after so many.
_NAMED = 12
#: So many skipped places of one run are named.
_SKIPS_NAMED = 5


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """One line about a run, then an indented line for everything worth knowing."""
    yield f"{_mark(outcome)} {outcome.target.project}/{outcome.name} [{outcome.target.run_id}] " + (
        _what(outcome)
    )
    if outcome.error is not None:
        yield from error_lines(outcome.error)
    if outcome.verdict is not None and not outcome.verdict.agrees:
        yield f"    READ-BACK DISAGREES ({outcome.verdict.how}):"
        yield from (f"      {difference}" for difference in outcome.verdict.differences)
        yield "      Nothing is marked as uploaded: run the same command again"
    for note in (*outcome.notes, *(outcome.verdict.notes if outcome.verdict else ())):
        yield f"    {note}"
    if outcome.account is not None:
        yield from account_lines(outcome.account)


def _mark(outcome: Outcome) -> str:
    return "ok  " if int(outcome.exit_code) == 0 else "FAIL" if outcome.error else "WARN"


def _what(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "failed"
    action = outcome.action or Action.NOTHING
    if action is Action.NOTHING:
        return f"up to date: {counted(outcome.rows_total, 'row')}, {outcome.state}"
    sent = outcome.rows_sent or outcome.rows_planned
    verb = "sent" if outcome.rows_sent or not outcome.rows_planned else "to send"
    text = f"{action.value}: {counted(sent, 'row')} {verb} of {outcome.rows_total}, {outcome.state}"
    if outcome.verdict is not None:
        text += ", verified" if outcome.verdict.agrees else ", NOT verified"
    return f"{text}  {outcome.url}".rstrip()


def counted(count: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def error_lines(error: LogsyncError) -> Iterator[str]:
    """An error as indented lines: what, where, what next."""
    yield f"    {error.place}: {error.message}" if error.place else f"    {error.message}"
    if error.hint:
        yield f"    -> {error.hint}"


def account_lines(account: Account) -> Iterator[str]:
    """Where the records went, when not all of them became rows."""
    if account.seen != account.kept:
        yield (
            f"    {account.seen} records seen = {account.kept} kept + {account.merged} merged + "
            f"{account.superseded} superseded + {account.skipped} skipped"
        )
    yield from left_out_lines(account.skips)
    if account.conflict_count:
        yield f"    {account.conflict_count} values stated differently within a step, for example:"
        yield from (
            f"      step {c.step}, {c.key}: kept {c.kept}, dropped {c.dropped}"
            for c in account.conflicts[:3]
        )


def left_out_lines(skips: Sequence[Skip]) -> Iterator[str]:
    """What is not in a run, below its line: the first of it."""
    yield from (f"    skipped {skip}" for skip in skips[:_SKIPS_NAMED])
    if len(skips) > _SKIPS_NAMED:
        yield f"    ... and {len(skips) - _SKIPS_NAMED} more (--json names them)"


def skip_lines(skips: Iterable[Skip]) -> Iterator[str]:
    """What was left out: every problem, and the first of the harmless ones."""
    skips = list(skips)
    yield from problem_lines(skips)
    harmless = [skip for skip in skips if skip.reason in HARMLESS]
    yield from (f"skipped {skip}" for skip in harmless[:_NAMED])
    if len(harmless) > _NAMED:
        yield f"skipped {len(harmless) - _NAMED} more files (see: verl-logsync scan --json)"


def problem_lines(skips: Iterable[Skip]) -> Iterator[str]:
    """What was left out although it should not have been."""
    yield from (f"skipped {skip}" for skip in skips if skip.reason not in HARMLESS)


def report_lines(report: Report) -> Iterator[str]:
    """An upload's report without the outcomes: what was left out, and the totals."""
    yield from skip_lines(report.skips)
    if not report.outcomes:
        yield "nothing to upload" + _looked_at(report.catalog)
        return
    rows = sum(outcome.rows_sent for outcome in report.outcomes)
    bad = sum(int(outcome.exit_code) != 0 for outcome in report.outcomes)
    text = f"{counted(len(report.outcomes), 'run')}, {counted(rows, 'row')} sent"
    yield f"{text}, {bad} with something to look at" if bad else text


def _looked_at(catalog: Catalog) -> str:
    waiting = sum(skip.reason is SkipReason.NOTHING_YET for skip in catalog.skips)
    return f": {waiting} logs hold nothing yet" if waiting else ": no log was recognised"


def _rank(file: LogFile) -> str:
    return "" if file.facts.rank is None else f"  rank {file.facts.rank}"


def run_lines(
    run: RunSources,
    state: str,
    rows: str,
    account: Account | None,
    attempts: Sequence[Attempt] = (),
    *,
    verbose: bool = False,
) -> Iterator[str]:
    """One run of a scan.

    Args:
        attempts: those that reading the rows told of; without them what the quick look told.
        verbose: name the files that each step comes from.
    """
    target = run.target
    yield f"{target.project}/{run.name}  run {target.run_id} ({run.id_from}), {rows}, {state}"
    for number, attempt in enumerate(attempts or run.attempts, 1):
        span = f"steps {attempt.first_step}..{attempt.last_step}"
        steps = "no steps" if attempt.first_step is None else span
        yield f"  attempt {number} ({attempt.ordered_by}): {steps}"
        yield from (f"    {file.source:12} {file.place}{_rank(file)}" for file in attempt.files)
    for file in (*run.configs, *run.rollouts, *run.checkpoints):
        yield f"  {file.source:12} {file.place}"
    yield from (f"  {note}" for note in run.notes)
    if account is not None:
        yield from (f"  {note}" for note in account.notes)
        yield from (line[2:] for line in account_lines(account))
    if account is not None and verbose:
        yield from origin_lines(account)


def origin_lines(account: Account) -> Iterator[str]:
    """Which steps come from which files."""
    for origin in account.origins:
        steps = f"{origin.first_step}..{origin.last_step}"
        yield f"  steps {steps:>12}  attempt {origin.attempt + 1}: {' + '.join(origin.places)}"
