"""Every script of examples/ runs and says what it found; a plain project changes by few lines."""

from __future__ import annotations

import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LEAST = {"plain": 0.93, "federate": 0.8, "prune": 0.9, "own_method": 0.4, "own_data": 0.85}
"""Smallest value of the last number that a script prints, an accuracy."""


def changed_lines(name: str) -> int:
    """Count the lines of plain.py that a script replaces, and those that it adds."""
    before, after = ((EXAMPLES / f"{script}.py").read_text().splitlines() for script in ("plain", name))
    blocks = SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in blocks if tag != "equal")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem != "own_data")) for p in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_it_runs_and_prints_its_accuracy(path: Path, tmp_path: Path):
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FLOPs are not counted" not in done.stderr
    found = re.findall(r"accuracy (?:of their models )?(0?\.\d+|1\.0+)", done.stdout)
    assert found, done.stdout
    assert float(found[-1]) >= LEAST[path.stem]


@pytest.mark.parametrize("name", ["federate", "prune"])
def test_a_plain_project_changes_by_few_lines(name: str):
    assert 0 < changed_lines(name) < 20
    listed = next(line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"[{name}.py]" in line)
    assert f"; {changed_lines(name)} lines differ" in listed


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_is_short_and_listed(path: Path):
    assert len(path.read_text().splitlines()) < 60
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()
