"""Tables as text: numbers as in the summary, unknown cells empty, and nothing that breaks the format."""

import csv
import io
import math

import pytest

from lightning_sparsefl.report.documents.cells import cell, part_rows
from lightning_sparsefl.report.documents.tables import csv_text, group_rows, latex, latex_text, markdown, run_rows
from lightning_sparsefl.report.measures.mean_std import MeanStd
from lightning_sparsefl.report.measures.summary import Measure, Summary


def parsed(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_groups_as_csv(report):
    rows = parsed(csv_text(group_rows(report.summary)))
    assert [row["group"] for row in rows] == ["FedAvg", "FedSpa"]
    for row in rows:
        for measure in report.summary.measures:
            value = report.summary.groups[row["group"]][measure.name]
            found = row[f"{measure.name}_mean"]
            assert found == ("" if math.isnan(value.mean) else repr(value.mean))
            assert row[f"{measure.name}_count"] == str(value.count)
    assert rows[0]["flops_mean"] == "", "unknown is not zero"


def test_runs_as_csv(report):
    rows = parsed(csv_text(run_rows(report.summary, report.groups, report.names)))
    assert [row["run"] for row in rows] == [f"FedAvg/version_{k}" for k in range(2)] + [
        f"FedSpa/version_{k}" for k in range(3)
    ]
    assert [row["seed"] for row in rows] == ["0", "1", "0", "1", "2"]
    assert float(rows[3]["bytes_up"]) == report.summary.runs["FedSpa"][1]["bytes_up"]
    assert rows[0]["flops"] == ""


def test_markdown_has_a_table_for_each_part(report):
    text = markdown(report.summary)
    assert text.count("### ") == len(report.summary.parts()) == 4
    lines = [line for line in text.splitlines() if line.startswith("| FedSpa |")]
    headers, rows = part_rows(report.summary, "costs")
    cells = [part.strip() for part in lines[1].strip("|").split("|")]
    assert cells[1] == "3"
    assert [text.strip("*") for text in cells[2:]] == [found.text() for found in rows["FedSpa"]]
    assert len(headers) + 2 == len(cells)


def test_the_name_of_a_metric_keeps_markdown_whole():
    metric = Measure("score", "global acc|<b>")
    summary = Summary(
        [metric], {"FedAvg": {"score": MeanStd(0.5, 0.1, 2)}}, {"FedAvg": [{}, {}]}, {"scores": "of acc<b>"}
    )
    assert markdown(summary).splitlines() == [
        "### of acc&lt;b>",
        "",
        "| group | runs | global acc\\|&lt;b> |",
        "| --- | ---: | ---: |",
        "| FedAvg | 2 | 0.5000 \u00b1 0.1000 |",
    ]


def test_latex_is_a_whole_table(report):
    text = latex(report.summary, "scores")
    lines = text.splitlines()
    assert lines[1].startswith("\\begin{tabular}{lrrrr")
    assert lines[-1] == "\\end{tabular}"
    rows = [line for line in lines if line.startswith(("FedAvg", "FedSpa"))]
    assert {row.count("&") for row in rows} == {lines[3].count("&")}
    assert "val\\_acc" in text
    assert sum(row.count("\\mathbf") for row in rows) >= 3
    assert text.isascii()


def test_the_best_is_the_highest_score_and_the_lowest_cost(report):
    for part, name in (("scores", "personal_val_acc"), ("costs", "bytes_up")):
        chosen = report.summary.parts()[part]
        place = [measure.name for measure in chosen].index(name)
        means = {group: values[name].mean for group, values in report.summary.groups.items()}
        best = (max if part == "scores" else min)(means, key=means.get)
        _, rows = part_rows(report.summary, part)
        assert [group for group, cells in rows.items() if cells[place].is_best] == [best]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (MeanStd(), "B", ""),
        (MeanStd(0.0, math.nan, 1), "B", "0 B"),
        (MeanStd(0.0, math.nan, 1), None, "0.0000"),
        (MeanStd(999.99e6, 1e6, 2), "B", "1.000 +- 0.001 GB"),
        (MeanStd(12, 0.0, 2), "", "12 +- 0"),
        (MeanStd(12.5, 0.7, 2), "", "12.5 +- 0.7"),
        (MeanStd(0.0123, 0.001, 2), "s", "12.30 +- 1.00 ms"),
    ],
)
def test_numbers_as_text(value, unit, text):
    assert cell(value, Measure("x", "x", unit=unit)).text("+-") == text


def test_how_many_runs_have_a_value_is_told():
    assert cell(MeanStd(1.0, math.nan, 1), Measure("x", "x"), runs=3).text() == "1.0000 (1/3)"
    assert cell(MeanStd(), Measure("x", "x"), runs=3).text() == ""


def test_signs_of_latex_are_escaped():
    assert latex_text("a_b & 50% {x}\n#1 \\ ~^<|>") == (
        r"a\_b \& 50\% \{x\} \#1 \textbackslash{} "
        r"\textasciitilde{}\textasciicircum{}\textless{}\textbar{}\textgreater{}"
    )
