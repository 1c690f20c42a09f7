"""The data that is handed to the figures, against a slow computation from the files."""

import math
import statistics

import numpy as np
import pytest

from helpers.run_folders import FAILED_ROUND, read_table, write_run, write_table
from lightning_sparsefl.report import Report, load_runs
from lightning_sparsefl.report.measures.direction import worst_tenth
from lightning_sparsefl.report.plots.drawing import draw


def plot(report, name):
    return next(plot for plot in report.plots if plot.name == name)


def tables(folders, group, name="metrics"):
    return [read_table(folder / f"{name}.csv") for folder in sorted((folders / group).iterdir())]


@pytest.mark.parametrize(
    ("name", "column"), [("rounds", None), ("bytes_up", "comm/uplink_bytes_total"), ("flops", "flops/train_total")]
)
def test_curves(name, column, report, folders):
    curves = plot(report, f"score_{name}")
    assert list(curves.panels) == ["global val_acc", "personal val_acc"]
    for panel, lines in curves.panels.items():
        assert [line.group for line in lines] == (["FedSpa"] if name == "flops" else ["FedAvg", "FedSpa"])
        for line in lines:
            found = tables(folders, line.group)
            rows = [[table[at] for table in found] for at in (1, 3, 5)]  # evaluated every second round
            xs = [[int(row["round"]) + 1 if column is None else float(row[column]) for row in part] for part in rows]
            ys = [[float(row[panel.replace(" ", "/")]) for row in part] for part in rows]
            assert [point.mean for point in line.x] == pytest.approx([statistics.fmean(part) for part in xs])
            assert [point.mean for point in line.y] == pytest.approx([statistics.fmean(part) for part in ys])
            assert [point.std for point in line.y] == pytest.approx([statistics.stdev(part) for part in ys])


def test_simulated_time_adds_up(report, folders):
    (line,) = plot(report, "score_seconds").panels["global val_acc"]
    sums = [sum(float(row["time/simulated"]) for row in table[:4]) for table in tables(folders, "FedSpa")]
    assert line.x[1].mean == pytest.approx(statistics.fmean(sums))


def test_a_clock_is_preferred_to_the_sum_of_rounds(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.csv").read_text().splitlines()
    lines = [f"{line},{'time/clock' if number == 0 else 10 * number}" for number, line in enumerate(lines)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (line,) = plot(Report(load_runs([folder])), "score_seconds").panels["global val_acc"]
    assert [point.mean for point in line.x] == [20, 40, 60]


def test_the_mean_is_over_the_runs_that_reached_a_round(tmp_path):
    for seed, rounds in enumerate((4, 6)):
        folder = write_run(tmp_path / str(seed), seed=seed, rounds=rounds, finished=False)
        (folder / "config.yaml").write_text(
            (folder / "config.yaml").read_text().replace("max_rounds: 4", "max_rounds: 6")
        )
    (line,) = plot(Report(load_runs([tmp_path])), "score_rounds").panels["global val_acc"]
    assert [point.mean for point in line.x] == [2, 4, 6]
    assert [point.count for point in line.y] == [2, 2, 1]
    assert math.isnan(line.y[2].std)


def test_bars_of_a_target(report):
    bars = plot(report, "target")
    assert list(bars.series) == ["bytes", "FLOPs"]
    for model in ("global", "personal"):
        values = bars.series["bytes"][f"{model} val_acc \u2265 0.6"]
        assert values == {name: found[f"target_{model}_bytes"] for name, found in report.summary.groups.items()}
    assert bars.sizes == {"FedAvg": 2, "FedSpa": 3}


def test_the_distribution_has_the_clients_of_all_runs(report, folders):
    boxes = plot(report, "clients")
    for group in ("FedAvg", "FedSpa"):
        scores = [
            [float(row["personal/val_acc"]) for row in table if row["round"] == "5"]
            for table in tables(folders, group, "clients")
        ]
        assert boxes.values[group].tolist() == [value for part in scores for value in part]
        tenths = statistics.fmean(worst_tenth(part, rising=True) for part in scores)
        assert boxes.worst_tenths[group] == pytest.approx(tenths)
        assert boxes.worst_tenths[group] == pytest.approx(report.summary.groups[group]["personal_worst10_val_acc"].mean)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("diverged", [1, None], ids=["one client", "all clients"])
def test_scores_of_clients_that_are_not_finite_are_no_earlier_ones(diverged, tmp_path):
    folder = write_run(tmp_path / "run")
    rows = read_table(folder / "clients.csv")
    scored = [row for row in rows if row["round"] == "5"]
    for row in scored[:diverged]:
        row["personal/val_acc"] = "nan"
    write_table(folder / "clients.csv", rows)
    report = Report(load_runs([folder]))
    boxes = plot(report, "clients")
    left = [float(row["personal/val_acc"]) for row in scored[diverged:]] if diverged else []
    assert [values.tolist() for values in boxes.values.values()] == ([left] if left else [])
    assert all(math.isnan(tenth) for tenth in boxes.worst_tenths.values())
    report.write(tmp_path / "report")


def test_densities_of_the_layers_are_means_over_runs(report, folders):
    maps = plot(report, "density")
    (panel,) = maps.panels
    assert (panel.title, panel.row_names) == ("FedSpa", ["net.fc1.weight", "net.fc2.weight"])
    assert panel.column_names == ["1", "2", "3", "4", "5", "6"]
    for row, name in enumerate(panel.row_names):
        columns = [[float(line[f"density/layer/{name}"]) for line in table] for table in tables(folders, "FedSpa")]
        np.testing.assert_allclose(panel.table[row], np.mean(columns, axis=0))


def test_similarities_are_those_of_the_last_recorded_round(report, folders):
    maps = plot(report, "mask_similarity")
    (panel,) = maps.panels
    assert panel.row_names == panel.column_names == ["0", "2", "4", "6"]
    assert np.isnan(np.diag(panel.table)).all()
    table = tables(folders, "FedSpa", "overlap")[0]
    newest = [row for row in table if row["round"] == "5"]
    assert len(newest) == 6
    for row in newest:
        first, other = int(row["client"]) // 2, int(row["other"]) // 2
        assert panel.table[first, other] == panel.table[other, first] == float(row["overlap"])
    assert "round 6." in maps.caption


def test_mean_similarities_over_rounds(report, folders):
    (line,) = plot(report, "mask_similarity_rounds").panels["mean overlap of masks"]
    assert [point.mean for point in line.x] == [2, 4, 6]
    for number, point in zip((1, 3, 5), line.y, strict=True):
        means = [
            statistics.fmean(float(row["overlap"]) for row in table if row["round"] == str(number))
            for table in tables(folders, "FedSpa", "overlap")
        ]
        assert (point.mean, point.std) == pytest.approx((statistics.fmean(means), statistics.stdev(means)))


def test_participation_shows_who_trained_how_long_and_who_failed(folders):
    maps = plot(Report(load_runs([folders / "FedSpa"])), "participation")
    (panel,) = maps.panels
    assert (panel.title, maps.colour_label) == ("FedSpa, seed 0", "simulated time")
    rows = tables(folders, "FedSpa", "clients")[0]
    trained = {(int(r["client"]), int(r["round"])): float(r["simulated_seconds"]) for r in rows if r["trained"] == "1"}
    found = {(int(r), int(c)): panel.table[r, c] for r, c in np.argwhere(np.isfinite(panel.table))}
    assert found == trained
    assert panel.marks == [(int(r["client"]), FAILED_ROUND) for r in rows if r["failure"]]
    assert len(panel.marks) == 1


def test_without_times_participation_is_filled_or_blank(report):
    maps = plot(report, "participation")
    assert maps.colour_label is None
    assert "durations are unknown" in maps.caption
    assert set(maps.panels[0].table[np.isfinite(maps.panels[0].table)]) == {1.0}


def test_durations_are_those_of_all_runs(report, folders):
    boxes = plot(report, "durations")
    rows = [row for table in tables(folders, "FedSpa", "clients") for row in table]
    assert list(boxes.values) == ["FedSpa"]
    assert boxes.values["FedSpa"].tolist() == [float(r["simulated_seconds"]) for r in rows if r["simulated_seconds"]]


def test_the_rows_of_a_plot_are_its_marks(report):
    curves = plot(report, "score_rounds").rows()
    assert curves[0].keys() == {"panel", "group", "x", "mean", "std", "runs"}
    assert len(curves) == 2 * 2 * 3
    assert len(plot(report, "target").rows()) == 2 * 2 * 2
    assert len(plot(report, "clients").rows()) == 5 * 12
    assert len(plot(report, "density").rows()) == 2 * 6
    assert len(plot(report, "mask_similarity").rows()) == 12


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("score_flops", "the FLOPs of the module could not be counted"),
        ("score_seconds", "time was not simulated"),
        ("durations", "time was not simulated"),
        ("density", "all layers are dense"),
        ("mask_similarity", "`overlap.csv`"),
        ("mask_similarity_rounds", "`overlap.csv`"),
    ],
)
def test_a_figure_says_what_is_missing(name, reason, folders):
    assert reason in plot(Report(load_runs([folders / "FedAvg"])), name).missing


def test_before_the_first_round_all_figures_are_missing(tmp_path):
    report = Report(load_runs([write_run(tmp_path / "run", rounds=0, finished=False)]))
    assert all(plot.missing for plot in report.plots)
    assert plot(report, "score_rounds").missing == "no round has been evaluated yet"


def test_within_the_first_round_the_figures_of_rounds_are_missing(tmp_path):
    folder = write_run(tmp_path / "run", rounds=1, finished=False)
    header = (folder / "metrics.csv").read_text().partition("\n")[0]
    (folder / "metrics.csv").write_text(f"{header}\n")  # the row of the round comes after those of its clients
    report = Report(load_runs([folder]))
    assert plot(report, "participation").missing
    assert plot(report, "density").missing
    assert report.write(tmp_path / "report").is_file()


def test_a_group_without_a_global_model_has_no_bar_of_it(tmp_path):
    write_run(tmp_path / "FedAvg" / "version_0", "FedAvg")
    write_run(tmp_path / "Local" / "version_0", "Local", common=False)
    report = Report(load_runs([tmp_path]))
    bars = plot(report, "target")
    groups = {name.partition(" ")[0]: sorted(values) for name, values in bars.series["bytes"].items()}
    assert groups == {"global": ["FedAvg"], "personal": ["FedAvg", "Local"]}
    assert len(bars.rows()) == 2 * 3
    assert report.write(tmp_path / "report").is_file()
    figure = draw(bars, {"FedAvg": 0, "Local": 1})
    assert [len(axes.patches) for axes in figure.axes] == [4, 4]  # one of them without a length
    assert not any(axes.texts for axes in figure.axes)


def test_a_target_that_no_run_reaches_is_missing(folders):
    bars = plot(Report(load_runs([folders]), target=2.0), "target")
    assert bars.missing == "no run with all of its rounds has reached the target (see `--target`)"


def test_a_line_ends_where_the_runs_with_the_highest_costs_do(tmp_path):
    """Else it would run backwards, and its end would not be its largest cost."""
    for seed, costs in enumerate(([100, 200, 300], [50, 100, 150, 200, 250])):
        folder = write_run(tmp_path / str(seed), seed=seed, finished=False)
        lines = [f"{n},{cost},{0.1 * n}" for n, cost in enumerate(costs)]
        (folder / "metrics.csv").write_text("\n".join(["round,comm/uplink_bytes_total,global/val_acc", *lines, ""]))
    report = Report(load_runs([tmp_path]))
    (line,) = plot(report, "score_bytes_up").panels["global val_acc"]
    assert [point.mean for point in line.x] == [75, 150, 225, 250]
    assert [point.mean for point in line.y] == pytest.approx([0, 0.1, 0.2, 0.4])
    (line,) = plot(report, "score_rounds").panels["global val_acc"]
    assert [point.mean for point in line.x] == [1, 2, 3, 4, 5]


def test_durations_are_those_of_clients_that_trained(tmp_path):
    """A late client has an expected time alone, unless its update is merged later."""
    folder = write_run(tmp_path / "run")
    rows = read_table(folder / "clients.csv")
    trained = [float(row["simulated_seconds"]) for row in rows if row["simulated_seconds"]]
    idle = next(row for row in rows if row["trained"] == "0" and not row["failure"])
    idle["simulated_seconds"] = "99"
    write_table(folder / "clients.csv", rows)
    assert sorted(plot(Report(load_runs([folder])), "durations").values["FedSpa"]) == sorted(trained)


def test_scores_that_are_not_finite_are_said_to_be_so(tmp_path):
    for name, loss in (("a", 1.0), ("b", math.nan)):
        folder = write_run(tmp_path / name, seed=ord(name))
        lines = [f"{n},0.5,{loss}" for n in range(3)]
        (folder / "metrics.csv").write_text("\n".join(["round,global/test_acc,global/test_loss", *lines, ""]))
    report = Report(load_runs([tmp_path]), metric="test_loss")
    (found,) = report.summary.groups.values()
    assert (found["global_test_loss"].mean, found["global_test_loss"].count) == (1.0, 1)
    diverged = Report(load_runs([tmp_path / "b"]), metric="test_loss")
    assert plot(diverged, "score_rounds").missing == "no score is a finite number"
