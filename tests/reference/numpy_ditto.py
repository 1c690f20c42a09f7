"""Slow twin of Ditto (Li et al., arXiv:2012.04221)."""

from reference.numpy_network import copied, train, weighted_mean


class Ditto:
    """FedAvg, beside which v_k minimizes f_k(v) + lam / 2 ||v - received||^2."""

    def __init__(self, weights, sizes, sgd, lam):
        self.weights, self.start, self.sizes, self.sgd = copied(weights), copied(weights), sizes, sgd
        self.lam, self.own = lam, {}

    def round(self, batches, personal):
        """`personal[k]` are the batches of the second model."""
        received = self.weights
        for k in batches:
            v = self.own.get(k, self.start)
            # train pulls towards its start: lam (x - v) + lam (v - received)
            towards = {name: self.lam * (v[name] - received[name]) for name in v}
            self.own[k] = train(v, personal[k], mu=self.lam, offset=towards, **self.sgd)
        trained = {k: train(received, batches[k], **self.sgd) for k in batches}
        self.weights = weighted_mean(trained, self.sizes)

    def personal(self, client):
        return self.own.get(client, self.weights)
