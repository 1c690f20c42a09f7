"""Slow twin of FjORD (Horvath et al., arXiv:2102.13451)."""

import math

import numpy as np

from reference.numpy_narrow import narrow_gradient, reach
from reference.numpy_network import clipped, copied, forward, layers, probabilities


def prefix(sizes, rate):
    return [range(math.ceil(round(rate * size, 9))) for size in sizes]


def taught_gradient(weights, x, teacher):
    """Of the mean over the batch of -sum_c teacher_c log p_c: dL/dlogits = (p - teacher) / B."""
    inputs, logits = forward(weights, x)
    delta = (probabilities(logits) - teacher) / len(x)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        slopes[weight], slopes[bias] = delta.T @ a, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0)
    return slopes


class FjORD:
    """Each step on the prefix of a drawn rate, within the network of the largest; the merge by samples and holders.

    `largest[k]` is client k's p_max, `drawn(k, t, step)` the rate of a step; with `distill`, the largest network takes
    the step's labels, and teaches the drawn one.
    """

    def __init__(self, weights, sizes, largest, drawn, sgd, distill=False):
        self.weights, self.sizes, self.largest, self.drawn = copied(weights), sizes, largest, drawn
        self.sgd, self.distill, self.t = sgd, distill, 0

    def widths(self):
        return [self.weights[bias].size for _, bias in layers(self.weights)[:-1]]

    def slopes(self, weights, x, y, rate, full_widths):
        """Gradients of the held network, zeros beyond the prefix of the rate."""
        place = reach(weights, prefix(full_widths, rate))
        small = {name: weights[name][place[name]] for name in weights}
        found = {name: np.zeros_like(value) for name, value in weights.items()}
        if self.distill:
            teacher = probabilities(forward(weights, x)[1])
            found = {name: found[name] + slope for name, slope in narrow_gradient(weights, x, y).items()}
            slopes = taught_gradient(small, x, teacher)
        else:
            slopes = narrow_gradient(small, x, y)
        for name, slope in slopes.items():
            found[name][place[name]] += slope
        return found

    def train(self, client, batches, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
        place = reach(self.weights, prefix(self.widths(), self.largest[client]))
        weights = {name: self.weights[name][place[name]] for name in self.weights}
        velocity = {name: np.zeros_like(value) for name, value in weights.items()}
        for step, (x, y) in enumerate(batches):
            slopes = self.slopes(weights, x, y, self.drawn(client, self.t, step), self.widths())
            slopes = slopes if clip is None else clipped(slopes, clip)
            for name in weights:
                velocity[name] = momentum * velocity[name] + slopes[name] + weight_decay * weights[name]
                weights[name] = weights[name] - lr * velocity[name]
        return place, weights

    def round(self, batches):
        sums = {name: np.zeros_like(value) for name, value in self.weights.items()}
        held = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for k in batches:
            place, trained = self.train(k, batches[k], **self.sgd)
            for name in self.weights:
                sums[name][place[name]] += self.sizes[k] * trained[name]
                held[name][place[name]] += self.sizes[k]
        for name, total in held.items():
            self.weights[name] = np.where(total > 0, sums[name] / np.maximum(total, 1), self.weights[name])
        self.t += 1

    def personal(self, client):
        zeros = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for name, place in reach(self.weights, prefix(self.widths(), self.largest[client])).items():
            zeros[name][place] = self.weights[name][place]
        return zeros
