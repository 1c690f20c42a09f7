"""The numbers of the tables against a slow computation from the files."""

import json
import math
import statistics

import numpy as np
import pytest

from helpers.run_folders import read_table, write_run, write_table
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import Report, Run, load_runs
from lightning_sparsefl.report.measures.mean_std import MeanStd, mean_std
from lightning_sparsefl.report.measures.values import reached


def final(folder, name):
    """Return the last number of a column."""
    return [float(row[name]) for row in read_table(folder / "metrics.csv") if row.get(name)][-1]


def spent_until(folder, key, target):
    """Return rounds, bytes, FLOPs and seconds up to the first row that reaches a target, None if it never does."""
    seconds = 0.0
    for row in read_table(folder / "metrics.csv"):
        seconds += float(row["time/simulated"]) if "time/simulated" in row else math.nan
        if row[key] and float(row[key]) >= target:
            both = int(row["comm/uplink_bytes_total"]) + int(row["comm/downlink_bytes_total"])
            flops = float(row["flops/train_total"]) if "flops/train_total" in row else math.nan
            return int(row["round"]) + 1, both, flops, seconds
    return None


def expected(values):
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return (math.nan, math.nan, 0)
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else math.nan, len(known)


def same(found: MeanStd, values):
    return (found.mean, found.std, found.count) == pytest.approx(expected(values), nan_ok=True)


@pytest.mark.parametrize(
    ("measure", "column"),
    [
        ("global_val_acc", "global/val_acc"),
        ("personal_val_acc", "personal/val_acc"),
        ("personal_worst10_val_acc", "personal/val_acc_worst10"),
        ("bytes_up", "comm/uplink_bytes_total"),
        ("bytes_down", "comm/downlink_bytes_total"),
        ("density", "density/all"),
    ],
)
def test_scores_and_costs_are_those_of_the_last_row(measure, column, report, folders):
    for group in ("FedAvg", "FedSpa"):
        values = [final(folder, column) for folder in sorted((folders / group).iterdir())]
        assert same(report.summary.groups[group][measure], values)
        assert [run[measure] for run in report.summary.runs[group]] == values


def test_simulated_time_is_the_sum_over_rounds(report, folders):
    tables = [read_table(folder / "metrics.csv") for folder in sorted((folders / "FedSpa").iterdir())]
    values = [sum(float(row["time/simulated"]) for row in table) for table in tables]
    assert same(report.summary.groups["FedSpa"]["seconds"], values)


def test_unknown_costs_stay_unknown(report):
    for name in ("flops", "seconds", "target_personal_flops", "target_personal_seconds"):
        assert report.summary.groups["FedAvg"][name].count == 0
        assert math.isnan(report.summary.groups["FedAvg"][name].mean)


@pytest.mark.parametrize("model", ["global", "personal"])
def test_costs_to_a_target(model, report, folders):
    for group in ("FedAvg", "FedSpa"):
        spent = [spent_until(folder, f"{model}/val_acc", 0.6) for folder in sorted((folders / group).iterdir())]
        assert any(spent), "the target can be reached"
        for place, name in enumerate(("rounds", "bytes", "flops", "seconds")):
            values = [math.nan if found is None else found[place] for found in spent]
            assert same(report.summary.groups[group][f"target_{model}_{name}"], values)


def test_a_target_that_some_runs_miss_counts_those_that_reach_it(folders):
    best = [final(folder, "personal/val_acc") for folder in sorted((folders / "FedSpa").iterdir())]
    between = sorted(best)[-1] - 1e-9
    report = Report(load_runs([folders / "FedSpa"]), target=between)
    assert report.summary.groups["FedSpa"]["target_personal_rounds"].count == 1
    missed = reached(report.runs[best.index(min(best))], "personal/val_acc", between)
    assert math.isnan(missed.rounds)
    assert math.isnan(missed.bytes)


def test_the_default_target_is_the_best_that_every_run_has_reached(folders):
    report = Report(load_runs([folders]))
    for model in ("global", "personal"):
        tables = [read_table(folder / "metrics.csv") for folder in folders.glob("*/*")]
        key = f"{model}/val_acc"
        bests = [max(float(row[key]) for row in table if row[key]) for table in tables]
        assert report.targets[model] == math.floor(min(bests) * 100) / 100
        for group in report.groups:
            assert report.summary.groups[group.name][f"target_{model}_rounds"].count == len(group.runs)


def test_costs_to_a_target_are_unknown_where_the_first_rounds_are_in_another_folder(tmp_path):
    folder = write_run(tmp_path / "FedSpa" / "version_0")
    rows = read_table(folder / "metrics.csv")
    write_table(folder / "metrics.csv", rows[2:])
    report = Report(load_runs([folder]), target=0.3)
    (run,) = report.summary.runs["FedSpa"]
    unknown = [name for name in run if name.startswith("target_")]
    assert len(unknown) == 8
    assert all(math.isnan(run[name]) for name in [*unknown, "seconds"])
    assert run["bytes_up"] == float(rows[-1]["comm/uplink_bytes_total"])
    assert report.notes() == [
        "FedSpa/version_0 has no rounds before round 3 in its folder, so that its costs to a target are not known."
    ]


@pytest.mark.parametrize(
    ("metric", "best", "target"),
    [("val_acc", 0.19, 0.19), ("val_acc", 0.1899, 0.18), ("val_loss", 0.56, 0.56), ("val_loss", 0.5601, 0.57)],
)
def test_the_rounding_of_float32_does_not_change_a_target(metric, best, target, tmp_path):
    stored = float(np.float32(best))
    run = Run(tmp_path, {"algorithm": "FedAvg"}, {"round": np.arange(1.0), f"global/{metric}": np.array([stored])})
    report = Report([run], metric=metric)
    assert report.targets["global"] == target
    assert Report([run], metric=metric, target=best).summary.runs["FedAvg"][0]["target_global_rounds"] == 1


def test_of_a_loss_the_lowest_is_the_best(folders):
    report = Report(load_runs([folders]), metric="val_loss")
    assert list(report.targets) == ["global"]
    losses = [final(folder, "global/val_loss") for folder in folders.glob("*/*")]
    assert max(losses) <= report.targets["global"] < max(losses) + 0.01
    measure = next(m for m in report.summary.measures if m.name == "global_val_loss")
    means = [values["global_val_loss"].mean for values in report.summary.groups.values()]
    assert report.summary.best(measure) == min(means)


def test_scores_after_the_last_round_are_those_of_the_summary(report, folders):
    values = [
        json.loads(path.read_text())["finetuned/val_acc"] for path in sorted((folders / "FedSpa").glob("*/*.json"))
    ]
    assert same(report.summary.groups["FedSpa"]["finetuned_val_acc"], values)


def test_a_score_of_the_last_evaluation_that_is_not_finite_is_unknown(tmp_path):
    folder = write_run(tmp_path / "run", rounds=5)
    rows = read_table(folder / "metrics.csv")
    scored = [row for row in rows if row["global/val_acc"]]
    scored[-1]["global/val_acc"] = "nan"
    write_table(folder / "metrics.csv", rows)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "global/val_acc": None}))
    (run,) = Report(load_runs([folder])).summary.runs["FedSpa"]
    assert len(scored) > 1
    assert math.isnan(run["global_val_acc"])
    assert run["personal_val_acc"] == final(folder, "personal/val_acc")


def test_a_run_that_is_still_going_has_the_scores_of_its_last_evaluation(tmp_path):
    folder = write_run(tmp_path / "run", rounds=5, finished=False)
    (run,) = Report(load_runs([folder])).summary.runs["FedSpa"]
    assert run["global_val_acc"] == final(folder, "global/val_acc")
    assert math.isnan(run["finetuned_val_acc"])


def test_a_missing_metric_is_refused(folders):
    with pytest.raises(
        InvalidOption, match=r"`metric` is 'acc', which .*version_0 does not have; .* val_loss, val_acc\."
    ):
        Report(load_runs([folders]), metric="acc")


def test_the_time_of_a_run_whose_last_round_has_none_is_unknown(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = read_table(folder / "metrics.csv")
    write_table(folder / "metrics.csv", [*rows[:-1], {**rows[-1], "time/simulated": ""}])
    summary = Report(load_runs([folder])).summary
    (values,) = next(iter(summary.runs.values()))
    assert math.isnan(values["seconds"])
    assert values["flops"] == final(folder, "flops/train_total")


def test_without_a_metric_in_common_each_list_is_shown(tmp_path):
    folders = [write_run(tmp_path / name, name) for name in ("FedAvg", "FedSpa", "FedProx")]
    for folder, metric in zip(folders, ("iou", "mse", "mse"), strict=True):
        path = folder / "metrics.csv"
        path.write_text(path.read_text().replace("val_loss", f"val_{metric}").replace("val_acc", f"other_{metric}"))
    message = r"The runs have no metric in common \(.*FedAvg: val_iou, other_iou; .*FedSpa: val_mse, other_mse\); expec"
    with pytest.raises(InvalidOption, match=message):
        Report(load_runs(folders))
    path.write_text(path.read_text().replace("other_mse", "val_acc"))
    assert Report(load_runs(folders[1:])).metric == "val_mse"  # `val_acc` is of one run only


def test_a_metric_cannot_be_asked_for_before_the_first_evaluation(tmp_path):
    run = load_runs([write_run(tmp_path / "run", rounds=0, finished=False)])
    assert Report(run).metric is None
    with pytest.raises(InvalidOption, match="`metric` is 'val_acc', but no run has been evaluated yet"):
        Report(run, metric="val_acc")


def test_a_target_must_be_a_number(report):
    with pytest.raises(InvalidOption, match="`target` is nan; expected a number"):
        Report(report.runs, target=math.nan)


def test_the_deviation_is_that_of_a_sample():
    values = [1.0, 2.0, 4.0]
    assert mean_std(values).std == pytest.approx(np.std(values, ddof=1))
