"""Slow twin of ScaleFL (Ilhan et al., CVPR 2023) on three hidden layers with a linear exit each."""

import numpy as np

from reference.exits import BLOCKS, backward, forward
from reference.numpy_network import clipped, copied, probabilities


def taught(logits, gamma, temperature):
    """By each exit's logits, of gamma T^2 sum_{j < L} s_j mean(p_L log(p_L / p_j)), sample by sample."""
    count, found = len(logits), [np.zeros_like(value) for value in logits]
    p = [probabilities(value / temperature) for value in logits]
    for place in range(count - 1):
        factor = gamma * temperature**2 * share(place, count) / logits[place].size
        for row, (last, own) in enumerate(zip(p[-1], p[place], strict=True)):
            found[place][row] += factor * (own - last) / temperature
            by_scaled = np.diag(last) - np.outer(last, last)  # of the last probabilities
            found[-1][row] += factor * by_scaled @ (np.log(last / own) + 1.0) / temperature
    return found


def share(place, count):
    """Weight of an exit's loss: 1, 2, ... over their sum."""
    return (place + 1) / sum(range(1, count + 1))


def gradient(weights, x, y, depth, width, gamma, temperature):
    inputs, hidden, logits = forward(weights, x, depth, width)
    by_logits = taught(logits, gamma, temperature)
    for place, own in enumerate(logits):
        delta = probabilities(own)
        delta[np.arange(len(y)), y] -= 1.0
        by_logits[place] += share(place, depth) * delta / len(y)
    return backward(weights, inputs, hidden, by_logits, width)


class ScaleFL:
    """Each coordinate is the plain mean over the clients whose first blocks and first units have it."""

    def __init__(
        self, weights, depths, sgd, widths, rounds, *, scaler=True, strength=0.05, temperature=3.0, warmup=0.25
    ):
        self.theta, self.depths, self.sgd, self.widths, self.scaler = copied(weights), depths, sgd, widths, scaler
        self.strength, self.temperature, self.starts, self.t = strength, temperature, warmup * rounds, 0

    def places(self, depth):
        """For each tensor of a network, the index of what it has of the whole one."""
        found, reads = {}, np.arange(self.theta["first.weight"].shape[1])
        for layer, exit in BLOCKS[:depth]:
            size = len(self.theta[f"{layer}.bias"])
            units = np.arange(max(1, int(self.widths[depth - 1] * size)))
            classes = np.arange(len(self.theta[f"{exit}.bias"]))
            found[f"{layer}.weight"], found[f"{layer}.bias"] = np.ix_(units, reads), units
            found[f"{exit}.weight"], found[f"{exit}.bias"] = np.ix_(classes, units), classes
            reads = units
        return found

    def train(self, k, batches, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
        depth = self.depths[k]
        weights = {name: self.theta[name][place].copy() for name, place in self.places(depth).items()}
        velocity = {name: np.zeros_like(value) for name, value in weights.items()}
        width = self.widths[depth - 1] if self.scaler else 1.0
        gamma = self.strength if self.t > self.starts else 0.0
        for x, y in batches:
            slopes = gradient(weights, x, y, depth, width, gamma, self.temperature)
            slopes = slopes if clip is None else clipped(slopes, clip)
            for name in weights:
                velocity[name] = momentum * velocity[name] + slopes[name] + weight_decay * weights[name]
                weights[name] = weights[name] - lr * velocity[name]
        return weights

    def round(self, batches):
        totals, counts = ({name: np.zeros_like(v) for name, v in self.theta.items()} for _ in range(2))
        for k in batches:
            places = self.places(self.depths[k])
            for name, value in self.train(k, batches[k], **self.sgd).items():
                totals[name][places[name]] += value
                counts[name][places[name]] += 1
        for name, count in counts.items():
            self.theta[name] = np.where(count > 0, totals[name] / np.maximum(count, 1), self.theta[name])
        self.t += 1

    def predicting(self, weights, depth):
        """The last layer of one exit times the number of exits, and zeros for the others."""
        own = copied(weights)
        for place, (_, exit) in enumerate(BLOCKS):
            for kind in ("weight", "bias"):
                own[f"{exit}.{kind}"] *= len(BLOCKS) if place == depth - 1 else 0.0
        return own

    @property
    def weights(self):
        return self.predicting(self.theta, len(BLOCKS))

    def personal(self, client):
        """The client's network, with zeros for what it has not."""
        own = {name: np.zeros_like(value) for name, value in self.theta.items()}
        for name, place in self.places(self.depths[client]).items():
            own[name][place] = self.theta[name][place]
        return self.predicting(own, self.depths[client])
