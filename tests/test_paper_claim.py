"""Methods of the papers' runs at equal costs: the comparison and the figures, on made-up rows."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[1] / "benchmarks" / "paper"
MODULES = ("_rows", "_tables", "_runs", "_data_sets", "claim", "figures")
LARGEST = 60_000
"""Bytes of a figure."""


@pytest.fixture(scope="module")
def paper():
    """The modules of the comparison by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture
def rows(paper, tmp_path):
    """A function that writes a run whose accuracy is linear in its rounds, and whose costs are `cost` a round."""

    def write(script, run, cost, end, *, seed=0, rounds=100, every=20, after="", curve=True):
        files = paper["_rows"]
        run = {"run": run, "seed": seed}
        points = [
            run | {"round": done - 1, "accuracy": end * done / rounds, "bytes": cost * done, "flops": 10 * cost * done}
            for done in range(every, rounds + 1, every)
        ]
        sent = {"bytes_down": cost * rounds / 4, "bytes_up": cost * rounds * 3 / 4}
        row = run | sent | {"rounds": rounds, "final": end, "after": after, "flops_train": 10 * cost * rounds}
        files.append(tmp_path / f"{script}.csv", [row])
        if curve:
            files.append(tmp_path / f"{script}_curves.csv", points, files.CURVE)
        return tmp_path

    return write


def group_of(paper, folder, script="fedlps_mnist", setting=0):
    (data_set,) = (one for one in paper["_data_sets"].DATA_SETS if one.script == script)
    return paper["_data_sets"].groups(data_set, folder=folder)[setting]


def places(ranking):
    return [(place.label, round(place.mean, 4), round(place.spent, 4)) for place in ranking.places]


def test_an_accuracy_at_a_budget_is_between_two_points_or_that_of_the_end(paper):
    point, accuracy_at = paper["_data_sets"].Point, paper["claim"].accuracy_at
    points = [point(10, 0.2, 100.0, 1.0), point(20, 0.6, 200.0, 2.0), point(30, 0.5, 300.0, 3.0)]
    budgets = np.linspace(0, 400, 81)
    for budget in budgets:
        before = [one for one in points if one.bytes <= budget]
        beyond = [one for one in points if one.bytes > budget]
        if not before or not beyond or 1.01 * budget >= 300:
            expected = before[-1].accuracy if before else None
        else:
            part = (budget - before[-1].bytes) / (beyond[0].bytes - before[-1].bytes)
            expected = (1 - part) * before[-1].accuracy + part * beyond[0].accuracy
        assert accuracy_at(points, "bytes", budget) == (None if expected is None else pytest.approx(expected))
    assert accuracy_at(points, "flops", 1.5) == pytest.approx(0.4)
    assert accuracy_at(points[2:], "bytes", 298.0) == 0.5  # 1 % above the budget
    assert accuracy_at(points[2:], "bytes", 200.0) is None  # a run without a curve


def test_methods_are_ranked_within_half_and_all_of_what_fedavg_spends(paper, rows):
    rows("fedlps_mnist", "fedavg", 100, 0.9)
    rows("fedlps_mnist", "ditto", 200, 0.96)
    rows("fedlps_mnist", "fedspa", 40, 0.8)
    group = group_of(paper, rows("fedlps_mnist", "fedprox", 101, 0.7, curve=False))
    ranking = paper["claim"].ranking
    half, whole = (ranking(group, "flops", share) for share in (0.5, 1.0))
    assert (half.budget, whole.budget) == (50_000, 100_000)
    assert places(half) == [("FedSpa, density .5", 0.8, 0.8), ("FedAvg", 0.45, 1), ("Ditto", 0.24, 1)]
    assert half.left_out == ["FedProx"]
    assert places(whole) == [
        ("FedAvg", 0.9, 1),
        ("FedSpa, density .5", 0.8, 0.4),
        ("FedProx", 0.7, 1),
        ("Ditto", 0.48, 1),
    ]
    assert whole.left_out == []


def test_only_equal_settings_and_methods_with_a_cell_of_their_own_are_compared(paper, rows):
    rows("fedlps_mnist", "fedavg", 100, 0.9)
    rows("fedlps_mnist", "fedavg-steps", 100, 0.5)
    rows("fedlps_mnist", "fedlps-sum", 100, 0.99)
    rows("fedlps_mnist", "fedper", 100, 0.99, rounds=60)
    folder = rows("fedlps_mnist", "fedlps", 50, 0.8)
    assert list(group_of(paper, folder).methods) == ["fedavg", "fedlps"]
    assert list(group_of(paper, folder, setting=1).methods) == ["fedavg"]
    assert paper["claim"].ranking(group_of(paper, folder, setting=1), "bytes", 1.0) is None


def test_methods_are_compared_over_the_seeds_that_all_have(paper, rows):
    for seed, end in enumerate([0.8, 0.6, 0.1]):
        rows("fedlps_mnist", "fedavg", 100, end, seed=seed)
    for seed, end in enumerate([0.7, 0.8]):
        rows("fedlps_mnist", "fedlps", 50 * (seed + 1), end, seed=seed)
    folder = rows("fedlps_mnist", "fedper", 100, 0.99, seed=1)
    ranking = paper["claim"].ranking(group_of(paper, folder), "bytes", 1.0)
    assert places(ranking) == [("FedLPS (P-UCBV, Dyn)", 0.75, 0.75), ("FedAvg", 0.7, 1)]
    assert ranking.places[0].percent == "75.00 (7.07)"
    assert ranking.left_out == ["FedPer"]


def test_fine_tuned_models_are_compared_after_whole_runs(paper, rows):
    rows("perfedmask_cifar10", "fedavg", 100, 0.6, after=0.7)
    rows("perfedmask_cifar10", "fedbabu", 90, 0.1, after=0.8)
    rows("perfedmask_cifar10", "mobilenet", 10, 0.1, after=0.9)
    folder = rows("perfedmask_cifar10", "optimized", 120, 0.1, after=0.9)
    *_, line = paper["claim"].summary(folder).splitlines()
    best = "FedBABU 80.0, then FedAvg 70.0 (PerFedMask, optimized needs more)"
    assert line == f"| CIFAR-10 (small CNN), fine-tuned models | all of FedAvg's | {best} | {best} |"


def test_the_table_has_a_dash_for_fewer_than_two_methods(paper, rows):
    rows("fedlps_mnist", "fedavg", 100, 0.9)
    rows("feddip_fashion", "fedavg-T200", 100, 0.8, rounds=200)
    folder = rows("feddip_fashion", "feddip-T200", 90, 0.9, rounds=200)
    claim = paper["claim"]
    head, rule, *lines = claim.table(folder).splitlines()
    assert {line.count("|") for line in (head, rule, *lines)} == {len(claim.HEAD) + 1}
    assert lines[0] == "| MNIST" + (len(claim.HEAD) - 1) * " | -" + " |"
    assert lines[1] == (
        "| Fashion-MNIST (T 200), global models | bytes | 10 kB (half) | FedDIP | 50.00 | 1.00 | FedAvg | 40.00 | 1.00 "
        "| 40.00 | 2 of 2 | 1 |"
    )
    best = "FedDIP 50.0, then FedAvg 40.0"
    assert claim.summary(folder).splitlines()[2:] == [
        "| MNIST | - | - | - |",
        f"| Fashion-MNIST (T 200), global models | half of FedAvg's | {best} | {best} |",
        "| EMNIST-Letters | - | - | - |",
        "| CIFAR-10 | - | - | - |",
    ]


def test_the_summary_takes_whole_runs_where_a_method_has_no_curve(paper, rows):
    rows("fedlps_mnist", "fedavg", 100, 0.9, curve=False)
    first = paper["claim"].summary(rows("fedlps_mnist", "fedlps", 50, 0.8)).splitlines()[2]
    assert first.startswith(
        "| MNIST (5 epochs), personal models | all of FedAvg's | FedAvg 90.0, then FedLPS (P-UCBV, Dyn) 80.0 |"
    )


def test_the_documents_show_the_comparison(paper, tmp_path, monkeypatch):
    claim = paper["claim"]
    document = claim.DOCUMENT.read_text()
    assert f"<!-- claim -->\n{claim.table()}\n<!-- /claim -->" in document
    assert f"<!-- claim -->\n{claim.summary()}\n<!-- /claim -->" in claim.README.read_text()
    for name, text in (("DOCUMENT", "no marks"), ("README", "Best: <!-- claim -->\nold\n<!-- /claim -->\nend")):
        monkeypatch.setattr(claim, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    claim.write()
    assert (tmp_path / "DOCUMENT").read_text() == "no marks"
    assert (tmp_path / "README").read_text() == f"Best: <!-- claim -->\n{claim.summary()}\n<!-- /claim -->\nend"


def test_the_document_shows_all_figures_and_they_are_small(paper):
    figures = paper["figures"]
    shown = figures.DOCUMENT.read_text().partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    assert sorted(figures.IMAGES.iterdir()) == sorted(
        figures.IMAGES / f"{one.script}.png" for one in figures.DATA_SETS if f"(images/{one.script}.png)" in shown
    )
    assert all(path.stat().st_size < LARGEST for path in figures.IMAGES.iterdir())


def test_colours_go_to_the_papers_method_fedavg_the_best_and_those_with_a_curve(paper, rows):
    for place, name in enumerate(["fedavg", "oort", "refl", "cs", "efd", "fedmp", "ditto", "hermes", "fedp3"]):
        folder = rows("fedlps_mnist", name, 100, 0.1 * place, curve=name != "fedp3")
    methods = group_of(paper, rows("fedlps_mnist", "prunefl", 100, 0.6, curve=False)).methods
    assert paper["figures"].highlighted(methods, "hermes") == [
        *("hermes", "fedavg", "fedp3", "ditto", "fedmp", "efd", "cs"),
    ]
    assert len(group_of(paper, folder).methods) == 10


def test_a_figure_has_a_line_for_each_method_and_a_panel_for_each_known_cost(paper, rows):
    for name in ("fedavg", "optimized", "fedbabu"):
        for seed in (0, 1):
            folder = rows("perfedmask_cifar10", name, 100, 0.6 + 0.1 * seed, seed=seed, after=0.9)
    figures, data_sets = paper["figures"], paper["_data_sets"]
    (group,) = data_sets.groups(data_sets.DATA_SETS[-1], score="final", folder=folder)
    figure = figures.draw(group, group_of(paper, folder, "perfedmask_cifar10"))
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "communication round",
        "bytes, both ways (kB)",
        "training FLOPs (kFLOP)",
    ]
    line, tuned = figure.axes[1].get_lines()[:2]
    np.testing.assert_allclose(line.get_xdata(), [2, 4, 6, 8, 10])
    np.testing.assert_allclose(line.get_ydata(), np.array([0.13, 0.26, 0.39, 0.52, 0.65]))
    assert (list(tuned.get_xdata()), list(tuned.get_ydata())) == ([10], [0.9])
    assert all(len(axes.get_lines()) == 6 for axes in figure.axes)
    assert figure.axes[0].get_ylim()[0] == pytest.approx(0.4)


def test_figures_are_drawn_from_the_files_alone(paper, rows, tmp_path):
    rows("feddip_fashion", "fedavg-T200", 100, 0.8, rounds=200)
    rows("fedlps_mnist", "fedavg", 100, 0.8, curve=False)
    rows("fedlps_mnist", "fedlps", 100, 0.8)
    folder = rows("feddip_fashion", "feddip-T200", 90, 0.9, rounds=200)
    text = paper["figures"].draw_all(folder, tmp_path / "images")
    (image,) = (tmp_path / "images").iterdir()
    assert image.name == "feddip_fashion.png"
    assert "(images/feddip_fashion.png)" in text
    assert image.stat().st_size < LARGEST
    content = image.read_bytes()
    assert Image.open(io.BytesIO(content)).size[0] > 600
    paper["figures"].draw_all(folder, tmp_path / "images")
    assert image.read_bytes() == content
