"""Slow twin of PruneTrain in a federation (Lym et al., arXiv:1901.09290), and of FedDIP's variant of it."""

import itertools

import numpy as np

from reference.numpy_network import clipped, copied, gradient, layers, loss, masked, weighted_mean

EPSILON = 1e-8


def unit_norms(weights):
    """For each hidden layer: the norms of its units' rows, and of the columns by which the next layer reads them."""
    names = [weight for weight, _ in layers(weights)]
    norms = {}
    for number, (row, column) in enumerate(itertools.pairwise(names)):
        for j in range(len(weights[row])):
            norms[number, "out", j] = np.sqrt((weights[row][j] ** 2).sum() + EPSILON)
            norms[number, "in", j] = np.sqrt((weights[column][:, j] ** 2).sum() + EPSILON)
    return norms


def unit_slopes(weights):
    names = [weight for weight, _ in layers(weights)]
    norms, slopes = unit_norms(weights), {name: np.zeros_like(weights[name]) for name in names}
    for number, (row, column) in enumerate(itertools.pairwise(names)):
        for j in range(len(weights[row])):
            slopes[row][j] += weights[row][j] / norms[number, "out", j]
            slopes[column][:, j] += weights[column][:, j] / norms[number, "in", j]
    return slopes


def layer_slopes(weights, names):
    return {name: weights[name] / np.linalg.norm(weights[name]) for name in names}


def train(received, batches, penalty, strength, *, lr, momentum=0.0, weight_decay=0.0, clip=None, masks=None):
    """SGD on the loss plus the strength times the penalty, whose slopes are taken at each step."""
    weights = masked(received, masks or {})
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for x, y in batches:
        slopes = gradient(weights, x, y)
        for name, slope in penalty(weights).items():
            slopes[name] = slopes[name] + strength * slope
        slopes = masked(slopes, masks or {})
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
        weights = masked(weights, masks or {})
    return weights


def globally_largest(weights, names, count):
    """Masks of the largest |w| of all these tensors together."""
    sizes = np.concatenate([np.abs(weights[name]).ravel() for name in names])
    keep = np.zeros(sizes.size, dtype=bool)
    keep[np.argsort(-sizes, kind="stable")[:count]] = True
    parts = np.split(keep, np.cumsum([weights[name].size for name in names])[:-1])
    return {name: part.reshape(weights[name].shape) for name, part in zip(names, parts, strict=True)}


class PruneTrain:
    """Rounds t = 0, 1, ...; `live[l]` are the units of hidden layer l, or `masks` those of the pruned layers."""

    def __init__(self, weights, sizes, sgd, *, strength, ratio, groups, threshold, every, densities, rounds):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd
        self.strength, self.ratio, self.groups = strength, ratio, groups
        self.threshold, self.every, self.densities, self.rounds, self.t = threshold, every, densities, rounds, 0
        self.pruned = [weight for weight, _ in layers(weights)][1:-1]
        self.masks = {}

    def penalty(self, weights):
        return unit_slopes(weights) if self.groups == "units" else layer_slopes(weights, self.pruned)

    def kept(self):
        """(1 - s_t) N with s_t from the first to the last pruned fraction by a cubic."""
        first, last = self.densities
        density = last + (first - last) * (1 - self.t / self.rounds) ** 3
        size = sum(self.weights[name].size for name in self.pruned)
        return size - int(np.floor((1 - density) * size + 0.5))

    def round(self, batches):
        start, trees = copied(self.weights), {}
        for k, steps in batches.items():
            strength = 0.0 if self.strength is None else self.strength
            held = self.masks if self.groups == "units" else {}
            trees[k] = train(start, steps, self.penalty, strength, masks=held, **self.sgd)
            if self.groups == "layers":
                trees[k] = masked(trees[k], globally_largest(trees[k], self.pruned, self.kept()))
        mean = weighted_mean(trees, self.sizes)
        if self.strength is None:
            first = np.mean([loss(start, *steps[0]) for steps in batches.values()])
            norms = unit_norms(start).values()
            if self.groups == "layers":
                norms = [np.linalg.norm(start[name]) for name in self.pruned]
            self.strength = float(np.float32(self.ratio * first / ((1 - self.ratio) * sum(norms))))  # as it is stored
        if self.groups == "layers":
            self.masks = globally_largest(mean, self.pruned, self.kept())
        elif (self.t + 1) % self.every == 0:
            self.masks = self.without_dead_units(mean)
        self.weights = masked(mean, self.masks)
        self.t += 1

    def without_dead_units(self, weights):
        masks = {name: np.ones(value.shape, dtype=bool) for name, value in weights.items()}
        pairs = layers(weights)
        for (row, bias), (column, _) in itertools.pairwise(pairs):
            largest = np.maximum(np.abs(weights[row]).max(axis=1), np.abs(weights[column]).max(axis=0))
            for j in range(len(largest)):
                if largest[j] < self.threshold and j != largest.argmax():
                    masks[row][j], masks[bias][j], masks[column][:, j] = False, False, False
        return masks

    def personal(self, client):
        return self.weights
