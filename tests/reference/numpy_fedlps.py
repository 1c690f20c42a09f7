"""Slow twin of FedLPS (arXiv:2412.07216, eqs. 6 to 13): gates that really stand on the hidden units' outputs.

NumPy in float64, over the network of `numpy_federation`: linear layers with ReLU between them. The units of hidden
layer l are the rows of its weight; a kept list holds one bool array for each hidden layer. What chance decides is
handed in: the cohort, the batches, the densities, the rankings of drawn patterns.
"""

import math

import numpy as np


def layers(weights):
    names = list(weights)
    return list(zip(names[0::2], names[1::2], strict=True))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def norms(weights):
    """|w|_J: the sum of |outgoing row| of every unit of each hidden layer."""
    return [np.abs(weights[weight]).sum(axis=1) for weight, _ in layers(weights)[:-1]]


def relative(weights):
    return [sigmoid(a / a.mean()) for a in norms(weights)]


def largest(ranking, density):
    """The max(floor(s J + .5), 1) largest; of equal ones the first."""
    count = max(math.floor(density * len(ranking) + 0.5), 1)
    ranked = sorted(range(len(ranking)), key=lambda j: (-ranking[j], j))
    kept = np.zeros(len(ranking), dtype=bool)
    kept[ranked[:count]] = True
    return kept


def masks(weights, kept):
    """A unit takes its row, its bias, and the column of its reader along."""
    result = {}
    for at, (weight, bias) in enumerate(layers(weights)):
        rows = kept[at] if at < len(kept) else np.ones(len(weights[bias]), dtype=bool)
        columns = kept[at - 1] if at else np.ones(weights[weight].shape[1], dtype=bool)
        result[weight], result[bias] = rows[:, None] & columns[None, :], rows
    return result


def slopes(weights, x, y):
    """Of the mean loss, for the weights and for a gate on each hidden unit's output: sum over samples of h dL/dh."""
    outputs, last = [x], layers(weights)[-1]
    for pair in layers(weights):
        x = x @ weights[pair[0]].T + weights[pair[1]]
        x = x if pair == last else np.maximum(x, 0.0)
        outputs.append(x)
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    delta = powers / powers.sum(axis=1, keepdims=True)
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    found, gates = {}, []
    for at, (weight, bias) in reversed(list(enumerate(layers(weights)))):
        found[weight], found[bias] = delta.T @ outputs[at], delta.sum(axis=0)
        into = delta @ weights[weight]
        if at:
            gates.insert(0, (outputs[at] * into).sum(axis=0))
        delta = into * (outputs[at] > 0)
    return found, gates


def tie(scores, weights, strength, mean):
    """Gradients of strength * ||Q - sigma(a / mean a)||^2 for Q and for the weights, by the quotient and chain rules.

    With `mean`, the mean over each layer's units instead of the sum.
    """
    for_scores, for_weights = [], {}
    for q, a, (weight, _) in zip(scores, norms(weights), layers(weights), strict=False):
        count = len(q) if mean else 1
        target, average = sigmoid(a / a.mean()), a.mean()
        for_scores.append(strength * 2 * (q - target) / count)
        c = -strength * 2 * (q - target) / count * target * (1 - target)
        for_norms = c / average - (c * a).sum() / (average**2 * len(a))
        for_weights[weight] = for_norms[:, None] * np.sign(weights[weight])
    return for_scores, for_weights


def forward_flops(weights, kept):
    """2 * kept multiplications, and all biases."""
    masked = masks(weights, kept)
    return sum(2 * masked[weight].sum() + len(weights[bias]) for weight, bias in layers(weights))


class FedLPS:
    """`capacity[k]` is what clients that never took part are scored at."""

    def __init__(self, weights, sizes, sgd, method, capacity):
        self.weights, self.sizes, self.sgd, self.method = {n: v.copy() for n, v in weights.items()}, sizes, sgd, method
        self.capacity, self.scores, self.kept, self.own, self.flops = capacity, {}, {}, {}, {}

    def ranking(self, weights, scores, drawn, t):
        pattern = self.method.pattern
        if pattern == "learned":
            return scores
        if pattern == "magnitude":
            return norms(weights)
        if pattern == "random":
            return drawn
        shift = t if pattern == "rolling" else 0
        return [-((np.arange(len(a)) - shift) % len(a)) for a in norms(weights)]

    def choose(self, weights, scores, density, drawn, t):
        return [largest(ranking, density) for ranking in self.ranking(weights, scores, drawn, t)]

    def round(self, t, batches, probes, densities, drawn):
        uploads = {k: self.client(t, k, batches[k], probes.get(k), densities[k], drawn[k]) for k in batches}
        total = sum(self.sizes[k] for k in batches)
        for name, value in self.weights.items():
            self.weights[name] = value + sum(self.sizes[k] * uploads[k][name] for k in batches) / total

    def client(self, t, k, batches, probe, density, drawn):
        method, received = self.method, self.weights
        learned, often = (
            method.pattern == "learned",
            method.refresh == "step" and method.pattern in ("learned", "magnitude"),
        )
        scores = self.scores.get(k, relative(received)) if learned else None
        if learned and method.probe:
            scores = [q - method.score_lr * g for q, g in zip(scores, slopes(received, *probe)[1], strict=True)]
        w = {name: value.copy() for name, value in received.items()}
        velocity = {name: np.zeros_like(value) for name, value in received.items()}
        size = sum(value.size for value in received.values()) if method.reduction == "mean" else 1
        for number, (x, y) in enumerate(batches):
            if number == 0 or often:
                kept = self.choose(w, scores, density, drawn, t)
                m = masks(w, kept)
                velocity = {name: value * m[name] for name, value in velocity.items()}
            found, gates = slopes({name: value * m[name] for name, value in w.items()}, x, y)
            found = {name: g + 2 * method.mu / size * (w[name] - received[name]) for name, g in found.items()}
            if learned:
                pulls, rows = tie(scores, w, method.score_strength, method.reduction == "mean")
                scores = [q - method.score_lr * (g + p) for q, g, p in zip(scores, gates, pulls, strict=True)]
                found = {name: g + rows.get(name, 0) for name, g in found.items()}
            found = {name: g * m[name] for name, g in found.items()}
            if self.sgd.get("clip"):
                length = math.sqrt(sum(float((g**2).sum()) for g in found.values()))
                found = {name: g * min(1.0, self.sgd["clip"] / (length + 1e-6)) for name, g in found.items()}
            for name, g in found.items():
                decayed = g + self.sgd.get("weight_decay", 0.0) * w[name] * m[name]
                velocity[name] = self.sgd.get("momentum", 0.0) * velocity[name] + decayed
                w[name] = w[name] - self.sgd["lr"] * velocity[name] * m[name]
        self.scores[k], self.kept[k] = scores, kept
        if density > method.score_above:
            self.own[k] = {name: value * m[name] for name, value in w.items()}
        return {name: (w[name] - received[name]) * m[name] for name in w}

    def personal(self, k, t, drawn):
        """After round t - 1."""
        if k in self.own:
            return self.own[k]
        if self.method.score_above:
            return self.weights
        m = masks(self.weights, self.choose(self.weights, relative(self.weights), self.capacity[k], drawn, t))
        return {name: value * m[name] for name, value in self.weights.items()}
