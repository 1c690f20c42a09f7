"""Slow twin of FedPer (Arivazhagan et al., arXiv:1912.00818)."""

from reference.numpy_network import copied, train


class FedPer:
    """w_k = train(join(w, own_k)); own_k = own(w_k); shared(w) = sum_k p_k shared(w_k)."""

    def __init__(self, weights, own, sizes, sgd):
        self.weights, self.initial, self.own = copied(weights), copied(weights), own
        self.sizes, self.sgd, self.kept = sizes, sgd, {}

    def work(self, received, batches):
        return train(received, batches, **self.sgd)

    def round(self, batches):
        trained = {k: self.work(self.personal(k), batches[k]) for k in batches}
        total = sum(self.sizes[k] for k in batches)
        for k in batches:
            self.kept[k] = {name: trained[k][name] for name in self.own}
        for name in self.weights:
            if name not in self.own:
                self.weights[name] = sum(self.sizes[k] * trained[k][name] for k in batches) / total

    def personal(self, client):
        kept = self.kept.get(client, self.initial)
        return {name: kept[name] if name in self.own else value for name, value in self.weights.items()}
