"""Hand-made clients: what an algorithm asks of the engine is answered from a script, and noted."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import ClientView, CostFacts, FitResult, LayerFlops, Message


class Script:
    """Stands in for the bench: `trained` is what a fit yields, `slopes` what a gradient is."""

    def __init__(self, trained, slopes=None):
        self.trained, self.slopes, self.fits, self.gradients = trained, slopes, [], []

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        self.fits.append((weights, masks, trainable, callbacks))
        return FitResult(weights=self.trained, metrics={"train_loss": 0.5}, steps=3)

    def gradient(self, client, weights):
        self.gradients.append(weights)
        return self.slopes


def view_of(client=0, round=0, max_rounds=5, shared=None, num_examples=7, seed=0):
    return ClientView(
        id=client,
        num_examples=num_examples,
        capacity=1.0,
        round=round,
        max_rounds=max_rounds,
        seed=seed,
        shared=shared or {},
    )


@pytest.fixture
def view():
    return view_of


@pytest.fixture
def client():
    """A client and the script behind it."""

    def make(trained=None, slopes=None, memory=None, **facts):
        script = Script(trained, slopes)
        return Client(view_of(**facts), memory or {}, script), script

    return make


@pytest.fixture
def fleet():
    def make(clients=3, buffers=(), seed=0):
        views = [view_of(client=i, seed=seed) for i in range(clients)]
        return Fleet(views, frozenset(buffers), torch.device("cpu"))

    return make


@pytest.fixture
def facts():
    """Two epochs over seven samples, in batches of four, of a net whose forward pass is 2 * 10 + 2 + 2 * 6 = 34 FLOPs.

    Layer a: 5 x 2 weights and 2 biases; layer b: 3 x 2 weights. Together 18 numbers.
    """
    layers = (LayerFlops(weight="a.weight", macs=10, bias=2), LayerFlops(weight="b.weight", macs=6, bias=0))
    weights = {"a.weight": torch.ones(2, 5), "a.bias": torch.ones(2), "b.weight": torch.ones(3, 2)}

    def make(masks=None, trainable=None, batch_size=4, message=None, **view):
        return CostFacts(
            view=view_of(**view),
            message=message or Message(weights=weights, masks=masks or {}, trainable=trainable or {}),
            layers=layers,
            epochs=2,
            samples=7,
            batch_size=batch_size,
        )

    return make
