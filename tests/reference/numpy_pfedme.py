"""Slow twin of pFedMe (Dinh et al., arXiv:2006.08848)."""

import numpy as np

from reference.numpy_network import clipped, copied, gradient, weighted_mean


class PFedMe:
    """On each batch K times theta <- theta - lp (grad f(theta) + lam (theta - w)), then w by lam (w - theta)."""

    def __init__(self, weights, sizes, sgd, lam, personal_lr, steps, beta=1.0, decay=0.0):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd
        self.lam, self.personal_lr, self.steps, self.beta, self.decay = lam, personal_lr, steps, beta, decay
        self.own = {}

    def round(self, batches):
        copies = {k: self.trained(k, batches[k]) for k in batches}
        mean = weighted_mean(copies, self.sizes)
        self.weights = {name: (1 - self.beta) * w + self.beta * mean[name] for name, w in self.weights.items()}

    def trained(self, k, batches):
        momentum, weight_decay = self.sgd.get("momentum", 0.0), self.sgd.get("weight_decay", 0.0)
        w, theta = copied(self.weights), copied(self.weights)
        velocity = {name: np.zeros_like(value) for name, value in w.items()}
        for x, y in batches:
            for _ in range(self.steps):
                slopes = gradient(theta, x, y)
                theta = {
                    n: t - self.personal_lr * (slopes[n] + self.lam * (t - w[n]) + self.decay * t)
                    for n, t in theta.items()
                }
            slopes = {name: self.lam * (w[name] - theta[name]) for name in w}
            if "clip" in self.sgd:
                slopes = clipped(slopes, self.sgd["clip"])
            for name, slope in slopes.items():
                velocity[name] = momentum * velocity[name] + slope + weight_decay * w[name]
                w[name] = w[name] - self.sgd["lr"] * velocity[name]
        self.own[k] = theta
        return w

    def personal(self, client):
        return self.own.get(client, self.weights)
