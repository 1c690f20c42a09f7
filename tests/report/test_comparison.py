"""Costs of a module before and after, as a table, and the figure of sensitivities."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.cost import ModelCosts, measure
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report.comparison import Comparison, compare_costs
from lightning_sparsefl.report.pictures import pixels
from lightning_sparsefl.report.sensitivity_picture import sensitivity_figure
from lightning_sparsefl.sparse import Sensitivity

TABLE = """\
                  before    after   share
parameters         1,234      617  50.0 %
forward FLOPs  20.5 kFLOP  205 FLOP   1.0 %
latency             2 ms  500 us  25.0 %"""


def test_parameters_and_operations_are_counted_and_time_is_measured():
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Dropout(), nn.Linear(18, 4)).train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    costs = measure(module, torch.zeros(2, 1, 5, 5), seconds=0.01)
    assert costs.parameters == 2 * 9 + 2 + 18 * 4 + 4
    assert costs.flops == 2 * (2 * 9 * 9 * 2 + 18) + 2 * (2 * 18 * 4 + 4)  # two samples
    assert 0 < costs.seconds < 1
    assert module.training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_the_table_has_both_and_their_ratio(capsys):
    table = Comparison(ModelCosts(1234, 20500.0, 2e-3), ModelCosts(617, 205.0, 5e-4))
    assert [line.split() for line in str(table).splitlines()] == [line.split() for line in TABLE.splitlines()]
    assert len({len(line) for line in str(table).splitlines()}) == 1
    table.print()
    assert [line.split() for line in TABLE.splitlines()][1] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_two_modules_are_measured_on_the_same_inputs():
    one, two = nn.Linear(8, 8), nn.Linear(8, 2)
    table = compare_costs(one, two, torch.zeros(1, 8), seconds=0.01)
    assert (table.before.parameters, table.after.parameters) == (72, 18)
    assert table.rows()[1] == ("forward FLOPs", "136 FLOP", "34 FLOP", "25.0 %")


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(InvalidOption, match="seconds"):
        measure(nn.Linear(1, 1), torch.zeros(1, 1), seconds=seconds)


def test_the_figure_has_a_curve_for_each_layer_and_the_dense_score():
    result = Sensitivity(0.9, (0.5, 0.1), {"net.0.weight": (0.88, 0.6), "net.2.weight": (0.9, 0.85)})
    figure = sensitivity_figure(result, "accuracy")
    (axes,) = figure.axes
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert curves == {"dense": [0.9, 0.9], "net.0.weight": [0.88, 0.6], "net.2.weight": [0.9, 0.85]}
    assert axes.get_ylabel() == "accuracy"
    assert pixels(figure).float().std() > 0
