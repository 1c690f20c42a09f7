"""Slow twin of Federated Dropout (Caldas et al., arXiv:1812.07210) and of eFD."""

import numpy as np

from reference.numpy_narrow import reach, train_narrow
from reference.numpy_network import copied


class FD:
    """w <- w + sum_k p_k scatter(w_k - w), p_k = n_k / sum of n over the cohort, on arrays that are really narrow.

    `kept(k, t)` are the numbers of the units of each hidden layer that client k trains in round t.
    """

    def __init__(self, weights, sizes, kept, sgd):
        self.weights, self.sizes, self.kept, self.sgd, self.t = copied(weights), sizes, kept, sgd, 0

    def round(self, batches):
        total = sum(self.sizes[k] for k in batches)
        change = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for k in batches:
            place = reach(self.weights, self.kept(k, self.t))
            narrow = {name: self.weights[name][place[name]] for name in self.weights}
            trained = train_narrow(narrow, batches[k], **self.sgd)
            for name in self.weights:
                change[name][place[name]] += self.sizes[k] / total * (trained[name] - narrow[name])
        self.weights = {name: self.weights[name] + change[name] for name in self.weights}
        self.t += 1

    def personal(self, client):
        return self.weights
