"""Slow twin of FedMef (Huang et al., arXiv:2403.14737) and of FedTiny's adjustment (arXiv:2212.01977)."""

import math

import numpy as np

from reference.numpy_network import clipped, forward, gradient, layers, masked, probabilities, weighted_mean


def largest(score, allowed, count):
    """The `count` largest scores where allowed; of equal ones the first."""
    places = np.zeros(score.size, dtype=bool)
    worth = np.where(allowed.ravel(), score.ravel(), -np.inf)
    places[np.argsort(-worth, kind="stable")[:count]] = True
    return places.reshape(score.shape)


def rate(alpha, t, every, end):
    """alpha / 2 (1 + cos(pi t / t_end)) in rounds R, 2 R, ... up to t_end."""
    return 0.5 * alpha * (1 + math.cos(math.pi * t / end)) if t and t % every == 0 and t <= end else 0.0


def penalized(gamma, t, end):
    """gamma / 2 (1 + cos(pi t / t_end)) up to t_end, and 0 after it."""
    return 0.5 * gamma * (1 + math.cos(math.pi * t / end)) if t <= end else 0.0


def exchanged(mask, share):
    alive = int(mask.sum())
    return min(math.floor(round(share * alive, 9)), mask.size - alive)


def pruned_gradient(weights, x, y, density):
    """The gradient where each layer's weight gradient has only the largest inputs of the batch."""
    inputs, logits = forward(weights, x)
    delta = probabilities(logits)
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        saved = a * largest(np.abs(a), np.ones(a.shape, dtype=bool), round(density * a.size))
        slopes[weight], slopes[bias] = delta.T @ saved, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0)
    return {name: slopes[name] for name in weights}


def train_with_penalty(received, batches, masks, sgd, *, strength, share, psi, max_lr, density):
    """SGD on f + strength sum ||w_low||_2 at the raised rate; w_low are the smallest kept weights at the start."""
    weights, sgd = masked(received, masks), {"momentum": 0.0, "weight_decay": 0.0, "clip": None, **sgd}
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    low = {}
    for name, mask in masks.items():
        stay = int(mask.sum()) - math.floor(round(share * int(mask.sum()), 9))
        low[name] = mask & ~largest(np.abs(weights[name]), mask, stay)
    for b, (x, y) in enumerate(batches):
        slopes = gradient(weights, x, y) if density is None else pruned_gradient(weights, x, y, density)
        lr = sgd["lr"]
        if strength:
            for name, places in low.items():
                norm = math.sqrt(float((weights[name][places] ** 2).sum()))
                slopes[name] = slopes[name] + (strength / norm if norm > 0 else 0.0) * weights[name] * places
            size = sum(float(np.abs(weights[name][places]).sum()) for name, places in low.items())
            total = len(batches)
            fall = (2 * total - 2 * b) / (2 * total - b)
            lr = min(max_lr, max(lr, psi * fall * (2 / (1 + math.exp(-size)) - 1) * lr))
        slopes = masked(slopes, masks)
        if sgd["clip"] is not None:
            slopes = clipped(slopes, sgd["clip"])
        for name, slope in slopes.items():
            velocity[name] = sgd["momentum"] * velocity[name] + slope + sgd["weight_decay"] * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
        weights = masked(weights, masks)
    return weights


class FedMef:
    """`counts` is the number of weights of each layer; `local` has the options of the penalty and the activations."""

    def __init__(self, weights, counts, sizes, sgd, *, alpha, every, end, local):
        everywhere = {name: np.ones(weights[name].shape, dtype=bool) for name in counts}
        self.masks = {name: largest(np.abs(weights[name]), everywhere[name], counts[name]) for name in counts}
        self.weights, self.sizes, self.sgd, self.local, self.t = masked(weights, self.masks), sizes, sgd, local, 0
        self.alpha, self.every, self.end = alpha, every, end

    def round(self, batches, search):
        """`search[k]` is the batch of the gradient that client k sends."""
        local = {**self.local, "share": penalized(self.local["share"], self.t, self.end)}
        trained = {k: train_with_penalty(self.weights, batches[k], self.masks, self.sgd, **local) for k in batches}
        mean, share = weighted_mean(trained, self.sizes), rate(self.alpha, self.t, self.every, self.end)
        if share:
            sent = {}
            for k in batches:
                slopes = gradient(trained[k], *search[k])
                sent[k] = {
                    name: slopes[name] * largest(np.abs(slopes[name]), ~mask, exchanged(mask, share))
                    for name, mask in self.masks.items()
                }
            growth = weighted_mean(sent, self.sizes)
            for name, mask in self.masks.items():
                stay = largest(np.abs(mean[name]), mask, int(mask.sum()) - exchanged(mask, share))
                mean[name] = mean[name] * stay
                self.masks[name] = stay | largest(np.abs(growth[name]), ~stay, exchanged(mask, share))
        self.weights = masked(mean, self.masks)
        self.t += 1

    def personal(self, client):
        return self.weights
