"""Slow twin of Hermes (Li et al., MobiCom 2021), on a network of linear layers."""

import numpy as np

from reference.numpy_network import copied, layers, masked
from reference.numpy_prunetrain import train, unit_slopes
from reference.numpy_subfedavg import accuracy


def masks_of(units, weights):
    """A removed unit loses its row, its bias, and the column by which the next layer reads it."""
    masks, pairs = {name: np.ones(value.shape, dtype=bool) for name, value in weights.items()}, layers(weights)
    for number, kept in enumerate(units):
        (row, bias), (column, _) = pairs[number], pairs[number + 1]
        masks[row][~kept], masks[bias][~kept], masks[column][:, ~kept] = False, False, False
    return masks


class Hermes:
    """`units[k][l]` are the units of hidden layer l that client k has, `models[k]` its model."""

    def __init__(self, weights, clients, sgd, *, density, step, min_score, penalty, own):
        self.weights, self.sgd, self.own = copied(weights), sgd, own
        self.density, self.step, self.min_score, self.penalty = density, step, min_score, penalty
        hidden = [len(weights[weight]) for weight, _ in layers(weights)[:-1]]
        self.units = {k: [np.ones(size, dtype=bool) for size in hidden] for k in clients}
        self.models, self.common, self.pruned = {}, None, 0

    def shrunk(self, units, weights, own):
        """Without the units whose rows have a norm strictly below the percentile of the live ones."""
        if np.concatenate(units).mean() <= self.density or not accuracy(weights, *own) > self.min_score:
            return units
        self.pruned += 1
        left = []
        for (row, _), kept in zip(layers(weights), units, strict=False):
            norms = np.abs(weights[row]).sum(axis=1)
            left.append(kept & (norms >= np.percentile(norms[kept], 100 * self.step)))
        return left

    def start(self, k):
        held = masks_of(self.units[k], self.weights)
        if not self.own or k not in self.models:
            return masked(self.weights, held)
        received = held if self.common is None else {n: mask & self.common[n] for n, mask in held.items()}
        return {n: np.where(received[n], self.weights[n], own) for n, own in self.models[k].items()}

    def round(self, batches, own):
        """One round; `own[k]` are the samples that client k scores itself with."""
        trees, votes = {}, {}
        for k, steps in batches.items():
            start = self.start(k)
            if not self.own:
                self.units[k] = self.shrunk(self.units[k], start, own[k])
            held = masks_of(self.units[k], self.weights)
            trained = train(start, steps, unit_slopes, self.penalty, masks=held, **self.sgd)
            if self.own:
                self.units[k] = self.shrunk(self.units[k], trained, own[k])
            votes[k] = masks_of(self.units[k], self.weights)
            trees[k] = masked(trained, votes[k])
        merged = {}
        for name, old in self.weights.items():
            if self.own:
                everybody = np.all([votes[k][name] for k in trees], axis=0)
                merged[name] = np.where(everybody, np.mean([trees[k][name] for k in trees], axis=0), old)
            else:
                merged[name] = old + np.mean([votes[k][name] * (trees[k][name] - old) for k in trees], axis=0)
        if self.own:
            self.common = {n: np.all([votes[k][n] for k in trees], axis=0) for n in self.weights}
            self.models.update(trees)
        self.weights = merged

    def personal(self, client):
        if self.own and client in self.models:
            return self.models[client]
        return masked(self.weights, masks_of(self.units[client], self.weights))
