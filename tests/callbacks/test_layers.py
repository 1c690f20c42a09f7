from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.errors import InvalidOption


class Net(nn.Module):
    """Layers of several types, one of them tied to a second name."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), Dilated(2, 2, 3)
        self.cell, self.head = nn.LSTM(2, 1), nn.Linear(2, 4)
        self.tail = nn.Linear(2, 4)
        self.tail.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1, 2))


class Dilated(nn.Conv2d):
    """A user's layer."""


CONVS, CELL, REST = ["conv1.weight", "conv2.weight"], ["cell.weight_ih_l0", "cell.weight_hh_l0"], ["head.weight"]
EVERY = [*CONVS, *CELL, *REST]


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, EVERY),
        ([], EVERY),
        ("conv*", ["conv1.weight", "conv2.weight"]),
        (["head*", "conv1.*"], ["conv1.weight", "head.weight"]),  # in the module's order, and no bias
        (["*", "!head*"], ["scale", *CONVS, *CELL]),
        (["!head*"], [*CONVS, *CELL]),
        (["!head*", "!conv1*"], ["conv2.weight", *CELL]),
        (["!conv1*", "conv*"], ["conv2.weight"]),  # in any order
        (["conv[12].weight"], ["conv1.weight", "conv2.weight"]),
        (("head.weight",), ["head.weight"]),
        ("type:Conv2d", CONVS),  # and what derives from it
        ("type:Dilated", ["conv2.weight"]),
        ("type:_ConvNd", CONVS),
        (["type:Conv*", "head*"], [*CONVS, *REST]),
        (["type:Conv2d", "!type:Dilated"], ["conv1.weight"]),
        (["!type:Conv2d", "!scale"], [*CELL, *REST]),
        ("type:LSTM", CELL),
        ("type:Net", ["scale"]),  # what a module holds itself
    ],
)
def test_patterns_choose_layers(layers, chosen):
    assert choose(Net(), layers, "Callback") == tuple(chosen)


@pytest.mark.parametrize("pattern", ["fc*", "CONV*", "conv1", "*.bias", "norm.*", "!fc*", "Conv2d", "tail.weight"])
def test_a_pattern_without_a_layer_is_refused_by_name(pattern):
    with pytest.raises(InvalidOption) as caught:
        choose(Net(), ["conv*", pattern], "Callback")
    assert f"`Callback`: the pattern {pattern!r} in `layers` matches no layer" in str(caught.value)
    assert "expected one for `scale`, `conv1.weight`, `conv2.weight`, `cell.weight_ih_l0`" in str(caught.value)


@pytest.mark.parametrize("pattern", ["type:Conv1d", "type:conv2d", "!type:GRU", "type:Module", "type:BatchNorm2d"])
def test_a_type_without_a_layer_is_refused_by_name(pattern):
    with pytest.raises(InvalidOption) as caught:
        choose(Net(), ["conv*", pattern], "Callback")
    assert f"`Callback`: the pattern {pattern!r} in `layers` matches no layer" in str(caught.value)
    assert "expected one for `type:Net`, `type:Conv2d`, `type:Dilated`, `type:LSTM`, `type:Linear`." in str(
        caught.value
    )


def test_nothing_left_is_refused():
    with pytest.raises(InvalidOption, match=r"`Callback\(layers=\['head\*', '!\*weight'\]\)` leaves no layer"):
        choose(Net(), ["head*", "!*weight"], "Callback")
    with pytest.raises(InvalidOption, match="`Callback` finds no layer: the module has no parameter of two or more"):
        choose(nn.BatchNorm1d(3), None, "Callback")


def test_many_names_are_cut_short():
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(InvalidOption, match=r"`11\.weight` and 8 more"):
        choose(many, "fc", "Callback")
