"""Slow twin of SNIP (Lee et al., arXiv:1810.02340) in a federation."""

import numpy as np

from reference.numpy_network import copied, gradient, masked, train, weighted_mean


def scored(weights, slopes):
    """|w g| of all matrices."""
    return {name: np.abs(weights[name] * slopes[name]) for name in weights if weights[name].ndim >= 2}


def largest(scores, share):
    """Masks of the round(share N) largest scores of all matrices, one for each at least."""
    names, worth = list(scores), {name: score.ravel() for name, score in scores.items()}
    places = {name: np.zeros(worth[name].size, dtype=bool) for name in names}
    for name in names:
        places[name][int(np.argmax(worth[name]))] = True
    ranked = sorted(((-worth[n][i], k, i, n) for k, n in enumerate(names) for i in range(worth[n].size)))
    left = round(share * sum(worth[name].size for name in names)) - len(names)
    for _, _, i, name in ranked:
        if left and not places[name][i]:
            places[name][i] = True
            left -= 1
    return {name: places[name].reshape(scores[name].shape) for name in names}


class SNIP:
    """`asked[k]` is the batch on which client k takes its gradient before the first round."""

    def __init__(self, weights, asked, sizes, sgd, share):
        slopes = weighted_mean({k: gradient(weights, *batch) for k, batch in asked.items()}, sizes)
        self.masks = largest(scored(weights, slopes), share)
        self.weights, self.sizes, self.sgd = masked(copied(weights), self.masks), sizes, sgd

    def round(self, batches):
        trained = {k: train(self.weights, batches[k], masks=self.masks, **self.sgd) for k in batches}
        self.weights = weighted_mean(trained, self.sizes)

    def personal(self, client):
        return self.weights
