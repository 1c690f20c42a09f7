"""Scores with one layer pruned at a time, against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse import sensitivity, shrink
from lightning_sparsefl.sparse.units import find_groups

INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()


@torch.no_grad()
def evaluate(module):
    return float(module(INPUTS.double()).square().sum())


def test_each_score_is_that_of_a_module_with_that_layer_pruned():
    module, densities = net(), (0.5, 0.2)
    result = sensitivity(module, evaluate, densities)
    assert result.dense == evaluate(module)
    assert list(result.scores) == ["0.weight", "2.weight", "4.weight"]
    for name, scores in result.scores.items():
        for density, score in zip(densities, scores, strict=True):
            plain = net()
            weight = plain.get_parameter(name).detach()
            order = sorted(range(weight.numel()), key=lambda i: -abs(float(weight.view(-1)[i])))
            weight.view(-1)[order[math.ceil(density * weight.numel()) :]] = 0
            assert score == evaluate(plain) != result.dense


def test_a_table_of_whole_numbers_is_no_layer():
    module = net()
    module.table = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    assert list(sensitivity(module, evaluate, [0.5]).scores) == ["0.weight", "2.weight", "4.weight"]


def test_groups_of_units_are_pruned_as_they_are_removed():
    module = net()
    groups = find_groups(module, INPUTS.double())
    result = sensitivity(module, evaluate, [0.5], groups=groups)
    assert list(result.scores) == ["0", "2"]
    for group in groups:
        rows = module.get_parameter(f"{group.name}.weight").abs().sum(1)
        keep = {group.name: rows >= rows.sort(descending=True).values[2]}
        assert result.scores[group.name][0] == pytest.approx(evaluate(shrink(module, INPUTS.double(), keep=keep)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_has_its_own_weights_again(fails):
    module, calls = net(), []
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def scored(module):
        calls.append(1)
        if fails and len(calls) == 3:
            raise RuntimeError("out of data")
        return evaluate(module)

    if fails:
        with pytest.raises(RuntimeError, match="out of data"):
            sensitivity(module, scored)
    else:
        sensitivity(module, scored)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value.requires_grad for value in module.parameters())


def test_layers_are_chosen_by_globs():
    assert list(sensitivity(net(), evaluate, layers=["0.*", "4.*"]).scores) == ["0.weight", "4.weight"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"densities": (0.5, 0.0)}, r"expected numbers in \(0, 1\], got 0.0"),
        ({"densities": (1.5,)}, "got 1.5"),
        ({"layers": "conv*"}, "matches no layer; expected one or more of `0.weight`, `2.weight`, `4.weight`"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(InvalidOption, match=said):
        sensitivity(net(), evaluate, **options)


def test_layers_that_cannot_be_masked_are_left_out():
    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    module = nn.Sequential(weight_norm(nn.Linear(4, 6)), spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2)).double()
    assert list(sensitivity(module, evaluate, [0.05]).scores) == ["1.parametrizations.weight.original", "2.weight"]
    with pytest.raises(InvalidOption, match=r"`layers='0.\*'` matches no layer; expected one or more of `1.param"):
        sensitivity(module, evaluate, [0.05], layers="0.*")
