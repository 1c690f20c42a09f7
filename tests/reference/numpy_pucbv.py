"""Slow twin of the bandit of FedLPS, from the equations: every arm keeps the list of its rewards.

Only the standard library. What chance decides is handed in: `pick(n)` is one of n, `share()` a number in (0, 1].
"""

import math


class Bandit:
    def __init__(self, arms=5, rho=0.5, xi=10.0, drop=0.05):
        self.arms = [(i / arms, (i + 1) / arms, []) for i in range(arms)]
        self.rho, self.xi, self.drop = rho, xi, drop
        self.selections, self.accuracy = 0, None

    def candidates(self, capacity):
        return [arm for arm in self.arms if arm[0] < capacity]

    def score(self, arm):
        """mean + sqrt(rho (var + 2) log(max(xi psi eps, 1)) / (4 (pulls + 1))); eps is halved by every selection."""
        rewards = arm[2]
        if not rewards:
            return math.inf
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        known = self.xi * (self.xi / len(self.arms) ** 2) * 0.5**self.selections
        bonus = math.log(known) if known > 1 else 0.0
        return mean + math.sqrt(self.rho * (variance + 2) * bonus / (4 * (len(rewards) + 1)))

    def choose(self, capacity, pick, share):
        best, candidates = [], self.candidates(capacity)
        if not candidates:
            return capacity
        top = max(self.score(arm) for arm in candidates)
        best = [arm for arm in candidates if self.score(arm) == top]
        low, high, _ = best[pick(len(best))]
        high = min(high, capacity)
        return low + share() * (high - low)

    def learn(self, capacity, density, accuracy, before, seconds):
        self.selections += 1
        self.accuracy = accuracy
        for arm in self.arms:
            low, high, rewards = arm
            if not low < density <= high:
                continue
            new = [*rewards, (self.utility(accuracy) - self.utility(before)) / seconds]
            upper = [] if density == high else [(density, high, list(new))]
            others = [other for other in self.candidates(capacity) if other is not arm]
            others += [part for part in upper if part[0] < capacity]
            drops = accuracy - before < -self.drop and others
            lower = [] if drops else [(low, density, list(new))]
            self.arms = sorted([other for other in self.arms if other is not arm] + lower + upper)
            return

    @staticmethod
    def utility(accuracy):
        return 10 - 20 / (1 + math.exp(0.35 * accuracy))
