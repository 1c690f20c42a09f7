"""Split-Mix: who holds what, what it costs, and what is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl import SplitMix
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import LeNet5
from lightning_sparsefl.sparse.width import block_units


def test_published_means(preresnet):
    """PerFedMask, Table 1: .793 M; eight biases of the head are one here."""
    method = SplitMix()
    server, views = preresnet.start(method, 0.125, 1.0)
    sizes = [preresnet.sent(method.download(server, person)) for person in views]
    assert sizes == [176_178, 8 * 176_178 - 7 * 10]
    assert f"{sum(sizes) / 2e6:.3f}" == "0.793"


@pytest.mark.parametrize("capacity", [0.25, 0.5, 1.0])
def test_costs_are_those_of_the_narrow_networks(mlp, capacity):
    method = SplitMix(bases=4)
    server, (person, _) = mlp.start(method, capacity, 1.0)
    mlp.check_costs(method, server, person, [block_units(mlp.units, base, 4) for base in method.bases_of(person)])


def test_base_networks_share_nothing_and_take_turns(mlp, view):
    method = SplitMix(bases=4)
    server, _ = mlp.start(method, 0.25, 1.0)
    masks = [method.download(server, view(client, capacity=0.25)).masks for client in range(4)]
    for name, union in server.masks.items():
        assert torch.equal(sum(tree[name].int() for tree in masks), union.int())
    assert [method.bases_of(view(1, t, capacity=0.5)) for t in range(4)] == [[1, 2], [2, 3], [0, 3], [0, 1]]
    assert method.bases_of(view(3, capacity=0.1)) == [3]
    for client in range(4):
        held = method.download(server, view(client, capacity=0.25)).extra["bases"]
        assert {name: tensor.tolist() for name, tensor in held.items()} == {"net.fc3.weight": [client]}


def test_clients_are_scored_and_fine_tuned_with_all_networks_if_asked(mlp):
    own, whole = SplitMix(bases=4), SplitMix(bases=4, scored="whole")
    server, (person, everything) = mlp.start(own, 0.25, 1.0)
    message = whole.download_for(server, person, "finetune")
    assert message.extra["bases"]["net.fc3.weight"].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(message.weights, own.download_for(server, everything, "finetune").weights)
    assert own.download_for(server, person, "finetune").extra["bases"]["net.fc3.weight"].tolist() == [0]
    assert whole.download(server, person).extra["bases"]["net.fc3.weight"].tolist() == [0]


def test_norms_over_several_base_networks_are_refused_by_name():
    module = L.LightningModule()
    module.norm = nn.GroupNorm(4, 16)
    SplitMix(bases=2).adapt(module)
    with pytest.raises(InvalidOption, match="`norm` normalizes over the units of several base networks"):
        SplitMix(bases=8).adapt(module)
    module.norm = nn.LayerNorm(16)
    with pytest.raises(InvalidOption, match="`norm` normalizes"):
        SplitMix(bases=2).adapt(module)


def test_too_many_base_networks_are_refused_by_name(network):
    with pytest.raises(InvalidOption, match=r"`net.conv1` has \d+ units; expected at least one for each of 100"):
        network(LeNet5(num_classes=10), (1, 28, 28)).start(SplitMix(bases=100), 1.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bases": 0}, "a whole number from 1 to 254"),
        ({"bases": 255}, "a whole number from 1 to 254"),
        ({"finetune_epochs": -1}, "a whole number >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        SplitMix(**options)
