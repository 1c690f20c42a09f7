"""Slow twins of the merge: votes ordered one coordinate at a time, updates clipped, epsilon from formulas.

Only NumPy in float64, scipy's normal distribution and the standard library; nothing of the package.
"""

import math

import numpy as np
from scipy.stats import norm


def middle(votes):
    """The median of some numbers; None without any."""
    ordered, n = sorted(votes), len(votes)
    if n == 0:
        return None
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def trimmed(votes, fraction):
    """The mean without floor(fraction n) numbers at each end; None without any."""
    left_out = math.floor(round(fraction * len(votes), 9))
    ordered = sorted(votes)[left_out : len(votes) - left_out]
    return sum(ordered) / len(ordered) if ordered else None


def by_coordinate(updates, centre):
    """Each coordinate's centre over those who voted, 0 without any, and where there were any.

    `updates` is a list of pairs of arrays: values, and True where they count.
    """
    shape = updates[0][0].shape
    result, covered = np.zeros(shape), np.zeros(shape, dtype=bool)
    for place in np.ndindex(*shape):
        found = centre([float(values[place]) for values, counts in updates if counts[place]])
        if found is not None:
            result[place], covered[place] = found, True
    return result, covered


def clipped(difference, votes, limit):
    """The differences times min(1, limit / norm), where the norm is that of the coordinates voted on; and the norm."""
    squares = sum(float((value[votes[name]] ** 2).sum()) for name, value in difference.items())
    norm_ = math.sqrt(squares)
    factor = 1.0 if norm_ <= limit else limit / norm_
    return {name: value * factor for name, value in difference.items()}, norm_


# ---- privacy: one release of a number with noise of deviation z, where a client counts for -1 to 1


def gaussian_delta(epsilon, z, rounds):
    """Balle, Wang 2018 (arXiv:1805.06530), eq. 6, exact: `rounds` times N(1, z^2) against N(-1, z^2)."""
    apart = 2 * math.sqrt(rounds) / z
    return norm.cdf(apart / 2 - epsilon / apart) - math.exp(epsilon) * norm.cdf(-apart / 2 - epsilon / apart)


def sampled_delta(epsilon, z, q, others):
    """Exact as well, by quadrature, for two concrete federations.

    A client that is drawn with probability q counts for 1 in the one and for -1 in the other, every other client for
    `others`, of which one has its place in the cohort where it is not drawn. What the rest add to all sums is left out.
    """
    x, step = np.linspace(-1 - 12 * z, 1 + 12 * z, 20_001, retstep=True)
    p, p_ = ((1 - q) * norm.pdf(x, others, z) + q * norm.pdf(x, own, z) for own in (1, -1))
    return float(np.maximum(p - math.exp(epsilon) * p_, 0).sum() * step)


def gaussian_divergence(order, z):
    """Renyi divergence of N(1, z^2) from N(-1, z^2): order * 2^2 / (2 z^2)."""
    return order * 4 / (2 * z**2)


def sampled_divergence(order, z, q):
    """Wang, Balle, Kasiviswanathan 2019, theorem 27, for whole orders, in its form that holds for any mechanism."""
    second = gaussian_divergence(2, z)
    log_terms = [
        math.log(2 * math.comb(order, j)) + j * math.log(q) + (j - 1) * gaussian_divergence(j, z)
        for j in range(3, order + 1)
    ]
    log_terms += [0.0, math.log(q**2 * math.comb(order, 2) * min(4 * math.expm1(second), 2 * math.exp(second)))]
    return float(np.logaddexp.reduce(log_terms)) / (order - 1)


def epsilon_of(divergences, delta):
    """Canonne, Kamath, Steinke 2020 (arXiv:2004.00010), proposition 12; `divergences` by order."""
    return min(d + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, d in divergences.items())
