"""Whose is it? Logs without a name, rollout dumps and checkpoints find the run they belong to.

By the first of these that applies: the user's mapping, the folders that a run's config names, the
experiment's name in the path, the only run that lies nearest. What fits several runs equally well
belongs to none, and that is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from verl_logsync.binding import checkpoint_root
from verl_logsync.errors import quoted, run_flag
from verl_logsync.fingerprint import CHECKPOINT_FOLDER, DUMP_FOLDERS
from verl_logsync.model import LogFile, RunSources, Skip, SkipReason

_T = TypeVar("_T")

Matches = Callable[[Path, str], bool]


# -- logs without a name -------------------------------------------------------------------


def adopted(files: Sequence[LogFile], configs: Sequence[LogFile]) -> list[LogFile]:
    """Give logs that name no experiment the names of the only one that lies nearest.

    The steps of such a log must meet those of the experiment's logs, or of another log that
    was given its names: every start of a job may have left a console of its own.
    """
    named = [f for f in (*files, *configs) if f.facts.name]
    homes: dict[tuple[str, str, tuple[str, ...]], list[LogFile]] = {}
    for file in files:
        if not (file.facts.name or file.facts.run_id):
            nearest = _nearest(file.path, named, lambda other: other.path)
            names = {(other.facts.project, other.facts.name) for other in nearest}
            if len(names) == 1:
                logs = tuple(sorted(o.place for o in nearest if o.role == "history"))
                homes.setdefault((*names.pop(), logs), []).append(file)
    by_place = {file.place: file for file in files}
    found: dict[str, LogFile] = {}
    for (project, name, logs), strays in homes.items():
        for file in _meeting(strays, [by_place[place] for place in logs]):
            facts = replace(file.facts, project=project, name=name)
            found[file.place] = replace(file, facts=facts)
    return [found.get(file.place, file) for file in files]


def _meeting(strays: Sequence[LogFile], logs: Sequence[LogFile]) -> list[LogFile]:
    """Those whose steps meet those of the logs, or of one that does; all where there is no log."""
    if not logs:
        return list(strays)
    found: list[LogFile] = []
    front, left = list(logs), list(strays)
    while front:
        met = [file for file in left if any(_may_be_one(file, other) for other in front)]
        left = [file for file in left if not any(file is other for other in met)]
        found.extend(met)
        front = met
    return found


def unclear(run: RunSources, runs: Sequence[RunSources]) -> str:
    """What to say of a log that names no experiment and may be of several that lie near."""
    logs = [file for attempt in run.attempts for file in attempt.files]
    if any(file.facts.name or file.facts.run_id for file in logs):
        return ""
    others = [
        other for other in runs if other is not run and any(f.facts.name for f in other.files)
    ]
    pairs = [(other.name, file) for other in others for file in other.files]
    nearest = _nearest(logs[0].path, pairs, lambda pair: pair[1].path)
    names = sorted({name for name, file in nearest if _may_be_one(logs[0], file)})
    if not names:
        return ""
    flag = run_flag(names[0], logs[0].place)
    return (
        f"names no experiment; if it is a log of {' or '.join(names[:5])}, say so: "
        f"{flag}, with the files of that run in the same way"
    )


def _may_be_one(one: LogFile, other: LogFile) -> bool:
    """Whether the steps of two logs meet."""
    spans = [(f.facts.first_step, f.facts.last_step) for f in (one, other)]
    (first, last), (first_other, last_other) = spans
    if None in (first, last, first_other, last_other):
        return True
    assert first is not None and last is not None  # noqa: PT018 - for the type checker
    assert first_other is not None and last_other is not None  # noqa: PT018
    return first <= last_other + 1 and first_other <= last + 1


def _nearest(path: Path, things: Iterable[_T], place: Callable[[_T], Path]) -> list[_T]:
    """Those that share the deepest folder with a path."""
    best, found = 0, []
    here = path.absolute()
    for thing in things:
        depth = len(Path(os.path.commonpath([here.parent, place(thing).absolute().parent])).parts)
        if depth > best:
            best, found = depth, [thing]
        elif depth == best:
            found.append(thing)
    return found


# -- rollout dumps and checkpoints -----------------------------------------------------------


def attach(
    runs: Sequence[RunSources],
    belongings: Sequence[LogFile],
    mapping: Sequence[tuple[str, str]],
    matches: Matches,
) -> tuple[list[RunSources], list[Skip]]:
    """Give runs their rollout dumps and checkpoints; and what belongs to none.

    Args:
        belongings: files of the roles "rollouts" and "checkpoint".
        mapping: the user's (run name, shell pattern) pairs.
        matches: whether a path matches a pattern.
    """
    owned: dict[int, list[LogFile]] = {}
    notes: dict[int, list[str]] = {}
    skips: list[Skip] = []
    contested = _contested(belongings)
    for file in belongings:
        owners = _owners(runs, file, mapping, matches)
        if file.facts.run_id in contested:
            unbound = replace(file, facts=replace(file.facts, run_id=""))
            owners = _owners(runs, unbound, mapping, matches)
            if [runs[i].target.run_id for i in owners] != [file.facts.run_id]:
                note = _copied(file, contested[file.facts.run_id])
                file = unbound  # noqa: PLW2901 - it is attached, its binding is not followed
                for index in owners:
                    notes.setdefault(index, []).append(note)
        if len(owners) == 1:
            owned.setdefault(owners[0], []).append(file)
        else:
            skips.append(_ownerless(file, [runs[i].name for i in owners]))
    attached = (_with(run, owned.get(index, ())) for index, run in enumerate(runs))
    return [
        replace(run, notes=(*run.notes, *dict.fromkeys(notes.get(index, ()))))
        for index, run in enumerate(attached)
    ], skips


def _contested(belongings: Sequence[LogFile]) -> dict[str, list[Path]]:
    """The run ids that the checkpoint folders of several experiments are bound to, and these.

    Copies of one experiment's folder have its name; the file of a binding comes along when a
    folder is copied to begin another experiment with it.
    """
    folders: dict[str, set[Path]] = {}
    for file in belongings:
        if file.role == "checkpoint" and file.facts.run_id:
            folders.setdefault(file.facts.run_id, set()).add(checkpoint_root(file.path).absolute())
    return {
        run_id: sorted(places)
        for run_id, places in folders.items()
        if len({place.name for place in places}) > 1
    }


def _copied(file: LogFile, folders: Sequence[Path]) -> str:
    mine = checkpoint_root(file.path)
    others = ", ".join(str(place) for place in folders if place != mine.absolute())
    return (
        f"{mine} is bound to run {file.facts.run_id}, and so is {others}: the binding was copied "
        "with the checkpoints, and is not followed here. If this is another experiment, remove the "
        f"small file with that id in {quoted(mine)}; if it is the same, say so: "
        f"{run_flag('NAME', str(mine))}, with the logs of that run in the same way"
    )


def _owners(
    runs: Sequence[RunSources],
    file: LogFile,
    mapping: Sequence[tuple[str, str]],
    matches: Matches,
) -> list[int]:
    every = list(range(len(runs)))
    given = [name.rpartition("/")[2] for name, pattern in mapping if matches(file.path, pattern)]
    if given:
        return [i for i in every if runs[i].name in given]
    by_id = [i for i in every if file.facts.run_id and runs[i].target.run_id == file.facts.run_id]
    configured = [i for i in every if _is_configured(runs[i], file)]
    called = [i for i in every if runs[i].name and runs[i].name in file.path.absolute().parts]
    for found in (by_id, configured, called):
        if found:
            return _nearest_runs(runs, found, file) if len(found) > 1 else found
    return _nearest_runs(runs, every, file) if file.role == "rollouts" else []


def _is_configured(run: RunSources, file: LogFile) -> bool:
    is_dump = file.role == "rollouts"
    keys = DUMP_FOLDERS if is_dump else (CHECKPOINT_FOLDER,)
    folders = [f.facts.dirs[key] for f in run.files for key in keys if key in f.facts.dirs]
    place = file.path if is_dump else checkpoint_root(file.path)
    return any(_is_same_folder(folder, place) for folder in folders)


def _is_same_folder(configured: str, path: Path) -> bool:
    """Whether a path may be the folder of a config that was written on another machine."""
    parts = [part for part in PurePosixPath(configured).parts if part not in ("/", ".", "..")]
    ours = path.absolute().parts
    if not parts:
        return False
    # Two parts, where there are two: everybody's last part is `rollouts`.
    count = min(len(parts), 2)
    return tuple(parts[-count:]) == ours[-count:]


def _nearest_runs(runs: Sequence[RunSources], among: Sequence[int], file: LogFile) -> list[int]:
    pairs = [(index, f.path) for index in among for f in runs[index].files]
    nearest = {index for index, _ in _nearest(file.path, pairs, lambda pair: pair[1])}
    return sorted(nearest)


def _with(run: RunSources, files: Sequence[LogFile]) -> RunSources:
    dumps = tuple(f for f in files if f.role == "rollouts")
    checkpoints = tuple(f for f in files if f.role == "checkpoint")
    bound = next((f.facts.run_id for f in checkpoints if f.facts.run_id), "")
    run = replace(run, rollouts=dumps, checkpoints=checkpoints)
    if not bound or run.id_from in ("offline run", "log"):
        return run
    return replace(run, target=replace(run.target, run_id=bound), id_from="checkpoint")


def _ownerless(file: LogFile, owners: Sequence[str]) -> Skip:
    what = "rollout dumps" if file.role == "rollouts" else "checkpoints"
    which = f"of several runs ({', '.join(owners[:5])})" if owners else "of no run that was found"
    hint = f"Say whose they are: {run_flag('NAME', file.place)}"
    return Skip(SkipReason.NO_OWNER, file.place, f"{what} {which}", hint)
