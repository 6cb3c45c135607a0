"""verl's `Tracking` gets a step log by an environment variable, or by `attach`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from verl_logsync.steplog import attach

ROOT = Path(__file__).parents[2]

# The parts of verl that matter here, laid out as in its wheels: the loading of external modules
# (0.6.1 and newer), and a Tracking that passes on what it is given. Until 0.8 it has no `finish`.
PACKAGE = """
    import importlib, os
    for name in filter(None, os.getenv("VERL_USE_EXTERNAL_MODULES", "").split(",")):
        importlib.import_module(name)
"""
TRACKING = """
    class Tracking:
        supported_backend = ["console", "file"]

        def __init__(self, project_name, experiment_name, default_backend="console", config=None):
            self.logger = {}
            self._finished = False

        def log(self, data, step, backend=None):
            for name, one in self.logger.items():
                if backend is None or name in backend:
                    one.log(data=data, step=step)
"""
FINISH = """
        def finish(self, exit_code=0):
            self._finished = True

        def __del__(self):
            if not self._finished:
                self.finish()
"""
TRAINER = """
    from verl.utils.tracking import Tracking
    config = {"trainer": {"default_local_dir": "ckpt", "project_name": "grpo"}, "hf_token": "hf_x"}
    tracking = Tracking(project_name="grpo", experiment_name="toy", default_backend=["console"],
                        config=config)
    for step in range(3):
        tracking.log(data={"actor/lr": 1e-6, "s": float(step)}, step=step)
    tracking.log({"only": 1}, 3, backend=["console"])
"""


def _verl(folder: Path, *, with_finish: bool) -> None:
    utils = folder / "verl" / "utils"
    utils.mkdir(parents=True)
    (folder / "verl" / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    (utils / "__init__.py").touch()
    body = TRACKING + (FINISH if with_finish else "")
    (utils / "tracking.py").write_text(textwrap.dedent(body))


def _train(folder: Path, code: str, **env: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "WANDB_RUN_ID"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, "PYTHONPATH": f"{folder}:{ROOT}", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def _lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "step_logs/grpo/toy/rank-0000.steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


HOOK = {"VERL_USE_EXTERNAL_MODULES": "verl_logsync.verl_hook"}


@pytest.mark.parametrize(
    ("with_finish", "ending", "code"),
    [
        (True, "\n    tracking.finish(exit_code=0)", 0),
        (True, "\n    tracking.finish(1)", 1),
        (True, "", None),
        (False, "", None),
        (False, "\n    del tracking", None),
    ],
)
def test_the_variable_gives_every_tracking_a_step_log(
    with_finish: bool, ending: str, code: int | None, tmp_path: Path
) -> None:
    """With nothing but the variable set all is logged, with config, run id and exit code."""
    _verl(tmp_path, with_finish=with_finish)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "wandb_run_id").write_text("bound123\n")
    assert "step log" not in _train(tmp_path, TRAINER + ending, **HOOK)
    header, *records, end = _lines(tmp_path)
    assert header["run_id"] == "bound123"
    assert header["config"]["trainer"]["project_name"] == "grpo"
    assert header["config"]["hf_token"] == "***"
    assert [(r["step"], r["data"]["s"]) for r in records] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert end["exit_code"] == code


@pytest.mark.parametrize(
    "order",
    [
        "import verl_logsync.verl_hook",
        "import verl.utils.tracking, verl_logsync.verl_hook",
        "import verl_logsync.verl_hook as h\n    h.install(); h.install()",
        "import verl.utils.tracking, verl_logsync.verl_hook as h\n    h.install()",
    ],
)
def test_importing_the_hook_is_enough(order: str, tmp_path: Path) -> None:
    """Before or after verl's tracking, once or twice: one step log a tracking."""
    _verl(tmp_path, with_finish=True)
    _train(tmp_path, f"\n    {order}{TRAINER}")
    assert [line.get("step") for line in _lines(tmp_path)] == [None, 0, 1, 2, None]


def test_verl_is_not_imported_by_the_hook(tmp_path: Path) -> None:
    """Importing the hook alone does not load verl, nor anything beside the standard library."""
    _verl(tmp_path, with_finish=True)
    code = """
        import sys
        before = set(sys.modules)
        import verl_logsync.verl_hook
        new = {n.split(".")[0] for n in set(sys.modules) - before} - sys.stdlib_module_names
        assert new == {"verl_logsync"}, new
    """
    _train(tmp_path, code)


def test_a_hook_that_fails_does_not_end_the_training(tmp_path: Path) -> None:
    """With a Tracking that is not as expected, or a wrong format, the trainer goes on, warned."""
    _verl(tmp_path, with_finish=True)
    said = _train(tmp_path, TRAINER, **HOOK, VERL_LOGSYNC_STEP_LOG_FORMAT="csv")
    assert "not attached" in said
    strict = {"VERL_LOGSYNC_STEP_LOG_FORMAT": "csv", "PYTHONWARNINGS": "error"}
    _train(tmp_path, TRAINER, **HOOK, **strict)
    assert not (tmp_path / "step_logs").exists()


class Tracking:
    """What `attach` needs of a tracking object."""

    def __init__(self) -> None:
        self.logger: dict[str, Any] = {}


def test_attach_adds_a_backend_that_ends_with_the_tracking(tmp_path: Path) -> None:
    """The logger is beside the others, and is closed when the tracking object goes away."""
    tracking = Tracking()
    logger = attach(tracking, "grpo", "toy", directory=tmp_path, rank=2, world_size=4)
    assert tracking.logger == {"step_log": logger}
    tracking.logger["step_log"].log(data={"a": 1}, step=1)
    assert Path(logger.path).name == "rank-0002.steps.jsonl"
    del tracking
    gc.collect()
    assert '"end":1' in Path(logger.path).read_text()
