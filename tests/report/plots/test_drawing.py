"""What is drawn is what the plot holds."""

import matplotlib as mpl
import numpy as np
import pytest

from helpers.run_folders import write_run
from lightning_sparsefl.report import Report, load_runs
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.plots.drawing import draw
from lightning_sparsefl.report.plots.style import COLOURS, DASHES, MARKERS, WIDTH, look, short_names


@pytest.fixture(scope="module")
def figures(report):
    places = {group.name: place for place, group in enumerate(report.groups)}
    return {plot.name: (plot, draw(plot, places)) for plot in report.plots}


def test_every_figure_has_the_width_of_a_column(figures):
    assert {figure.get_figwidth() for _, figure in figures.values()} == {WIDTH}
    assert len(figures) == 12


@pytest.mark.parametrize("name", ["score_rounds", "score_bytes_up", "mask_similarity_rounds"])
def test_lines_have_the_means_and_a_band_of_one_deviation(name, figures):
    plot, figure = figures[name]
    assert [axes.get_ylabel() for axes in figure.axes] == list(plot.panels)
    largest = max(line.x[-1].mean for lines in plot.panels.values() for line in lines)
    scale, unit = scaled_unit(largest, plot.x_unit) if plot.x_unit else (1.0, "")
    assert figure.axes[-1].get_xlabel().endswith(f"({unit})" if unit else plot.x_label)
    for axes, lines in zip(figure.axes, plot.panels.values(), strict=True):
        for drawn, band, line in zip(axes.get_lines(), axes.collections, lines, strict=True):
            assert drawn.get_label() == line.group
            np.testing.assert_allclose(drawn.get_xdata(), [point.mean / scale for point in line.x])
            np.testing.assert_allclose(drawn.get_ydata(), [point.mean for point in line.y])
            edges = {round(y, 9) for y in band.get_paths()[0].vertices[:, 1]}
            assert {round(point.mean + point.std, 9) for point in line.y} <= edges


def test_bars_have_the_means_and_a_missing_one_is_not_zero(figures):
    plot, figure = figures["target"]
    for axes, (panel, series) in zip(figure.axes, plot.series.items(), strict=True):
        means = [value.mean for values in series.values() for value in values.values()]
        scale, unit = scaled_unit(np.nanmax(means), plot.units[panel])
        assert axes.get_xlabel() == f"{panel} ({unit})"
        np.testing.assert_allclose([bar.get_width() for bar in axes.patches], np.nan_to_num(means) / scale)
        notes = [text.get_text() for text in axes.texts]
        values = [value for found in series.values() for value in found.items()]
        assert notes == [f"{v.count}/{plot.sizes[group]}" for group, v in values if v.count < plot.sizes[group]]


def test_boxes_have_the_quartiles_and_the_worst_tenth(figures):
    plot, figure = figures["clients"]
    axes = figure.axes[0]
    for bar, values in zip(axes.patches, plot.values.values(), strict=True):
        low, high = np.quantile(values, [0.25, 0.75])
        assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((low, high))
    dots = axes.collections[-1].get_offsets()
    assert dots[:, 0].tolist() == pytest.approx(list(plot.worst_tenths.values()))
    assert [label.get_text() for label in axes.get_yticklabels()] == list(plot.values)


@pytest.mark.parametrize("name", ["density", "mask_similarity", "participation"])
def test_colours_show_the_tables(name, figures):
    plot, figure = figures[name]
    drawn = [axes for axes in figure.axes if axes.images]
    for axes, panel in zip(drawn, plot.panels, strict=True):
        image = axes.images[0].get_array()
        np.testing.assert_array_equal(image.mask, np.isnan(panel.table))
        np.testing.assert_allclose(image.compressed(), panel.table[np.isfinite(panel.table)])
        assert axes.get_title(loc="left") == panel.title


def test_the_last_densities_are_written_beside_the_layers(figures):
    plot, figure = figures["density"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == [f"{value:.2f}" for value in plot.panels[0].table[:, -1]]


def test_costs_of_different_orders_are_on_a_logarithmic_axis(figures, report):
    plot, _ = figures["score_bytes_up"]
    lines = {label: list(lines) for label, lines in plot.panels.items()}
    small = lines["global val_acc"][0]
    large = type(small)("FedSpa", [type(p)(100 * p.mean, p.std, p.count) for p in small.x], small.y)
    places = {"FedAvg": 0, "FedSpa": 1}
    wide = type(plot)(**{**vars(plot), "panels": {"global val_acc": [small, large]}})
    assert draw(wide, places).axes[0].get_xscale() == "log"
    assert draw(plot, places).axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("name", ["score_rounds", "mask_similarity_rounds"])
@pytest.mark.parametrize("rounds", [1, 2, 3, 40])
def test_the_ticks_of_rounds_are_whole_numbers(name, rounds, tmp_path):
    folder = write_run(tmp_path / "run", rounds=rounds, every=rounds if rounds < 40 else 2)
    report = Report(load_runs([folder]))
    plot = next(plot for plot in report.plots if plot.name == name)
    axes = draw(plot, {"FedSpa": 0}).axes[-1]
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown
    assert shown == [round(tick) for tick in shown]


def test_long_names_stay_apart_in_the_legend(report):
    plot = next(plot for plot in report.plots if plot.name == "score_rounds")
    line = plot.panels["global val_acc"][0]
    names = [f"FedSpa (a_long_name_of_an_option=1, density={value})" for value in (0.25, 0.5)]
    lines = [type(line)(name, line.x, line.y) for name in names]
    figure = draw(type(plot)(**{**vars(plot), "panels": {"a": lines}}), {names[0]: 0, names[1]: 1})
    legend = figure.legends[0]
    texts = [text.get_text() for text in legend.get_texts()]
    assert [text[-13:] for text in texts] == [name[-13:] for name in names]
    assert max(map(len, texts)) == 34
    assert [handle.get_color() for handle in legend.get_lines()] == [look(0)["color"], look(1)["color"]]


def test_groups_look_alike_only_after_many():
    looks = {(style["color"], str(style["linestyle"]), style["marker"]) for style in map(look, range(140))}
    assert len(looks) == len(COLOURS) * len(DASHES) * len(MARKERS) == 140


def test_dollars_in_a_name_are_text(folders, tmp_path):
    report = Report(load_runs([folders / "FedSpa"]))
    plot = next(plot for plot in report.plots if plot.name == "score_rounds")
    line = plot.panels["global val_acc"][0]
    odd = type(line)("$\\frac{x", line.x, line.y)
    draw(type(plot)(**{**vars(plot), "panels": {"a": [odd]}}), {odd.group: 0}).savefig(tmp_path / "x.png")


def test_the_settings_of_the_user_stay(figures, report):
    before = dict(mpl.rcParams)
    draw(figures["density"][0], {"FedSpa": 0})
    assert dict(mpl.rcParams) == before


def test_long_names_of_groups_stay_different_and_lose_the_path_of_a_module():
    names = [f"my_methods.Method (max_rounds={rounds}, shards_per_client=2)" for rounds in (4, 8)]
    assert short_names(names) == ["1: Method (max_...ds_per_client=2)", "2: Method (max_...ds_per_client=2)"]
    assert short_names(["mine.FedAvg", "FedSpa (density=0.5)"]) == ["FedAvg", "FedSpa (density=0.5)"]
    assert short_names(["mine.FedAvg", "FedAvg"]) == ["mine.FedAvg", "FedAvg"]
    assert short_names(["mine.FedAvg (lr=0.5), seed 0"]) == ["FedAvg (lr=0.5), seed 0"]
