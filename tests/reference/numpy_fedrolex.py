"""Slow twin of FedRolex (Alam et al., arXiv:2212.01548)."""

import math

from reference.numpy_heterofl import HeteroFL
from reference.numpy_narrow import reach
from reference.numpy_network import layers


class FedRolex(HeteroFL):
    """HeteroFL with the units (s + j) mod C for j < ceil(r C), where s is `step` times the round."""

    def __init__(self, weights, rates, sgd, step=1, **options):
        super().__init__(weights, rates, sgd, **options)
        self.step, self.t = step, 0

    def place(self, client):
        sizes = [self.weights[bias].size for _, bias in layers(self.weights)[:-1]]
        first, rate = self.step * self.t, self.rates[client]
        return reach(self.weights, [sorted((first + j) % C for j in range(math.ceil(rate * C))) for C in sizes])

    def round(self, batches):
        super().round(batches)
        self.t += 1

    def personal(self, client):
        return self.weights
