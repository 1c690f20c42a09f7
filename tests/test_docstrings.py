"""Each entry under `Args:` names the thing first; files that do not yet hold to it are listed, and the lists shrink."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_sparsefl"
PYPROJECT = REPOSITORY / "pyproject.toml"
FRAGMENTS = {
    *("Of", "As", "At", "By", "For", "From", "In", "On", "Per", "To", "With", "Within", "Without"),  # prepositions
    *("After", "Before", "Beside", "Besides", "Between", "During", "If", "Than", "Until", "When"),
    *("That", "What", "Where", "Who", "Whom", "Whose"),  # "Whether", "Which" and "How" ask for the value of an option
    *("Its", "Their", "It", "They", "Those"),  # pronouns that stand for the function or the argument
    *("Decides", "Does", "Finds", "Gives", "Has", "Holds", "Is", "Keeps", "Knows", "Makes", "Reads", "Says", "Takes"),
    *("Called", "Changed", "Drawn", "Filled", "Finished", "Kept", "Launched", "Named", "Shown", "Used"),  # participles
    *("Also", "Not", "Only"),
}
"""First words of descriptions that go on from the name instead of naming a thing, as "seed: Of the run." does."""
NOT_YET: frozenset[str] = frozenset({})
"""Files with such entries; `python tests/test_docstrings.py` takes out those that pass, and none may be added."""
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?: \(.*?\))?: +(\w+)", re.MULTILINE)


def fragments(source: str) -> Iterator[str]:
    """Yield the entries under `Args:` of all functions and classes that begin with a fragment."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
        for name, word in ENTRY.findall(section[1]) if section else ():
            if word in FRAGMENTS:
                yield f"{node.name}: `{name}: {word} ...`"


def found() -> dict[str, list[str]]:
    """Return the fragments by file."""
    files = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: entries for name, text in files.items() if (entries := list(fragments(text)))}


def without_fragments() -> list[str]:
    """Return the files in `NOT_YET` that have no fragment left."""
    return sorted(NOT_YET - set(found()))


def with_imperative_summaries() -> list[str]:
    """Return the files that pyproject.toml exempts from D401 although all their summaries are imperative."""
    listed = re.findall(r'^"(\S+\.py)" = \["D401"\]', PYPROJECT.read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=D401", "--output-format=concise", *listed]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    return sorted(name for name in listed if f"{name}:" not in said)


def take_out(names: list[str], page: Path) -> None:
    """Remove the lines of these files from a list."""
    lines = page.read_text().splitlines(keepends=True)
    page.write_text("".join(line for line in lines if not any(line.strip().startswith(f'"{name}"') for name in names)))


def test_an_entry_names_the_thing_first():
    offenders = {name: entries for name, entries in found().items() if name not in NOT_YET}
    assert not offenders


def test_the_list_of_files_with_fragments_shrinks():
    assert not without_fragments(), "take these out of NOT_YET: python tests/test_docstrings.py"


@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ("seed: Of the run.", True),
        ("seed (int): Of the run.", True),
        ("**options: As in a run.", True),
        ("folder: Where files go.", True),
        ("seed: Random seed of the run.", False),
        ("verbose: Whether to print.", False),
        ("seed: Offset of the first round.", False),
    ],
)
def test_a_planted_fragment_is_found(entry: str, refused: bool):
    source = f'class A:\n    def f(self, x):\n        """Do it.\n\n        Args:\n            {entry}\n        """\n'
    assert bool(list(fragments(source))) == refused


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed (extra `dev`)")
def test_the_list_of_files_without_imperative_summaries_shrinks():
    assert not with_imperative_summaries(), "take these out of `per-file-ignores`: python tests/test_docstrings.py"


if __name__ == "__main__":  # take out of both lists what passes
    take_out(without_fragments(), Path(__file__))
    take_out(with_imperative_summaries(), PYPROJECT)
