"""Log files -> runs and attempts.

A file belongs to a run by the first of these that applies: an explicit mapping, its run id,
its project and experiment name together with the training configuration. Within a name, files
that continue one another are attempts of one run, files that both start at the beginning are
two runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

from verl_logsync.attach import adopted, attach, unclear
from verl_logsync.attempts import at_the_beginning, attempts_of, content_order, log_of, start_order
from verl_logsync.binding import is_run_id
from verl_logsync.copies import without_copies
from verl_logsync.discover import Found
from verl_logsync.errors import as_run, quoted, run_flag
from verl_logsync.fingerprint import Essentials, digest, disagreements
from verl_logsync.model import (
    TRAINED,
    Binding,
    Catalog,
    LogFile,
    RunSources,
    Skip,
    SkipReason,
    Target,
    short_digest,
)

_PACKED: Final = re.compile(r"\.(gz|zst)$")
#: W&B's own name for runs without a project.
NO_PROJECT: Final = "uncategorized"


Merge = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class Grouping:
    """What the user said about grouping.

    `mapping` holds (run name, shell pattern) pairs. `merge` says whether starts of one name are
    attempts of one run: where configs agree and steps meet, always, or never.
    """

    entity: str = ""
    project: str = ""
    mapping: tuple[tuple[str, str], ...] = ()
    merge: Merge = "auto"


@dataclass(slots=True)
class _Chain:
    """Files that become one run, while they are being put together."""

    project: str
    name: str
    files: list[LogFile] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    given: bool = False

    @property
    def run_id(self) -> str:
        with_id = [f for f in self.files if f.facts.run_id]
        return min(with_id, key=start_order).facts.run_id if with_id else ""

    @property
    def id_from(self) -> Literal["offline run", "log", "derived"]:
        sources = {f.source for f in self.files if f.facts.run_id}
        return "derived" if not sources else "offline run" if "offline_run" in sources else "log"

    @property
    def first(self) -> int | None:
        return min(
            (f.facts.first_step for f in self.files if f.facts.first_step is not None), default=None
        )

    @property
    def last(self) -> int | None:
        return max(
            (f.facts.last_step for f in self.files if f.facts.last_step is not None), default=None
        )

    @property
    def starts_over(self) -> bool:
        return any(at_the_beginning(file) for file in self.files)


def _begins(run: RunSources) -> bool:
    return any(at_the_beginning(file) for attempt in run.attempts for file in attempt.files)


def catalog(found: Found, grouping: Grouping) -> Catalog:
    """Group everything found into runs."""
    files, odd_ids = _with_usable_ids(found.files)
    history, copies = without_copies([f for f in files if f.role == "history"])
    configs = [f for f in files if f.role == "config"]
    belongings = [f for f in files if f.role in ("rollouts", "checkpoint")]
    history = adopted(history, configs)
    given, rest = _split_given(history, grouping)
    chains = list(given)
    for (project, name), files in sorted(_by_name(rest).items()):
        chains.extend(_chains_of_name(project, name, files, configs, grouping.merge))
    runs, ownerless = attach(
        [_run(chain, configs, grouping) for chain in chains], belongings, grouping.mapping, matches
    )
    runs = told_apart(runs)
    runs = _with_hints(_explained(runs, grouping.merge))
    runs = [_noted(run, note) if (note := unclear(run, runs)) else run for run in runs]
    used = {config.place for run in runs for config in run.configs}
    lonely = [_config_only(config) for config in configs if config.place not in used]
    unmatched = [
        Skip(
            SkipReason.NO_MATCH,
            run_flag(name, pattern),
            "no log matches this pattern",
            "See the paths with: verl-logsync scan; a name with a = in it needs --run NAME==GLOB",
        )
        for name, pattern in grouping.mapping
        if not any(matches(file.path, pattern) for file in (*history, *belongings))
    ]
    skips = (*found.skips, *odd_ids, *copies, *ownerless, *lonely, *unmatched)
    return Catalog(tuple(runs), tuple(sorted(skips, key=lambda skip: skip.place)))


def _with_usable_ids(files: Iterable[LogFile]) -> tuple[list[LogFile], list[Skip]]:
    """Forget recorded run ids that W&B would not take; they become parts of paths too."""
    usable: list[LogFile] = []
    skips: list[Skip] = []
    for file in files:
        if file.facts.run_id and not is_run_id(file.facts.run_id):
            detail = f"its run id {file.facts.run_id[:40]!r} is none; another one is derived"
            skips.append(Skip(SkipReason.MALFORMED, file.place, detail))
            file = replace(file, facts=replace(file.facts, run_id=""))  # noqa: PLW2901
        usable.append(file)
    return usable, skips


# -- grouping ------------------------------------------------------------------------------


def _split_given(
    files: Sequence[LogFile], grouping: Grouping
) -> tuple[list[_Chain], list[LogFile]]:
    chains: dict[str, _Chain] = {}
    rest: list[LogFile] = []
    for file in files:
        name = next((n for n, pattern in grouping.mapping if matches(file.path, pattern)), None)
        if name is None:
            rest.append(file)
            continue
        project, _, run_name = name.rpartition("/")
        chain = chains.setdefault(name, _Chain(project or file.facts.project, run_name, given=True))
        chain.files.append(file)
        chain.config = {**file.facts.config, **chain.config}
    return list(chains.values()), rest


def matches(path: Path, pattern: str) -> bool:
    """Whether a path, its name or a folder above it is what a shell pattern means."""
    places = {str(path), str(path.absolute()), path.name, *map(str, path.parents)}
    return pattern in places or any(fnmatch(place, pattern) for place in places)


def _by_name(files: Sequence[LogFile]) -> dict[tuple[str, str], list[LogFile]]:
    """Files by project and name; those of one run id together, whatever their names."""
    groups: dict[tuple[str, str], list[LogFile]] = {}
    for group in _by_id(files):
        named = next((f.facts.name for f in group if f.facts.name), group[0].facts.run_id)
        groups.setdefault((group[0].facts.project, named), []).extend(group)
    for file in files:
        if not file.facts.run_id:
            own = file.facts.name or file.facts.place_name
            name = own or Path(_PACKED.sub("", file.path.name)).stem
            groups.setdefault((file.facts.project, name), []).append(file)
    return groups


def _chains_of_name(
    project: str,
    name: str,
    files: Sequence[LogFile],
    configs: Sequence[LogFile],
    merge: Merge,
) -> list[_Chain]:
    """The runs of one project and name: first those with ids, then the files without."""
    chains: list[_Chain] = []
    for same_id in _by_id(files):
        chain = _Chain(project, name, list(same_id))
        for file in same_id:
            chain.config = {**file.facts.config, **chain.config}
        _join(chains, chain, merge)
    for file in sorted((f for f in files if not f.facts.run_id), key=content_order):
        nearest = _nearest_config(file, _named_for(file, configs, project, name))
        config = dict(nearest.facts.config) if nearest else {}
        full_project = nearest.facts.project if nearest else project
        _join(chains, _Chain(full_project, name, [file], config), merge)
    return chains


def _by_id(files: Iterable[LogFile]) -> list[list[LogFile]]:
    """Groups of files that have a run id of one project in common, by their start."""
    groups: dict[tuple[str, str], list[LogFile]] = {}
    for file in sorted(files, key=start_order):
        if file.facts.run_id:
            groups.setdefault((file.facts.project, file.facts.run_id), []).append(file)
    return list(groups.values())


def _join(chains: list[_Chain], newcomer: _Chain, merge: Merge) -> None:
    """Add files to the run that they belong to, or as a run of their own."""
    fitting = [chain for chain in chains if _fits(chain, newcomer, merge)]
    if not fitting:
        chains.append(newcomer)
        return
    # Of several runs of one name the one in the same folder is meant, else the latest.
    chain = max(fitting, key=lambda c: (bool(_folders(c) & _folders(newcomer)), chains.index(c)))
    chain.files.extend(newcomer.files)
    chain.config = {**newcomer.config, **chain.config}


def _fits(chain: _Chain, newcomer: _Chain, merge: Merge) -> bool:
    if merge == "always":
        return True
    if disagreements(chain.config, newcomer.config):
        return False
    other_source = _is_other_source(chain, newcomer)
    continues = merge == "auto" and _continues(chain, newcomer)
    return (other_source or continues) and _may_follow(chain, newcomer)


def _folders(chain: _Chain) -> set[Path]:
    """Where its files lie; every offline run has a folder of its own beside the others."""
    return {
        f.path.parent.parent if f.source == "offline_run" else f.path.parent for f in chain.files
    }


def _may_follow(chain: _Chain, newcomer: _Chain) -> bool:
    """Whether what a path held at earlier uploads belongs to that run too."""
    before = {digest for file in newcomer.files for digest in file.before}
    known = {digest for file in chain.files for digest in (*file.digests, *file.before)}
    return not before or bool(before & known)


def _is_other_source(chain: _Chain, newcomer: _Chain) -> bool:
    """Whether the newcomer is a log of another format of the same training job."""
    if {log_of(f) for f in chain.files} & {log_of(f) for f in newcomer.files}:
        return False
    if chain.first is None or newcomer.first is None:
        return True
    return (chain.starts_over and newcomer.starts_over) or any(
        _starts_with(f, newcomer.first) for f in chain.files
    )


def _starts_with(file: LogFile, step: int) -> bool:
    return file.facts.first_step is not None and file.facts.first_step == step


def _continues(chain: _Chain, newcomer: _Chain) -> bool:
    """Whether one of the two resumes inside or at the end of the other."""
    if chain.first is None or newcomer.first is None:
        return False
    if chain.starts_over and newcomer.starts_over:
        return False
    earlier, later = sorted((chain, newcomer), key=lambda c: c.first or 0)
    return (later.first or 0) <= (earlier.last or 0) + 1


def _named(configs: Iterable[LogFile], project: str, name: str) -> list[LogFile]:
    return [c for c in configs if (c.facts.project, c.facts.name) == (project, name)]


def _named_for(file: LogFile, configs: Sequence[LogFile], project: str, name: str) -> list[LogFile]:
    """Configs of that name; a project name with slashes is a path of folders on disk."""
    parent = file.path.absolute().parent.as_posix()
    nested = [
        c
        for c in configs
        if c.facts.name == name
        and "/" in c.facts.project
        and parent.endswith(f"/{c.facts.project}")
    ]
    return _named(configs, project, name) or nested


def _nearest_config(file: LogFile, configs: Sequence[LogFile]) -> LogFile | None:
    """The config that lies nearest to a file; of equally near ones the latest started.

    verl truncates its log at every start, so the file is that of the latest start.
    """

    def nearness(config: LogFile) -> tuple[int, float, str]:
        shared = os.path.commonpath([file.path.absolute(), config.path.absolute()])
        return len(Path(shared).parts), config.facts.started_at or 0.0, config.place

    return max(configs, key=nearness, default=None)


# -- runs ----------------------------------------------------------------------------------


def _run(chain: _Chain, configs: Sequence[LogFile], grouping: Grouping) -> RunSources:
    own = [
        c
        for c in _named(configs, chain.project, chain.name)
        if not disagreements(chain.config, c.facts.config)
    ]
    entity = grouping.entity or next((f.facts.entity for f in chain.files if f.facts.entity), "")
    project = grouping.project or chain.project or NO_PROJECT
    fingerprint = digest(_first_config(chain, own))
    run_id = chain.run_id or _derived_id(chain, project, fingerprint)
    notes = list(chain.notes)
    attempts = attempts_of(chain.files)
    if any(attempt.ordered_by == "guess" for attempt in attempts):
        notes.append("the order of its attempts is guessed from modification times and names")
    return RunSources(
        Target(entity, project, run_id),
        chain.name,
        fingerprint,
        chain.id_from,
        attempts,
        tuple(own),
        notes=tuple(notes),
    )


def _first_config(chain: _Chain, configs: Sequence[LogFile]) -> Essentials:
    """The config of the run's first start, by which it is identified."""
    having = [f for f in (*chain.files, *configs) if f.facts.config]
    return min(having, key=start_order).facts.config if having else {}


def _derived_id(chain: _Chain, project: str, fingerprint: str) -> str:
    if chain.given:
        return short_digest("given", project, chain.name)
    first = min(chain.files, key=content_order).facts
    return short_digest(
        project, chain.name, fingerprint, first.training_digest or first.head_digest
    )


def told_apart(runs: Sequence[RunSources]) -> list[RunSources]:
    """No two runs share a target: of two that start alike one gets an id of its own.

    (Two starts of a job from scratch may have the first validation record in common.) The run
    that keeps the id is the one that began to be written first.
    """
    taken: set[Target] = set()
    apart: dict[int, RunSources] = {}
    for index in sorted(range(len(runs)), key=lambda i: (runs[i].changed_at, runs[i].name)):
        run = runs[index]
        if run.target in taken:
            salt = "+".join(sorted(run.heads)) + "".join(sorted(f.place for f in run.files))
            run_id = short_digest("twin", run.target.run_id, salt)
            run = replace(run, target=replace(run.target, run_id=run_id), id_from="derived")
        taken.add(run.target)
        apart[index] = run
    return [apart[index] for index in range(len(runs))]


def _explained(runs: Sequence[RunSources], merge: Merge) -> list[RunSources]:
    """Say it aloud when several runs have the same project and name."""
    alike: dict[tuple[str, str], list[RunSources]] = {}
    for run in runs:
        alike.setdefault((run.target.project, run.name), []).append(run)
    told = []
    for run in runs:
        others = [o for o in alike[run.target.project, run.name] if o is not run]
        told.append(_noted(run, _why_apart(run, others, merge)) if others else run)
    return told


def _why_apart(run: RunSources, others: Sequence[RunSources], merge: Merge) -> str:
    ids = ", ".join(sorted(other.target.run_id for other in others))
    keys = sorted({key for o in others for key in disagreements(_config_of(run), _config_of(o))})
    if keys:
        more = ", ..." if len(keys) > 5 else ""
        why = f"the configs differ in {', '.join(keys[:5])}{more} (--merge makes them one run)"
    elif run.first_step is None or all(other.first_step is None for other in others):
        why = "there is no step by which one could continue the other"
    elif _begins(run) and any(map(_begins, others)):
        why = (
            f"both start at the beginning (if this one goes on with {others[0].target.run_id}: "
            f"{_as_continued(run, others[0])}; if it replaces it: --merge --on-restart replace)"
        )
    elif merge == "never" and any(_meet(run, other) for other in others):
        why = "--no-merge keeps them apart"
    else:
        why = "steps are missing between them (--merge makes them one run all the same)"
    return f"has the same project and name as run {ids}, but is another run: {why}"


def _as_continued(run: RunSources, before: RunSources) -> str:
    """The flags that count the steps of a run from the last one of another."""
    reached = max((attempt.last_step or 0 for attempt in before.attempts), default=0)
    logs = dict.fromkeys(file.place for attempt in run.attempts for file in attempt.files)
    return " ".join(f"--offset {quoted(f'{place}={reached}')}" for place in logs)


def _meet(run: RunSources, other: RunSources) -> bool:
    """Whether one of the two begins inside or at the end of the other."""
    earlier, later = sorted((run, other), key=lambda r: r.first_step or 0)
    reached = max((attempt.last_step or 0 for attempt in earlier.attempts), default=0)
    return (later.first_step or 0) <= reached + 1


def _config_of(run: RunSources) -> Essentials:
    merged: dict[str, str] = {}
    for file in run.files:
        merged = {**file.facts.config, **merged}
    return merged


def _noted(run: RunSources, note: str) -> RunSources:
    return replace(run, notes=(*run.notes, note))


def _with_hints(runs: Sequence[RunSources]) -> list[RunSources]:
    """Name the flag that would merge a log that starts in the middle with the one before it."""
    hinted = []
    for run in runs:
        first = run.first_step
        before = None if first is None or _begins(run) else _predecessor(run, first, runs)
        hinted.append(_noted(run, _merge_hint(run, before, first or 0)) if before else run)
    return hinted


def _predecessor(run: RunSources, first: int, runs: Sequence[RunSources]) -> RunSources | None:
    folder = run.files[0].path.parent
    fitting = [
        other
        for other in runs
        if other.name != run.name
        and (other.files[0].path.parent == folder or other.target.project == run.target.project)
        and other.first_step is not None
        and other.first_step < first <= (other.attempts[-1].last_step or 0) + 1
    ]
    return max(fitting, key=lambda other: other.first_step or 0, default=None)


def _merge_hint(run: RunSources, before: RunSources, first: int) -> str:
    flags = as_run(before.name, [before.files[0].place, run.files[0].place])
    return (
        f"starts at step {first}, inside or at the end of {before.name}: it looks like a resumed "
        f"attempt of it. To merge the two add {flags}"
    )


def _config_only(config: LogFile) -> Skip:
    return Skip(
        SkipReason.CONFIG_ONLY,
        config.place,
        f"the config of {config.facts.project}/{config.facts.name}; metrics are not in this folder",
        "Add the folder with PROJECT/EXPERIMENT.jsonl, the console log or wandb/ to the paths",
    )


# -- runs that exist already ---------------------------------------------------------------


def bind(
    runs: Sequence[RunSources], known: Sequence[Binding], surveyed: Sequence[RunSources]
) -> list[RunSources]:
    """Give runs the targets under which they already exist; `told_apart` has the last word.

    The same first records mean the same run. A log that starts in the middle (verl truncates
    its file at a restart) belongs to the known run of that name which it continues, unless the
    log of that run is here too.

    Args:
        surveyed: all runs that were found.
    """
    by_names: dict[tuple[str, str], list[RunSources]] = {}
    for run in surveyed:
        by_names.setdefault((run.names_key, run.target.project), []).append(run)
    claimed = {
        b.target
        for b in known
        if any(_same_start(run, b) for run in by_names.get((b.names_key, b.target.project), ()))
    }
    return [_bound(run, known, claimed) for run in runs]


def _bound(run: RunSources, known: Iterable[Binding], claimed: Collection[Target]) -> RunSources:
    candidates = [
        b for b in known if b.names_key == run.names_key and b.target.project == run.target.project
    ]
    if run.id_from == "checkpoint":  # somebody said which run it is
        candidates = [b for b in candidates if b.target.run_id == run.target.run_id]
    same = [b for b in candidates if _same_start(run, b)]
    first = run.first_step
    before = {digest for file in run.files for digest in file.before}
    if not same and run.id_from == "derived" and first is not None and not _begins(run):
        same = [
            b
            for b in candidates
            if first <= b.last_step + 1
            and (not run.fingerprint or b.fingerprint in ("", run.fingerprint))
            and (b.target not in claimed or b.heads & before)
        ]
    same = [b for b in same if b.heads & before] or same
    if not same:
        return run
    best = max(same, key=lambda b: (b.target.run_id == run.target.run_id, b.last_step))
    return replace(run, target=replace(best.target, entity=run.target.entity), id_from="bound")


def _same_start(run: RunSources, known: Binding) -> bool:
    """Whether a run and a known one began with the same records.

    By their training records where both have some: validations of one model may be equal.
    """
    ours = {d for d in run.heads if d.startswith(TRAINED)}
    theirs = {d for d in known.heads if d.startswith(TRAINED)}
    return bool(ours & theirs) if ours and theirs else bool(run.heads & known.heads)
