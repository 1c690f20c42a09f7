"""Slow twin of LotteryFL (Li et al., arXiv:2008.03371)."""

from reference.numpy_network import copied, masked, train
from reference.numpy_subfedavg import accuracy, below, covered_mean, full_masks


class LotteryFL:
    """Algorithm 1; `masks[k]` is what client k holds next, `densities[k]` its nominal density."""

    def __init__(self, weights, clients, sgd, *, density, step, min_score, rewind, merge):
        self.weights, self.initial, self.sgd = copied(weights), copied(weights), sgd
        self.masks, self.densities = {k: full_masks(weights) for k in clients}, dict.fromkeys(clients, 1.0)
        self.density, self.step, self.min_score = density, step, min_score
        self.rewind, self.merge, self.pruned = rewind, merge, 0

    def prepare(self, k, own):
        """The weights that client k starts from; its mask may lose the smallest weights first."""
        received = masked(self.weights, self.masks[k])
        if not (self.densities[k] > self.density and accuracy(received, *own) > self.min_score):
            return received
        self.densities[k] *= 1 - self.step
        self.masks[k] = {
            name: below(received[name], mask, self.step) if mask.ndim >= 2 else mask
            for name, mask in self.masks[k].items()
        }
        self.pruned += 1
        return masked(self.initial if self.rewind else received, self.masks[k])

    def round(self, batches, own):
        """One round; `own[k]` are the samples that client k scores itself with."""
        starts = {k: self.prepare(k, own[k]) for k in batches}
        trees = {k: train(starts[k], batches[k], masks=self.masks[k], **self.sgd) for k in batches}
        if self.merge == "count":
            self.weights = covered_mean(self.weights, trees, self.masks)
        else:
            self.weights = {
                name: old + sum(self.masks[k][name] * (tree[name] - old) for k, tree in trees.items()) / len(trees)
                for name, old in self.weights.items()
            }

    def personal(self, client):
        return masked(self.weights, self.masks[client])
