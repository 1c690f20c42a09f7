"""Slow twin of FedPM (Isik et al., arXiv:2209.15328); draws from the uniform distribution are handed in."""

import numpy as np

from reference.numpy_network import clipped, copied, gradient


def sigmoid(scores):
    return 1.0 / (1.0 + np.exp(-scores))


def train_scores(frozen, scores, batches, draws, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """s <- s - lr v, where dL/ds = dL/d(w m) w p p (1 - p); m keeps where a draw is below p; one draw for each step."""
    scores = copied(scores)
    velocity = {name: np.zeros_like(value) for name, value in scores.items()}
    for step, (x, y) in enumerate(batches):
        chances = {name: sigmoid(value) for name, value in scores.items()}
        shown = {name: w * (draws(step, name) < chances[name]) for name, w in frozen.items()}
        slopes = gradient(shown, x, y)
        slopes = {n: slope * frozen[n] * chances[n] * chances[n] * (1 - chances[n]) for n, slope in slopes.items()}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * scores[name]
            scores[name] = scores[name] - lr * velocity[name]
    return scores


class FedPM:
    """`frozen` are signs times e / sqrt(fan in); `draws(k, t)` are client k's draws by step, `bits(k, t)` the last."""

    def __init__(self, frozen, scores, sgd, draws, bits, least=0.01):
        self.frozen, self.scores, self.sgd = frozen, copied(scores), sgd
        self.draws, self.bits, self.least, self.t = draws, bits, least, 0

    @property
    def weights(self):
        return {name: value * (self.scores[name] > 0) for name, value in self.frozen.items()}

    def round(self, batches):
        votes = {name: np.zeros_like(value) for name, value in self.scores.items()}
        for k in batches:
            trained = train_scores(self.frozen, self.scores, batches[k], self.draws(k, self.t), **self.sgd)
            drawn = self.bits(k, self.t)
            for name, scores in trained.items():
                votes[name] += drawn(name) < sigmoid(scores)
        for name, count in votes.items():
            theta = self.least + (1 - 2 * self.least) * (count / len(batches)).astype(np.float32).astype(float)
            self.scores[name] = np.log(theta / (1 - theta))
        self.t += 1

    def personal(self, client):
        return self.weights
