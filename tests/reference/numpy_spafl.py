"""Slow twin of SpaFL (Kim et al., arXiv:2406.00431)."""

import itertools
import math

import numpy as np

from reference.numpy_network import copied, gradient


def on(row, threshold):
    return np.abs(row).mean() > threshold


def shown(weights, thresholds):
    """Rows of weights are 0 unless their mean magnitude exceeds their threshold."""
    result = copied(weights)
    for name, tau in thresholds.items():
        for i in range(len(tau)):
            if not on(weights[name][i], tau[i]):
                result[name][i] = 0.0
    return result


def bounded(weights, thresholds):
    """In [-5, 5]; 0 for a layer of which at most one percent of the rows is on."""
    result = {}
    for name, tau in thresholds.items():
        tau = np.clip(tau, -5.0, 5.0)
        live = sum(on(row, t) for row, t in zip(weights[name], tau, strict=True)) / len(tau)
        result[name] = np.zeros_like(tau) if live <= 0.01 else tau
    return result


def train_thresholds(weights, thresholds, batches, strength, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """SGD on weights and thresholds; q_i = sum_j w_ij g_ij, dL/dtau_i = -q_i - a exp(-tau_i)."""
    weights, tau = copied(weights), bounded(weights, thresholds)
    key = {name: ("tau", name) for name in tau}
    velocity = {n: np.zeros_like(v) for n, v in weights.items()} | {key[n]: np.zeros_like(t) for n, t in tau.items()}
    for x, y in batches:
        dense, slopes = gradient(shown(weights, tau), x, y), {}
        for name, slope in dense.items():
            slopes[name] = slope.copy()
        for name in tau:
            slopes[key[name]] = np.zeros_like(tau[name])
            for i, row in enumerate(weights[name]):
                q = float((row * dense[name][i]).sum())
                own = dense[name][i] if on(row, tau[name][i]) else np.zeros_like(row)
                slopes[name][i] = own + np.sign(row) * q / row.size
                slopes[key[name]][i] = -q - strength * math.exp(-tau[name][i])
        if clip is not None:
            norm = math.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
            slopes = {n: slope * min(1.0, clip / (norm + 1e-6)) for n, slope in slopes.items()}
        for name, slope in slopes.items():
            value = tau[name[1]] if isinstance(name, tuple) else weights[name]
            velocity[name] = momentum * velocity[name] + slope + weight_decay * value
            value -= lr * velocity[name]
        tau = bounded(weights, tau)
    return weights, tau


def followed(weights, history):
    """After the changes of the common thresholds, one round after another; a linear layer divides by its inputs."""
    weights = copied(weights)
    for before, after in itertools.pairwise(history):
        for name in after:
            for i, row in enumerate(weights[name]):
                weights[name][i] = row - (after[name][i] - before[name][i]) * np.sign(row.sum()) / row.size
    return weights


class SpaFL:
    """`history` has the common thresholds of all rounds, `own[k]` client k's weights, thresholds and last round."""

    def __init__(self, weights, sgd, names, *, strength):
        self.weights, self.sgd, self.strength = copied(weights), sgd, strength
        self.history = [{name: np.zeros(len(weights[name])) for name in names}]
        self.own = {}

    def now(self, client):
        weights, tau, since = self.own.get(client, (self.weights, self.history[0], 0))
        return followed(weights, self.history[since:]), tau

    def round(self, batches):
        trained = {}
        for k in batches:
            trained[k] = train_thresholds(self.now(k)[0], self.history[-1], batches[k], self.strength, **self.sgd)
            self.own[k] = (*trained[k], len(self.history) - 1)
        taus = [tau for _, tau in trained.values()]
        self.history.append({name: sum(tau[name] for tau in taus) / len(taus) for name in taus[0]})

    def personal(self, client):
        return shown(*self.now(client))
