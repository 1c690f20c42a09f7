"""Slow twin of the server optimizers (Reddi et al. 2021, Algorithm 2; FedAvgM of Hsu et al. 2019; AdamW)."""

import numpy as np

from reference.numpy_fedavg import FedAvg
from reference.numpy_network import copied, train, weighted_mean


def second(rule, v, square, b2):
    """v <- v + D^2, b2 v + (1 - b2) D^2, or v - (1 - b2) D^2 sign(v - D^2)."""
    if rule == "adagrad":
        return v + square
    if rule == "yogi":
        return v - (1 - b2) * square * np.sign(v - square)
    return b2 * v + (1 - b2) * square


class AdamW:
    """A list of numbers, each of which counts the changes that came to it since its moments were last 0."""

    def __init__(self, weights, s, b1, b2, tau, decay):
        self.s, self.b1, self.b2, self.tau, self.decay = s, b1, b2, tau, decay
        self.w, self.m, self.v, self.t = list(weights), *([0.0] * len(weights) for _ in range(3))

    def step(self, change, covered):
        for i in range(len(self.w)):
            if covered[i]:
                self.t[i] += 1
                self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * change[i]
                self.v[i] = self.b2 * self.v[i] + (1 - self.b2) * change[i] ** 2
                m, v = self.m[i] / (1 - self.b1 ** self.t[i]), self.v[i] / (1 - self.b2 ** self.t[i])
                self.w[i] += self.s * (m / (v**0.5 + self.tau) - self.decay * self.w[i])

    def forget(self, kept):
        for i in range(len(self.w)):
            if not kept[i]:
                self.m[i] = self.v[i] = self.t[i] = 0


class FedOpt(FedAvg):
    """D = sum_k p_k (w_k - w); m <- b1 m + (1 - b1) D; v <- rule(v, D); w <- w + s m / (sqrt(v) + tau)."""

    def __init__(self, weights, sizes, sgd, rule, s, b1, b2=0.99, tau=1e-3, decay=0.0, raw_first=False):
        super().__init__(weights, sizes, sgd)
        self.rule, self.s, self.b1, self.b2, self.tau, self.decay = rule, s, b1, b2, tau, decay
        self.raw_first, self.rounds = raw_first, 0
        self.m = {name: np.zeros_like(value) for name, value in weights.items()}
        v_0 = 0.0 if rule == "adamw" else tau**2
        self.v = {name: np.full_like(value, v_0) for name, value in weights.items()}

    def round(self, batches):
        trained = {k: train(self.weights, batches[k], **self.sgd) for k in batches}
        mean = weighted_mean(trained, self.sizes)
        self.step({name: mean[name] - self.weights[name] for name in mean})

    def step(self, change):
        self.rounds += 1
        old = copied(self.weights)
        for name, d in change.items():
            if self.rounds == 1 and self.raw_first:
                self.m[name], self.v[name] = d, d**2
                self.weights[name] = old[name] + d
                continue
            self.m[name] = self.b1 * self.m[name] + (d if self.rule == "momentum" else (1 - self.b1) * d)
            self.v[name] = second(self.rule, self.v[name], d**2, self.b2)
            m, v = self.m[name], self.v[name]
            if self.rule == "adamw":
                m, v = m / (1 - self.b1**self.rounds), v / (1 - self.b2**self.rounds)
            step = m if self.rule == "momentum" else m / (np.sqrt(v) + self.tau)
            self.weights[name] = old[name] + self.s * step - self.s * self.decay * old[name]
