"""Slow twin of HeteroFL (Diao et al., arXiv:2010.01264)."""

import math

import numpy as np

from reference.numpy_narrow import reach, train_narrow
from reference.numpy_network import copied, layers


class HeteroFL:
    """Algorithm 1: eqs. 1 and 2 on arrays that are really narrow.

    `rates[k]` is client k's width; with `classes`, `classes[k]` says which classes it has; `trains[k]` names the
    tensors that it trains.
    """

    def __init__(self, weights, rates, sgd, scaler=True, classes=None, trains=None):
        self.weights, self.rates, self.sgd = copied(weights), rates, sgd
        self.scaler, self.classes, self.trains = scaler, classes, trains

    def place(self, client):
        sizes = [self.weights[bias].size for _, bias in layers(self.weights)[:-1]]
        return reach(self.weights, [range(math.ceil(self.rates[client] * size)) for size in sizes])

    def round(self, batches):
        sums = {name: np.zeros_like(value) for name, value in self.weights.items()}
        holders = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for k in batches:
            place, own = self.place(k), None if self.classes is None else self.classes[k]
            narrow = {name: self.weights[name][place[name]] for name in self.weights}
            names = None if self.trains is None else self.trains[k]
            rate = self.rates[k] if self.scaler else 1.0
            trained = train_narrow(narrow, batches[k], rate=rate, own=own, names=names, **self.sgd)
            for name in self.weights if names is None else names:
                votes = np.ones_like(trained[name])
                if own is not None and name in layers(self.weights)[-1]:
                    votes = (votes.T * own).T
                sums[name][place[name]] += votes * trained[name]
                holders[name][place[name]] += votes
        for name, count in holders.items():
            self.weights[name] = np.where(count > 0, sums[name] / np.maximum(count, 1), self.weights[name])

    def personal(self, client):
        zeros = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for name, place in self.place(client).items():
            zeros[name][place] = self.weights[name][place]
        return zeros
