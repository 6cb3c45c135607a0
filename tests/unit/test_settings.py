"""Settings files: what is written there is what happens."""

from __future__ import annotations

import shlex

import pytest

import verl_logsync
from verl_logsync import StepLogger
from verl_logsync.errors import UsageError, run_flag
from verl_logsync.settings import load_settings, parse_offset, parse_run
from verl_logsync.testing.builders import write_verl_log


@pytest.fixture
def toml(tmp_path, monkeypatch):
    """Write the settings file of the current folder."""
    place = tmp_path / "cwd"
    place.mkdir()
    monkeypatch.chdir(place)

    def write(text):
        (place / "verl-logsync.toml").write_text(text)

    return write


@pytest.fixture
def ranks(tmp_path):
    """Logs of four ranks; rank r logs step + r under three keys."""
    for rank in range(4):
        with StepLogger(
            "grpo", "exp", directory=tmp_path / "logs", rank=rank, world_size=4, attempt_id="a"
        ) as logger:
            for step in range(1, 4):
                value = float(step + rank)
                logger.log({"x/loss": value, "x/peak": value, "y/tokens": value}, step)
    return tmp_path / "logs"


def test_rank_rules_of_a_settings_file(ranks, toml):
    """[rank_rules], per_rank and rank_spread of verl-logsync.toml decide how ranks become one."""
    toml(
        'per_rank = ["y/*"]\nrank_spread = ["x/loss"]\n'
        '[rank_rules]\n"x/peak" = "max"\n"y/*" = "sum"\n'
    )
    (run,) = verl_logsync.load(ranks)
    frame = run.history()
    assert frame["x/loss"].tolist() == [2.5, 3.5, 4.5]
    assert frame["x/peak"].tolist() == [4.0, 5.0, 6.0]
    assert frame["y/tokens"].tolist() == [10.0, 14.0, 18.0]
    assert frame["x/loss/spread"].tolist() == [3.0, 3.0, 3.0]
    assert [frame[f"rank{r}/y/tokens"][1] for r in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert "rank0/x/loss" not in frame


def test_without_rules_the_names_decide(ranks, toml):
    """Without a settings file the mean is taken, and sums of counts."""
    (run,) = verl_logsync.load(ranks)
    assert run.history()["y/tokens"].tolist() == [2.5, 3.5, 4.5]


def test_ranks_that_must_be_the_same(ranks, toml):
    """Where a rule says "same", ranks that differ are a conflict, and counted."""
    toml('[rank_rules]\n"x/loss" = "same"\n')
    (run,) = verl_logsync.load(ranks)
    assert any("x/loss" in note for note in run.notes), run.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[rank_rules]\n"x" = "median"\n', "median"),
        ('rank_rules = "x"\n', "rank_rules"),
        ('[offsets]\n"*.jsonl" = "many"\n', "many"),
        ("merge = 'sometimes'\n", "always"),
        ("on_restart = 1\n", "replace"),
        ("no_such = 1\n", "no_such"),
        ("[runs\n", "TOML"),
    ],
)
def test_mistakes_are_named(toml, text, said):
    """A settings file that cannot be meant is a usage error that names the mistake."""
    toml(text)
    with pytest.raises(UsageError) as refused:
        load_settings({})
    assert said in f"{refused.value} {refused.value.hint}"


def test_runs_and_offsets_of_a_settings_file(tmp_path, toml):
    """[runs] (one pattern or several) and [offsets] do what --run and --offset do."""
    first = write_verl_log(tmp_path / "logs/one.jsonl", [(s, {"a": s}) for s in range(11)])
    second = write_verl_log(tmp_path / "logs/two.jsonl", [(s, {"a": s}) for s in range(1, 6)])
    toml(f'[runs]\n"p/both" = ["{first}", "*two.jsonl"]\n[offsets]\n"{second}" = 10\n')
    (run,) = verl_logsync.load(tmp_path / "logs")
    assert (run.project, run.name) == ("p", "both")
    assert run.history().index.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=*.jsonl", ("a", "*.jsonl")),
        ("p/a=lr=1/*.jsonl", ("p/a", "lr=1/*.jsonl")),
        ("p/lr=1==lr=1/*.jsonl", ("p/lr=1", "lr=1/*.jsonl")),
        ("a==b", ("a", "b")),
    ],
)
def test_a_run_may_have_equals_signs_in_its_name(text, pair):
    """The first = ends the name, unless there is a ==, which then does."""
    assert parse_run(text) == pair


@pytest.mark.parametrize("text", ["", "a", "=b", "a=", "==b", "a=="])
def test_bad_runs(text):
    """A run is NAME=GLOB or NAME==GLOB, both of them not empty."""
    with pytest.raises(UsageError, match="NAME==GLOB"):
        parse_run(text)


def test_names_with_equals_signs(tmp_path, toml):
    """A sweep's names are taken from [runs] as they stand, and proposed options can be pasted."""
    rows = [(s, {"actor/loss": s / 7}) for s in range(3)]
    log = write_verl_log(tmp_path / "logs/lr=1e-5/one.jsonl", rows)
    toml(f'[runs]\n"p/lr=1e-5" = "{log}"\n')
    (run,) = verl_logsync.load(tmp_path / "logs")
    assert (run.project, run.name) == ("p", "lr=1e-5")
    _, flag = run_flag("lr=1e-5", str(log)).split(" ", 1)
    assert parse_run(shlex.split(flag)[0]) == ("lr=1e-5", str(log))


def test_the_command_line_wins(tmp_path, toml):
    """A setting that is given counts more than the file's, and that more than the default."""
    toml('merge = "always"\non_restart = "replace"\n')
    assert load_settings({}).merge == "always"
    assert load_settings({"merge": "never"}).merge == "never"
    assert load_settings({}).on_restart == "replace"


@pytest.mark.parametrize("text", ["", "=3", "a", "a=", "a=b", "a=1.5"])
def test_bad_offsets(text):
    """An offset is PATTERN=STEPS, with whole steps."""
    with pytest.raises(UsageError, match="--offset needs"):
        parse_offset(text)


@pytest.mark.parametrize(
    ("text", "pair"),
    [("a=b=3", ("a=b", 3)), ("x y=-2", ("x y", -2)), ("*.jsonl=0", ("*.jsonl", 0))],
)
def test_offsets(text, pair):
    """A pattern may hold an equals sign; an offset may be negative."""
    assert parse_offset(text) == pair


def test_a_run_is_a_name_and_a_pattern():
    """The name ends at the first equals sign: paths may have more."""
    assert parse_run("p/n=/x/lr=1/*") == ("p/n", "/x/lr=1/*")
