"""What every `Source` must do with whole, cut, damaged, vanished and growing files.

Run it over a source of your own with a sample that it recognises:

    check_source(MySource(), Path("fixtures/mine/sample.log"), tmp_path)

Every check raises AssertionError with what was expected; a source that raises anything but
`InputError` for broken content fails.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from verl_logsync.digests import row_digests
from verl_logsync.discover import discover
from verl_logsync.errors import InputError
from verl_logsync.interfaces import Source
from verl_logsync.model import History, LogFile, Reading

#: So many places are tried for each kind of damage, if nobody says otherwise.
PLACES: Final = 60
_JUNK: Final = (b"\0" * 64, b"\xff\xfe\xfd junk \n", b"{", b"\n\n", b"\r", b'{"step": "x"}\n')


def check_source(
    source: Source, sample: Path, work: Path, *, seed: int = 0, places: int = PLACES
) -> None:
    """All checks.

    Args:
        source: the source.
        sample: a file, or a folder that the source claims as one.
        work: an empty folder for damaged copies.
        seed: of the places where damage is done.
        places: how many are tried for each kind of damage; large samples take a while.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible damage, no secret
    for number, check in enumerate(_CHECKS):
        folder = work / f"{number}-{check.__name__}"
        folder.mkdir()
        check(source, _Sample(sample, folder, places), rng)


class _Sample:
    """Copies of a sample, in which one file is the log itself.

    A source may claim a folder of many files (rollout dumps): then the last of them is damaged.
    """

    def __init__(self, original: Path, work: Path, places: int) -> None:
        self.places = places
        self._original = original
        self._work = work
        self._count = 0

    def copy(self) -> Path:
        self._count += 1
        place = self._work / str(self._count) / self._original.parent.name / self._original.name
        place.parent.mkdir(parents=True)
        if self._original.is_dir():
            shutil.copytree(self._original, place)
        else:
            shutil.copy2(self._original, place)
        return place


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
)
