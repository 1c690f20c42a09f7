"""Slow twin of FedNova (Wang et al. 2020)."""

from reference.numpy_fedavg import FedAvg
from reference.numpy_network import train


def norm(rates, momentum, mu=0.0):
    """The coefficients of each gradient in the change, one after another: a = sum / first rate.

    A gradient of 1 in every step, and the pull of the proximal term mu on what was moved so far.
    """
    moved, velocity = 0.0, 0.0
    for rate in rates:
        velocity = momentum * velocity + 1 - mu * moved
        moved += rate * velocity
    return moved / rates[0]


class FedNova(FedAvg):
    """w <- w + (sum_k p_k a_k) sum_k p_k (w_k - w) / a_k; with mu > 0 the first factor is of the numbers of steps."""

    def __init__(self, weights, sizes, sgd, mu=0.0):
        super().__init__(weights, sizes, sgd)
        self.mu = mu

    def round(self, batches):
        trained = {k: train(self.weights, batches[k], mu=self.mu, **self.sgd) for k in batches}
        rates = {k: [self.sgd["lr"]] * len(batches[k]) for k in batches}
        a = {k: norm(rates[k], self.sgd.get("momentum", 0.0), self.mu) for k in batches}
        total = sum(self.sizes[k] for k in batches)
        p = {k: self.sizes[k] / total for k in batches}
        length = sum(p[k] * (len(batches[k]) if self.mu else a[k]) for k in batches)
        self.weights = {
            name: w + length * sum(p[k] * (trained[k][name] - w) / a[k] for k in batches)
            for name, w in self.weights.items()
        }


class LocalLR(FedAvg):
    """FedAvg whose client k trains at the rate lr (sum_j p_j a_j) / a_k, with j over all clients."""

    def __init__(self, weights, sizes, sgd, steps):
        super().__init__(weights, sizes, sgd)
        a = {k: norm([1.0] * steps[k], sgd["momentum"]) for k in range(len(sizes))}
        mean = sum(sizes[k] * a[k] for k in a) / sum(sizes)
        self.rates = {k: sgd["lr"] * mean / a[k] for k in a}

    def round(self, batches):
        total = sum(self.sizes[k] for k in batches)
        ends = {k: train(self.weights, batches[k], **{**self.sgd, "lr": self.rates[k]}) for k in batches}
        self.weights = {n: sum(self.sizes[k] * ends[k][n] for k in batches) / total for n in self.weights}
