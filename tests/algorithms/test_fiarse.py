from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl import FIARSE, FedAvg
from lightning_sparsefl.callbacks.magnitude_gate import MagnitudeGate
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import kept, same
from lightning_sparsefl.sparse.reparameterize import gate_slope
from lightning_sparsefl.types import FitResult, Message

WEIGHTS = {
    "a.weight": torch.tensor([[4.0, -0.1], [0.3, 2.0]]),
    "a.bias": torch.tensor([9.0, 9.0]),
    "b.weight": torch.tensor([[1.0, -1.0, 0.2, 0.2]]),
    "norm.mean": torch.ones(2, 2),
}


def start(method, fleet):
    return method.init(WEIGHTS, fleet(buffers=["norm.mean"]))


def test_the_factor_of_the_gradients():
    factors = gate_slope(torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64), 1.0)
    torch.testing.assert_close(factors, torch.tensor([1.5, 1.4444444, 1.1652893], dtype=torch.float64))


@pytest.mark.parametrize(("capacity", "count"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_a_client_has_exactly_its_share_of_all_weights_together(capacity, count, view, fleet):
    method = FIARSE()
    message = method.download(start(method, fleet), view(capacity=capacity))
    assert kept(message.masks) == count
    held = torch.cat([message.weights[n][m].abs() for n, m in message.masks.items()])
    others = torch.cat([WEIGHTS[n][~m].abs() for n, m in message.masks.items()])
    assert not len(others) or held.min() >= others.max()
    assert all(torch.equal(message.weights[name], WEIGHTS[name]) for name in ("a.bias", "norm.mean"))


def test_or_of_each_layer(view, fleet):
    method = FIARSE(scope="layer")
    masks = method.download(start(method, fleet), view(capacity=0.5)).masks
    assert {name: mask.flatten().tolist() for name, mask in masks.items()} == {
        "a.weight": [True, False, False, True],
        "b.weight": [True, True, False, False],
    }


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("global", {"a.weight": 1.0, "b.weight": 1.0}), ("layer", {"a.weight": 2.0, "b.weight": 1.0})],
)
def test_the_threshold_is_the_smallest_magnitude_that_is_held(scope, expected, view, fleet, client):
    method = FIARSE(scope=scope, boost=False)
    message = method.download(start(method, fleet), view(capacity=0.5))
    (gate,) = method.callbacks(message, client()[0])
    assert isinstance(gate, MagnitudeGate)
    assert (gate.thresholds, gate.boost) == (expected, False)


def test_a_layer_that_holds_nothing_has_a_threshold(view, fleet, client):
    method = FIARSE()
    message = method.download(start(method, fleet), view(capacity=0.25))
    assert not message.masks["b.weight"].any()
    assert method.callbacks(message, client()[0])[0].thresholds == {"a.weight": 2.0, "b.weight": 2.0}
    assert FIARSE(scope="layer")._thresholds(message)["b.weight"] == 0


def test_changes_are_of_theta_and_the_own_model_is_without_what_fell(client):
    masks = {"w": torch.tensor([True, True, False])}
    message = Message(weights={"w": torch.tensor([2.0, 1.0, 0.0]), "bias": torch.ones(1)}, masks=masks)
    someone, script = client({"w": torch.tensor([3.0, 0.0, 0.0]), "bias": torch.zeros(1)})

    def fit(client, weights, masks, trainable, callbacks, **options):
        callbacks[0]._theta = {"w": torch.tensor([3.0, 0.5, 0.0])}  # the second one fell below 1
        return FitResult(weights=script.trained, metrics={}, steps=1)

    someone._worker = type("Bench", (), {"fit": staticmethod(fit)})
    update = FIARSE().train(message, someone)
    assert update.weights["w"].tolist() == [1.0, -0.5, 0.0]
    assert update.weights["bias"].tolist() == [-1.0]
    assert (update.kind, update.weight, update.votes) == ("difference", 1, None)
    assert same(FIARSE().may_vote(message), masks)
    assert FIARSE().trained(message, update)["w"].tolist() == [3.0, 0.0, 0.0]


def test_norms_are_static_and_costs_are_those_of_the_part(facts, view, fleet):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    FIARSE().adapt(module)
    assert list(dict(module.named_buffers())) == []
    masks = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}
    costs = FIARSE().costs(facts(masks))
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * (4 + 2 + 6)
    assert costs.flops_paper == 3 * 14 * 22


def test_an_unknown_scope_is_refused():
    with pytest.raises(InvalidOption, match=r"`algorithm.scope` is 'all'; expected one of 'global', 'layer'"):
        FIARSE(scope="all")


def test_at_full_capacity_without_the_factor_it_is_fedavg_with_equal_weights(federation):
    """Up to rounding, since changes are averaged, and as long as no weight falls below the smallest one."""

    class Equal(FedAvg):
        adapt = FIARSE.adapt

        def train(self, message, client):
            update = super().train(message, client)
            return type(update)(weights=update.weights, metrics=update.metrics)

    weights = []

    def module():
        torch.manual_seed(0)
        made = federation.module()
        with torch.no_grad():
            made.net[0].weight[0, 0] = 1e-9  # no other weight falls below this one
        return made

    alone = {"local_engine": "fast"}
    for method in (FIARSE(boost=False), Equal(), FIARSE(scope="layer")):
        folder = type(method).__name__ + str(len(weights))
        trainer = federation(method, rounds=1, module=module(), folder=folder, federation=alone)
        path = trainer.run_folder / "checkpoints" / "last.ckpt"
        weights.append(torch.load(path, weights_only=True)["state_dict"])
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-6)
    assert any((value - weights[2][name]).abs().max() > 1e-3 for name, value in weights[0].items())
