"""What every `Source` must do with whole, cut, damaged, vanished, locked and replaced files.

Run it over a source of your own with a sample that it recognises:

    check_source(MySource(), Path("fixtures/mine/sample.log"), tmp_path)

Every check raises AssertionError with what was expected; a source that raises anything but
`InputError` for broken content fails.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from verl_logsync.digests import row_digests
from verl_logsync.discover import discover
from verl_logsync.errors import InputError
from verl_logsync.interfaces import Source
from verl_logsync.model import History, LogFile, Reading
from verl_logsync.steady import read_steadily
from verl_logsync.testing._meanwhile import Meanwhile
from verl_logsync.testing._unprivileged import StillAllowed, without_rights

#: So many places are tried for each kind of damage, if nobody says otherwise.
PLACES: Final = 60
_JUNK: Final = (b"\0" * 64, b"\xff\xfe\xfd junk \n", b"{", b"\n\n", b"\r", b'{"step": "x"}\n')


def check_source(
    source: Source,
    sample: Path,
    work: Path,
    *,
    other: Path | None = None,
    seed: int = 0,
    places: int = PLACES,
) -> tuple[str, ...]:
    """All checks.

    Args:
        source: the source.
        sample: a file, or a folder that the source claims as one.
        work: an empty folder for damaged copies.
        other: another sample, by which the first is replaced while it is read; by default the
            first half of the same one.
        seed: of the places where damage is done.
        places: how many are tried for each kind of damage; large samples take a while.

    Returns:
        What could not be checked on this machine, and why: one sentence each.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible damage, no secret
    unchecked = []
    for number, check in enumerate(_CHECKS):
        folder = work / f"{number}-{check.__name__}"
        folder.mkdir()
        try:
            check(source, _Sample(sample, other, folder, places), rng)
        except StillAllowed as error:
            unchecked.append(f"{check.__name__}: {error}")
    return tuple(unchecked)


class _Sample:
    """Copies of a sample, in which one file is the log itself.

    A source may claim a folder of many files (rollout dumps): then the last of them is damaged.
    """

    def __init__(self, original: Path, other: Path | None, work: Path, places: int) -> None:
        self.places = places
        self.moments = max(1, places // 8)
        self._original = original
        self._other = other
        self._work = work
        self._count = 0

    def copy(self) -> Path:
        return self._copied(self._original)

    def _copied(self, original: Path) -> Path:
        self._count += 1
        place = self._work / str(self._count) / original.parent.name / original.name
        place.parent.mkdir(parents=True)
        if original.is_dir():
            shutil.copytree(original, place)
        else:
            shutil.copy2(original, place)
        return place

    def another(self, source: Source) -> bytes:
        """The content of another log, by which this one is replaced."""
        if self._other is not None:
            return _log_of(source, self._copied(self._other)).read_bytes()
        data = _log_of(source, self.copy()).read_bytes()
        return data[: len(data) // 2]


def _found(source: Source, path: Path) -> LogFile | None:
    files = discover([path], [source]).files
    return files[0] if files else None


def _read(source: Source, path: Path) -> Reading | None:
    """The reading, or None when the source says that it cannot be used."""
    file = _found(source, path)
    if file is None:
        return None
    try:
        return source.read(file)
    except InputError:
        return None


def _steps(reading: Reading | None) -> list[int]:
    return [] if reading is None else reading.rows.column("_step").to_pylist()


def _digests(reading: Reading) -> list[int]:
    rows = History(reading.rows, np.zeros(reading.rows.num_rows, dtype=np.int64))
    return [int(digest) for digest in row_digests(rows)]


def _is_beginning(part: Sequence[int], whole: Sequence[int]) -> bool:
    return list(part) == list(whole[: len(part)])


def _is_part(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `part` is `whole` with some items left out."""
    rest = iter(whole)
    return all(item in rest for item in part)


def reads_the_same_twice(source: Source, sample: _Sample, _: random.Random) -> None:
    """A whole file is recognised and read completely, and again the same."""
    path = sample.copy()
    file = _found(source, path)
    assert file is not None, f"{source.name} does not recognise its sample"
    one, two = source.read(file), source.read(file)
    assert _digests(one) == _digests(two), "two readings differ"
    assert not any(skip.records for skip in one.skips), f"records skipped: {one.skips}"


def survives_any_cut(source: Source, sample: _Sample, rng: random.Random) -> None:
    """A file cut anywhere gives the rows before the cut, in order, none of them twice."""
    path = sample.copy()
    log, whole = _log_of(source, path), _steps(_read(source, path))
    data = log.read_bytes()
    for size in sorted({0, 1, 7, *(rng.randrange(len(data)) for _ in range(sample.places))}):
        log.write_bytes(data[:size])
        part = _steps(_read(source, path))
        assert _is_beginning(part, whole), f"cut at byte {size}: steps {part}"


def survives_junk_anywhere(source: Source, sample: _Sample, rng: random.Random) -> None:
    """Junk inserted anywhere costs what it touches; the other rows are read in order."""
    path = sample.copy()
    log, whole = _log_of(source, path), _steps(_read(source, path))
    data = log.read_bytes()
    for _ in range(sample.places):
        place, junk = rng.randrange(len(data)), rng.choice(_JUNK)
        log.write_bytes(data[:place] + junk + data[place:])
        part = _steps(_read(source, path))
        assert _is_part(part, whole), f"{junk!r} at byte {place}: steps {part}"


def survives_overwriting(source: Source, sample: _Sample, rng: random.Random) -> None:
    """Overwritten bytes never raise, and what cannot be read is said."""
    path = sample.copy()
    log, whole = _log_of(source, path), _read(source, path)
    data = log.read_bytes()
    for _ in range(sample.places):
        place = rng.randrange(max(1, len(data) - 4))
        log.write_bytes(data[:place] + rng.randbytes(4) + data[place + 4 :])
        reading = _read(source, path)
        if reading is None or whole is None:
            continue
        lost = whole.rows.num_rows - reading.rows.num_rows
        assert lost <= 0 or reading.skips, f"byte {place}: {lost} rows lost in silence"


def says_when_a_file_is_gone(source: Source, sample: _Sample, _: random.Random) -> None:
    """A file that vanishes after it was found is an input error, not a crash."""
    path = sample.copy()
    file = _found(source, path)
    assert file is not None, f"{source.name} does not recognise its sample"
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    place = None
    try:
        source.read(file)
    except InputError as error:
        place = error.place
    assert place, "reading a vanished file succeeded, or the error names no place"


def grows_monotonously(source: Source, sample: _Sample, rng: random.Random) -> None:
    """A growing file gives ever more rows, each of them once."""
    path = sample.copy()
    log, whole = _log_of(source, path), _steps(_read(source, path))
    data = log.read_bytes()
    known: list[int] = []
    for size in sorted(rng.randrange(len(data)) for _ in range(sample.places)):
        log.write_bytes(data[:size])
        steps = _steps(_read(source, path))
        assert _is_beginning(known, steps), f"rows went away at {size} bytes"
        known = steps
    log.write_bytes(data)
    assert _steps(_read(source, path)) == whole, "the whole file is read otherwise in the end"


def says_when_access_is_denied(source: Source, sample: _Sample, _: random.Random) -> None:
    """What may not be read is a verdict when it is looked for, and an input error when read.

    Raises:
        StillAllowed: this machine lets us read what nobody may.
    """
    path = sample.copy()
    file, log = _found(source, path), _log_of(source, path)
    assert file is not None
    whole = source.read(file).rows.num_rows
    for place, mode in _locks(path, log):
        before = place.stat().st_mode
        place.chmod(mode)
        try:
            found = without_rights(log, partial(discover, [path], [source]))
            outcome = without_rights(log, partial(_read_or_error, source, file))
        finally:
            place.chmod(before)
        assert found.files or found.skips, f"{place} of mode {mode:o} is passed over in silence"
        if isinstance(outcome, InputError):
            assert outcome.place, f"the error names no place: {outcome}"
        else:
            lost = whole - outcome.rows.num_rows
            assert not lost or outcome.skips, f"{place} of mode {mode:o}: {lost} rows lost"


def _locks(path: Path, log: Path) -> list[tuple[Path, int]]:
    """Which permissions are taken: of the log, and of folders: to enter them, or all."""
    folders = {log.parent, path} if path.is_dir() else {log.parent}
    return [(log, 0), *((folder, mode) for folder in sorted(folders) for mode in (0, 0o444))]


def _read_or_error(source: Source, file: LogFile) -> Reading | InputError:
    try:
        return source.read(file)
    except InputError as error:
        return error


def grows_while_it_is_read(source: Source, sample: _Sample, rng: random.Random) -> None:
    """What a writer adds meanwhile may be in the rows or not; they begin as the whole file does."""
    path = sample.copy()
    log, whole = _log_of(source, path), _steps(_read(source, path))
    data = log.read_bytes()

    def write() -> None:
        log.write_bytes(data)

    for _ in range(sample.moments):
        log.write_bytes(data[: rng.randrange(len(data))])
        steps = _steps(_read_while(source, path, write, rng))
        assert _is_beginning(steps, whole), f"steps {steps}"


def is_replaced_while_it_is_read(source: Source, sample: _Sample, rng: random.Random) -> None:
    """A log that another takes the place of is read as the one or the other, never as a mix.

    By rename, as editors and copiers do it, and in place, as a trainer that opens it anew.
    """
    path = sample.copy()
    log = _log_of(source, path)
    data, other = log.read_bytes(), sample.another(source)
    logs = [_read(source, path)]
    log.write_bytes(other)
    logs.append(_read(source, path))
    whole = [_digests(reading) for reading in logs if reading is not None]

    def rename() -> None:
        new = log.with_name(f".{log.name}.new")
        new.write_bytes(other)
        new.replace(log)

    def rewrite() -> None:
        log.write_bytes(other)

    for number in range(2 * sample.moments):
        log.write_bytes(data)
        reading = _read_while(source, path, (rename, rewrite)[number % 2], rng)
        if reading is not None:
            rows = _digests(reading)
            assert any(_is_beginning(rows, log) for log in whole), "rows of two logs are mixed"


def _read_while(
    source: Source, path: Path, change: Callable[[], None], rng: random.Random
) -> Reading | None:
    """The reading of a file that is changed at some call meanwhile."""
    file = _found(source, path)
    if file is None:
        return None
    with Meanwhile(change, at=0) as rehearsal:
        _steadily(source, file)
    with Meanwhile(change, at=rng.randint(1, max(1, rehearsal.asked))):
        return _steadily(source, file)


def _steadily(source: Source, file: LogFile) -> Reading | None:
    try:
        return read_steadily(source, file)
    except InputError:
        return None


def _log_of(source: Source, path: Path) -> Path:
    """The file that is cut and damaged: the log, or the last file of a folder of logs."""
    file = _found(source, path)
    assert file is not None, f"{source.name} does not recognise its sample"
    if not file.path.is_dir():
        return file.path
    return max((entry for entry in file.path.iterdir() if entry.is_file()), key=_by_name)


def _by_name(path: Path) -> tuple[int, str]:
    return len(path.name), path.name


_CHECKS: Final[tuple[Callable[[Source, _Sample, random.Random], None], ...]] = (
    reads_the_same_twice,
    survives_any_cut,
    survives_junk_anywhere,
    survives_overwriting,
    says_when_a_file_is_gone,
    grows_monotonously,
    says_when_access_is_denied,
    grows_while_it_is_read,
    is_replaced_while_it_is_read,
)
