"""The site of the documentation: pages that are made from the code, and keys that are described as they are logged."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

import lightning_sparsefl.algorithms
from helpers.command_line import QUICKSTART, SHORT, run_folder
from lightning_sparsefl import Federation

ROOT = Path(__file__).parents[1]
PLACEHOLDERS = {"<metric>": r"\w+", "<tensor>": r"[\w.]+", "<rank>": r"\d+", "<key>": r"\w+"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The folder that Sphinx reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "docs" / "site"), *sys.path])
        patch.setattr(sys, "argv", ["sparsefl"])
        folder = tmp_path_factory.mktemp("site") / "source"
        import_module("build").write_sources(folder)
        for name in ("build", "method_pages", "reference_pages", "rst"):
            sys.modules.pop(name, None)
    return folder


@pytest.mark.parametrize("name", lightning_sparsefl.algorithms.__all__)
def test_every_method_has_a_page(name, sources):
    method = getattr(lightning_sparsefl.algorithms, name)
    page = (sources / "methods" / f"{name}.rst").read_text()
    paper, departures, options, configs, results = re.split(r"^(?:\w+)\n-+$", page, flags=re.MULTILINE)[1:]
    docstring = sys.modules[method.__module__].__doc__
    assert docstring.splitlines()[0] in paper
    assert docstring.split()[-1] in (departures if "Departures" in docstring else paper)
    for field in dataclasses.fields(method):
        assert f"``algorithm.{field.name}``" in options
    assert re.search(r"^   \* - ", configs, flags=re.MULTILINE) or configs.startswith("\n\nNone; ")
    rows = [
        row for row in (ROOT / "benchmarks/results/methods.csv").read_text().splitlines() if row.startswith(f"{name},")
    ]
    assert len(rows) == results.count("   * - ") - bool(rows)


def test_every_method_without_running_statistics_is_named_in_the_limits():
    methods = [getattr(lightning_sparsefl.algorithms, name) for name in lightning_sparsefl.algorithms.__all__]
    found = {each.__name__ for each in methods if hasattr(sys.modules[each.__module__], "make_norms_static")}
    items = re.split(r"^- ", (ROOT / "docs" / "limits.md").read_text(), flags=re.MULTILINE)
    item = next(item for item in items if "track_running_stats" in item)
    assert set(re.findall(r"`([A-Z]\w+)`", item)) == found | {"PerFedMask"}


def test_an_option_has_its_docstring_type_and_default(sources):
    page = " ".join((sources / "methods" / "FedProx.rst").read_text().split())
    assert "``algorithm.mu`` - ``float`` - ``0.01`` - Strength of the" in page


def test_the_page_of_the_command_line_has_every_option(sources):
    page = (sources / "reference" / "command_line.rst").read_text()
    for field in dataclasses.fields(Federation):
        assert f"``--federation.{field.name}``" in page
    for name in ("--trainer.max_rounds", "--ckpt_path", "--config", "--json", "--copy", "--pdb", "--lr_scheduler"):
        assert f"``{name}``" in page


def test_every_page_is_in_the_sidebar_once(sources):
    pages = {path.relative_to(sources).with_suffix("").as_posix() for path in sources.rglob("*.[mri][dsp]*")}
    index = (sources / "index.md").read_text()
    listed = [
        entry for block in re.findall(r"```{toctree}\n(.*?)```", index, flags=re.DOTALL) for entry in block.split()
    ]
    listed = [entry for entry in listed if entry in pages]
    assert len(listed) == len(set(listed))
    below = r"(methods|reference/api)/\w[\w.]*|docs/decisions/\d.*|notebooks/\d.*|index"
    assert {page for page in pages - set(listed) if not re.fullmatch(below, page)} == set()
    for name, pattern in (
        ("docs/methods", "/methods/*"),
        ("docs/decisions/README", "[0-9]*"),
        ("notebooks/README", "[0-9]*"),
    ):
        assert f":glob:\n\n{pattern}\n```" in (sources / f"{name}.md").read_text()
    assert "[`FedSpa`](/methods/FedSpa.rst)" in (sources / "docs" / "methods.md").read_text()


def test_every_link_to_a_file_leads_to_a_page_or_file_of_the_site(sources):
    links = [
        (page, link)
        for page in (*sources.rglob("*.md"), *sources.rglob("*.ipynb"))
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", page.read_text()))
        if "://" not in link and not link.startswith("/")
    ]
    assert len(links) > 150
    missing = [f"{page.relative_to(sources)}: {link}" for page, link in links if not (page.parent / link).exists()]
    assert missing == []


def keys_of(section: str) -> re.Pattern[str]:
    """Return the pattern of the keys in the tables under a heading of the page."""
    page = (ROOT / "docs" / "run_folder.md").read_text()
    text = re.split(r"^## ", page.partition(f"## {section}")[2], flags=re.MULTILINE)[0]
    patterns = []
    for key in re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE):
        pattern = re.escape(key)
        for placeholder, match in PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(placeholder), match)
        patterns.append(pattern + r"(_std|_worst10)?" if "<metric>" in key and not key.endswith("_gap") else pattern)
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


EVERYTHING = """
federation:
  unseen_clients: 2
  eval_clients: 2
  eval_after_training: true
  finetune_epochs: 1
  pictures_every_n_rounds: 2
  capacities: [0.25, 0.5, 1.0]
  devices: {flops_per_second: 1.e+9}
  availability: {intervals: [[[0, 1.e+6]]], period: 1.e+6}
  sampler: {class_path: REFL, init_args: {over_select: 2.0, rest: 0, target: fixed}}
"""
"""Options by which a run writes keys and files that it has not by default."""


def files_of(page):
    """The patterns of the names in the tree of a run folder; those of folders end in a slash."""
    return re.findall(r"^[|`]-- (\S+) ", page, flags=re.MULTILINE)


def test_every_file_and_key_that_a_run_writes_is_described(sparsefl, tmp_path):
    (tmp_path / "more.yaml").write_text(EVERYTHING)
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, "--config", "more.yaml")
    assert code == 0, err
    folder = run_folder(tmp_path)
    code, _, err = sparsefl("export", "--config", folder / "config.yaml")
    assert code == 0, err
    patterns = files_of((ROOT / "docs" / "run_folder.md").read_text())
    found = {path.name + "/" * path.is_dir() for path in folder.iterdir()}
    assert {"export/", "checkpoints/", "overlap.csv", "finetuned.csv"} <= found
    assert [name for name in found if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    metrics = keys_of("metrics.csv")
    for name in ("metrics.csv", "clients.csv", "finetuned.csv", "overlap.csv"):
        with (folder / name).open(newline="") as file:
            header = next(csv.reader(file))
        assert len(header) > 3
        assert name != "metrics.csv" or {"time/clock", "clients/arrived"} <= {*header}
        assert [key for key in header if not keys_of(name).fullmatch(key)] == []
    summary = json.loads((folder / "summary.json").read_text())
    known = keys_of("summary.json")
    assert [key for key in summary if not known.fullmatch(key) and not metrics.fullmatch(key)] == []
    assert not metrics.fullmatch("comm/unknown")
