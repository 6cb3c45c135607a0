"""Every registered source passes the public conformance suite, on every sample of its format."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_logsync.discover import discover
from verl_logsync.interfaces import Source
from verl_logsync.sources import SOURCES
from verl_logsync.testing.conformance import check_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
DAMAGED = ("empty", "header_only", "torn_tail", "corrupt_middle", "wrong_version", "truncated")


def _samples() -> list[tuple[Source, Path]]:
    found = []
    for source in SOURCES:
        roots = [p for p in sorted(FIXTURES.glob(f"{source.name}/*")) if p.is_dir()]
        roots.append(FIXTURES / "demo")
        for root in roots:
            if any(word in root.name for word in DAMAGED):
                continue
            for path, _ in discover([root], [source]).reached:
                found.append((source, Path(path)))
    return found


SAMPLES = _samples()


def test_every_source_has_a_sample() -> None:
    """A source without a fixture would pass unseen."""
    assert {source.name for source, _ in SAMPLES} == {source.name for source in SOURCES}


@pytest.mark.parametrize(
    ("source", "sample"), SAMPLES, ids=[f"{s.name}-{p.parent.name}-{p.name}" for s, p in SAMPLES]
)
def test_source_conforms(source: Source, sample: Path, tmp_path: Path) -> None:
    """Whole, cut, damaged, vanished, locked, growing and replaced files are read as demanded."""
    unchecked = check_source(
        source, sample, tmp_path, other=_another(source, sample), places=_places(sample)
    )
    if unchecked:
        pytest.skip("; ".join(unchecked))


def _another(source: Source, sample: Path) -> Path | None:
    """Another sample of the same kind: a Parquet log is not replaced by JSON lines."""
    alike = [
        path
        for other, path in SAMPLES
        if other is source and path.suffix == sample.suffix and path.is_dir() == sample.is_dir()
    ]
    return alike[(alike.index(sample) + 1) % len(alike)]


def _places(sample: Path) -> int:
    """Small samples are damaged in more places; what is read with every place takes its time."""
    size = sum(p.stat().st_size for p in (sample, *sample.rglob("*")) if p.is_file())
    slow = sample.parent.name == ".hydra" or size > 100_000
    return 12 if slow else 40
