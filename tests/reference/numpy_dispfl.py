"""Slow twins of DisPFL (Dai et al., arXiv:2206.00187), on any graph and on the full one."""

import numpy as np

from reference.numpy_fedspa import exchange_rate, searched
from reference.numpy_network import copied, gradient, masked, train


class DisPFL:
    """No server: w_k = m_k * sum_j w_j / sum_j m'_j over j = k and its neighbours, w_j trained under m'_j.

    `neighbours` gives those of a client in a round. At first w_k = m_k * w_0.
    """

    def __init__(self, weights, masks, sgd, *, neighbours, rounds, exchange=0.5):
        self.masks, self.sgd = {k: copied(mask) for k, mask in masks.items()}, sgd
        self.shared = {k: copied(mask) for k, mask in masks.items()}
        self.models = {k: masked(weights, mask) for k, mask in masks.items()}
        self.neighbours, self.rounds, self.exchange, self.t = neighbours, rounds, exchange, 0

    def personal(self, client):
        mask, mean = self.masks[client], {}
        terms = [(self.models[k], self.shared[k]) for k in (client, *self.neighbours(client, self.t))]
        for name in self.models[client]:
            holders = sum(held[name].astype(float) if name in held else 1.0 for _, held in terms)
            mean[name] = sum(model[name] for model, _ in terms) / np.maximum(holders, 1)
        return masked(mean, mask)

    def round(self, batches, search_batch):
        rate = exchange_rate(self.exchange, self.t, self.rounds + 1)
        starts = {k: self.personal(k) for k in batches}
        for k in batches:
            mask = self.masks[k]
            self.models[k], self.shared[k] = train(starts[k], batches[k], masks=mask, **self.sgd), mask
            slopes = gradient(self.models[k], *search_batch[k])
            self.masks[k] = {n: searched(m, self.models[k][n], slopes[n], rate) for n, m in mask.items()}
        self.t += 1


class FullGraph:
    """No server: w_k = m_k * sum_j w_j / sum_j m'_j over all clients, w_j trained under m'_j.

    Each client trains w_k under m_k, then searches for its next mask. Weights that nobody holds are 0, or `remembered`.
    """

    def __init__(self, weights, masks, sgd, *, rounds, exchange=0.5, remembered=False):
        self.masks = {k: copied(mask) for k, mask in masks.items()}
        self.shared = {k: copied(mask) for k, mask in masks.items()}
        self.models = {k: masked(weights, mask) for k, mask in masks.items()}
        self.sgd, self.rounds, self.exchange, self.t = sgd, rounds, exchange, 0
        self.remembered, self.last, self.unheld = remembered, copied(weights), 0

    def consensus(self):
        """The mean over those that hold a weight."""
        mean = {}
        for name, last in self.last.items():
            holders = sum(mask[name].astype(float) for mask in self.shared.values())
            mean[name] = sum(model[name] for model in self.models.values()) / np.maximum(holders, 1)
            if self.remembered:
                mean[name] = np.where(holders > 0, mean[name], last)
        return mean

    def round(self, batches, search_batch):
        mean, rate = self.consensus(), exchange_rate(self.exchange, self.t, self.rounds)
        self.last = mean
        for k in batches:
            mask = self.masks[k]
            self.models[k] = train(masked(mean, mask), batches[k], masks=mask, **self.sgd)
            self.shared[k] = mask
            if rate > 0:
                slopes = gradient(self.models[k], *search_batch[k])
                self.masks[k] = {n: searched(m, self.models[k][n], slopes[n], rate) for n, m in mask.items()}
        self.unheld += sum(int((~sum(m[n] for m in self.shared.values()).astype(bool)).sum()) for n in self.last)
        self.t += 1

    def personal(self, client):
        return masked(self.consensus(), self.masks[client])
