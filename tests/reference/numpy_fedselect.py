"""Slow twin of FedSelect (Tamirisa et al., arXiv:2404.02478)."""

import math

import numpy as np

from reference.numpy_network import clipped, copied, gradient


def train_free(received, batches, free, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """SGD where only the coordinates in `free` move; the others have no gradient, also in the norm."""
    weights = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for x, y in batches:
        slopes = {name: slope * free[name] for name, slope in gradient(weights, x, y).items()}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = np.where(free[name], weights[name] - lr * velocity[name], weights[name])
    return weights


class FedSelect:
    """`own[k]` is True where a weight is personal; biases never are."""

    def __init__(self, weights, clients, sgd, *, rate, bound, every, alternations):
        self.weights, self.sgd, self.kept = copied(weights), sgd, {}
        self.rate, self.bound, self.every, self.alternations = rate, bound, every, alternations
        self.own = {k: {n: np.zeros(w.shape, bool) for n, w in weights.items()} for k in clients}
        self.reference, self.turns = {k: copied(weights) for k in clients}, dict.fromkeys(clients, 0)

    def round(self, epochs):
        """`epochs[k]` are the epochs that client k ran, each a list of batches."""
        votes = {k: {name: ~own for name, own in self.own[k].items()} for k in epochs}
        trained = {k: self.work(k, list(epochs[k])) for k in epochs}
        for name, weight in self.weights.items():
            for place in np.ndindex(*weight.shape):
                values = [trained[k][name][place] for k in epochs if votes[k][name][place]]
                if values:
                    weight[place] = sum(values) / len(values)
        for k in epochs:
            self.kept[k] = trained[k]
            if self.turns[k] and self.turns[k] % self.every == 0:
                for name in self.weights:
                    if name.endswith("weight"):
                        self.select(k, name)
                self.reference[k] = copied(trained[k])
            self.turns[k] += 1

    def work(self, k, epochs):
        x, own = self.personal(k), self.own[k]
        shared = {name: ~mask for name, mask in own.items()}
        for _ in range(self.alternations):
            if any(mask.any() for mask in own.values()):
                x = train_free(x, epochs.pop(0), own, **self.sgd)
            x = train_free(x, epochs.pop(0), shared, **self.sgd)
        assert not epochs
        return x

    def select(self, k, name):
        own, size = self.own[k][name].copy(), self.own[k][name].size
        if own.sum() / size > self.bound:
            return
        moved = np.abs(self.kept[k][name] - self.reference[k][name])
        left = sorted((-moved.flat[place], place) for place in range(size) if not own.flat[place])
        for _, place in left[: math.floor(self.rate * len(left) + 0.5)]:
            own.flat[place] = True
        self.own[k][name] = own

    def personal(self, k):
        if k not in self.kept:
            return self.weights
        return {name: np.where(self.own[k][name], self.kept[k][name], value) for name, value in self.weights.items()}
