"""Slow twin of SparsyFed (Guastella et al., arXiv:2504.05153)."""

import math

import numpy as np

from reference.numpy_network import clipped, copied, forward, layers, probabilities


def shown(theta, names, b):
    """sign(theta) |theta|^b for the named tensors; the others as they are."""
    return {n: np.sign(v) * np.abs(v) ** b if n in names else v.copy() for n, v in theta.items()}


def largest(sizes, count):
    """The `count` largest numbers of an array; of equal ones the earlier."""
    mask = np.zeros(sizes.size, dtype=bool)
    mask[np.argsort(-sizes.ravel(), kind="stable")[:count]] = True
    return mask.reshape(sizes.shape)


def slopes_of(weights, x, y, prune):
    """Gradients of the mean loss; with `prune`, dL/dW from the inputs of W at the density of W."""
    inputs, logits = forward(weights, x)
    delta = probabilities(logits)
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        density = np.count_nonzero(weights[weight]) / weights[weight].size
        kept = a * largest(np.abs(a), max(1, math.floor(density * a.size + 1e-9))) if prune else a
        slopes[weight], slopes[bias] = delta.T @ kept, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0)
    return {name: slopes[name] for name in weights}


def train_powers(received, batches, names, b, prune, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """theta <- theta - lr v, where g = grad F(sign(theta)|theta|^b) b |theta|^(b-1)."""
    theta = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in theta.items()}
    for x, y in batches:
        slopes = slopes_of(shown(theta, names, b), x, y, prune)
        for name in names:
            slopes[name] = slopes[name] * b * np.abs(theta[name]) ** (b - 1)
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * theta[name]
            theta[name] = theta[name] - lr * velocity[name]
    return theta


class SparsyFed:
    """The server's theta and its model; `names` are the layers that are pruned."""

    def __init__(self, weights, sgd, sizes, names, *, density, exponent=1.25, prune_activations=True):
        self.names, self.sgd, self.sizes, self.density = names, sgd, sizes, density
        self.b, self.prune = exponent, prune_activations
        self.theta = shown(weights, names, 1 / exponent)

    @property
    def weights(self):
        return shown(self.theta, self.names, self.b)

    def round(self, batches):
        total = sum(self.sizes[k] for k in batches)
        mean = {name: np.zeros_like(value) for name, value in self.theta.items()}
        for k in batches:
            theta = self.pruned(train_powers(self.theta, batches[k], self.names, self.b, self.prune, **self.sgd))
            for name, value in theta.items():
                mean[name] += self.sizes[k] / total * value
        self.theta = mean

    def pruned(self, theta):
        flat = np.concatenate([np.abs(theta[name]).ravel() for name in self.names])
        mask = largest(flat, round(self.density * flat.size))
        ends = np.cumsum([theta[name].size for name in self.names])[:-1]
        parts = dict(zip(self.names, np.split(mask, ends), strict=True))
        return {n: v * parts[n].reshape(v.shape) if n in parts else v for n, v in theta.items()}

    def personal(self, client):
        return self.weights
