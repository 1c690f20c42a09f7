"""Slow twin of FLASC (Kuo et al., arXiv:2406.05233)."""

import math

import numpy as np

from reference.numpy_network import clipped, copied, gradient, masked


def largest(weights, names, density):
    """Masks of the floor(density a) largest magnitudes of all named tensors together; of equal ones the earlier."""
    sizes = np.concatenate([np.abs(weights[name]).ravel() for name in names])
    mask = np.zeros(sizes.size, dtype=bool)
    mask[np.argsort(-sizes, kind="stable")[: math.floor(density * sizes.size + 1e-9)]] = True
    ends = np.cumsum([weights[name].size for name in names])[:-1]
    return {n: part.reshape(weights[n].shape) for n, part in zip(names, np.split(mask, ends), strict=True)}


def train_some(received, batches, trained, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """SGD on the named tensors; the others have no gradient, also for the norm by which gradients are clipped."""
    weights = copied(received)
    velocity = {name: np.zeros_like(weights[name]) for name in trained}
    for x, y in batches:
        slopes = gradient(weights, x, y)
        slopes = {name: slopes[name] for name in trained}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
    return weights


class AdamW:
    """m = .9 m + .1 g, v = .999 v + .001 g^2; w <- w - lr .01 w - lr m/(1 - .9^t) / (sqrt(v/(1 - .999^t)) + 1e-8)."""

    def __init__(self, lr):
        self.lr, self.t, self.m, self.v = lr, 0, {}, {}

    def step(self, weights, slopes):
        self.t += 1
        for name, slope in slopes.items():
            self.m[name] = 0.9 * self.m.get(name, 0.0) + 0.1 * slope
            self.v[name] = 0.999 * self.v.get(name, 0.0) + 0.001 * slope**2
            mean, square = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.999**self.t)
            weights[name] = weights[name] * (1 - self.lr * 0.01) - self.lr * mean / (np.sqrt(square) + 1e-8)


class FLASC:
    """`adapters` are chosen from, `whole` is trained and sent whole, and the other tensors never change."""

    def __init__(self, weights, sgd, adapters, whole, *, down, up, lr):
        self.weights, self.sgd, self.down, self.up = copied(weights), sgd, down, up
        self.adapters, self.trained = adapters, [*adapters, *whole]
        self.server, self.masks = AdamW(lr), largest(weights, adapters, down)

    def round(self, batches):
        self.masks = largest(self.weights, self.adapters, self.down)
        received = masked(self.weights, self.masks)
        mean = {name: np.zeros_like(self.weights[name]) for name in self.trained}
        for k in batches:
            trained = train_some(received, batches[k], self.trained, **self.sgd)
            changes = {name: trained[name] - received[name] for name in self.trained}
            for name, change in masked(changes, largest(changes, self.adapters, self.up)).items():
                mean[name] += change / len(batches)
        self.server.step(self.weights, {name: -change for name, change in mean.items()})

    def personal(self, client):
        return masked(self.weights, self.masks)
