"""Slow twin of Sub-FedAvg, unstructured (Vahidian et al., arXiv:2105.00562), and what the twins of its kin share."""

import numpy as np

from reference.numpy_network import copied, forward, masked, train


def accuracy(weights, x, y):
    """Share of the samples whose largest logit is that of their class."""
    return float((forward(weights, x)[1].argmax(axis=1) == y).mean())


def below(weight, mask, fraction):
    """A mask without the weights whose |w| is strictly below the percentile of those that are kept."""
    limit = np.percentile(np.abs(weight[mask]), 100 * fraction)
    return mask & (np.abs(weight) >= limit)


def covered_mean(server, trees, votes):
    """Each coordinate is averaged over the clients that vote on it; the server keeps the others."""
    merged = {}
    for name, old in server.items():
        count = sum(votes[k][name].astype(float) for k in trees)
        total = sum(trees[k][name] * votes[k][name] for k in trees)
        merged[name] = np.where(count > 0, total / np.maximum(count, 1), old)
    return merged


def full_masks(weights):
    return {name: np.ones(value.shape, dtype=bool) for name, value in weights.items()}


class SubFedAvg:
    """Algorithm 1; `masks[k]` is what client k holds next."""

    def __init__(self, weights, clients, sgd, *, density, step, min_change, min_score, last_step, votes, epochs):
        self.weights, self.sgd, self.epochs = copied(weights), sgd, epochs
        self.masks = {k: full_masks(weights) for k in clients}
        self.density, self.step, self.last_step, self.votes = density, step, last_step, votes
        self.min_change, self.min_score, self.pruned = min_change, min_score, 0

    def candidate(self, weights, masks, fraction):
        return {
            name: below(weights[name], mask, fraction) if mask.ndim >= 2 else mask.copy()
            for name, mask in masks.items()
        }

    def fraction(self, masks):
        """p; with less than p to go, the rest of the way as a share of what is left, 5 % at most."""
        size = sum(mask.size for mask in masks.values())
        pruned, target = 1 - sum(mask.sum() for mask in masks.values()) / size, 1 - self.density
        if pruned >= target:
            return None
        if self.last_step == "short" and target - pruned < self.step:
            return min(0.05, (target - pruned) / (1 - pruned))
        return self.step

    def next_masks(self, early, late, masks, own):
        first, last = (self.candidate(weights, masks, self.step) for weights in (early, late))
        layers = [name for name, mask in masks.items() if mask.ndim >= 2]
        distance = np.mean([(first[name] != last[name]).mean() for name in layers])
        fraction = self.fraction(masks)
        if fraction is None or not distance > self.min_change:
            return masks
        last = self.candidate(late, masks, fraction)
        if not accuracy(masked(late, last), *own) > self.min_score:
            return masks
        self.pruned += 1
        return last

    def round(self, batches, own):
        """One round; `own[k]` are the samples that client k scores itself with."""
        trees, votes = {}, {}
        for k, steps in batches.items():
            held, seen = self.masks[k], {}

            def watch(weights, step, seen=seen):
                seen[step] = copied(weights)
                return weights

            trained = train(masked(self.weights, held), steps, masks=held, after=watch, **self.sgd)
            self.masks[k] = self.next_masks(seen[len(steps) // self.epochs - 1], trained, held, own[k])
            trees[k], votes[k] = masked(trained, self.masks[k]), self.masks[k] if self.votes == "kept" else held
        self.weights = covered_mean(self.weights, trees, votes)

    def personal(self, client):
        return masked(self.weights, self.masks[client])
