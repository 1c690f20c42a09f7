"""Build the site of the documentation: `make docs`.

The pages of the repository are copied to a folder, with their paths, so that the links between them stay as they are.
Pages that are made from the code are added there: one for each method, and the reference.
"""

from __future__ import annotations

import re
import shutil
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from method_pages import method_pages
from reference_pages import reference_pages

from lightning_sparsefl import algorithms

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("*.md", "docs/*.md", "docs/decisions/*.md", "notebooks/*", "examples/*", "tests/stress/README.md"),
    *("configs/README.md", "callbacks/README.md", "benchmarks/*.md", "LICENSE"),
    *("docs/images/*", "benchmarks/results/*", "tests/stress/results/*"),
)
"""Pages, and files that pages link to."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("docs/your_project", "notebooks/README", "examples/README"),
    "Guides": ("configs/README", "callbacks/README", "docs/merging", "docs/scaling", "docs/deployment"),
    "Methods": ("docs/methods",),
    "Reference": ("docs/run_folder", "reference/*"),
    "Explanations": ("docs/architecture", "docs/decisions/README", "docs/limits", "docs/security"),
    "Results": ("docs/results", "docs/paper_counts", "docs/sparse_training", "benchmarks/*"),
    "Development": ("CONTRIBUTING", "CHANGELOG", "tests/stress/README", "docs/index"),
}
"""Pages by section of the sidebar; pages that are in none of them are guides."""
BELOW = {"docs/methods": "/methods/*", "docs/decisions/README": "[0-9]*", "notebooks/README": "[0-9]*"}
"""Pages with other pages below them; `reference/api` lists its own."""
PAGES = (".md", ".rst", ".ipynb")
"""Suffixes of pages."""


def build(folder: Path, *options: str) -> int:
    """Write the sources and the pages, and return the exit code of Sphinx.

    Args:
        folder: Folder for `source/` and `html/`; the former is replaced.
        options: Further options of Sphinx.
    """
    from sphinx.cmd.build import main as sphinx_build

    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    write_sources(source)
    return sphinx_build(["-b", "html", "-c", str(Path(__file__).parent), *options, str(source), str(folder / "html")])


def write_sources(source: Path) -> None:
    """Write all pages of the site as Markdown and reStructuredText.

    Args:
        source: Folder of the pages, which does not exist.
    """
    for path in sorted({path for pattern in COPIED for path in ROOT.glob(pattern) if path.is_file()}):
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".md", ".ipynb"):
            target.write_text(_with_links_to_pages(path.read_text(), path.parent))
        else:
            shutil.copy(path, target)
    for name, text in {**method_pages(ROOT), **reference_pages()}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    for name, pages in BELOW.items():
        with (source / f"{name}.md").open("a") as file:
            file.write(f"\n{_toctree(':glob:', '', pages)}\n")
    start = (source / "README.md").read_text()
    (source / "README.md").unlink()
    (source / "index.md").write_text(f"{start}\n{toctrees(source)}")


def _with_links_to_pages(text: str, folder: Path) -> str:
    """Lead links to the README to the start page, those to a folder to its README, and link methods in tables.

    Args:
        text: Page in Markdown, or a notebook.
        folder: Folder of the page in the repository, which its links start from.
    """
    text = re.sub(r"\]\(((?:\.\./)*)README\.md", partial(_to_start_page, folder=folder), text)
    text = re.sub(r"\]\(((?:\.\./)?(?:callbacks|configs|examples|notebooks|benchmarks)/)\)", r"](\1README.md)", text)
    methods = "|".join(algorithms.__all__)
    return re.sub(rf"^\| `({methods})` \|", r"| [`\1`](/methods/\1.rst) |", text, flags=re.MULTILINE)


def _to_start_page(link: re.Match[str], folder: Path) -> str:
    """Return the start of a link to a README, with the name that the page has in the site."""
    name = "index.md" if (folder / link[1]).resolve() == ROOT else "README.md"
    return f"]({link[1]}{name}"


def toctrees(source: Path) -> str:
    """Return the sidebar: one list of pages for each section.

    Args:
        source: Folder of the pages.
    """
    pages = {path.relative_to(source).with_suffix("").as_posix() for path in source.rglob("*") if path.suffix in PAGES}
    below = ("methods/*", "reference/api/*", "docs/decisions/[0-9]*", "notebooks/[0-9]*", "README")
    pages = {page for page in pages if not any(fnmatchcase(page, pattern) for pattern in below)}
    listed: dict[str, list[str]] = {}
    for section, patterns in SECTIONS.items():
        found = [sorted(page for page in pages if fnmatchcase(page, pattern)) for pattern in patterns]
        listed[section] = [page for group in found for page in group]
    listed["Guides"] += sorted(pages.difference(*listed.values()))
    return "\n\n".join(_toctree(f":caption: {section}", "", *entries) for section, entries in listed.items()) + "\n"


def _toctree(*lines: str) -> str:
    return "\n".join(["```{toctree}", ":hidden:", *lines, "```"])


if __name__ == "__main__":
    sys.exit(build(ROOT / "build" / "docs", *sys.argv[1:]))
