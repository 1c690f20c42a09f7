"""Slow twin of FedRTS (Huang et al., arXiv:2501.19122); what chance decides is handed in."""

import math

import numpy as np

from reference.numpy_network import gradient, masked, train, weighted_mean


def largest(score, allowed, count):
    """The `count` largest scores where allowed; of equal ones the first."""
    places = np.zeros(score.size, dtype=bool)
    worth = np.where(allowed.ravel(), score.ravel(), -np.inf)
    places[np.argsort(-worth, kind="stable")[:count]] = True
    return places.reshape(score.shape)


class FedRTS:
    """`counts` is the number of weights of each layer, `draw(alpha, beta, t)` draws from the distributions."""

    def __init__(self, weights, counts, sizes, sgd, *, exchange, every, end, trust, evidence, draw):
        everywhere = {name: np.ones(weights[name].shape, dtype=bool) for name in counts}
        self.masks = {name: largest(np.abs(weights[name]), everywhere[name], counts[name]) for name in counts}
        self.weights, self.counts, self.sizes, self.sgd = masked(weights, self.masks), counts, sizes, sgd
        self.exchange, self.every, self.end, self.trust, self.evidence = exchange, every, end, trust, evidence
        self.alpha = {name: np.ones(weights[name].shape) for name in counts}
        self.beta = {name: np.ones(weights[name].shape) for name in counts}
        self.draw, self.t = draw, 0

    def round(self, batches, search):
        t, g = self.t, self.trust
        share = self.exchange / 2 * (1 + math.cos(math.pi * t / self.end)) if t <= self.end else 0.0
        trained = {k: train(self.weights, batches[k], masks=self.masks, **self.sgd) for k in batches}
        mean = weighted_mean(trained, self.sizes)
        due = t > 0 and t % self.every == 0 and t <= self.end
        total = sum(self.sizes[k] for k in batches)
        for name, mask in self.masks.items():
            k_out = min(math.floor(round(share * self.counts[name], 9)), mask.size - self.counts[name])
            kappa = self.counts[name] - k_out
            votes, hopes = np.zeros(mask.shape), np.zeros(mask.shape)
            for k in batches:
                votes += self.sizes[k] / total * largest(np.abs(trained[k][name]), mask, kappa)
                if due:
                    slope = gradient(trained[k], *search[k])[name]
                    hopes += self.sizes[k] / total * largest(np.abs(slope), ~mask, k_out)
            outcome = (1 - g) * largest(np.abs(mean[name]), mask, kappa) + g * votes
            self.alpha[name][mask] += self.evidence * outcome[mask]
            self.beta[name][mask] += self.evidence * (1 - outcome[mask])
            if due:
                outcome = (1 - g) * 0.5 + g * hopes
                self.alpha[name][~mask] += self.evidence * outcome[~mask]
                self.beta[name][~mask] += self.evidence * (1 - outcome[~mask])
        if due:
            draws = self.draw(self.alpha, self.beta, t)
            for name, mask in self.masks.items():
                self.masks[name] = largest(draws[name], np.ones(mask.shape, dtype=bool), self.counts[name])
        self.weights = masked(mean, self.masks)
        self.t += 1

    def personal(self, client):
        return self.weights
