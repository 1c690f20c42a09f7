"""Slow twin of FedDST (Bibikar et al., arXiv:2112.09824)."""

import math

import numpy as np

from reference.numpy_network import copied, gradient, masked, train, weighted_mean


def searched(mask, weight, slope, rate, count):
    """What stays after dropping the ceil(rate kept) smallest |w|, and that with the largest |g| up to `count`."""
    places = mask.ravel().copy()
    size = np.where(places, np.abs(weight).ravel(), np.inf)
    dropped = min(math.ceil(round(rate * int(mask.sum()), 9)), mask.size - count)
    places[np.lexsort((-np.arange(size.size), size))[:dropped]] = False  # of equal ones the last
    kept = places.copy()
    worth = np.where(mask.ravel(), -np.inf, np.abs(slope).ravel())
    places[np.argsort(-worth, kind="stable")[: count - int(kept.sum())]] = True
    return kept.reshape(mask.shape), places.reshape(mask.shape)


def largest_of(weights, counts):
    """Masks of each layer's largest |w|; of equal ones the first."""
    masks = {}
    for name, count in counts.items():
        places = np.argsort(-np.abs(weights[name]).ravel(), kind="stable")[:count]
        masks[name] = np.isin(np.arange(weights[name].size), places).reshape(weights[name].shape)
    return masks


class FedDST:
    """`masks` is the server's first mask, whose numbers of weights stay; `rates[t]` is what a round exchanges."""

    def __init__(self, weights, masks, sizes, sgd, rates, least):
        self.masks, self.sizes, self.sgd, self.rates, self.t = copied(masks), sizes, sgd, rates, 0
        self.counts = {name: int(mask.sum()) for name, mask in masks.items()}
        self.weights, self.least = masked(weights, masks), least

    def round(self, batches, search, after=None):
        """`search[k]` is the batch of a search gradient, `after[k]` the batches under the new mask."""
        trained, masks, rate = {}, {}, self.rates[self.t]
        for k in batches:
            x, masks[k] = train(self.weights, batches[k], masks=self.masks, **self.sgd), copied(self.masks)
            if rate:
                slopes = gradient(x, *search[k])
                for name, mask in self.masks.items():
                    kept, masks[k][name] = searched(mask, x[name], slopes[name], rate, self.counts[name])
                    x[name] = x[name] * kept
                if after:
                    x = train(x, after[k], masks=masks[k], **self.sgd)
            trained[k] = x
        mean = weighted_mean(trained, self.sizes)
        for name in self.masks:
            voters = sum(masks[k][name].astype(int) for k in batches)
            shares = sum(self.sizes[k] * masks[k][name] for k in batches)
            value = sum(self.sizes[k] * trained[k][name] * masks[k][name] for k in batches) / np.maximum(shares, 1)
            ranked = sorted(
                (-abs(v), -c, i) for i, (v, c) in enumerate(zip(value.ravel(), voters.ravel(), strict=True))
            )
            alive = [i for _, c, i in ranked if -c >= self.least][: self.counts[name]]
            self.masks[name] = np.isin(np.arange(value.size), alive).reshape(value.shape)
            mean[name] = value * self.masks[name]
        self.weights = mean
        self.t += 1

    def personal(self, client):
        return self.weights
