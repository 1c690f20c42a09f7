"""Slow twin of FedBN (Li et al., arXiv:2102.07623) on a network with one batch norm.

The network is linear, batch norm, ReLU, linear, ReLU, linear; its tensors come in this order, the statistics last.
"""

import numpy as np

from reference.numpy_fedper import FedPer
from reference.numpy_network import copied, probabilities

EPSILON, MOMENTUM = 1e-5, 0.1
FIRST, NORM, SECOND, LAST = "net.0", "net.1", "net.3", "net.5"


def step(weights, x, y):
    """Gradients of the mean loss in training mode, and the batch's mean and variance before the norm."""
    a = x @ weights[f"{FIRST}.weight"].T + weights[f"{FIRST}.bias"]
    mean, variance = a.mean(axis=0), a.var(axis=0)
    scale = 1 / np.sqrt(variance + EPSILON)
    normed = (a - mean) * scale
    h = np.maximum(normed * weights[f"{NORM}.weight"] + weights[f"{NORM}.bias"], 0)
    z = np.maximum(h @ weights[f"{SECOND}.weight"].T + weights[f"{SECOND}.bias"], 0)
    delta = probabilities(z @ weights[f"{LAST}.weight"].T + weights[f"{LAST}.bias"])
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    slopes = {f"{LAST}.weight": delta.T @ z, f"{LAST}.bias": delta.sum(axis=0)}
    delta = (delta @ weights[f"{LAST}.weight"]) * (z > 0)
    slopes |= {f"{SECOND}.weight": delta.T @ h, f"{SECOND}.bias": delta.sum(axis=0)}
    delta = (delta @ weights[f"{SECOND}.weight"]) * (h > 0)
    slopes |= {f"{NORM}.weight": (delta * normed).sum(axis=0), f"{NORM}.bias": delta.sum(axis=0)}
    delta = delta * weights[f"{NORM}.weight"]
    delta = scale * (delta - delta.mean(axis=0) - normed * (delta * normed).mean(axis=0))
    slopes |= {f"{FIRST}.weight": delta.T @ x, f"{FIRST}.bias": delta.sum(axis=0)}
    return slopes, mean, variance


def train(received, batches, *, lr, momentum=0.0, weight_decay=0.0):
    """SGD, with running statistics r <- .9 r + .1 (batch), where the batch's variance is the unbiased one."""
    weights, velocity = copied(received), {}
    for x, y in batches:
        slopes, mean, variance = step(weights, x, y)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity.get(name, 0.0) + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
        unbiased = variance * len(y) / (len(y) - 1)
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
            weights[f"{NORM}.{name}"] = (1 - MOMENTUM) * weights[f"{NORM}.{name}"] + MOMENTUM * value
    return weights


class FedBN(FedPer):
    """The norm's parameters and statistics stay with the client."""

    def __init__(self, weights, sizes, sgd):
        super().__init__(weights, [name for name in weights if name.startswith(f"{NORM}.")], sizes, sgd)

    def work(self, received, batches):
        return train(received, batches, **self.sgd)
