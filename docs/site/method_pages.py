"""Page of each method, from the docstring of its module, its options, its configurations and its measured rows."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from rst import code, field_docs, heading, list_table

from lightning_sparsefl import algorithms
from lightning_sparsefl.cli.packaged import config_names, packaged_files

COLUMNS = {
    "options": "options",
    "model": "network",
    "global_acc": "global accuracy",
    "personal_acc": "personal accuracy",
    "mb_up": "MB up",
    "mb_down": "MB down",
    "tflop": "TFLOP",
    "seconds": "seconds",
}
"""Columns of benchmarks/results/methods.csv, with their titles."""


def method_pages(root: Path) -> dict[str, str]:
    """Return the pages as reStructuredText by file name.

    Args:
        root: Folder of the repository.
    """
    configs, rows = configs_by_method(), rows_by_method(root / "benchmarks" / "results" / "methods.csv")
    return {
        f"methods/{name}.rst": method_page(getattr(algorithms, name), configs[name], rows[name])
        for name in algorithms.__all__
    }


def method_page(method: Any, configs: list[str], rows: list[dict[str, str]]) -> str:
    """Return the page of a method.

    Args:
        method: Class of the method.
        configs: Names of its configurations.
        rows: Its rows of `methods.csv`.
    """
    name = method.__name__
    paper, about, departures = docstring_parts(sys.modules[method.__module__].__doc__ or "")
    reference = f":class:`lightning_sparsefl.algorithms.{name}`"
    parts = [
        heading(name, "="),
        f"{inspect.getdoc(method).partition(chr(10))[0]} The class is {reference}.",
        heading("Paper"),
        paper,
        about,
        heading("Departures"),
        departures or "None are listed.",
        heading("Options"),
        options_table(method),
        heading("Configurations"),
        configs_list(configs),
        heading("Results"),
        results_table(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def docstring_parts(docstring: str) -> tuple[str, str, str]:
    """Split the docstring of a module into the paper, the description and the departures.

    The first two paragraphs name the paper. The departures begin with this word, and go on to the end.

    Args:
        docstring: Docstring of the module of a method.
    """
    title, *others = inspect.cleandoc(docstring).split("\n\n")
    citation = others.pop(0) if len(others) > 1 else ""
    text = "\n\n".join(others)
    found = re.search(r"(?:^|(?<=\s))Departures", text)
    about, departures = (text[: found.start()], text[found.start() :]) if found else (text, "")
    return f"{title} {citation}".strip(), about.strip(), departures.strip()


def options_table(method: Any) -> str:
    """Return the table of a method's options.

    Args:
        method: Class of the method, a dataclass.
    """
    docs = field_docs(method)
    rows = [
        (code(f"algorithm.{f.name}"), code(f.type), _default(f), docs.get(f.name, ""))
        for f in dataclasses.fields(method)
    ]
    if not rows:
        return "The method has no options of its own."
    return list_table(("option", "type", "default", "meaning"), rows, widths=(22, 20, 13, 45))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return code(field.default)
    return code(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def configs_by_method() -> dict[str, list[str]]:
    """Return the names of the packaged configurations that choose each method."""
    found = defaultdict(list)
    for name in config_names():
        algorithm = yaml.load(packaged_files()[name].read_text(), yaml.CSafeLoader).get("algorithm", "")
        chosen = algorithm.get("class_path", "") if isinstance(algorithm, dict) else algorithm
        found[chosen.rpartition(".")[2]].append(name)
    return found


def configs_list(names: list[str]) -> str:
    """Return the list of configurations, by folder.

    Args:
        names: Names of the configurations.
    """
    if not names:
        return "None; choose the method with ``--algorithm`` on top of a configuration of data and a network."
    folders = defaultdict(list)
    for name in names:
        folder, _, file = name.rpartition("/")
        folders[folder].append(f"``{file}``")
    rows = [(code(f"{folder}/") if folder else "", ", ".join(files)) for folder, files in folders.items()]
    text = "Names for ``sparsefl fit --config FOLDER/NAME``; ``sparsefl configs`` says what each of them is."
    return f"{text}\n\n{list_table(('folder', 'names'), rows, widths=(25, 75))}"


def rows_by_method(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a table of results by method.

    Args:
        path: CSV file with a column `method`.
    """
    found = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found[row["method"]].append(row)
    return found


def results_table(rows: list[dict[str, str]]) -> str:
    """Return the table of measured rows.

    Args:
        rows: Rows of `methods.csv` of one method.
    """
    if not rows:
        return "No run has been measured."
    cells = [[code(row[key]) if key in ("options", "model") else row[key] for key in COLUMNS] for row in rows]
    text = (
        "Ten rounds on MNIST, one run; :doc:`the page of methods </docs/methods>` has the rows of all methods and says "
        "how they were made. Accuracies beside those of papers are in :doc:`/docs/results`."
    )
    return f"{text}\n\n{list_table(tuple(COLUMNS.values()), cells)}"
