"""Costs of FedP3 on the network of FedLPS's Table I, whose printed FLOPs follow from no set of layers at density .9."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from lightning_sparsefl import FedP3
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.models import VGG11
from lightning_sparsefl.sparse.uses import TensorUses
from lightning_sparsefl.types import ClientView, CostFacts

CLIENTS, HEAD = 50, 5_130
PRINTED, DENSE = 320.1, 825.4
"""FLOPs in 1e12 of FedP3 and of FedAvg on CIFAR-10."""


def test_costs_of_all_clients():
    module, method = VGG11(norm="batch_static"), FedP3()
    weights = {name: value.detach() for name, value in module.named_parameters()}
    layers = count_layers(module, torch.zeros(1, 3, 32, 32))
    views = [ClientView(k, num_examples=180, capacity=1.0, round=0, max_rounds=100, seed=0) for k in range(CLIENTS)]
    server = method.init(weights, Fleet(views, frozenset(), torch.device("cpu")))
    sizes = [weight.numel() for weight in weights.values() if weight.dim() == 4]
    biases = sum(weight.numel() for weight in weights.values() if weight.dim() == 1) - 10
    for view in views[::7]:
        facts = CostFacts(view, method.download(server, view), layers, epochs=5, samples=180, batch_size=20)
        model = SimpleNamespace(uses=TensorUses(), initial=weights)
        costs = method.costs(CostFacts(**{**vars(facts), "model": model}))
        block = view.id * len(sizes) // CLIENTS
        owned = {block, (block + 1) % len(sizes)}
        down = sum(size if place in owned else 9 * size // 10 for place, size in enumerate(sizes)) + biases
        assert costs.bytes_down_paper == 4 * down
        own = sum(sizes[place] + 3 * weights[list(weights)[4 * place]].shape[0] for place in owned)
        assert costs.bytes_up_paper == 4 * (own + HEAD)
        assert 0.9 < costs.flops_paper / costs.flops_analytic < 1
    assert PRINTED / DENSE < 0.9
