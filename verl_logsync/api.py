"""The public Python face, and the one place that names sources and sinks to the engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_logsync import pipeline
from verl_logsync.columns import MISSING, STEP, decode
from verl_logsync.discover import discover
from verl_logsync.errors import InputWarning, LogsyncError, OverlapRefused
from verl_logsync.interfaces import Source
from verl_logsync.ledger import Ledger, LedgerRun, locked, remembered_runs
from verl_logsync.model import (
    HARMLESS,
    Account,
    Catalog,
    Outcome,
    Report,
    RunSources,
)
from verl_logsync.settings import Settings, load_settings
from verl_logsync.sources import SOURCES, TRUNCATED
from verl_logsync.sources.checkpoint import Checkpoint
from verl_logsync.sources.verl_file import VerlFile

if TYPE_CHECKING:
    import pandas as pd

    from verl_logsync.diagnostics import Finding
    from verl_logsync.export import Format
    from verl_logsync.pipeline.deriving import Diagnosed
    from verl_logsync.snapshot import Copied

Paths = str | Path | Iterable[str | Path]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, read and aligned from all its files.

    Attributes:
        name: the experiment name.
        project: the project name.
        run_id: the W&B run id that an upload uses.
        account: where every record went: seen = kept + merged + superseded + skipped.
        config: the training config, secrets masked; empty when no file holds one.
        notes: what was noticed while grouping and aligning.
    """

    name: str
    project: str
    run_id: str
    account: Account
    config: Mapping[str, Any]
    notes: tuple[str, ...]
    _loaded: pipeline.Loaded

    def history(self) -> pd.DataFrame:
        """The aligned history.

        Returns:
            A frame of shape (steps, metrics), indexed by the training step (ascending, unique,
            named `_step`). Numbers and booleans have Arrow dtypes, in which a missing value is
            `<NA>` and NaN stays NaN; text, lists, objects and explicit nulls are Python values
            in object columns. `_timestamp` is in seconds since 1970 (UTC), `_runtime` in
            seconds; all other units are those of the trainer.

        Example:
            >>> frame = verl_logsync.load("outputs")[0].history()  # doctest: +SKIP
            >>> frame["critic/score/mean"].tail(3)  # doctest: +SKIP
        """
        return _frame(self._loaded.history.table)

    def diagnose(self, **settings: Any) -> RunDiagnosis:
        """The same as `verl_logsync.diagnose(run)`."""
        from verl_logsync.pipeline.deriving import diagnosed

        diagnosis = diagnosed(_reader(load_settings(settings)), self._loaded).diagnosis
        return RunDiagnosis(
            diagnosis.findings, diagnosis.provenance, diagnosis.missing, diagnosis.columns
        )


def _frame(table: Any) -> pd.DataFrame:
    import pandas as pd

    columns = {name: _series(table.column(name)) for name in table.schema.names if name != STEP}
    index = pd.Index(table.column(STEP).to_numpy(), name=STEP)
    frame: pd.DataFrame = pd.DataFrame(columns, index=range(len(index))).set_index(index)
    return frame


def _series(column: Any) -> Any:
    import pandas as pd
    import pyarrow as pa

    if pa.types.is_string(column.type):
        values = [pd.NA if value is MISSING else value for value in decode(column)]
        return pd.Series(values, dtype=object)
    return pd.Series(pd.arrays.ArrowExtensionArray(column))


def load(paths: Paths, **settings: Any) -> list[Run]:
    """Read and align every run below some paths. Nothing is written or sent.

    Args:
        paths: files or folders.
        settings: as for the command line, with underscores (`on_overlap="first"`).

    Returns:
        The runs, by project and name.

    Raises:
        UsageError: a path does not exist or a setting is wrong.
        OverlapRefused: attempts overlap, and that was to be an error.
        InputError: there are runs, but none of them can be read.

    Warns:
        InputWarning: a run cannot be read; the others are returned.
    """
    engine = _reader(load_settings(settings))
    found = pipeline.survey(engine, _paths(paths))
    results = [(run, pipeline.load_or_error(engine, run)) for run in found.runs]
    failed = [(run, error) for run, error in results if isinstance(error, LogsyncError)]
    for run, error in failed:
        if isinstance(error, OverlapRefused) or len(failed) == len(results):
            raise error
        text = f"run {run.name} is left out: {error.place}: {error.message}. {error.hint}"
        warnings.warn(text, InputWarning, stacklevel=2)
    return [_loaded_run(r) for _, r in results if not isinstance(r, LogsyncError)]


def _loaded_run(loaded: pipeline.Loaded) -> Run:
    run = loaded.run
    return Run(
        run.name,
        run.target.project,
        run.target.run_id,
        loaded.account,
        loaded.around.config,
        (*run.notes, *loaded.account.notes),
        loaded,
    )


@dataclass(frozen=True, slots=True)
class RunDiagnosis:
    """What a run tells.

    Attributes:
        findings: what was noticed, the gravest first: code, severity, steps, evidence, advice.
        provenance: of each derived series, from which logged key and formula it comes.
        missing: why something could not be computed.
    """

    findings: tuple[Finding, ...]
    provenance: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]
    _columns: Any

    def series(self) -> pd.DataFrame:
        """The derived series.

        Returns:
            A frame of shape (steps, series), indexed like `Run.history()`: canonical series,
            `grpo/...` group statistics and `health/...` levels (0, 1 warning, 2 critical).
            `docs/reference/diagnostics.md` has formula, unit and source of each.
        """
        return _frame(self._columns)


def diagnose(run: Run, **settings: Any) -> RunDiagnosis:
    """Derive what the trainer did not log, and judge the run. Nothing is written or sent.

    Args:
        run: from `load`; its rollout dumps are read.
        settings: as for the command line, with underscores (`rules="my.toml"`).

    Returns:
        Findings and series; what is said about a step depends on rows up to that step only.

    Raises:
        UsageError: a setting or the rules file is wrong.
    """
    return run.diagnose(**settings)


def diagnose_paths(
    paths: Sequence[Path], settings: Settings
) -> tuple[Catalog, list[tuple[RunSources, Diagnosed | LogsyncError]]]:
    """Every run below some paths, diagnosed, or the error that prevents it."""
    from verl_logsync.pipeline.deriving import check_options, diagnosed_or_error

    engine = _reader(settings)
    check_options(engine)
    found = pipeline.survey(engine, paths)
    results: list[tuple[RunSources, Diagnosed | LogsyncError]] = []
    for run in found.runs:
        loaded = pipeline.load_or_error(engine, run)
        done = loaded if isinstance(loaded, LogsyncError) else diagnosed_or_error(engine, loaded)
        results.append((run, done))
    return found, results


def upload(paths: Paths, **settings: Any) -> list[Outcome]:
    """Send every run below some paths to W&B, verified, as `verl-logsync upload` does.

    Args:
        paths: files or folders.
        settings: as for the command line, with underscores (`verify="full"`).

    Returns:
        One outcome a run; `outcome.exit_code` is 0 when it is uploaded and verified.

    Raises:
        UsageError: a path does not exist or a setting is wrong.
        AuthError: there is no API key.
        Locked: another upload uses the same state folder.
        StateError: the state folder cannot be used.
    """
    return list(run_upload(_paths(paths), load_settings(settings)).outcomes)


def _paths(paths: Paths) -> list[Path]:
    if isinstance(paths, str | Path):
        return [Path(paths)]
    return [Path(path) for path in paths]


def _reader(settings: Settings) -> pipeline.Engine:
    """An engine that reads, and neither sends nor remembers."""
    return pipeline.Engine(settings, _sources(settings))


def _sources(settings: Settings) -> tuple[Source, ...]:
    """The log formats, as the settings want them."""
    wanted: tuple[Source, ...] = (Checkpoint(settings.binding_file), VerlFile(settings.step_key))
    by_name = {source.name: source for source in wanted}
    return tuple(by_name.get(source.name, source) for source in SOURCES)


# -- what the command line uses too --------------------------------------------------------


def run_upload(
    paths: Sequence[Path],
    settings: Settings,
    progress: pipeline.Progress = pipeline.no_progress,
) -> Report:
    """An upload with settings that are complete already."""
    with uploader(settings, progress) as engine:
        return pipeline.upload(engine, paths)


@contextmanager
def uploader(
    settings: Settings, progress: pipeline.Progress = pipeline.no_progress
) -> Iterator[pipeline.Engine]:
    """An engine with the sink and the memory that the mode asks for."""
    if settings.mode == "online":
        with _online(settings, progress) as engine:
            yield engine
        return
    from verl_logsync.sinks.offline_dir import OfflineDirSink

    yield pipeline.Engine(
        settings, _sources(settings), OfflineDirSink(settings.output), None, progress
    )


@contextmanager
def _online(settings: Settings, progress: pipeline.Progress) -> Iterator[pipeline.Engine]:
    from verl_logsync.sinks.wandb_sync.credentials import find_server
    from verl_logsync.sinks.wandb_sync.sink import WandbSink

    server = find_server()
    folder = settings.state_folder
    with _memory(settings, server.account) as (ledger, held):
        sink = WandbSink(
            server, folder / "outbox", jobs=settings.jobs, seconds=settings.timeout, held=held
        )
        try:
            yield pipeline.Engine(settings, _sources(settings), sink, ledger, progress)
        finally:
            sink.close()


@contextmanager
def _memory(settings: Settings, account: str) -> Iterator[tuple[Ledger | None, tuple[int, ...]]]:
    """The ledger, and the descriptor that keeps others from it; a dry run only looks into it."""
    folder = settings.state_folder
    with ExitStack() as stack:
        held: tuple[int, ...] = ()
        if settings.dry_run:
            ledger = Ledger.for_reading(folder, account)
        else:
            held = (stack.enter_context(locked(folder)),)
            ledger = Ledger(folder, account)
        if ledger is not None:
            stack.callback(ledger.close)
        yield ledger, held


def scan(
    paths: Sequence[Path], settings: Settings
) -> tuple[Catalog, list[tuple[RunSources, pipeline.Loaded | LogsyncError]]]:
    """Everything below some paths, each run read and aligned or the error that prevents it.

    The state in which an upload would leave a run now is `pipeline.readiness_of(...)`.
    """
    engine = _reader(settings)
    found = pipeline.survey(engine, paths)
    return found, [(run, pipeline.load_or_error(engine, run)) for run in found.runs]


def status(settings: Settings, *, remote: bool) -> list[dict[str, Any]]:
    """What the ledger remembers, one entry a run; with `remote` what the server holds too.

    Without `remote` neither key nor network is needed, and runs of every server are told.
    """
    folder = settings.state_folder
    if not remote:
        return [_status_row(run) for run in remembered_runs(folder)]
    from verl_logsync.sinks.wandb_sync.credentials import find_server
    from verl_logsync.sinks.wandb_sync.sink import WandbSink

    server = find_server()
    remembered = remembered_runs(folder, server.account)
    sink = WandbSink(server, folder / "outbox", jobs=1, seconds=settings.timeout)
    states = sink.look([run.target for run in remembered])
    rows = []
    for run in remembered:
        state = states.get(run.target)
        held = (state.lines, state.last_step) if state is not None else None
        row = _status_row(run)
        row["server"] = f"{state.lines} rows, {state.state}" if state else "no such run"
        row["agrees"] = held == (run.rows, run.last_step)
        rows.append(row)
    return rows


def _status_row(run: LedgerRun) -> dict[str, Any]:
    return {
        "entity": run.target.entity,
        "project": run.target.project,
        "run_id": run.target.run_id,
        "name": run.name,
        "rows": run.rows,
        "last_step": run.last_step,
        "state": run.state,
        "confirmed_at": run.confirmed_at,
        "attention": list(run.attention),
    }


@dataclass(frozen=True, slots=True)
class Exported:
    """A history that was written; `partial` when some of its inputs could not be used."""

    path: Path
    rows: int
    partial: bool


def export(
    paths: Sequence[Path], settings: Settings, folder: Path, form: Format
) -> tuple[Catalog, list[tuple[RunSources, Exported | LogsyncError]]]:
    """Write the history of every run below some paths; see `verl_logsync.export`.

    Raises:
        WriteError: the folder cannot be written.
    """
    from verl_logsync.export import export_run
    from verl_logsync.reports.as_json import account_values, run_values

    engine = _reader(replace(settings, output=folder))
    found = pipeline.survey(engine, paths)
    results: list[tuple[RunSources, Exported | LogsyncError]] = []
    for run in found.runs:
        loaded = pipeline.load_or_error(engine, run)
        if isinstance(loaded, LogsyncError):
            results.append((run, loaded))
            continue
        account = run_values(run) | {
            "clock": loaded.history.clock,
            "account": account_values(loaded.account),
            "config": loaded.around.config,
        }
        path = export_run(run, loaded.history, account, folder, form)
        partial = any(skip.reason not in HARMLESS for skip in loaded.account.skips)
        results.append((run, Exported(path, len(loaded.history), partial)))
    return found, results


def snapshot(
    paths: Sequence[Path], folder: Path, settings: Settings
) -> Iterator[tuple[Path, Copied | LogsyncError]]:
    """Keep copies of the logs that verl truncates; see `verl_logsync.snapshot`."""
    from verl_logsync.snapshot import snapshot_file

    for file in discover(paths, _sources(settings), excluded=(folder,)).files:
        if file.source == TRUNCATED:
            try:
                yield file.path, snapshot_file(file, folder)
            except LogsyncError as error:
                yield file.path, error
