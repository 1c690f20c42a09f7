"""Groups of layers against their slow twin, on networks and on modules that were drawn."""

from __future__ import annotations

import random

import pytest
import torch
import torchvision
from torch import nn

from lightning_sparsefl.models import VGG11, LeNet5, MobileNet, PreResNet18
from lightning_sparsefl.sparse.layer_groups import group_sizes, head_of, layer_groups
from reference import layer_groups_reference as slow

KEYS = ["conv", "norm", "fc", "block_1", "block_2", "block_10", "b1-0", "b1-1", "stage1", "0", "1", "2"]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Tensors by name, a module's own before those inside of it, as modules have them."""
    rng, weights = random.Random(seed), {}

    def fill(path: str, depth: int) -> None:
        children = rng.sample(KEYS if rng.random() < 0.5 else KEYS[-3:], rng.randint(1, 3)) if depth else []
        if not children or rng.random() < 0.2:
            for leaf in ("weight", "bias")[: rng.randint(1, 2)]:
                dims = rng.choice([1, 2, 4]) if leaf == "weight" else 1
                weights[f"{path}{leaf}"] = torch.zeros([rng.randint(1, 3)] * dims)
        for key in children:
            fill(f"{path}{key}.", rng.choice([0, depth - 1, depth - 1]))

    fill("", 4)
    return weights


def dims(weights):
    return {name: value.dim() for name, value in weights.items()}


def assert_alike(weights, patterns=()):
    groups = layer_groups(weights, patterns)
    expected = slow.layer_groups(dims(weights), patterns)
    assert list(groups.items()) == [(path, tuple(names)) for path, names in expected.items()]
    sizes = [sum(weights[name].numel() for name in names) for names in expected.values()]
    assert group_sizes(weights, groups) == sizes
    return groups


@pytest.mark.parametrize(
    "build",
    [LeNet5, VGG11, MobileNet, PreResNet18, torchvision.models.mobilenet_v2, torchvision.models.vit_b_16],
    ids=lambda build: build.__name__,
)
def test_networks(build):
    with torch.device("meta"):
        weights = dict(build().named_parameters())
    assert list(head_of(weights)) == slow.head_of(dims(weights))
    assert_alike(weights)


def test_drawn_modules():
    counts = set()
    for seed in range(300):
        weights = drawn(seed)
        groups = assert_alike(weights)
        counts.add(len(groups))
        assert_alike(weights, [f"{random.Random(seed).choice(list(groups))}*"])
        assert_alike(weights, ["*e*", "*bias"] if any("e" not in name for name in weights) else ["*"])
        if 2 in dims(weights).values():
            assert list(head_of(weights)) == slow.head_of(dims(weights))
    assert counts >= {1, 2, 3, 4, 5, 6}


def test_a_module_of_one_tensor():
    assert_alike(dict(nn.Linear(2, 2, bias=False).named_parameters()))
