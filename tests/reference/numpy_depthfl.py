"""Slow twin of DepthFL (Kim et al., ICLR 2023) on two hidden layers with a linear exit each."""

import math

import numpy as np

from reference import exits
from reference.exits import backward, forward
from reference.numpy_network import clipped, copied, probabilities

BLOCKS = exits.BLOCKS[:2]


def objective_slopes(logits, y, strength):
    """By each exit's logits, of sum_i CE_i + strength / (L - 1) sum_{j != i} KL(p_j + 1e-7 || p_i), j constant."""
    found = []
    for i, own in enumerate(logits):
        slope = probabilities(own)
        slope[np.arange(len(y)), y] -= 1.0
        for j, other in enumerate(logits):
            if j != i:
                target = probabilities(other) + 1e-7
                pulled = target.sum(axis=1, keepdims=True) * probabilities(own) - target
                slope = slope + strength / (len(logits) - 1) * pulled
        found.append(slope / len(y))
    return found


def gradient(weights, x, y, depth, strength):
    inputs, hidden, logits = forward(weights, x, depth)
    return backward(weights, inputs, hidden, objective_slopes(logits, y, strength))


class DepthFL:
    """First blocks by capacity, FedDyn on what a client has, the plain mean of each tensor over those who have it."""

    def __init__(self, weights, depths, clients, sgd, alpha=0.1, distill=True, ramp=300):
        self.weights, self.depths, self.clients, self.sgd = copied(weights), depths, clients, sgd
        self.alpha, self.distill, self.ramp, self.t = alpha, distill, ramp, 0
        self.g = {k: {} for k in range(clients)}
        self.h = {name: np.zeros_like(value) for name, value in weights.items()}

    def strength(self):
        return math.exp(-5 * (1 - min(self.t, self.ramp) / self.ramp) ** 2) if self.distill else 0.0

    def names(self, depth):
        return [f"{part}.{kind}" for block in BLOCKS[:depth] for part in block for kind in ("weight", "bias")]

    def train(self, k, batches, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
        names = self.names(self.depths[k])
        weights = {name: self.weights[name].copy() for name in names}
        velocity = {name: np.zeros_like(value) for name, value in weights.items()}
        for x, y in batches:
            slopes = gradient(weights, x, y, self.depths[k], self.strength())
            for name in names:
                pull = self.alpha * (weights[name] - self.weights[name])
                slopes[name] = slopes[name] - self.g[k].get(name, 0.0) + pull
            slopes = slopes if clip is None else clipped(slopes, clip)
            for name in names:
                velocity[name] = momentum * velocity[name] + slopes[name] + weight_decay * weights[name]
                weights[name] = weights[name] - lr * velocity[name]
        return weights

    def round(self, batches):
        trained = {k: self.train(k, batches[k], **self.sgd) for k in batches}
        for k, weights in trained.items():
            for name, value in weights.items():
                self.g[k][name] = self.g[k].get(name, 0.0) - self.alpha * (value - self.weights[name])
        for name in list(self.weights):
            have = [weights[name] for weights in trained.values() if name in weights]
            if have:
                mean = sum(have) / len(have)
                self.h[name] = self.h[name] - self.alpha * len(have) / self.clients * (mean - self.weights[name])
                self.weights[name] = mean - self.h[name] / self.alpha if self.alpha else mean
        self.t += 1

    def personal(self, client):
        """The client's exits times L / L_k, zeros for deeper blocks."""
        depth, own = self.depths[client], copied(self.weights)
        for name in own:
            if name not in self.names(depth):
                own[name] = np.zeros_like(own[name])
        for _, exit in BLOCKS[:depth]:
            for kind in ("weight", "bias"):
                own[f"{exit}.{kind}"] = own[f"{exit}.{kind}"] * len(BLOCKS) / depth
        return own
