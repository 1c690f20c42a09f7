from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.errors import InvalidOption

WEIGHTS = {
    "conv1.weight": torch.ones(2, 1, 3, 3),
    "conv1.bias": torch.ones(2),
    "norm.weight": torch.ones(2),
    "conv2.weight": torch.ones(2, 2, 3, 3),
    "head.weight": torch.ones(4, 2),
    "head.bias": torch.ones(4),
}


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, ["conv1.weight", "conv2.weight", "head.weight"]),
        ([], ["conv1.weight", "conv2.weight", "head.weight"]),
        ("conv*", ["conv1.weight", "conv2.weight"]),
        (["head*", "conv1.*"], ["conv1.weight", "head.weight"]),  # in the module's order, and no bias
        (["*", "!head*"], ["conv1.weight", "conv2.weight"]),
        (["!head*"], ["conv1.weight", "conv2.weight"]),
        (["!head*", "!conv1*"], ["conv2.weight"]),
        (["!conv1*", "conv*"], ["conv2.weight"]),  # in any order
        (["conv[12].weight"], ["conv1.weight", "conv2.weight"]),
        (("head.weight",), ["head.weight"]),
    ],
)
def test_patterns_choose_layers(layers, chosen):
    assert choose(WEIGHTS, layers, "Callback") == tuple(chosen)


@pytest.mark.parametrize("pattern", ["fc*", "CONV*", "conv1", "*.bias", "norm.*", "!fc*"])
def test_a_pattern_without_a_layer_is_refused_by_name(pattern):
    with pytest.raises(InvalidOption) as caught:
        choose(WEIGHTS, ["conv*", pattern], "Callback")
    assert f"`Callback`: the pattern {pattern!r} in `layers` matches no layer" in str(caught.value)
    assert "`conv1.weight`, `conv2.weight`, `head.weight`" in str(caught.value)


def test_nothing_left_is_refused():
    with pytest.raises(InvalidOption, match=r"`Callback\(layers=\['head\*', '!\*weight'\]\)` leaves no layer"):
        choose(WEIGHTS, ["head*", "!*weight"], "Callback")
    with pytest.raises(InvalidOption, match="there is none"):
        choose({"bias": torch.ones(3)}, None, "Callback")


def test_many_names_are_cut_short():
    many = {f"layer{number}": torch.ones(1, 1) for number in range(20)}
    with pytest.raises(InvalidOption, match="`layer11` and 8 more"):
        choose(many, "fc", "Callback")
