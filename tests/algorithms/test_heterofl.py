"""HeteroFL: who holds what, what it costs, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import HeteroFL, PerFedMask
from lightning_sparsefl.callbacks.width import OutputScaler
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.width import prefix_units


def test_published_means(preresnet):
    """PerFedMask, Table 1: 5.674 M."""
    method = HeteroFL()
    server, views = preresnet.start(method, 0.125, 1.0)
    sizes = [preresnet.sent(method.download(server, person)) for person in views]
    assert sizes == [176_178, 11_172_170]
    small = cut(preresnet.module, preresnet.units, prefix_units(preresnet.units, 0.125))
    assert sum(p.numel() for p in small.parameters()) == sizes[0]
    assert f"{sum(sizes) / 2e6:.3f}" == "5.674"


def test_a_client_has_the_largest_rate_within_its_capacity():
    method = HeteroFL(rates=(0.25, 1.0, 0.5))
    assert [method.rate(capacity) for capacity in (0.25, 0.4, 0.5, 0.99, 1.0)] == [0.25, 0.25, 0.5, 0.5, 1.0]
    with pytest.raises(InvalidOption, match=r"the capacity 0.2, and the smallest of `algorithm.rates` is 0.25"):
        method.rate(0.2)


@pytest.mark.parametrize("base", [None, PerFedMask(base=HeteroFL(scored="whole"))], ids=["alone", "in PerFedMask"])
def test_clients_are_scored_and_fine_tuned_with_the_whole_network_if_asked(base, mlp, client):
    method = HeteroFL(scored="whole", finetune_epochs=5) if base is None else base
    server, (person, _) = mlp.start(method, 0.25, 1.0)
    for task in ("score", "finetune"):
        message = method.download_for(server, person, task)
        assert not message.masks
        torch.testing.assert_close(message.weights, server.weights)
    assert method.download(server, person).masks
    someone, script = client(server.weights, capacity=0.25)
    assert method.finetune(message, someone) is server.weights
    ((weights, masks, trainable, callbacks),) = script.fits
    assert weights is message.weights
    assert (masks, trainable, list(callbacks)) == ({}, {}, [])
    assert (script.epochs, script.kept) == ([5], [None])


def test_clients_are_fine_tuned_with_their_own_width_by_default(mlp, client):
    method = HeteroFL(finetune_epochs=5)
    server, (person, _) = mlp.start(method, 0.25, 1.0)
    message = method.download_for(server, person, "finetune")
    someone, script = client(server.weights, capacity=0.25)
    script.units = mlp.units
    method.finetune(message, someone)
    assert message.masks
    assert [type(callback) for callback in script.fits[0][3]] == [OutputScaler]
    torch.testing.assert_close(script.kept[0], prefix_units(mlp.units, 0.25))


def test_without_epochs_nothing_is_fine_tuned(mlp, client):
    server, (person,) = mlp.start(HeteroFL(), 1.0)
    someone, script = client(server.weights)
    assert HeteroFL().finetune(HeteroFL().download_for(server, person, "finetune"), someone) is None
    assert script.fits == []


def test_an_update_has_the_metrics_of_the_fit(mlp, client):
    server, (person,) = mlp.start(HeteroFL(), 1.0)
    update = HeteroFL().train(HeteroFL().download(server, person), client(server.weights)[0])
    assert update.metrics == {"train_loss": 0.5}


@pytest.mark.parametrize("capacity", [0.25, 0.5, 1.0])
def test_costs_are_those_of_the_narrow_network(mlp, capacity):
    server, (person, _) = mlp.start(HeteroFL(), capacity, 1.0)
    mlp.check_costs(HeteroFL(), server, person, [prefix_units(mlp.units, capacity)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rates": ()}, "one or more numbers in"),
        ({"rates": (0.5, 2.0)}, "one or more numbers in"),
        ({"finetune_epochs": -1}, "a whole number >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options, expected):
    with pytest.raises(InvalidOption, match=expected):
        HeteroFL(**options)
