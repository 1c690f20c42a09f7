"""Slow twin of PruneFL (Jiang et al., arXiv:1909.12326)."""

import math

import numpy as np

from reference.numpy_network import copied, gradient, masked, train, weighted_mean


def worthwhile(weights, masks, squares, seconds, fraction, constant):
    """All but the smallest of each layer; of the others the best q / t, one at a time, while above Q / T."""
    sure = {}
    for name, mask in masks.items():
        places = mask.ravel().copy()
        size = np.where(places, np.abs(weights[name]).ravel(), np.inf)
        dropped = math.floor(round(fraction * int(mask.sum()), 9))
        places[np.lexsort((-np.arange(size.size), size))[:dropped]] = False
        sure[name] = places
    gain = sum(float(square.sum()) for name, square in squares.items() if name not in masks)
    gain += sum(float(squares[name].ravel()[places].sum()) for name, places in sure.items())
    time = constant + sum(seconds[name] * int(places.sum()) for name, places in sure.items())
    rest = [
        (squares[name].ravel()[i], seconds[name], name, i)
        for name, places in sure.items()
        for i in range(places.size)
        if not places[i]
    ]
    for square, cost, name, i in sorted(rest, key=lambda item: -item[0] / item[1]):
        if time > 0 and square / cost <= gain / time:
            break
        sure[name][i] = True
        gain, time = gain + square, time + cost
    return {name: places.reshape(masks[name].shape) for name, places in sure.items()}


def largest(squares, masks, share):
    """The floor(share N) largest of all layers together."""
    names = list(masks)
    flat = np.concatenate([squares[name].ravel() for name in names])
    places = np.zeros(flat.size, dtype=bool)
    places[np.argsort(-flat, kind="stable")[: math.floor(share * flat.size + 1e-9)]] = True
    parts = np.split(places, np.cumsum([masks[name].size for name in names])[:-1])
    return {name: part.reshape(masks[name].shape) for name, part in zip(names, parts, strict=True)}


def summed(received, batches, masks, sgd):
    """The trained weights, and the sum of the dense gradients on the way."""
    points = [masked(received, masks)]
    trained = train(
        received, batches, masks=masks, after=lambda weights, step: points.append(copied(weights)) or weights, **sgd
    )
    slopes = [gradient(point, *batch) for point, batch in zip(points, batches, strict=False)]
    return trained, {name: sum(slope[name] for slope in slopes) for name in received}


def alone(weights, whole, seconds, fraction, sgd, most=20):
    """The first client: one full batch between two reconfigurations, until five have changed little."""
    masks = {name: np.ones(weights[name].shape, dtype=bool) for name in seconds}
    calm = 0
    for _ in range(most):
        trained, slopes = summed(weights, [whole], masks, sgd)
        squares = {name: slope**2 for name, slope in slopes.items()}
        new = worthwhile(trained, masks, squares, seconds, fraction, 0.0)
        kept, before = (sum(int(m.sum()) for m in tree.values()) for tree in (new, masks))
        weights, masks = masked(trained, new), new
        calm = calm + 1 if abs(kept / before - 1) <= 0.1 else 0
        if calm == 5:
            break
    return weights, masks


def alone_at_density(weights, whole, names, share, sgd):
    """The first client of the cubic schedule: one full batch, and the largest squared gradients."""
    masks = {name: np.ones(weights[name].shape, dtype=bool) for name in names}
    trained, slopes = summed(weights, [whole], masks, sgd)
    masks = largest({name: slope**2 for name, slope in slopes.items()}, masks, share)
    return masked(trained, masks), masks


class PruneFL:
    """`masks` is the first mask; `shares[t]` is the density of a schedule, None for the rule by time."""

    def __init__(self, weights, masks, sizes, sgd, *, every, fractions, shares, seconds, constant):
        self.masks, self.sizes, self.sgd, self.t = copied(masks), sizes, sgd, 0
        self.weights, self.every, self.fractions, self.shares = masked(weights, masks), every, fractions, shares
        self.seconds, self.constant, self.squares = seconds, constant, {}

    def round(self, batches):
        trained = {}
        for k in batches:
            trained[k], slopes = summed(self.weights, batches[k], self.masks, self.sgd)
            before = self.squares.get(k, dict.fromkeys(slopes, 0.0))
            self.squares[k] = {name: before[name] + slope**2 for name, slope in slopes.items()}
        mean = weighted_mean(trained, self.sizes)
        if (self.t + 1) % self.every == 0:
            q = weighted_mean({k: self.squares.pop(k) for k in batches}, self.sizes)
            if self.shares is None:
                self.masks = worthwhile(mean, self.masks, q, self.seconds, self.fractions[self.t], self.constant)
            else:
                self.masks = largest(q, self.masks, self.shares[self.t])
        self.weights = masked(mean, self.masks)
        self.t += 1

    def personal(self, client):
        return self.weights
