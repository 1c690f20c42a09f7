"""Slow twins of `lightning_sparsefl.sparse`, one weight at a time, from the equations.

Only NumPy and the standard library; nothing is imported from the package. Trees are dicts of arrays.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def apply(weights, masks):
    out = {name: value.copy() for name, value in weights.items()}
    for name, mask in masks.items():
        for at in np.ndindex(mask.shape):
            if name in out and not mask[at]:
                out[name][at] = 0
    return out


def kept(masks):
    return sum(1 for mask in masks.values() for bit in mask.flat if bit)


def density(masks):
    total = sum(1 for mask in masks.values() for _ in mask.flat)
    return kept(masks) / total if total else 1.0


def dense_like(weights):
    return {name: np.array([True for _ in value.flat]).reshape(value.shape) for name, value in weights.items()}


def _pairs(a, b):
    """(name, bit of a, bit of b) of every position of every name; a missing name is True."""
    for name in [*a, *(name for name in b if name not in a)]:
        shape = (a if name in a else b)[name].shape
        for at in np.ndindex(shape):
            yield name, bool(name not in a or a[name][at]), bool(name not in b or b[name][at])


def _combine(a, b, names, rule):
    shapes = {name: (a if name in a else b)[name].shape for name in names}
    bits = {name: [] for name in names}
    for name, x, y in _pairs(a, b):
        if name in bits:
            bits[name].append(rule(x, y))
    return {name: np.array(bits[name], dtype=bool).reshape(shapes[name]) for name in names}


def intersect(a, b):
    return _combine(a, b, [*a, *(name for name in b if name not in a)], lambda x, y: x and y)


def union(a, b):
    return _combine(a, b, [name for name in a if name in b], lambda x, y: x or y)


def overlap(a, b):
    both = either = 0
    for name, x, y in _pairs(a, b):
        if name in a and name in b:
            both, either = both + (x and y), either + (x or y)
    return both / either if either else 1.0


def changed(a, b):
    pairs = list(_pairs(a, b))
    return sum(x != y for _, x, y in pairs) / len(pairs) if pairs else 0.0


def same(a, b):
    return all(x == y for _, x, y in _pairs(a, b))


def add(a, b, sign=1):
    out = {name: value.copy() for name, value in a.items()}
    for name, value in b.items():
        for at in np.ndindex(value.shape):
            out[name][at] += sign * value[at]
    return out


def subtract(a, b):
    return add(a, b, sign=-1)


def pack(mask):
    bits = [int(bit) for bit in mask.flat]
    return [sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]


def unpack(packed, shape):
    bits = [bool(byte >> place & 1) for byte in packed for place in range(8)]
    return np.array(bits[: math.prod(shape)], dtype=bool).reshape(shape)


def maskable(weights):
    return tuple(name for name in weights if len(weights[name].shape) > 1 and weights[name].size > 0)


def uniform(shapes, budget):
    return dict.fromkeys(shapes, budget)


def explicit(shapes, patterns, budget):
    """Patterns have ``*`` and ``?`` only."""
    out = {}
    for name in shapes:
        said = {value for pattern, value in patterns.items() if _fits(name, pattern)}
        assert len(said) <= 1
        out[name] = said.pop() if said else budget
    return out


def _fits(name, pattern):
    if not name or not pattern:
        return not name and not pattern.strip("*")
    if pattern[0] == "*":
        return _fits(name, pattern[1:]) or _fits(name[1:], pattern)
    return pattern[0] in ("?", name[0]) and _fits(name[1:], pattern[1:])


def _solve(shapes, budget, raw):
    """The equation of the paper, with exact fractions."""
    budget = Fraction(str(budget))
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    dense = {name for name in shapes if budget >= 1 or size[name] == 0}
    while len(dense) < len(shapes):
        sparse = [name for name in shapes if name not in dense]
        top = budget * sum(size[name] for name in sparse) - (1 - budget) * sum(size[name] for name in dense)
        eps = top / sum(raw[name] * size[name] for name in sparse)
        over = {name for name in sparse if raw[name] * eps > 1}
        if not over:
            return {name: Fraction(1) if name in dense else eps * raw[name] for name in shapes}
        dense |= over
    return {name: Fraction(1) for name in shapes}


def erk(shapes, budget, power=1):
    raw = {
        name: (Fraction(sum(shape), math.prod(shape)) if shape and math.prod(shape) else Fraction(1)) ** power
        for name, shape in shapes.items()
    }
    return _solve(shapes, budget, raw)


def erdos_renyi(shapes, budget):
    raw = {}
    for name, shape in shapes.items():
        fan_out, fan_in = [*shape, 1, 1][:2]
        wide = fan_out * fan_in > 0 and len(shape) > 1
        raw[name] = Fraction(fan_in + fan_out, fan_in * fan_out) if wide else Fraction(1)
    return _solve(shapes, budget, raw)


def kept_counts(shapes, densities):
    counts = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        exact = Fraction(str(densities[name])) if isinstance(densities[name], float) else densities[name]
        counts[name] = min(size, max(1, math.floor(exact * size)))
    return counts


def absolute(tree):
    out = {name: value.copy() for name, value in tree.items()}
    for value in out.values():
        for at in np.ndindex(value.shape):
            value[at] = -value[at] if value[at] < 0 else value[at]
    return out


def snip(weights, gradients):
    """SNIP, arXiv:1810.02340, with the sum that it divides by."""
    raw = {
        name: [abs(float(w) * float(g)) for w, g in zip(value.flat, gradients[name].flat, strict=True)]
        for name, value in weights.items()
    }
    total = sum(sum(values) for values in raw.values())
    return {name: np.array(values).reshape(weights[name].shape) / total for name, values in raw.items()}


def taylor(weights, gradients):
    """The change of a quadratic model of the loss, less its second-order part: (f(0) - f(w)) ** 2."""
    out = {name: np.zeros(value.shape) for name, value in weights.items()}
    for name, value in weights.items():
        for at in np.ndindex(value.shape):
            out[name][at] = (float(gradients[name][at]) * (0 - float(value[at]))) ** 2
    return out


def straight_through(weights, slopes, masks):
    """The gates, and dL/dscore where L has the slope `slopes` by each gated weight."""
    gates = {name: np.zeros(mask.shape) for name, mask in masks.items()}
    pull = {name: np.zeros(mask.shape) for name, mask in masks.items()}
    for name, mask in masks.items():
        for at in np.ndindex(mask.shape):
            gates[name][at] = 1 if mask[at] else 0
            pull[name][at] = weights[name][at] * slopes[name][at]
    return gates, pull


def _ranked(score, places):
    """Places, the largest score first, equal ones by index."""
    return sorted(places, key=lambda place: (-score.flat[place], place))


def _mask_of(shape, places):
    mask = np.zeros(shape, dtype=bool)
    for place in places:
        mask.flat[place] = True
    return mask


def keep_largest(score, count):
    return _mask_of(score.shape, _ranked(score, range(score.size))[:count])


def prune(scores, masks, fraction):
    pruned = {}
    for name, mask in masks.items():
        places = [place for place in range(mask.size) if mask.flat[place]]
        dropped = math.ceil(Fraction(str(fraction)) * len(places))
        pruned[name] = _mask_of(mask.shape, _ranked(scores[name], places)[: len(places) - dropped])
    return pruned


def prune_to(scores, counts):
    return {name: keep_largest(scores[name], count) for name, count in counts.items()}


def shrink(scores, masks, counts):
    out = {}
    for name, mask in masks.items():
        places = [place for place in range(mask.size) if mask.flat[place]]
        out[name] = _mask_of(mask.shape, _ranked(scores[name], places)[: counts.get(name, len(places))])
    return out


def shrink_globally(scores, masks, count):
    order = [(name, place) for name, mask in masks.items() for place in range(mask.size) if mask.flat[place]]
    best = sorted(order, key=lambda at: (-scores[at[0]].flat[at[1]], order.index(at)))[:count]
    return {name: _mask_of(mask.shape, [place for n, place in best if n == name]) for name, mask in masks.items()}


def _groups(shape, m, dim):
    """Flat indices of each group, in the order of its positions."""
    rows = {}
    for index, at in enumerate(np.ndindex(shape)):
        row, place = (at[0], index) if dim is None else (at[:dim] + at[dim + 1 :], at[dim])
        rows.setdefault(row, []).append((place, index))
    for row in rows.values():
        inside = [index for _, index in sorted(row)]
        yield from (inside[at : at + m] for at in range(0, len(inside), m))


def nm_masks(scores, n, m, dim=None):
    return {
        name: _mask_of(score.shape, [at for group in _groups(score.shape, m, dim) for at in _ranked(score, group)[:n]])
        for name, score in scores.items()
    }


def is_nm(masks, n, m, dim=None):
    return all(
        len(group) == m and sum(bool(mask.flat[at]) for at in group) <= n
        for mask in masks.values()
        for group in _groups(mask.shape, m, dim)
    )


def regrow(scores, masks, counts):
    grown = {}
    for name, mask in masks.items():
        kept_places = [place for place in range(mask.size) if mask.flat[place]]
        free = [place for place in range(mask.size) if not mask.flat[place]]
        missing = counts.get(name, len(kept_places)) - len(kept_places)
        grown[name] = _mask_of(mask.shape, kept_places + _ranked(scores[name], free)[:missing])
    return grown


def cosine(initial, step, total):
    return 0.0 if total == 1 else 0.5 * initial * (1 + math.cos(math.pi * step / (total - 1)))


def linear(initial, step, total):
    return 0.0 if total == 1 else initial - initial * step / (total - 1)


def constant(initial, step, total):
    return initial


def cubic(start, end, step, total):
    return end + (start - end) * (1 - step / total) ** 3


def gradual(start, end, step, first, last):
    if step <= first:
        return start
    if step >= last:
        return end
    return end + (start - end) * (1 - Fraction(step - first, last - first)) ** 3


def recurs(step, first, last, every):
    return step in {*range(first, last + 1, every), last}
