"""Which diagnostics made which rows: stretches of a run, as its marker keeps them."""

from __future__ import annotations

from dataclasses import replace

from verl_logsync.derived_by import MOST_STRETCHES, SEVERAL, column_set, continued, of_others
from verl_logsync.diagnostics import Described
from verl_logsync.diagnostics.column_set import ColumnSet
from verl_logsync.model import DerivedBy, Marker
from verl_logsync.transaction_log.fragment import marker_value, read_marker

OLD = DerivedBy("1", "1", "aa")
NEW = DerivedBy("2", "1", "aa")


def test_a_change_begins_a_stretch_where_rows_are_sent() -> None:
    """Other diagnostics begin a stretch at the first row they make; the same ones none, and
    nothing begins where nothing is sent."""
    first = continued((), OLD, 0)
    assert first == (OLD,)
    assert continued(first, OLD, 20) == first
    assert continued(first, NEW, None) == first
    assert continued(first, NEW, 20) == (OLD, replace(NEW, first_step=20))


def test_a_rewind_forgets_what_was_rewound() -> None:
    """Rows that are sent anew are of the diagnostics that send them."""
    both = (OLD, replace(NEW, first_step=20))
    assert continued(both, OLD, 10) == (OLD,)
    assert continued(both, NEW, 0) == (NEW,)
    assert continued(both, DerivedBy(), 0) == ()


def test_rows_without_diagnostics_are_a_stretch() -> None:
    """Rows that were sent without derived columns are not taken for those of a version, and the
    set of columns of the run stays."""
    found = continued((OLD,), DerivedBy(), 20)
    assert found == (OLD, DerivedBy(first_step=20))
    assert column_set(found) == "1"
    assert of_others(found, NEW, 10)
    assert not of_others(found, NEW, 30)


def test_stretches_are_bounded() -> None:
    """Two machines that take turns make the list no longer than it may be; what is merged says so,
    the first and the last are kept."""
    stretches: tuple[DerivedBy, ...] = ()
    for step in range(500):
        stretches = continued(stretches, (OLD, replace(OLD, options="bb"))[step % 2], step)
    assert len(stretches) == MOST_STRETCHES
    assert stretches[0] == OLD
    assert stretches[1].version == SEVERAL
    assert stretches[-1].first_step == 499
    assert column_set(stretches) == "1"


def test_markers_come_back_also_those_of_the_first_programs() -> None:
    """Stretches survive the run's config; a version alone is a stretch without known options."""
    marker = Marker("n", frozenset(), "", "", 3, diagnostics=(OLD, replace(NEW, first_step=2)))
    assert read_marker(marker_value(marker)) == marker
    early = read_marker({**marker_value(marker), "diagnostics": "1"})
    assert early is not None
    assert early.diagnostics == (DerivedBy("1", "1"),)
    assert read_marker({**marker_value(marker), "diagnostics": [7]}) is None


def test_a_set_of_columns_is_that_of_its_version() -> None:
    """What came later is left out, with why; names in braces and validation dumps count too."""
    described = (
        Described("grpo/a", "f", "", "", ""),
        Described("grpo/ab", "f", "", "", "", since=2),
        Described("grpo/pass@{k}", "f", "", "", "", since=3),
    )
    known = ColumnSet("2", described)
    assert [known.has(k) for k in ("grpo/a", "grpo/ab", "grpo/abc", "grpo/pass@4")] == [
        *(True, True, True, False)
    ]
    assert not ColumnSet("1", described).has("grpo_val/ab")
    assert "--recompute" in ColumnSet("1", described).lacking(["grpo/ab"])["grpo/ab"]
    for version in ("", "several", "9"):
        assert ColumnSet(version, described).has("grpo/pass@4")
