"""Slow twin of Per-FedAvg (Fallah et al., arXiv:2002.07948)."""

import numpy as np

from reference.numpy_network import clipped, copied, gradient, weighted_mean


def stepped(weights, slopes, rate):
    return {name: value - rate * slopes[name] for name, value in weights.items()}


class PerFedAvg:
    """w <- w - beta g, g = grad f(w - alpha grad f(w; b1); b2), and with the Hessian g <- g - alpha H(w; b3) g."""

    def __init__(self, weights, sizes, sgd, alpha, hessian=False, delta=1e-3):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd
        self.alpha, self.hessian, self.delta = alpha, hessian, delta
        self.adaptations = {}

    def round(self, batches, adaptations):
        """`adaptations[k]` are the batches that client k is adapted on for its score."""
        self.adaptations = adaptations
        trained = {k: self.trained(batches[k]) for k in batches}
        self.weights = weighted_mean(trained, self.sizes)

    def trained(self, batches):
        momentum, weight_decay = self.sgd.get("momentum", 0.0), self.sgd.get("weight_decay", 0.0)
        w = copied(self.weights)
        velocity = {name: np.zeros_like(value) for name, value in w.items()}
        size = 3 if self.hessian else 2
        for low in range(0, len(batches) - size + 1, size):
            slopes = self.meta(w, *batches[low : low + size])
            if "clip" in self.sgd:
                slopes = clipped(slopes, self.sgd["clip"])
            for name, slope in slopes.items():
                velocity[name] = momentum * velocity[name] + slope + weight_decay * w[name]
                w[name] = w[name] - self.sgd["lr"] * velocity[name]
        return w

    def meta(self, w, first, second, third=None):
        slopes = gradient(stepped(w, gradient(w, *first), self.alpha), *second)
        if third is None:
            return slopes
        above, below = (gradient(stepped(w, slopes, sign * self.delta), *third) for sign in (-1, 1))
        product = {name: (above[name] - below[name]) / (2 * self.delta) for name in w}
        return stepped(slopes, product, self.alpha)

    def personal(self, client):
        weights = self.weights
        for batch in self.adaptations[client]:
            weights = stepped(weights, gradient(weights, *batch), self.alpha)
        return weights
