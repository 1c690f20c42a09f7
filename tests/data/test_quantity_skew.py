"""Quantity skew: sizes follow the stated law, and nothing else differs."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.data import QuantitySkew
from lightning_sparsefl.errors import InvalidOption

EXAMPLES = torch.zeros(10_000, dtype=torch.int64)


def sizes(partition: QuantitySkew, num_clients: int, seed: int = 0) -> list[int]:
    return [len(own) for own in partition.split(EXAMPLES, num_clients, seed)]


def test_power_law_sizes_are_those_of_the_formula():
    drawn = sizes(QuantitySkew(1.5, law="power"), num_clients=8)
    weights = [1 / rank**1.5 for rank in range(1, 9)]
    expected = [1 + (10_000 - 8) * weight / sum(weights) for weight in weights]
    assert sorted(drawn, reverse=True) == pytest.approx(expected, abs=1)
    assert drawn != sorted(drawn, reverse=True)


def test_dirichlet_sizes_have_the_moments_of_the_distribution():
    """Shares of 4 clients have mean 1/4 and variance 3/16/(4 alpha + 1)."""
    alpha = 0.7
    shares = torch.tensor([sizes(QuantitySkew(alpha), 4, seed) for seed in range(600)]).double() / 10_000
    assert shares.mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert float(shares.var(0).mean()) == pytest.approx(3 / 16 / (4 * alpha + 1), rel=0.1)


@pytest.mark.parametrize("law", ["dirichlet", "power"])
@pytest.mark.parametrize("min_examples", [1, 50, 1000])
def test_each_client_has_enough(law, min_examples):
    alpha = 0.01 if law == "dirichlet" else 5.0
    drawn = sizes(QuantitySkew(alpha, law=law, min_examples=min_examples), num_clients=10)
    assert min(drawn) >= min_examples
    assert sum(drawn) == 10_000


def test_labels_are_spread_evenly():
    labels = torch.arange(10_000) % 2
    for own in QuantitySkew(1.0, law="power").split(labels, num_clients=5, seed=0):
        assert float(labels[own].double().mean()) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("options", "option"),
    [({"alpha": 0.0}, "alpha"), ({"alpha": 1.0, "law": "zipf"}, "law"), ({"alpha": 1.0, "min_examples": 0}, "min_")],
)
def test_refuses_options_out_of_range(options, option):
    with pytest.raises(InvalidOption, match=rf"`data\.partition\.{option}.*expected"):
        QuantitySkew(**options)


def test_refuses_a_concentration_that_underflows():
    with pytest.raises(InvalidOption, match=r"`data.partition.alpha` is 1e-310; expected a larger number, since"):
        QuantitySkew(1e-310).split(EXAMPLES, num_clients=5, seed=0)


def test_refuses_a_minimum_that_the_data_cannot_give():
    with pytest.raises(InvalidOption, match=r"min_examples` is 1001; expected at most 1000, the number of examples"):
        QuantitySkew(1.0, min_examples=1001).split(EXAMPLES, num_clients=10, seed=0)
