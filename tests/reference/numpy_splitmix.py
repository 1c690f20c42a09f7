"""Slow twin of Split-Mix (Hong et al., arXiv:2203.09747)."""

import math

import numpy as np

from reference.numpy_narrow import reach, train_narrow
from reference.numpy_network import copied, forward, layers


class SplitMix:
    """M networks, each a dict of its own narrow arrays; the last bias is common.

    `counts[k]` is how many of them client k can train; `trains[k]` names the tensors that it trains.
    """

    def __init__(self, weights, bases, counts, sizes, sgd, trains=None):
        self.full, self.counts, self.sizes, self.sgd, self.trains = copied(weights), counts, sizes, sgd, trains
        self.bases, self.t = bases, 0
        hidden = [weights[bias].size for _, bias in layers(weights)[:-1]]
        units = [[[i for i in range(size) if i * bases // size == b] for size in hidden] for b in range(bases)]
        self.places = [reach(weights, width) for width in units]
        self.nets = [{name: weights[name][place[name]] for name in weights} for place in self.places]
        self.last = layers(weights)[-1][1]
        for net in self.nets:
            for weight, _ in layers(weights)[1:]:
                net[weight] = net[weight] * math.sqrt(bases)

    def own(self, client, turn):
        return sorted((client + turn + place) % self.bases for place in range(self.counts[client]))

    def train_own(self, client, turn, batches, names):
        """The networks of a client, trained alone, and the mean of their last biases."""
        trained = {b: train_narrow(self.nets[b], batches[b], names=names, **self.sgd) for b in self.own(client, turn)}
        return trained, sum(net[self.last] for net in trained.values()) / len(trained)

    def round(self, batches):
        """`batches[k][b]` are client k's mini-batches for network b."""
        trained = {}
        for k in batches:
            names = None if self.trains is None else self.trains[k]
            trained[k] = self.train_own(k, self.t, batches[k], names)
        nets = [dict(net) for net in self.nets]
        for b, net in enumerate(self.nets):
            for name in net:
                owners = [
                    k
                    for k in batches
                    if (b in trained[k][0] or name == self.last) and (self.trains is None or name in self.trains[k])
                ]
                ends = {k: trained[k][1] if name == self.last else trained[k][0][b][name] for k in owners}
                if owners:
                    nets[b][name] = sum(self.sizes[k] * ends[k] for k in owners) / sum(self.sizes[k] for k in owners)
        self.nets, self.t = nets, self.t + 1

    def mix(self, numbers):
        """The networks side by side in full arrays; the mean of their logits is one product with W / their number."""
        mixed = {name: np.zeros_like(value) for name, value in self.full.items()}
        for b in numbers:
            for name, place in self.places[b].items():
                share = len(numbers) if name == layers(self.full)[-1][0] else 1
                mixed[name][place] = self.nets[b][name] / share
        return mixed

    @property
    def weights(self):
        return self.mix(range(self.bases))

    def personal(self, client):
        return self.mix(self.own(client, 0))

    def logits(self, numbers, x):
        """The mean of what the networks say, one after another."""
        return sum(forward(self.nets[b], x)[1] for b in numbers) / len(numbers)
