"""Log files whose records are in other ones too; see docs/decisions/0008-what-is-a-copy.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl_logsync.model import LogFile, Skip, SkipReason


def without_copies(files: Sequence[LogFile]) -> tuple[list[LogFile], list[Skip]]:
    """The logs that say something of their own, by place, and why the others do not count."""
    kept, skips = list(files), []
    for step in (_without_beginnings, _without_captures, _without_own_fragments):
        kept, dropped = step(kept)
        skips.extend(dropped)
    return sorted(kept, key=lambda file: file.place), skips


def _without_beginnings(files: Sequence[LogFile]) -> tuple[list[LogFile], list[Skip]]:
    """Drop files that are a copy, or the beginning, of another one of the same name or id.

    Under another name the same content is another run: people repeat experiments.
    """
    alike: dict[tuple[str, ...], list[LogFile]] = {}
    for file in files:
        facts = file.facts
        key = (file.source, facts.head_digest, facts.project, facts.name, facts.run_id)
        alike.setdefault(key, []).append(file)
    kept: list[LogFile] = []
    skips: list[Skip] = []
    for group in alike.values():
        longest_first = sorted(group, key=lambda f: (-f.stamp.size, f.place))
        skips += _keep_originals(
            longest_first, _is_beginning, "the same as the beginning of {}", kept
        )
    return kept, skips


def _without_captures(files: Sequence[LogFile]) -> tuple[list[LogFile], list[Skip]]:
    """Drop console text that was caught twice: by Ray, by the scheduler, by `tee`.

    Its decoration differs, so that no bytes agree; its records do.
    """
    caught: dict[tuple[str, str, int | None], list[LogFile]] = {}
    kept: list[LogFile] = []
    for file in files:
        facts = file.facts
        if file.source == "console" and facts.training_digest:
            key = (facts.head_digest, facts.training_digest, facts.first_step)
            caught.setdefault(key, []).append(file)
        else:
            kept.append(file)
    skips: list[Skip] = []
    for group in caught.values():
        most_complete_first = sorted(group, key=_completeness, reverse=True)
        skips += _keep_originals(
            most_complete_first, _is_captured, "the same records as in {}", kept
        )
    return kept, skips


def _keep_originals(
    group: Sequence[LogFile],
    is_copy: Callable[[LogFile, LogFile], bool],
    detail: str,
    kept: list[LogFile],
) -> Iterator[Skip]:
    """Add the files of a group that copy none before them to those that are kept; skip the rest."""
    originals: list[LogFile] = []
    for file in group:
        original = next((other for other in originals if is_copy(file, other)), None)
        if original is None:
            originals.append(file)
        else:
            yield Skip(SkipReason.DUPLICATE, file.place, detail.format(original.place))
    kept.extend(originals)


def _is_captured(file: LogFile, other: LogFile) -> bool:
    """Whether the records of a file may all be in another one, which has the same first ones."""
    ours, theirs = file.facts, other.facts
    if ours.name and theirs.name and (ours.project, ours.name) != (theirs.project, theirs.name):
        return False
    return ours.last_step != theirs.last_step or ours.tail_digest == theirs.tail_digest


def _completeness(file: LogFile) -> tuple[int, bool, bool, int, str]:
    facts = file.facts
    return facts.last_step or 0, bool(facts.name), bool(facts.config), file.stamp.size, file.place


def _is_beginning(file: LogFile, other: LogFile) -> bool:
    """Whether a file's bytes are the first bytes of another file."""
    if not file.facts.head_digest:
        return False
    left = file.stamp.size
    try:
        with file.path.open("rb") as short, other.path.open("rb") as long:
            while left > 0:
                size = min(left, 1 << 20)
                if short.read(size) != long.read(size):
                    return False
                left -= size
    except OSError:
        return False
    return True


def _without_own_fragments(files: Sequence[LogFile]) -> tuple[list[LogFile], list[Skip]]:
    """Drop fragments of our own whose logs are here too, and those that another one contains.

    They are no attempts: what they hold would count twice.
    """
    here = {digest for f in files if not f.facts.carries for digest in f.digests}
    whole: list[LogFile] = []
    fuller: dict[Path, LogFile] = {}
    for file in sorted((f for f in files if f.facts.carries), key=_extent, reverse=True):
        container = next((other for other in whole if _contains(other, file)), None)
        if container is None:
            whole.append(file)
        else:
            fuller[file.path] = container
    kept: list[LogFile] = []
    skips: list[Skip] = []
    for file in files:
        if not file.facts.carries:
            kept.append(file)
        elif set(file.facts.carries) <= here:
            detail = "a fragment of our own; the logs that it was made from are here"
            skips.append(Skip(SkipReason.DUPLICATE, file.place, detail))
        elif file.path in fuller:
            detail = f"a fragment of our own; {fuller[file.path].place} holds more"
            skips.append(Skip(SkipReason.DUPLICATE, file.place, detail))
        else:
            kept.append(file)
    return kept, skips


def _extent(file: LogFile) -> tuple[int, int, int, str]:
    """Sorts fragments by how many logs they were made from, then by how far they reach."""
    facts = file.facts
    return len(facts.carries), facts.last_step or 0, file.stamp.size, file.place


def _contains(other: LogFile, file: LogFile) -> bool:
    """Whether a fragment of larger extent holds what another one of its run does.

    One that begins later does not: the log was truncated at a restart in between.
    """
    begins, own = other.facts.first_step or 0, file.facts.first_step or 0
    whole = begins == own or set(file.facts.carries) <= set(other.facts.carries)
    return other.facts.run_id == file.facts.run_id and begins <= own and whole
