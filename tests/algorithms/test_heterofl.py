"""HeteroFL: who holds what, what it costs, and what is refused."""

from __future__ import annotations

import pytest

from lightning_sparsefl import HeteroFL
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
