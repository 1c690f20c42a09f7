"""Slow twin of Sub-FedAvg's hybrid form (arXiv:2105.00562, Algorithm 2) on the network with one batch norm of FedBN.

Channels are the units of the first layer, which the norm scales. All three weight matrices are fully connected layers.
"""

import numpy as np

from reference.numpy_fedbn import EPSILON, FIRST, LAST, MOMENTUM, NORM, SECOND, step
from reference.numpy_network import clipped, copied, masked, weighted_mean
from reference.numpy_subfedavg import below, covered_mean

SCALE, STATISTICS = f"{NORM}.weight", (f"{NORM}.running_mean", f"{NORM}.running_var")
MATRICES = [f"{layer}.weight" for layer in (FIRST, SECOND, LAST)]


def accuracy(weights, x, y):
    """In evaluation mode, with the running statistics."""
    mean, variance = (weights[name] for name in STATISTICS)
    a = x @ weights[f"{FIRST}.weight"].T + weights[f"{FIRST}.bias"]
    h = np.maximum((a - mean) / np.sqrt(variance + EPSILON) * weights[SCALE] + weights[f"{NORM}.bias"], 0)
    z = np.maximum(h @ weights[f"{SECOND}.weight"].T + weights[f"{SECOND}.bias"], 0)
    logits = z @ weights[f"{LAST}.weight"].T + weights[f"{LAST}.bias"]
    return float((logits.argmax(axis=1) == y).mean())


def train(received, batches, masks, penalty, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """The weights after each step, from the masked ones; removed channels keep their statistics."""
    weights, velocity, still = masked(received, masks), {}, ~masks[SCALE]
    for x, y in batches:
        slopes, mean, variance = step(weights, x, y)
        slopes[SCALE] = slopes[SCALE] + penalty * np.sign(weights[SCALE])
        slopes = masked(slopes, masks)
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity.get(name, 0.0) + slope + weight_decay * weights[name]
            weights[name] = (weights[name] - lr * velocity[name]) * masks[name]
        unbiased = variance * len(y) / (len(y) - 1)
        for name, value in zip(STATISTICS, (mean, unbiased), strict=True):
            weights[name] = np.where(still, weights[name], (1 - MOMENTUM) * weights[name] + MOMENTUM * value)
        yield copied(weights)


def without_channels(masks, kept):
    """A removed channel loses its row, its bias, its norm, and the column that reads it."""
    masks = copied(masks)
    for name in (f"{FIRST}.weight", f"{FIRST}.bias", SCALE, f"{NORM}.bias"):
        masks[name][~kept] = False
    masks[f"{SECOND}.weight"][:, ~kept] = False
    return masks


class SubFedAvgHybrid:
    """`masks[k]` is what client k holds next; the norm's statistics are averaged by samples."""

    def __init__(self, weights, sizes, sgd, method, epochs):
        self.weights, self.sgd, self.method, self.epochs = copied(weights), sgd, method, epochs
        self.sizes = sizes
        parameters = {name: value for name, value in weights.items() if name not in STATISTICS}
        self.masks = {k: {n: np.ones(v.shape, dtype=bool) for n, v in parameters.items()} for k in range(len(sizes))}
        self.pruned = self.removed = 0

    def fraction(self, masks):
        """In percent as the authors' code has it."""
        goal, step = 100 * (1 - self.method["density"]), 100 * self.method["step"]
        pruned = 100 * (1 - sum(mask.sum() for mask in masks.values()) / sum(mask.size for mask in masks.values()))
        if pruned >= goal:
            return None
        if goal - pruned < step:
            step = (goal - pruned) / (100 - pruned) * 100
            step = step - 5 if step > 16 else step
        return step / 100

    def candidate(self, weights, masks, fraction):
        return {**masks, **{name: below(weights[name], masks[name], fraction) for name in MATRICES}}

    def matrices(self, early, late, masks, own):
        first, last = (self.candidate(weights, masks, self.method["step"]) for weights in (early, late))
        distance, fraction = np.mean([(first[n] != last[n]).mean() for n in MATRICES]), self.fraction(masks)
        if not distance > self.method["min_change"] or fraction is None:
            return masks
        last = self.candidate(late, masks, fraction)
        if not accuracy(masked(late, last), *own) > self.method["min_score"]:
            return masks
        self.pruned += 1
        return last

    def channels(self, weights, held):
        """The channels with scales above that at place int(.45 n) of n sorted ones; all if too few would be left."""
        scales = np.abs(weights[SCALE])
        left = held & (scales > np.sort(scales[held])[int(held.sum() * self.method["channel_step"])])
        return left if left.sum() >= self.method["min_channels"][0] else held

    def fewer(self, early, late, masks, own):
        held = masks[SCALE]
        first, last = (self.channels(weights, held) for weights in (early, late))
        if not (first != last).sum() / held.sum() > self.method["min_channel_change"]:
            return masks
        removed = without_channels(masks, last)
        if not accuracy(masked(late, removed), *own) > self.method["min_score"]:
            return masks
        self.removed += 1
        return removed

    def round(self, batches, own):
        """One round; `own[k]` are the samples that client k scores itself with."""
        trees, votes = {}, {}
        for k, steps in batches.items():
            held = self.masks[k]
            seen = list(train(self.weights, steps, held, self.method["penalty"], **self.sgd))
            early, late = seen[len(steps) // self.epochs - 1], seen[-1]
            masks = self.fewer(early, late, self.matrices(early, late, held, own[k]), own[k])
            self.masks[k], trees[k], votes[k] = masks, masked(late, masks), masks
        statistics = weighted_mean(
            {k: {name: tree[name] for name in STATISTICS} for k, tree in trees.items()}, self.sizes
        )
        parameters = {name: value for name, value in self.weights.items() if name not in STATISTICS}
        self.weights = {**self.weights, **covered_mean(parameters, trees, votes), **statistics}

    def personal(self, client):
        return masked(self.weights, self.masks[client])
