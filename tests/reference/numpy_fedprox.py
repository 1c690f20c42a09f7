"""Slow twin of FedProx (Li et al. 2020)."""

from reference.numpy_fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg whose clients minimize f(w) + mu / 2 ||w - received||^2."""

    def __init__(self, weights, sizes, sgd, mu):
        super().__init__(weights, sizes, sgd)
        self.mu = mu
