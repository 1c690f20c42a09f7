"""Slow twin of REFL (Abdelmoniem et al. 2023): draws and the merge of late updates on dictionaries."""

import math

import numpy as np

from reference.numpy_network import copied, train


class Draws:
    """Draws the clients of a round, with the random numbers handed in."""

    def __init__(self, rest=5, accuracy=0.9, memory=0.25, target="adaptive"):
        self.rest, self.accuracy, self.memory, self.target = rest, accuracy, memory, target
        self.mu, self.turn = None, {}

    def needed(self, wanted, now, arrivals):
        mu = self.mu or 0.0
        coming = len([k for k in arrivals if arrivals[k] <= now + mu])
        low = {"adaptive": 1, "half": math.ceil(0.5 * wanted), "fixed": wanted}[self.target]
        return max(low, wanted - coming)

    def draw(self, t, clients, count, now, arrivals, available, randoms):
        early, late, tired = [], [], []
        for k in clients:
            if k in arrivals or (k in self.turn and t - self.turn[k] < self.rest):
                tired.append(k)
            elif available is None or self.mu is None:
                late.append(k)
            else:
                there = available(k, now + self.mu)
                if next(randoms) >= self.accuracy:
                    there = not there
                (late if there else early).append(k)
        cohort = []
        for group in (early, late, tired):
            while group and len(cohort) < count:
                cohort.append(group.pop(int(next(randoms) * len(group))))
        return cohort

    def learn(self, t, drawn, duration):
        self.turn |= dict.fromkeys(drawn, t)
        if duration is not None:
            self.mu = duration if self.mu is None else (1 - self.memory) * duration + self.memory * self.mu


class Merge:
    """w <- w + sum_k f_k n_k D_k / sum_k f_k n_k, over the round's updates and those that arrived late.

    f_k = 1, or (1 - beta) / (tau + 1) + beta (1 - exp(-L_k / max L)) with L_k = |D_k - D|^2 / |D|^2.
    """

    def __init__(self, weights, sizes, sgd, seconds, needed, beta=0.35, limit=None):
        self.weights, self.sizes, self.sgd = copied(weights), sizes, sgd
        self.seconds, self.needed, self.beta, self.limit = seconds, needed, beta, limit
        self.now, self.t, self.waiting = 0.0, 0, []
        self.factors = []  # of each round: by client

    def round(self, batches):
        changes = {
            k: {n: w - self.weights[n] for n, w in train(self.weights, batches[k], **self.sgd).items()} for k in batches
        }
        fastest = sorted(batches, key=lambda k: (self.seconds[k], k))
        fresh, slow = fastest[: self.needed], fastest[self.needed :]
        end = self.now + max(self.seconds[k] for k in fresh)
        arrived = [one for one in self.waiting if one[0] <= end]
        self.waiting = [one for one in self.waiting if one[0] > end]
        self.waiting += [(self.now + self.seconds[k], self.t, k, changes[k]) for k in slow]
        if self.limit is not None:
            arrived = [one for one in arrived if self.t - one[1] <= self.limit]
        terms = [(1.0, self.sizes[k], changes[k]) for k in fresh]
        mean = self.mean(terms)
        apart = [self.squared({n: late[n] - mean[n] for n in mean}) / self.squared(mean) for *_, late in arrived]
        factors = [
            (1 - self.beta) / (self.t - drawn + 1) + self.beta * (1 - np.exp(-far / max(apart)))
            for (_, drawn, _, _), far in zip(arrived, apart, strict=True)
        ]
        terms += [(f, self.sizes[k], late) for f, (_, _, k, late) in zip(factors, arrived, strict=True)]
        self.factors.append({k: f for f, (_, _, k, _) in zip(factors, arrived, strict=True)})
        self.step(self.mean(terms))
        self.now, self.t = end, self.t + 1

    def step(self, change):
        self.weights = {name: self.weights[name] + change[name] for name in change}

    def mean(self, terms):
        total = sum(f * n for f, n, _ in terms)
        return {name: sum(f * n * d[name] for f, n, d in terms) / total for name in terms[0][2]}

    def squared(self, tree):
        return sum((value**2).sum() for value in tree.values())
