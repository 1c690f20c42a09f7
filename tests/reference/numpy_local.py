"""Slow twin of Local, a baseline of FedSpa (Huang et al., arXiv:2201.11380, Table 1)."""

from reference.numpy_network import copied, train


class Local:
    """Every client goes on from its own weights, at first from the common ones."""

    def __init__(self, weights, sgd):
        self.weights, self.sgd, self.own = copied(weights), sgd, {}

    def round(self, batches):
        for k in batches:
            self.own[k] = train(self.personal(k), batches[k], **self.sgd)

    def personal(self, client):
        return self.own.get(client, self.weights)
