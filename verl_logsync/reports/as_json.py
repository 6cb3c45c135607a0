"""Reports as plain values for `--json`. The names are part of the public interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl_logsync.diagnostics import Diagnosis
from verl_logsync.errors import LogsyncError
from verl_logsync.model import Account, Attempt, Catalog, LogFile, Outcome, Report, RunSources, Skip


def report_values(report: Report) -> dict[str, Any]:
    """An upload's report."""
    return {
        "mode": report.mode,
        "exit_code": int(report.exit_code),
        "runs": [outcome_values(outcome) for outcome in report.outcomes],
        "skipped": [skip_values(skip) for skip in report.skips],
        "totals": {
            "runs": len(report.outcomes),
            "rows_sent": sum(outcome.rows_sent for outcome in report.outcomes),
            "failed": sum(int(outcome.exit_code) != 0 for outcome in report.outcomes),
        },
    }


def outcome_values(outcome: Outcome) -> dict[str, Any]:
    """What became of one run."""
    verdict = outcome.verdict
    return {
        "entity": outcome.target.entity,
        "project": outcome.target.project,
        "run_id": outcome.target.run_id,
        "name": outcome.name,
        "action": outcome.action.value if outcome.action else None,
        "state": outcome.state,
        "clock": outcome.clock,
        "rows_sent": outcome.rows_sent,
        "rows_planned": outcome.rows_planned,
        "rows_total": outcome.rows_total,
        "verified": verdict.agrees if verdict else None,
        "verified_by": verdict.how if verdict else None,
        "differences": list(verdict.differences) if verdict else [],
        "verdict_notes": list(verdict.notes) if verdict else [],
        "account": account_values(outcome.account) if outcome.account else None,
        "error": error_values(outcome.error) if outcome.error else None,
        "notes": list(outcome.notes),
        "url": outcome.url,
        "exit_code": int(outcome.exit_code),
    }


def account_values(account: Account) -> dict[str, Any]:
    """Where every record went."""
    return {
        "seen": account.seen,
        "kept": account.kept,
        "merged": account.merged,
        "superseded": account.superseded,
        "skipped": account.skipped,
        "superseded_steps": list(account.superseded_steps),
        "skips": [skip_values(skip) for skip in account.skips],
        "conflicts": account.conflict_count,
        "conflict_examples": [
            {"step": c.step, "key": c.key, "kept": c.kept, "dropped": c.dropped}
            for c in account.conflicts
        ],
        "notes": list(account.notes),
        "origins": [
            {
                "first_step": o.first_step,
                "last_step": o.last_step,
                "attempt": o.attempt + 1,
                "files": list(o.places),
            }
            for o in account.origins
        ],
    }


def error_values(error: LogsyncError) -> dict[str, Any]:
    """An error, laid out."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "place": error.place,
        "hint": error.hint,
        "retryable": error.retryable,
    }


def skip_values(skip: Skip) -> dict[str, Any]:
    """Something that was left out."""
    return {
        "reason": skip.reason.value,
        "place": skip.place,
        "detail": skip.detail,
        "hint": skip.hint,
        "records": skip.records,
    }


def diagnosis_values(diagnosis: Diagnosis) -> dict[str, Any]:
    """What was found in one run, and what could not be looked at."""
    return {
        "version": diagnosis.version,
        "worst": diagnosis.worst,
        "findings": [finding.as_dict() for finding in diagnosis.findings],
        "series": {key: dict(value) for key, value in diagnosis.provenance.items()},
        "missing": dict(diagnosis.missing),
        "summary": dict(diagnosis.summary),
    }


def catalog_values(catalog: Catalog) -> dict[str, Any]:
    """A catalog without what only reading the files can tell."""
    return {
        "runs": [run_values(run) for run in catalog.runs],
        "skipped": [skip_values(skip) for skip in catalog.skips],
    }


def run_values(run: RunSources) -> dict[str, Any]:
    """One run and its attempts."""
    return {
        "entity": run.target.entity,
        "project": run.target.project,
        "run_id": run.target.run_id,
        "run_id_from": run.id_from,
        "name": run.name,
        "config_fingerprint": run.fingerprint,
        "attempts": attempts_values(run.attempts),
        "configs": [file.place for file in run.configs],
        "rollouts": [file.place for file in run.rollouts],
        "checkpoints": [file.place for file in run.checkpoints],
        "notes": list(run.notes),
    }


def attempts_values(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Starts of a job and the files that tell of them."""
    return [
        {
            "first_step": attempt.first_step,
            "last_step": attempt.last_step,
            "started_at": attempt.started_at,
            "ordered_by": attempt.ordered_by,
            "files": [_file_values(file) for file in attempt.files],
        }
        for attempt in attempts
    ]


def _file_values(file: LogFile) -> dict[str, Any]:
    return {
        "path": file.place,
        "source": file.source,
        "bytes": file.stamp.size,
        "rank": file.facts.rank,
    }
