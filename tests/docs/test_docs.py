"""What the documentation says is true, and nothing in the repository gives its makers away."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page points to a file or folder that exists."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_module_of_the_map_exists() -> None:
    """The README's map of the code names files and folders that are there."""
    text = (ROOT / "README.md").read_text().partition("## Map of the code")[2]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(names) > 20
    for name in names:
        assert (ROOT / "verl_logsync" / name).exists(), name


def test_every_module_is_in_the_map() -> None:
    """A new module is explained in the README's map."""
    text = (ROOT / "README.md").read_text().partition("## Map of the code")[2]
    explained = {
        "__init__.py",
        "__main__.py",
        "verl_keys.py",
        "jsonlines.py",
        "fingerprint.py",
        "secrets_mask.py",
    }
    for path in (ROOT / "verl_logsync").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        if path.name != "__pycache__" and path.suffix in ("", ".py") and name not in explained:
            assert f"`{name}`" in text, f"{name} is not in the map"


def test_public_functions_explain_themselves() -> None:
    """Every public function and class of the package has a docstring."""
    silent = []
    for path in (ROOT / "verl_logsync").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            if not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert silent == []


def test_top_level_holds_only_what_was_agreed() -> None:
    """Beside the package there are tests, fixtures, docs, benchmarks and dotfiles."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listing.stdout.splitlines()}
    allowed = {
        "verl_logsync",
        "tests",
        "fixtures",
        "pyproject.toml",
        "README.md",
        "docs",
        "benchmarks",
    }
    assert {name for name in top if not name.startswith(".")} <= allowed
