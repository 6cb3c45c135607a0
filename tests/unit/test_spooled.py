"""Lines in a temporary file read like the same lines in memory."""

from __future__ import annotations

import random

import pytest

from verl_logsync.errors import WriteError
from verl_logsync.spooled import Joined, Lines, Spool, changed, joined


def spool_of(lines: list[str]) -> Spool:
    """Lines taken partly one by one, partly together."""
    spool = Spool()
    for start in range(0, len(lines), 700):
        spool.extend(lines[start : start + 300])
        for line in lines[start + 300 : start + 700]:
            spool.append(line)
    return spool


@pytest.mark.parametrize("width", [3, 3000], ids=["in memory", "on disk"])
def test_lines_come_back_as_they_were(width):
    """Every line, stretch and single line is the one of the list, whatever is in it."""
    rng = random.Random(1)
    odd = ["", " ", "\u2028", "\r", "a\x85b", "█ 完", "\ud800"]
    lines = [rng.choice(odd) + "x" * rng.randrange(width) for _ in range(5000)]
    spool = spool_of(lines)
    taken = spool.lines()
    assert len(spool) == len(taken) == 5000
    assert list(taken) == lines
    for _ in range(30):
        start, stop = rng.randrange(-50, 5100), rng.randrange(-50, 5100)
        assert list(taken[start:stop]) == lines[start:stop]
        assert len(taken[start:stop]) == len(lines[start:stop])
    for index in (0, 299, 300, -1, 4999):
        assert taken[index] == lines[index]
    with pytest.raises(IndexError):
        taken[5000]


def test_lines_can_be_replaced_and_go_on():
    """A line that was replaced stays so; reading in between does not disturb what is written."""
    spool = spool_of([f"line {n}" for n in range(1000)])
    spool[10] = "other"
    early = spool.lines()
    assert early[10] == spool[10] == "other"
    spool.append("last")
    assert list(early)[-1] == "line 999"
    assert list(spool.lines())[-2:] == ["line 999", "last"]


def test_two_readers_of_one_spool():
    """Two iterations over the same lines do not take them from one another."""
    lines = [f"{n} " + "x" * 1000 for n in range(10_000)]
    taken = spool_of(lines).lines()
    pairs = zip(taken, taken, strict=True)
    assert all(one == other == line for (one, other), line in zip(pairs, lines, strict=True))


def test_lines_are_changed_when_they_are_read():
    """Changes apply in order, to stretches too; lines in memory are changed at once."""
    taken = changed(changed(spool_of(["a", "b", "c"]).lines(), str.upper), lambda s: s + "!")
    assert isinstance(taken, Lines)
    assert list(taken[1:]) == ["B!", "C!"]
    assert changed(("a", "b"), str.upper) == ("A", "B")


def test_joined_is_one_sequence():
    """Parts in memory become a tuple; others stay where they are and are seen as one."""
    assert joined([(1, 2), (), (3,)]) == (1, 2, 3)
    many = joined([spool_of(["a", "b"]).lines(), (), ("c",), spool_of(["d", "e"]).lines()])
    assert isinstance(many, Joined)
    assert (len(many), list(many)) == (5, list("abcde"))
    for start in range(6):
        for stop in range(6):
            assert list(many[start:stop]) == list("abcde")[start:stop]
    assert [many[n] for n in range(-5, 5)] == list("abcde") * 2


def test_a_full_disk_is_an_error_that_names_the_way_out(monkeypatch, tmp_path):
    """Where the temporary file cannot be made, the error says where and what to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(WriteError, match="Set TMPDIR"):
        spool_of(["x" * 5000] * 2000)
