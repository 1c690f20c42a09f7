"""Tables of a report as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_sparsefl.report.documents.cells import Cell, part_rows
from lightning_sparsefl.report.measures.summary import AT_LEAST, AT_MOST, Summary
from lightning_sparsefl.report.reading.groups import Group

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with an empty cell for an unknown number.

    Args:
        rows: Rows as mappings from column to value.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if _is_unknown(value) else value for name, value in row.items()})
    return text.getvalue()


def _is_unknown(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def group_rows(summary: Summary) -> list[dict[str, Any]]:
    """Return one row for each group, with the mean, the standard deviation and the number of values of each measure.

    Args:
        summary: Table of a report.
    """
    return [
        {
            "group": group,
            "runs": len(summary.runs[group]),
            **{
                f"{measure.name}_{part}": getattr(values[measure.name], part)
                for measure in summary.measures
                for part in ("mean", "std", "count")
            },
        }
        for group, values in summary.groups.items()
    ]


def run_rows(summary: Summary, groups: Sequence[Group], names: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Return one row for each run, with its values and the options that differ between groups.

    Args:
        summary: Table of a report.
        groups: Groups of runs.
        names: Short names of the runs by path.
    """
    return [
        {
            "run": names[run.path],
            "group": group.name,
            "seed": run.seed,
            "finished": int(run.is_finished),
            **{measure.name: values[measure.name] for measure in summary.measures},
            **group.options,
        }
        for group in groups
        for run, values in zip(group.runs, summary.runs[group.name], strict=True)
    ]


def markdown(summary: Summary) -> str:
    """Return the parts of the table in Markdown, with the best means in bold.

    Args:
        summary: Table of a report.
    """
    return "\n".join(f"### {_escaped(title)}\n\n{_markdown(summary, part)}" for part, title in _titles(summary))


def _titles(summary: Summary) -> list[tuple[str, str]]:
    return [(part, summary.titles[part]) for part in summary.parts()]


def _markdown(summary: Summary, part: str) -> str:
    headers, rows = part_rows(summary, part)
    lines = [["group", "runs", *map(_escaped, headers)], ["---", *["---:"] * (len(headers) + 1)]]
    for group, cells in rows.items():
        lines.append([_escaped(group), str(len(summary.runs[group])), *(_bold(cell, "**{}**") for cell in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _bold(cell: Cell, form: str) -> str:
    return form.format(cell.text()) if cell.is_best else cell.text()


def latex(summary: Summary, part: str) -> str:
    r"""Return a part of the table in LaTeX, for ``\usepackage{booktabs}``, with the best means in bold.

    Args:
        summary: Table of a report.
        part: Name of the part.
    """
    headers, rows = part_rows(summary, part)
    body = [
        [latex_text(group), str(len(summary.runs[group])), *(_latex_cell(cell) for cell in cells)]
        for group, cells in rows.items()
    ]
    title = " ".join(summary.titles[part].split())
    lines = [
        f"% {title}: mean and sample standard deviation over runs; needs \\usepackage{{booktabs}}",
        f"\\begin{{tabular}}{{l{'r' * (len(headers) + 1)}}}",
        "\\toprule",
        _latex_row(["group", "runs", *map(latex_text, headers)]),
        "\\midrule",
        *map(_latex_row, body),
        "\\bottomrule",
        "\\end{tabular}\n",
    ]
    return "\n".join(lines).replace(AT_LEAST, ">=").replace(AT_MOST, "<=")


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _latex_cell(cell: Cell) -> str:
    if not cell.mean:
        return cell.note
    number = f"\\mathbf{{{cell.mean}}}" if cell.is_best else cell.mean
    number = f"${number} \\pm {cell.std}$" if cell.std else f"${number}$"
    return "~".join(part for part in (number, cell.unit, cell.note) if part)


def latex_text(text: str) -> str:
    r"""Escape the characters of a text that LaTeX treats in a special way.

    Args:
        text: Text.

    Example:
        >>> latex_text("test_acc 50%")
        'test\\_acc 50\\%'
    """
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
