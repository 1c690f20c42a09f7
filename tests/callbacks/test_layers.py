from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from helpers.masking import KINDS
from lightning_sparsefl.callbacks import GroupPenalty, LearnedImportance, PowerPropagation, SparsityMonitor, StaticMask
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


@pytest.mark.parametrize("kind", [*KINDS, GroupPenalty, LearnedImportance, PowerPropagation, SparsityMonitor])
def test_an_empty_list_is_refused(kind, net, fit):
    message = rf"^`{kind.__name__}\(layers=\[\]\)`: expected a pattern, a list of patterns, or None for all\.$"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [kind(layers=[])])


def test_many_names_are_cut_short():
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    with pytest.raises(InvalidOption, match=r"`11\.weight` and 8 more"):
        choose(many, "fc", "Callback")


class Parts(nn.Module):
    """What networks hold besides weights of layers."""

    def __init__(self):
        super().__init__()
        self.class_token, self.positions = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.ones(1, 5, 8))
        self.layer_scale = nn.Parameter(torch.ones(8, 1, 1))
        self.norm, self.embedding = nn.LayerNorm([4, 8]), nn.Embedding(4, 8)
        self.attention, self.cell = nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.GRUCell(8, 8)
        self.head, self.own = nn.Linear(8, 1), Own()
        self.codes = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)


class Own(nn.Module):
    """A linear layer of a library of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 8)), nn.Parameter(torch.ones(3))


def test_weights_of_linear_maps_are_the_default():
    expected = ["embedding.weight", "attention.in_proj_weight", "attention.out_proj.weight"]
    expected += ["cell.weight_ih", "cell.weight_hh", "head.weight", "own.weight"]
    assert choose(Parts(), None, "Callback") == tuple(expected)
    assert choose(Parts(), "!attention*", "Callback") == tuple(n for n in expected if "attention" not in n)
    assert choose(Parts(), "*positions", "Callback") == ("positions",)
    assert choose(Parts(), ["!head*", "!class_token"], "Callback") == tuple(n for n in expected if "head" not in n)


@pytest.mark.parametrize(
    ("name", "odd"), [("convnext_tiny", "layer_scale"), ("vit_b_16", "class_token"), ("swin_t", "bias_table")]
)
def test_defaults_in_networks_of_torchvision(name, odd):
    with torch.device("meta"):
        net = getattr(torchvision.models, name)()
    chosen, kinds = choose(net, None, "Callback"), nn.Linear | nn.Conv2d | nn.MultiheadAttention
    assert all(isinstance(net.get_submodule(each.rpartition(".")[0]), kinds) for each in chosen)
    assert not any(odd in each for each in chosen)
    assert any(odd in each for each, _ in net.named_parameters())


def test_integers_are_never_chosen():
    with pytest.raises(InvalidOption, match="'codes' in `layers` matches no layer"):
        choose(Parts(), "codes", "Callback")
    module = nn.Module()
    module.codes = nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(InvalidOption, match="has no parameter of two or more dimensions"):
        choose(module, None, "Callback")


def test_a_module_of_bare_parameters_needs_patterns():
    module = nn.Module()
    module.kernel = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(InvalidOption, match=r"finds no weight of a linear, .* in `layers`, among `kernel`"):
        choose(module, None, "Callback")
    assert choose(module, "kernel", "Callback") == ("kernel",)


@pytest.mark.parametrize("pattern", ["tail.weight", "!tail*"])
def test_a_tied_name_is_explained(pattern):
    with pytest.raises(InvalidOption, match=r"`tail.weight` is tied to `head.weight`, which is its name here\.$"):
        choose(Net(), pattern, "Callback")


def test_a_layer_without_a_shape_is_refused():
    with pytest.raises(InvalidOption, match=r"`0\.weight` has no shape yet; expected lazy layers to be initialized in"):
        choose(nn.Sequential(nn.LazyLinear(2)), None, "Callback")


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight + weight.T


def parametrized(kind):
    layer = nn.Linear(4, 4)
    if kind == "own":
        return nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    if kind == "weight_norm, old":
        with pytest.warns(FutureWarning):
            return nn.utils.weight_norm(layer)
    return getattr(nn.utils.parametrizations, kind)(layer)


KINDS = ["weight_norm", "weight_norm, old", "orthogonal", "own"]


@pytest.mark.parametrize("kind", KINDS)
def test_parametrizations_that_change_zeros_are_refused(kind):
    net = nn.Sequential(parametrized(kind), nn.Linear(4, 2))
    callback = StaticMask(0.5)
    with pytest.raises(InvalidOption, match=r"`StaticMask` cannot mask `0.weight`, which the param.* with '!0\.\*' in"):
        callback.claims(net)
    callback = StaticMask(0.5, layers="!0.*")
    assert callback.claims(net) == ("1.weight",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_is_not_put_on_what_a_weight_is_computed_from(kind):
    net = nn.Sequential(parametrized(kind), nn.Linear(4, 2))
    with pytest.raises(InvalidOption, match=r"`GroupPenalty` cannot penalize `0.weight`, which .* with '!0\.\*' in"):
        GroupPenalty().choose(net)
    assert GroupPenalty(layers="!0.*").choose(net) == ("1.weight",)


@pytest.mark.parametrize("kind", ["new", "old"])
def test_spectral_norm_keeps_zeros_and_is_seen_through(kind):
    norm = nn.utils.parametrizations.spectral_norm if kind == "new" else nn.utils.spectral_norm
    net = nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    name = "0.parametrizations.weight.original" if kind == "new" else "0.weight_orig"
    assert StaticMask(0.5).claims(net) == (name, "2.weight")
    assert choose(net, "0.weight", "Callback") == (name,)
    assert choose(net, "type:Linear", "Callback") == (name, "2.weight")
