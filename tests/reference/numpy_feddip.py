"""Slow twin of FedDIP (Long et al., arXiv:2309.06805)."""

import math

import numpy as np

from reference.numpy_network import clipped, copied, gradient, masked, weighted_mean


def pruned_penalty(weights, masks, layers, strength):
    """The gradient of strength * sum_z ||(w m)^(z)||_2 with respect to w m: strength v / ||v||, 0 where v is 0."""
    slopes = {}
    for name in layers:
        held = weights[name] * masks[name]
        norm = math.sqrt(float((held**2).sum()))
        slopes[name] = strength * held / norm if norm > 0 else np.zeros_like(held)
    return slopes


def train_with_feedback(
    received, batches, masks, layers, strength, *, lr, momentum=0.0, weight_decay=0.0, clip=None, mu=0.0
):
    """SGD on dense weights by gradients of pruned ones: g = grad F(m w), v <- momentum v + g + decay w, w <- w - lr v.

    F has the penalty on the norms of the layers and mu / 2 ||m w - received||^2.
    """
    dense = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in dense.items()}
    for x, y in batches:
        pruned = masked(dense, masks)
        slopes = gradient(pruned, x, y)
        for name, slope in pruned_penalty(dense, masks, layers, strength).items():
            slopes[name] = slopes[name] + slope
        slopes = {name: slope + mu * (pruned[name] - received[name]) for name, slope in slopes.items()}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * dense[name]
            dense[name] = dense[name] - lr * velocity[name]
    return dense


def largest_of_all(weights, allowed, count):
    """Masks of the `count` largest magnitudes of all tensors together, where allowed; of equal ones the earlier."""
    names = list(allowed)
    sizes = np.concatenate([np.where(allowed[name], np.abs(weights[name]), -np.inf).ravel() for name in names])
    places = np.zeros(len(sizes), dtype=bool)
    places[np.argsort(-sizes, kind="stable")[:count]] = True
    ends = np.cumsum([allowed[name].size for name in names])[:-1]
    return {n: part.reshape(allowed[n].shape) for n, part in zip(names, np.split(places, ends), strict=True)}


class FedDIP:
    """Algorithm 1, eqs. 5, 8, 9 and 11; tau counts rounds from 1.

    `masks` is the server's first mask, `fixed` names the tensors that keep theirs and have no penalty.
    """

    def __init__(self, weights, masks, sizes, sgd, *, rounds, first, last, every, peak, stairs, mu, recover, fixed):
        self.masks, self.sizes, self.sgd, self.mu = copied(masks), sizes, sgd, mu
        self.weights = masked(weights, self.masks)
        self.first, self.last, self.every, self.rounds = first, last, every, rounds
        self.peak, self.stairs, self.recover, self.tau = peak, stairs, recover, 0
        self.layers = [name for name in masks if name not in fixed]

    def round(self, batches):
        self.tau += 1
        stair = 1 + min(self.tau * self.stairs // self.rounds, self.stairs - 1)
        strength = self.peak * (stair - 1) / self.stairs
        trained = {
            k: train_with_feedback(self.weights, batches[k], self.masks, self.layers, strength, mu=self.mu, **self.sgd)
            for k in batches
        }
        mean = weighted_mean(trained, self.sizes)
        if self.tau % self.every == 0:
            self.reconfigure(mean)
        self.weights = masked(mean, self.masks)

    def reconfigure(self, dense):
        share = self.last + (self.first - self.last) * (1 - self.tau / self.rounds) ** 3
        everything = {name: np.ones(dense[name].shape, dtype=bool) for name in self.layers}
        allowed = everything if self.recover else {name: self.masks[name] for name in self.layers}
        count = round(share * sum(mask.size for mask in everything.values()))
        self.masks.update(largest_of_all(dense, allowed, min(count, sum(int(m.sum()) for m in allowed.values()))))

    def personal(self, client):
        return self.weights
