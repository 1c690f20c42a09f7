"""Slow twin of FedAvg (McMahan et al. 2017)."""

from reference.numpy_network import copied, train, weighted_mean


class FedAvg:
    """w <- sum_k n_k w_k / sum_k n_k over the cohort."""

    mu = 0.0

    def __init__(self, weights, sizes, sgd):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd

    def round(self, batches):
        trained = {k: train(self.weights, batches[k], mu=self.mu, **self.sgd) for k in batches}
        self.weights = weighted_mean(trained, self.sizes)

    def personal(self, client):
        return self.weights
