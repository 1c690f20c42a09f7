"""Slow twin of complement sparsification (Jiang, Borcea 2023)."""

import numpy as np

from reference.numpy_network import copied, train


def largest(values, count):
    """A mask of the `count` largest absolute values."""
    order = np.argsort(-np.abs(values).ravel(), kind="stable")[:count]
    mask = np.zeros(values.size, dtype=bool)
    mask[order] = True
    return mask.reshape(values.shape)


class CS:
    """x_k = train(w); w <- w + kappa ~m sum p_k (x_k - w) on pruned layers, the mean elsewhere; new m; w <- m w."""

    def __init__(self, weights, sizes, sgd, layers, density, kappa, largest_changes=False):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd
        self.layers, self.density, self.kappa, self.largest_changes = layers, density, kappa, largest_changes
        self.masks = {}

    def round(self, batches):
        total, old = sum(self.sizes[k] for k in batches), copied(self.weights)
        for k, own in batches.items():
            end = train(old, own, **self.sgd)
            for name, w in old.items():
                change = end[name] - w
                if name in self.masks:
                    m = self.masks[name]
                    sends = largest(change, (~m).sum()) if self.largest_changes else ~m
                    change = change * sends * np.where(m, 1.0, self.kappa)
                self.weights[name] = self.weights[name] + self.sizes[k] / total * change
        for name in self.layers:
            kept = max(1, round(self.density * self.weights[name].size))
            self.masks[name] = largest(self.weights[name], kept)
            self.weights[name] = self.weights[name] * self.masks[name]

    def personal(self, client):
        return self.weights
