"""Scores within a budget, against values that were computed by hand."""

import math

import pytest

from helpers.run_folders import write_run, write_table
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import Report, load_runs
from lightning_sparsefl.report.documents.cells import part_rows
from lightning_sparsefl.report.documents.tables import group_rows, latex, run_rows

RUNS = {  # bytes up, bytes down, FLOPs, and scores of the global and the personal models, after each round
    "FedSpa/0": [
        (40, 60, 10, None, None),
        (80, 120, 20, 0.5, 0.6),
        (120, 180, 30, None, None),
        (160, 240, 40, 0.7, 0.8),
    ],
    "FedSpa/1": [
        (50, 75, 12, None, None),
        (100, 150, 24, 0.4, 0.7),
        (150, 225, 36, 0.8, 0.9),
        (200, 300, 48, 0.6, 0.7),
    ],
    "FedSpa/2": [
        (60, 90, 14, None, None),
        (120, 180, 28, None, None),
        (180, 270, 42, 0.9, 1.0),
        (240, 360, 56, 0.5, 0.6),
    ],
    "FedAvg/0": [(300, 300, 60, 0.3, 0.2), (600, 600, 120, 0.4, 0.3)],
}
HEADER = ("comm/uplink_bytes_total", "comm/downlink_bytes_total", "flops/train_total", "global/acc", "personal/acc")


def rewrite(folder, rows):
    table = [{"round": number, **dict(zip(HEADER, row, strict=True))} for number, row in enumerate(rows)]
    write_table(folder / "metrics.csv", table)


@pytest.fixture
def root(tmp_path):
    for name, rows in RUNS.items():
        method, seed = name.split("/")
        rewrite(write_run(tmp_path / name, method, int(seed), rounds=len(rows)), rows)
    return tmp_path


def texts(report, model):
    """Return the headers and the rows of a table as text."""
    headers, rows = part_rows(report.summary, f"budget_{model}")
    return headers, {group: [cell.text("+-") for cell in cells] for group, cells in rows.items()}


def test_the_last_evaluated_round_within_a_budget_counts(root):
    report = Report(load_runs([root]), budget=400, flops_budget=24)
    headers, rows = texts(report, "global")
    assert headers == ["\u2264 400 B up and down", "\u2264 24 FLOP of training"]
    # of 400 bytes: 0.7 at 400, 0.8 at 375, none; of 24 FLOPs: 0.5 at 20, 0.4 at 24, none
    assert rows == {"FedAvg": ["-", "-"], "FedSpa": ["0.7500 +- 0.0707 (2/3)", "0.4500 +- 0.0707 (2/3)"]}
    assert texts(report, "personal")[1]["FedSpa"] == ["0.8500 +- 0.0707 (2/3)", "0.6500 +- 0.0707 (2/3)"]


@pytest.mark.parametrize(
    ("budget", "values"),
    [
        (199, [math.nan, math.nan, math.nan, math.nan]),
        (200, [math.nan, 0.5, math.nan, math.nan]),
        (249, [math.nan, 0.5, math.nan, math.nan]),
        (250, [math.nan, 0.5, 0.4, math.nan]),
        (399.9, [math.nan, 0.5, 0.8, math.nan]),
        (400, [math.nan, 0.7, 0.8, math.nan]),
        (450, [math.nan, 0.7, 0.8, 0.9]),
        (600, [0.3, 0.7, 0.6, 0.5]),
        (1e9, [0.4, 0.7, 0.6, 0.5]),
    ],
)
def test_a_cost_that_equals_the_budget_is_within_it(budget, values, root):
    summary = Report(load_runs([root]), budget=budget).summary
    found = [run["budget_global_bytes"] for group in ("FedAvg", "FedSpa") for run in summary.runs[group]]
    assert found == pytest.approx(values, nan_ok=True)


def test_the_best_score_within_a_budget_is_marked(root):
    report = Report(load_runs([root]), budget=600)
    _, rows = part_rows(report.summary, "budget_personal")
    assert {group: [cell.is_best for cell in cells] for group, cells in rows.items()} == {
        "FedAvg": [False],
        "FedSpa": [True],
    }


def test_without_a_budget_there_is_no_such_table(root):
    report = Report(load_runs([root]))
    assert not [part for part in report.summary.parts() if part.startswith("budget")]
    assert report.notes()[1:] == []  # but for the different numbers of rounds


def test_a_budget_below_all_costs_is_no_unknown_one(root):
    report = Report(load_runs([root]), budget=1)
    assert texts(report, "global")[1] == {"FedAvg": ["-"], "FedSpa": ["-"]}
    assert "FedAvg & 1 & - \\\\" in latex(report.summary, "budget_global").splitlines()
    assert {row["budget_global_bytes_count"] for row in group_rows(report.summary)} == {0}
    assert all(math.isnan(row["budget_global_bytes"]) for row in run_rows(report.summary, report.groups, report.names))
    assert not any("not known" in note for note in report.notes())


def test_unknown_costs_give_empty_cells(root):
    rows = [(up, down, "", *scores) for up, down, _, *scores in RUNS["FedAvg/0"]]
    rewrite(root / "FedAvg" / "0", rows)
    report = Report(load_runs([root]), flops_budget=1)
    assert texts(report, "global")[1] == {"FedAvg": [""], "FedSpa": ["-"]}
    (note,) = Report(load_runs([root / "FedAvg"]), budget=600, flops_budget=1).notes()
    assert note == (
        "Scores within 1 FLOP of training are not known, since no run folder has these costs of the first rounds "
        "(`--flops_budget`)."
    )


def test_rounds_in_another_folder_may_have_been_within_the_budget(root):
    path = root / "FedSpa" / "0" / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[3:]]))
    runs = load_runs([root / "FedSpa" / "0"])
    assert "budget_global" not in Report(runs, budget=200).summary.parts()
    assert texts(Report(runs, budget=400), "global")[1] == {"FedSpa": ["0.7000"]}


def test_a_score_that_is_not_finite_is_not_replaced_by_an_earlier_one(root):
    folder = root / "FedAvg" / "0"
    rewrite(folder, [RUNS["FedAvg/0"][0], (600, 600, 120, "nan", 0.3)])
    lines = (folder / "metrics.csv").read_text().splitlines()
    table = [lines[0] + ",comm/scoring_bytes", *(f"{line},5" for line in lines[1:])]
    (folder / "metrics.csv").write_text("\n".join([*table, ""]))
    runs = load_runs([folder])
    assert texts(Report(runs, budget=1199), "global")[1] == {"FedAvg": ["0.3000"]}
    (values,) = Report(runs, budget=1200).summary.runs["FedAvg"]
    assert math.isnan(values["budget_global_bytes"])
    assert values["budget_personal_bytes"] == 0.3


def test_a_report_has_the_tables_and_explains_their_sign(root, tmp_path):
    report = Report(load_runs([root]), budget=1)
    text = report.write(tmp_path / "report").read_text(encoding="utf-8")
    assert "Last global acc within a budget" in text
    assert "A cell with - is one of a group without an evaluated round within the budget." in text
    for model in ("global", "personal"):
        assert (tmp_path / "report" / "tables" / f"budget_{model}.tex").is_file()


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "170kB"])
@pytest.mark.parametrize(("option", "unit"), [("budget", "bytes"), ("flops_budget", "FLOPs")])
def test_a_budget_must_be_a_number_above_0(value, option, unit, report):
    with pytest.raises(InvalidOption, match=rf"`{option}` is {value!r}; expected a number of {unit} above 0, such as"):
        Report(report.runs, **{option: value})
