"""Slow twin of FedSpa (Huang et al., arXiv:2201.11380)."""

import math

import numpy as np

from reference.numpy_network import copied, gradient, masked, train


def exchange_rate(alpha, t, rounds):
    """alpha_t = alpha_0 / 2 (1 + cos(pi t / (T - 1))); 0 where there is one round only."""
    return 0.0 if rounds == 1 else 0.5 * alpha * (1 + math.cos(math.pi * t / (rounds - 1)))


def searched(mask, weight, score, rate):
    """FedSpa, Algorithm 2 on one tensor.

    Drop the n = ceil(rate kept) smallest |w| among the kept, then grow the n largest |score| among those that are not
    kept now, the dropped ones included.
    """
    kept = int(mask.sum())
    n = math.ceil(round(rate * kept, 9))
    places = mask.ravel().copy()
    size = np.where(places, np.abs(weight).ravel(), np.inf)
    places[np.argsort(size, kind="stable")[:n]] = False
    worth = np.where(places, -np.inf, np.abs(score).ravel())
    places[np.argsort(-worth, kind="stable")[:n]] = True
    assert places.sum() == kept
    return places.reshape(mask.shape)


class FedSpa:
    """Algorithms 1 to 3; `masks` holds every client's first mask."""

    def __init__(self, weights, masks, sgd, *, search, merge, rounds, exchange=0.5):
        self.weights, self.masks, self.sgd = copied(weights), {k: copied(mask) for k, mask in masks.items()}, sgd
        self.search, self.merge, self.rounds, self.exchange, self.t = search, merge, rounds, exchange, 0

    def round(self, batches, search_batch, scores=None):
        """One round.

        `search_batch[k]` is the batch of the search gradient; `scores[k]` stand in for it with random growth.
        """
        held = {k: self.masks[k] for k in batches}
        received = {k: masked(self.weights, held[k]) for k in batches}
        trained = {k: train(received[k], batches[k], masks=held[k], **self.sgd) for k in batches}
        rate = exchange_rate(self.exchange, self.t, self.rounds)
        if self.search == "dst" and rate > 0:
            for k in batches:
                score = gradient(trained[k], *search_batch[k]) if scores is None else scores[k]
                self.masks[k] = {
                    name: searched(mask, trained[k][name], score[name], rate) for name, mask in held[k].items()
                }
        for name, value in self.weights.items():
            change = sum(received[k][name] - trained[k][name] for k in batches)  # U_k = start - end
            holders = sum(held[k][name] if name in held[k] else np.ones(value.shape) for k in batches)
            by = len(batches) if self.merge == "mean" else np.maximum(holders, 1)
            self.weights[name] = value - change / by
        self.t += 1

    def personal(self, client):
        return masked(self.weights, self.masks[client])
