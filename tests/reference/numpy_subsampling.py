"""Slow twin of Subsampling (Konecny et al. 2016)."""

from reference.numpy_fedavg import FedAvg
from reference.numpy_network import copied, train


class Subsampling(FedAvg):
    """w <- w + sum_k p_k U_k (w_k - w) / q_n, where U_k has a part q_n of the coordinates of each tensor."""

    def __init__(self, weights, sizes, sgd, scale):
        super().__init__(weights, sizes, sgd)
        self.scale = scale

    def sampled_round(self, batches, drawn):
        total, old = sum(self.sizes[k] for k in batches), copied(self.weights)
        for k, own in batches.items():
            end = train(old, own, **self.sgd)
            for name, mask in drawn[k].items():
                share = mask.sum() / mask.size if self.scale else 1.0
                self.weights[name] = self.weights[name] + self.sizes[k] / total * mask * (end[name] - old[name]) / share
