"""Slow twin of FedDyn (Acar et al. 2021)."""

import numpy as np

from reference.numpy_network import copied, train


class FedDyn:
    """w_k = argmin f_k - <g_k, w> + alpha / 2 |w - received|^2; g_k -= alpha (w_k - received); w = mean - h / alpha."""

    def __init__(self, weights, clients, sgd, alpha):
        self.weights, self.clients, self.sgd, self.alpha = copied(weights), clients, sgd, alpha
        self.h = {name: np.zeros_like(value) for name, value in weights.items()}
        self.g = {k: copied(self.h) for k in range(clients)}

    def round(self, batches):
        ends = {}
        for k, own in batches.items():
            linear = {name: -value for name, value in self.g[k].items()}
            ends[k] = train(self.weights, own, mu=self.alpha, offset=linear, **self.sgd)
            self.g[k] = {n: self.g[k][n] - self.alpha * (ends[k][n] - self.weights[n]) for n in self.weights}
        for name, received in copied(self.weights).items():
            change = sum(end[name] - received for end in ends.values())
            self.h[name] = self.h[name] - self.alpha * change / self.clients
            self.weights[name] = received + change / len(ends) - self.h[name] / self.alpha

    def personal(self, client):
        return self.weights
