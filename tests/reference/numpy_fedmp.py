"""Slow twin of FedMP (Jiang et al., ICDE 2022), bandit included."""

import math

import numpy as np

from reference.numpy_narrow import reach, train_narrow
from reference.numpy_network import copied, layers


class Bandit:
    """Discounted UCB over leaves [low, high); every pull is kept, and its age counted anew each time."""

    def __init__(self, discount, width):
        self.discount, self.width, self.edges, self.pulls = discount, width, [0.0, 1.0], []

    def leaves(self):
        return [(self.edges[i], self.edges[i + 1]) for i in range(len(self.edges) - 1)]

    def weight(self, number):
        return self.discount ** (len(self.pulls) - 1 - number)

    def score(self, low, high):
        own = [i for i, (a, _) in enumerate(self.pulls) if low <= a < high]
        if not own:
            return math.inf
        n_leaf = sum(self.weight(i) for i in own)
        n = sum(self.weight(i) for i in range(len(self.pulls)))
        mean = sum(self.weight(i) * self.pulls[i][1] for i in own) / n_leaf
        return mean + math.sqrt(2 * math.log(n) / n_leaf)

    def choose(self, uniform):
        best = None
        for leaf in self.leaves():
            if best is None or self.score(*leaf) > self.score(*best):
                best = leaf
        return best[0] + uniform * (best[1] - best[0])

    def learn(self, a, reward):
        for low, high in self.leaves():
            if low < a < high and high - low > self.width:
                self.edges = sorted([*self.edges, a])
                break
        self.pulls.append((a, reward))


class FedMP:
    """The units with the largest sums of absolute weights; w <- w + sum_k u scatter(w_k - w), u = 1 / cohort.

    `uniform(k, t)` is chance; `losses` and `times` are what clients report, and how long their rounds take.
    """

    def __init__(self, weights, sgd, uniform, discount=0.98, width=0.02, ratio=None):
        self.weights, self.sgd, self.uniform = copied(weights), sgd, uniform
        self.discount, self.width, self.ratio, self.bandits, self.t = discount, width, ratio, {}, 0
        self.before = None

    def kept(self, a):
        """Numbers of the units of each hidden layer, by decreasing row sum of |w|, lower ones first."""
        found = []
        for weight, _ in layers(self.weights)[:-1]:
            rows = np.abs(self.weights[weight]).sum(axis=1)
            count = max(math.floor((1 - a) * len(rows) + 0.5), 1)
            found.append(sorted(sorted(range(len(rows)), key=lambda unit, rows=rows: (-rows[unit], unit))[:count]))
        return found

    def round(self, batches, losses=None, times=None):
        change = {name: np.zeros_like(value) for name, value in self.weights.items()}
        ratios = {}
        for k in batches:
            bandit = self.bandits.setdefault(k, Bandit(self.discount, self.width))
            ratios[k] = bandit.choose(self.uniform(k, self.t)) if self.ratio is None else self.ratio
            place = reach(self.weights, self.kept(ratios[k]))
            narrow = {name: self.weights[name][place[name]] for name in self.weights}
            trained = train_narrow(narrow, batches[k], **self.sgd)
            for name in self.weights:
                change[name][place[name]] += (trained[name] - narrow[name]) / len(batches)
        self.weights = {name: self.weights[name] + change[name] for name in self.weights}
        self.t += 1
        if self.ratio is None:
            self.reward(ratios, times, sum(losses.values()) / len(losses))

    def reward(self, ratios, times, loss):
        """(F_t - F_{t+1}) / |T_k - mean T|, with at least a millisecond; nothing in the first round."""
        mean = sum(times.values()) / len(times)
        for k, a in ratios.items():
            if self.before is not None:
                self.bandits[k].learn(a, (self.before - loss) / max(abs(times[k] - mean), 1e-3))
        self.before = loss

    def personal(self, client):
        return self.weights
