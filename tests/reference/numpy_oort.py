"""Slow twin of Oort (Lai et al. 2021): selection on dictionaries, with the random numbers handed in."""

import math

import numpy as np


class Oort:
    """Exploits clients with large utilities, and explores those that were never drawn."""

    def __init__(
        self, samples, seconds, *, threshold=100.0, pacer=(20, 5.0), clip=0.95, cut=0.95, alpha=2.0, explore=0.9
    ):
        self.samples, self.seconds = samples, seconds  # by client
        self.threshold, (self.step, self.delta) = threshold, pacer
        self.clip, self.cut, self.alpha = clip, cut, alpha
        self.epsilon, self.floor = explore, 0.2
        self.utility, self.success, self.time = {}, {}, {}
        self.exploitation = [0.0]

    def draw(self, t, wanted, randoms):
        """The clients of round t, from 1."""
        preferred = np.inf
        if self.threshold < 100 and self.time:
            times = np.sort(list(self.time.values()))
            preferred = times[min(math.floor(len(times) * self.threshold / 100), len(times) - 1)]
        self.epsilon = max(0.98 * self.epsilon, self.floor)
        score = self.scores(t, preferred)
        exploit = min(math.floor(wanted * (1 - self.epsilon)), len(score))
        order = sorted(score, key=lambda k: (-score[k], k))
        cohort = []
        if exploit:
            barrier = self.cut * score[order[exploit] if exploit < len(order) else order[-1]]
            cohort = self.sample([k for k in order if score[k] >= barrier], score, exploit, randoms)
        unseen = [k for k in range(len(self.samples)) if k not in self.utility]
        reward = {k: self.samples[k] * self.penalty(self.seconds[k], preferred) for k in unseen}
        explore = min(wanted - exploit, len(unseen))
        best = sorted(unseen, key=lambda k: (-reward[k], k))[: 5 * explore]
        cohort += self.sample(best, reward, explore, randoms)
        rest = [k for k in range(len(self.samples)) if k not in cohort]
        if not unseen:
            self.epsilon = self.floor = 0.0
        return cohort + self.sample(rest, dict.fromkeys(rest, 1.0), wanted - len(cohort), randoms)

    def scores(self, t, preferred):
        if not self.utility:
            return {}
        values = np.sort(list(self.utility.values()))
        ceiling = values[min(math.floor(self.clip * len(values)), len(values) - 1)]
        low = 0.999 * values[0]
        width = max(values[-1] - low, 1e-4)
        return {
            k: ((min(u, ceiling) - low) / width + math.sqrt(0.1 * math.log(t) / self.success[k]))
            * self.penalty(self.time[k], preferred)
            for k, u in self.utility.items()
        }

    def penalty(self, seconds, preferred):
        return (preferred / seconds) ** self.alpha if seconds > preferred else 1.0

    def sample(self, clients, weight, count, randoms):
        clients, drawn = list(clients), []
        for _ in range(count):
            edges = np.cumsum([weight[k] for k in clients])
            place = min(np.searchsorted(edges, next(randoms) * edges[-1], side="right"), len(clients) - 1)
            drawn.append(clients.pop(place))
        return drawn

    def learn(self, t, squares, late=()):
        """The mean squared losses of the clients that were merged; clients that were late get the mean utility."""
        seen_before = set(self.utility)
        new = {k: self.samples[k] * np.sqrt(square) for k, square in squares.items()}
        new |= dict.fromkeys(late, np.mean(list(new.values())))
        for k, u in new.items():
            self.utility[k], self.success[k], self.time[k] = u, t, self.seconds[k]
        old = [u for k, u in new.items() if k in seen_before]
        self.exploitation.append(np.mean(old) if old else 0.0)
        ahead = t + 1
        if ahead >= 2 * self.step and ahead % self.step == 0:
            before = sum(self.exploitation[-2 * self.step : -self.step])
            change = abs(sum(self.exploitation[-self.step :]) - before)
            if change <= 0.1 * before:
                self.threshold = min(100.0, self.threshold + self.delta)
            elif change >= 5 * before:
                self.threshold = max(self.delta, self.threshold - self.delta)
