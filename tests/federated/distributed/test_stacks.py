"""Stacks of a cohort: as few as possible, of almost equal loads, the same for any order of the clients."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_sparsefl.federated.distributed.stacks import compose_evaluations, compose_stacks


def loads_of(clients: int, alpha: float) -> dict[int, float]:
    """Loads of a fleet, drawn from a Dirichlet distribution."""
    torch.manual_seed(clients)
    shares = torch.distributions.Dirichlet(torch.full((clients,), alpha)).sample()
    return {client: 1.0 + round(100 * clients * share) for client, share in enumerate(shares.tolist())}


@pytest.mark.parametrize("compose", [compose_stacks, compose_evaluations])
@pytest.mark.parametrize(("clients", "size"), [(0, 3), (1, 3), (10, 5), (10, 1), (11, 5), (50, 25), (100, 25)])
def test_each_client_is_in_one_of_the_fewest_stacks(compose, clients, size):
    loads = loads_of(clients, 0.5) if clients else {}
    stacks = compose(loads, size)
    assert sorted(client for stack in stacks for client in stack) == list(range(clients))
    assert len(stacks) == math.ceil(clients / size)
    assert all(1 <= len(stack) <= size for stack in stacks)
    assert stacks == compose(dict(reversed(loads.items())), size)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
@pytest.mark.parametrize(("clients", "size"), [(10, 5), (20, 10), (50, 25), (100, 25)])
def test_stacks_that_train_have_almost_equal_loads(clients, size, alpha):
    loads = loads_of(clients, alpha)
    sums = [sum(loads[client] for client in stack) for stack in compose_stacks(loads, size)]
    assert max(sums) <= max(1.15 * sum(sums) / len(sums), max(loads.values()) + size)
    similar = [sum(loads[client] for client in stack) for stack in compose_evaluations(loads, size)]
    assert max(sums) < max(similar)


def test_clients_with_equal_loads_are_dealt_in_turn():
    assert compose_stacks(dict.fromkeys(range(7), 2.0), 3) == [(0, 3, 6), (1, 4), (2, 5)]


def test_clients_of_a_stack_have_their_value_in_common():
    loads = loads_of(12, 1.0)
    alike = {client: client % 3 for client in loads}
    stacks = compose_stacks(loads, 3, alike)
    assert len(stacks) == 6
    assert all(len({alike[client] for client in stack}) == 1 for stack in stacks)
