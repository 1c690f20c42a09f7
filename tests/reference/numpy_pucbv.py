"""Slow twin of the bandit of FedLPS, from Algorithm 2 and eqs. 15 to 17: every arm stores the list of its rewards.

Only the standard library. Random draws are passed in: `pick(n)` is one of n, `share()` a number in (0, 1].
"""

import math


class Bandit:
    def __init__(self, arms=5, rho=0.5, xi=10.0, drop=0.05, lowest=0.0, explore="untried", compare_with="last"):
        self.arms = [
            (lowest + (1 - lowest) * i / arms, lowest + (1 - lowest) * (i + 1) / arms, []) for i in range(arms)
        ]
        self.rho, self.xi, self.drop, self.explore, self.compare_with = rho, xi, drop, explore, compare_with
        self.selections, self.accuracy = 0, None

    def score(self, arm):
        """mean + sqrt(rho (var + 2) log(max(xi psi eps, 1)) / (4 (pulls + 1))); eps is halved by every selection."""
        rewards = arm[2]
        if not rewards and self.explore == "untried":
            return math.inf
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        variance = sum((reward - mean) ** 2 for reward in rewards) / len(rewards) if rewards else 0.0
        known = self.xi * (self.xi / len(self.arms) ** 2) * 0.5**self.selections
        bonus = math.log(known) if known > 1 else 0.0
        return mean + math.sqrt(self.rho * (variance + 2) * bonus / (4 * (len(rewards) + 1)))

    def choose(self, pick, share):
        """The density that the server draws; a client of capability z trains at min(density, z)."""
        top = max(self.score(arm) for arm in self.arms)
        best = [arm for arm in self.arms if self.score(arm) == top]
        if self.explore == "epsilon" and share() <= (1 if self.selections < 2 else 1 / self.selections):
            best = self.arms
        low, high, _ = best[pick(len(best))]
        return low + share() * (high - low)

    def learn(self, density, accuracy, before, seconds):
        self.selections += 1
        self.accuracy = max(before, accuracy) if self.compare_with == "best" else accuracy
        for arm in self.arms:
            low, high, rewards = arm
            if not low < density <= high:
                continue
            new = [*rewards, (self.utility(accuracy) - self.utility(before)) / seconds]
            lower, upper = [(low, density, list(new))], [(density, high, list(new))] if density < high else []
            others = [other for other in self.arms if other is not arm]
            if accuracy - before < -self.drop and others + upper:
                lower = []
            self.arms = sorted(others + lower + upper)
            return

    @staticmethod
    def utility(accuracy):
        return 10 - 20 / (1 + math.exp(0.35 * accuracy))
