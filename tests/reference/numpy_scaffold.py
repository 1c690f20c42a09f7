"""Slow twin of SCAFFOLD (Karimireddy et al. 2020, option II)."""

import numpy as np

from reference.numpy_network import copied, train


class SCAFFOLD:
    """w_k = train(w) with gradients + c - c_k; c_k' = c_k - c + (w - w_k) / S; plain means; c moves by |cohort| / K.

    S = lr (1 + (1 + momentum) + ...), which is lr times the number of steps without momentum.
    """

    def __init__(self, weights, clients, sgd, rate=1.0):
        self.weights, self.clients, self.sgd, self.rate = copied(weights), clients, sgd, rate
        self.c = {name: np.zeros_like(value) for name, value in weights.items()}
        self.own = {k: copied(self.c) for k in range(clients)}

    def path(self, steps):
        total, velocity = 0.0, 0.0
        for _ in range(steps):
            velocity = self.sgd.get("momentum", 0.0) * velocity + 1
            total += self.sgd["lr"] * velocity
        return total

    def round(self, batches):
        moved, changed = [], []
        for k, own_batches in batches.items():
            offset = {name: self.c[name] - self.own[k][name] for name in self.c}
            end = train(self.weights, own_batches, offset=offset, **self.sgd)
            s = self.path(len(own_batches))
            new = {n: self.own[k][n] - self.c[n] + (self.weights[n] - end[n]) / s for n in end}
            moved.append({n: end[n] - self.weights[n] for n in end})
            changed.append({n: new[n] - self.own[k][n] for n in end})
            self.own[k] = new
        cohort = len(batches)
        for name in self.weights:
            self.weights[name] = self.weights[name] + self.rate * sum(each[name] for each in moved) / cohort
            self.c[name] = self.c[name] + sum(each[name] for each in changed) / self.clients

    def personal(self, client):
        return self.weights
