"""Clients whose local work follows a script, for methods that prune by a score."""

from __future__ import annotations

from lightning_sparsefl.callbacks import EpochSnapshots
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.orders import ClientFacts, Order
from lightning_sparsefl.types import FitResult, Message


class Scripted:
    """Stands in for the worker, and notes what it is asked for.

    Args:
        trained: Weights that a fit yields, under the masks that it holds.
        early: Weights after the first epoch.
        scores: Metrics that an evaluation yields.
        units: Groups of units of the model.
    """

    def __init__(self, trained, early=None, scores=None, units=()):
        self.trained, self.early, self.scores, self.units = trained, early, scores or {}, units
        self.fits, self.evaluations = [], []

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        self.fits.append((weights, masks, units, list(callbacks)))
        for callback in callbacks:
            if isinstance(callback, EpochSnapshots) and self.early is not None:
                callback.snapshots = {1: self.early}
        return FitResult(self.trained, metrics={"train_loss": 0.5}, steps=3, callbacks=callbacks)

    def evaluate(self, client, weights, split):
        self.evaluations.append((weights, split))
        return self.scores


def scripted_client(script, memory=None, num_examples=7, round=0, max_rounds=5, capacity=1.0):
    """Return a client with this script."""
    facts = ClientFacts(num_examples=num_examples, capacity=capacity, max_rounds=max_rounds)
    order = Order("run", 0, round, "train", facts, key="key 0", message=Message(weights={}))
    return Client(order, memory or {}, script)
