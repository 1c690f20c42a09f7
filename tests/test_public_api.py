"""The public surface: what `__all__` promises, what an import costs, and that documented Python is Python."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import lightning_sparsefl

REPOSITORY = Path(__file__).parents[1]
PACKAGES = [
    "lightning_sparsefl",
    *(m.name for m in pkgutil.iter_modules(lightning_sparsefl.__path__, "lightning_sparsefl.") if m.ispkg),
]
MODULES = [
    "lightning_sparsefl",
    *(
        m.name
        for m in pkgutil.walk_packages(lightning_sparsefl.__path__, "lightning_sparsefl.")
        if not m.name.endswith("__main__")
    ),
]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "callbacks/*.md", "configs/*.md", "benchmarks/*.md", "tests/*/*.md")
    for path in REPOSITORY.glob(pattern)
)

IMPORTS_OURS = """
import builtins
original, seen = builtins.__import__, []

def spy(name, globals=None, *rest, **options):
    if (globals or {}).get("__name__", "").startswith("lightning_sparsefl"):
        seen.append(name)
    return original(name, globals, *rest, **options)

builtins.__import__ = spy
import sys
import lightning_sparsefl, lightning_sparsefl.report
lightning_sparsefl.FederatedTrainer
print(*seen, *(name for name in sys.modules if name.startswith("lightning_sparsefl")))
"""
"""Prints what our own modules import, and which of them are loaded; TorchMetrics loads matplotlib by itself."""


def in_the_order_of_ruff(name: str) -> tuple[int, list[tuple[int, str]]]:
    """CONSTANTS, Classes, then functions, each in natural order: ruff's RUF022."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    parts = re.findall(r"\d+|\D+", name)
    return kind, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def public_names(module: ModuleType) -> set[str]:
    """What ``import *`` would take if there were no `__all__`, less sub-modules and future statements."""
    names = {name for name in dir(module) if not name.startswith("_") and name != "annotations"}
    return {name for name in names if not inspect.ismodule(getattr(module, name))}


def python_blocks(path: Path) -> list[str]:
    """The ```python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_and_complete(name: str):
    module = import_module(name)
    exported = module.__all__
    assert list(exported) == sorted(set(exported), key=in_the_order_of_ruff)
    # `sparse` exports its modules, since a module and its main function share a name: masks.density, density.erk;
    # beside them only what takes a whole module
    functions = {name for name in exported if not inspect.ismodule(getattr(module, name))}
    assert functions - {"__version__"} == public_names(module)
    of_modules = {"Sensitivity", "sensitivity", "shrink"} if name.endswith(".sparse") else set()
    assert functions == of_modules or functions == set(exported)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_object_has_a_docstring(name: str):
    module = import_module(name)
    bare = []
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            doc = value.__doc__ or ""
            # A dataclass without a docstring is given its own signature as one.
            if not doc.strip() or doc.startswith(f"{public}("):
                bare.append(public)
    assert bare == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str):
    assert (import_module(name).__doc__ or "").strip()


def test_the_version_is_public():
    assert lightning_sparsefl.__version__ == import_module("lightning_sparsefl.__about__").__version__


def test_the_citation_names_this_version():
    version = import_module("lightning_sparsefl.__about__").__version__
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text()


def test_importing_the_package_does_not_import_matplotlib():
    out = subprocess.run([sys.executable, "-c", IMPORTS_OURS], capture_output=True, text=True, check=True)
    names = out.stdout.split()
    seen = {name.partition(".")[0] for name in names}
    assert "torch" in seen
    assert "matplotlib" not in seen
    assert "torch.utils.benchmark" not in names  # it imports torch.utils.cpp_extension, which warns without a GPU
    assert "lightning_sparsefl.report" in names
    assert "lightning_sparsefl.report.pictures" not in names


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_documented_python_compiles(path: Path):
    for number, block in enumerate(python_blocks(path), start=1):
        compile(block, f"{path.name}, block {number}", "exec")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/your_project.md", pytest.param("docs/smaller_models.md", marks=pytest.mark.slow)]
)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path):
    """The ```python blocks, top to bottom, as one script; fragments are fenced as ```py."""
    blocks = python_blocks(REPOSITORY / name)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FLOPs are not counted" not in done.stderr


def missing_imports(folder: Path) -> list[str]:
    """What the files of a folder import from the package that it does not have."""
    return [
        f"{path}: {node.module}.{item.name}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == lightning_sparsefl.__name__
        for item in node.names
        if not hasattr(import_module(node.module), item.name)
    ]


@pytest.mark.parametrize("folder", ["benchmarks", "callbacks", "integrations"])
def test_the_package_has_what_other_folders_import(folder: str):
    """The tests of an integration need its own requirements, so a name that it misses is found here."""
    assert not missing_imports(REPOSITORY / folder)


def test_a_missing_import_is_found(tmp_path: Path):
    (tmp_path / "plugin.py").write_text("def run():\n    from lightning_sparsefl.errors import InvalidOption, gone\n")
    assert missing_imports(tmp_path) == [f"{tmp_path / 'plugin.py'}: lightning_sparsefl.errors.gone"]


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120
