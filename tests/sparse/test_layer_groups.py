"""Groups of layers, on networks that were built without us in mind."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP, VGG11, AlexNet256, LeNet5, MobileNet, PreResNet18, ResNet18
from lightning_sparsefl.sparse.exits import exit_heads
from lightning_sparsefl.sparse.layer_groups import group_sizes, head_layer, head_of, layer_groups
from lightning_sparsefl.sparse.parts import layers_with_buffers, part


def split(module, patterns=(), head=None):
    """Groups of the body with their sizes, and the head's names."""
    weights = dict(module.named_parameters())
    last = head_of(weights, head)
    body = {name: value for name, value in weights.items() if name not in last}
    groups = layer_groups(body, patterns)
    together = [name for names in groups.values() for name in names]
    assert sorted(together) == sorted(body)
    return dict(zip(groups, group_sizes(body, groups), strict=True)), last


def on_meta(kind, **options):
    with torch.device("meta"):
        return kind(**options)


PAPER = {
    MobileNet: [928, 2528, 9152, 18048, 34688, 68864, 134912, *[268800] * 5, 531968, 1061888],
    PreResNet18: [1728, 73984, 73984, 229760, 295424, 918272, 1180672, 3671552, 4720640, 1024],
    AlexNet256: [23424, 307776, 664704, 885504, 590592, 37761024, 16789504],
}
BODY = {MobileNet: 3_206_976, PreResNet18: 11_167_040, AlexNet256: 57_022_528}


@pytest.mark.parametrize("kind", PAPER, ids=lambda kind: kind.__name__)
def test_the_networks_of_perfedmask(kind):
    groups, head = split(on_meta(kind))
    assert list(groups.values()) == PAPER[kind]
    assert sum(groups.values()) == BODY[kind]
    assert len(head) == 2


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (MLP, 1),
        (LeNet5, ["net.conv1", "net.conv2", "net.fc1"]),
        (VGG11, [f"net.conv{i}" for i in range(1, 9)]),
        (ResNet18, ["net.conv1", *[f"net.stage{i}.{j}" for i in range(1, 5) for j in range(2)]]),
        (torchvision.models.resnet18, ["conv1", *[f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]]),
        (torchvision.models.alexnet, [*[f"features.{i}" for i in (0, 3, 6, 8, 10)], "classifier.1", "classifier.4"]),
        (torchvision.models.mobilenet_v2, [f"features.{i}" for i in range(19)]),
        (torchvision.models.convnext_tiny, 23),
        (torchvision.models.swin_t, 17),
        (
            torchvision.models.vit_b_16,
            ["class_token", "conv_proj", "encoder.pos_embedding"]
            + [f"encoder.layers.encoder_layer_{i}" for i in range(12)]
            + ["encoder.ln"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_networks(build, names):
    groups, _ = split(on_meta(build))
    assert (len(groups) if isinstance(names, int) else list(groups)) == names


class Wrapped(nn.Module):
    """A classifier as in the libraries of language models: its blocks lie several modules deep."""

    def __init__(self):
        super().__init__()
        block = nn.ModuleDict({"layer": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in "ab")})
        body = {"embeddings": nn.Embedding(5, 2), "encoder": block, "pooler": nn.Linear(2, 2)}
        self.model = nn.ModuleDict({"bert": nn.ModuleDict(body), "classifier": nn.Linear(2, 3)})


def test_blocks_are_found_at_any_depth():
    groups, head = split(Wrapped())
    bert = "model.bert"
    blocks = [f"{bert}.encoder.layer.{place}" for place in range(2)]
    assert list(groups) == [f"{bert}.embeddings", *blocks, f"{bert}.pooler"]
    assert head == ("model.classifier.weight", "model.classifier.bias")


def test_a_norm_joins_the_layer_before_it_but_not_a_block():
    block = nn.ModuleDict({"conv": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2)})
    layers = [nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(block, block), nn.BatchNorm2d(2), nn.Linear(2, 2)]
    groups, head = split(nn.Sequential(*layers))
    assert list(groups) == ["0", "2.0", "3"]
    assert groups["0"] == 8
    assert head == ("4.weight", "4.bias")


def test_a_norm_before_everything_is_a_group():
    groups, _ = split(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)))
    assert groups == {"0": 4, "1": 10}


def test_patterns_come_first_and_the_rule_has_the_rest():
    patterns = ["net.stage[12].*", "net.stage2.*norm*", "net.stage4.*"]
    with pytest.raises(InvalidOption, match=r"'net.stage2.\*norm\*' in `groups` matches nothing new.*`net.conv1`"):
        split(on_meta(PreResNet18), patterns)
    groups, _ = split(on_meta(PreResNet18), ["net.stage[12].*", "net.stage4.*"])
    names = ["net.conv1", "net.stage[12].*", "net.stage3.0", "net.stage3.1", "net.stage4.*", "net.norm"]
    assert list(groups) == names
    assert groups["net.stage[12].*"] == 73984 * 2 + 229760 + 295424


def test_groups_are_in_the_order_of_their_first_tensors():
    body = {f"{layer}.{kind}": torch.ones(2, 2) for layer in "ab" for kind in ("weight", "bias")}
    assert list(layer_groups(body, ["*.bias"])) == ["a", "*.bias", "b"]


def test_the_head_by_name():
    net = on_meta(VGG11)
    assert head_of(dict(net.named_parameters()), "net.conv8") == ("net.conv8.weight", "net.conv8.bias")
    assert head_of(dict(net.named_parameters()), "net.fc*") == ("net.fc.weight", "net.fc.bias")
    with pytest.raises(InvalidOption, match=r"no `net\.classifier` to be its head; name one of `net\.conv1`"):
        head_of(dict(net.named_parameters()), "net.classifier")
    with pytest.raises(InvalidOption, match="no linear layer to be its head"):
        head_of({"bias": torch.ones(2)})


def test_a_missing_head_is_named_where_an_option_names_it():
    conv = {"conv.weight": torch.ones(2, 1, 3, 3)}
    with pytest.raises(InvalidOption, match=r"to be its head; name one of `conv` with `head`\.$"):
        head_of(conv)
    with pytest.raises(InvalidOption, match=r"to be its head; name one of `conv` instead of 'head'\.$"):
        part(conv, ["head"])
    with pytest.raises(InvalidOption, match=r"to be its head; expected one\.$"):
        exit_heads(conv, {"block": "conv"})
    recurrent = dict(Reader().named_parameters())
    with pytest.raises(InvalidOption, match=r"create the layer of the outputs last, or name it with `head`\.$"):
        head_of(recurrent)
    with pytest.raises(InvalidOption, match=r"create the layer of the outputs last\.$"):
        head_of(recurrent, named=None)


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrized_head_has_its_bias(wrap):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), wrap(nn.Linear(4, 2)))
    weights = dict(net.named_parameters())
    assert set(head_of(weights)) == set(head_of(weights, "2")) == {name for name in weights if name.startswith("2.")}
    assert head_layer(weights) == "2"
    weights |= {name: value for name, value in net.state_dict().items() if value.is_floating_point()}
    buffers = [name for name, _ in net.named_buffers() if name in weights]
    layers = layers_with_buffers(weights, buffers)
    assert sorted(name for names in layers.values() for name in names) == sorted(weights)
    assert set(layers["2"]) == {name for name in weights if name.startswith("2.")}


class Reader(nn.Module):
    """A recurrent network whose first matrix makes its outputs too, or whose head was created first."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(5, 3)
        self.states = nn.LSTM(3, 3, num_layers=2, bidirectional=True, proj_size=2)
        self.cell = nn.GRUCell(4, 3)


def test_a_recurrent_layer_is_no_head():
    weights = dict(Reader().named_parameters())
    with pytest.raises(InvalidOption, match="recurrent layer `cell` comes after `vectors`, its last other matrix"):
        head_of(weights)
    assert head_of(weights, "vectors") == ("vectors.weight",)
    assert head_of({**weights, "out.weight": torch.ones(5, 3), "out.bias": torch.ones(5)}) == ("out.weight", "out.bias")
    with pytest.raises(InvalidOption, match="has no linear layer"):
        head_of({name: value for name, value in weights.items() if name.startswith("cell")})
