"""Slow twin of FIARSE (Wu et al., arXiv:2407.19389)."""

import math

import numpy as np

from reference.numpy_network import clipped, copied, gradient, masked


def largest(weights, names, capacity, scope):
    """Masks of the floor(g N) largest magnitudes, over all layers together or of each layer; ties by place."""
    if scope == "layer":
        return {
            name: of_one(np.abs(weights[name]), max(1, math.floor(capacity * weights[name].size))) for name in names
        }
    sizes = np.concatenate([np.abs(weights[name]).ravel() for name in names])
    chosen = of_one(sizes, math.floor(capacity * sizes.size))
    ends = np.cumsum([weights[name].size for name in names])[:-1]
    return {n: part.reshape(weights[n].shape) for n, part in zip(names, np.split(chosen, ends), strict=True)}


def of_one(sizes, count):
    mask = np.zeros(sizes.size, dtype=bool)
    mask[np.argsort(-sizes.ravel(), kind="stable")[:count]] = True
    return mask.reshape(sizes.shape)


def train_gated(received, batches, thresholds, boost, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """g = grad F(w [|w| >= t]) [|w| >= t] (1 + 2 t |w| / (|w| + t)^2); what is below t stays as it is."""
    weights = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for x, y in batches:
        alive = {name: np.abs(weights[name]) >= t for name, t in thresholds.items()}
        slopes = masked(gradient(masked(weights, alive), x, y), alive)
        if boost:
            for name, t in thresholds.items():
                size = np.abs(weights[name])
                slopes[name] = slopes[name] * (1 + 2 * t * size / (size + t) ** 2)
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            stepped = weights[name] - lr * velocity[name]
            weights[name] = np.where(alive[name], stepped, weights[name]) if name in alive else stepped
    return weights


class FIARSE:
    """`capacities[k]` is the share of the weights that client k trains; `names` are the layers they are chosen from."""

    def __init__(self, weights, sgd, capacities, names, *, scope="global", boost=True):
        self.weights, self.sgd, self.capacities = copied(weights), sgd, capacities
        self.names, self.scope, self.boost, self.fallen = names, scope, boost, 0

    def mask(self, client):
        return largest(self.weights, self.names, self.capacities[client], self.scope)

    def round(self, batches):
        total = {name: np.zeros_like(value) for name, value in self.weights.items()}
        votes = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for k in batches:
            mask = self.mask(k)
            received = masked(self.weights, mask)
            least = {name: np.abs(received[name][mask[name]]) for name in self.names}
            t = {name: values.min() if values.size else np.inf for name, values in least.items()}
            if self.scope == "global":
                t = dict.fromkeys(self.names, min(t.values()))
            trained = train_gated(received, batches[k], t, self.boost, **self.sgd)
            self.fallen += sum(int((np.abs(trained[n][mask[n]]) < t[n]).sum()) for n in self.names)
            for name in total:
                held = mask.get(name, np.ones_like(total[name], dtype=bool))
                total[name] += (trained[name] - received[name]) * held
                votes[name] += held
        self.weights = {n: w + total[n] / np.maximum(votes[n], 1) for n, w in self.weights.items()}

    def personal(self, client):
        return masked(self.weights, self.mask(client))
