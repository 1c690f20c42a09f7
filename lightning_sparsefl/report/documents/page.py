"""The HTML page of a report: one file with everything embedded, without scripts and without references."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.report.documents.cells import Cell, part_rows
from lightning_sparsefl.report.documents.style_sheet import STYLE
from lightning_sparsefl.report.measures.summary import Summary
from lightning_sparsefl.report.plots.data import Plot
from lightning_sparsefl.report.reading.groups import Group
from lightning_sparsefl.report.reading.runs import Run


def page(
    title: str,
    facts: Sequence[str],
    notes: Sequence[str],
    summary: Summary,
    plots: Sequence[Plot],
    pictures: Mapping[str, bytes],
    groups: Sequence[Group],
    names: Mapping[Any, str],
) -> str:
    """Return the page.

    Args:
        title: Title of the page.
        facts: Sentences below the title.
        notes: Sentences about what is not as it should be.
        summary: Table of the groups.
        plots: Figures in their order, also those that are missing.
        pictures: SVG files by the name of the figure.
        groups: Groups of runs.
        names: Short names of the runs by path.
    """
    sections = [
        *(_table(summary, part) for part in summary.parts()),
        '<h2 id="figures">Figures</h2>',
        '<div class="figures">' + "".join(_figure(plot, pictures.get(plot.name, b"")) for plot in plots) + "</div>",
        _options(groups),
        _runs(groups, names),
    ]
    return _DOCUMENT.format(
        title=escape(title),
        style=STYLE,
        facts="".join(f"<p>{escape(fact)}</p>" for fact in facts),
        notes=f"<ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else "",
        sections="\n".join(sections),
        version=escape(__version__),
    )


_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
{facts}
{notes}
{sections}
<footer>lightning-sparsefl {version}</footer>
</main>
</body>
</html>
"""


def _table(summary: Summary, part: str) -> str:
    headers, rows = part_rows(summary, part)
    body: list[list[str | Cell]] = [[name, str(len(summary.runs[name])), *cells] for name, cells in rows.items()]
    return f"<h2>{escape(summary.titles[part])}</h2>" + _html_table(["group", "runs", *headers], body)


def _html_table(headers: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    """Return a table that scrolls within itself, with the best numbers in bold."""
    head = "".join(f"<th scope='col'>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in rows)
    return f"<div class='table'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _html_cell(value: str | Cell) -> str:
    text = escape(value if isinstance(value, str) else value.text())
    return f"<td><b>{text}</b></td>" if isinstance(value, Cell) and value.is_best else f"<td>{text}</td>"


def _figure(plot: Plot, picture: bytes) -> str:
    title, caption = escape(plot.title), escape(plot.caption)
    if plot.missing is not None:
        return f"<figure class='missing'><h3>{title}</h3><p>Not available: {escape(plot.missing)}.</p></figure>"
    data = base64.b64encode(picture).decode()
    image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
    return (
        f"<figure id='{escape(plot.name)}'><h3>{title}</h3>{image}<figcaption>{caption} "
        f"<span class='files'>figures/{escape(plot.name)}.png, .pdf, .svg, .csv</span></figcaption></figure>"
    )


def _options(groups: Sequence[Group]) -> str:
    """Return the options that differ between groups, and those that all runs share."""
    keys = list(dict.fromkeys(key for group in groups for key in group.options))
    differing = _html_table(
        ["group", *keys], [[group.name, *(_shown(group.options.get(key)) for key in keys)] for group in groups]
    )
    shared = _shared([run for group in groups for run in group.runs])
    table = _html_table(["option", "value"], [[name, _shown(value)] for name, value in shared.items()])
    return (
        f"<h2>Options</h2><p>Options that differ between groups:</p>{differing}"
        f"<details><summary>{len(shared)} options that all runs share</summary>{table}</details>"
    )


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0].options
    return {name: v for name, v in sorted(first.items()) if all(run.options.get(name) == v for run in runs)}


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _runs(groups: Sequence[Group], names: Mapping[Any, str]) -> str:
    rows = [
        [names[run.path], group.name, run.seed, str(run.rounds), "finished" if run.is_finished else "not finished"]
        for group in groups
        for run in group.runs
    ]
    return "<h2>Runs</h2>" + _html_table(["run", "group", "seed", "rounds", "state"], rows)
