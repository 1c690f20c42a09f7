"""Slow twin of FLASH in its form SPDST (Babakniya et al., arXiv:2208.13092)."""

import math

import numpy as np

from reference.numpy_network import copied, masked, train
from reference.numpy_snip import SNIP


def shared_out(total, worth, room):
    """One position after the other to the layer that is furthest behind its share of what is not full."""
    given, full = dict.fromkeys(worth, 0), set()
    while True:
        left = total - sum(given[name] for name in full)
        rest = {name: value for name, value in worth.items() if name not in full}
        shares = {name: left * value / sum(rest.values()) for name, value in rest.items()}
        over = {name for name, share in shares.items() if share >= room[name]}
        if not over:
            break
        given.update({name: room[name] for name in over})
        full |= over
    for name, share in shares.items():
        given[name] = math.floor(share)
    while sum(given.values()) < total:
        behind = max(shares, key=lambda name: shares[name] - given[name])
        given[behind] += 1
    return given


def ranked(places, values):
    """Places by falling value; of equal values the lower place first."""
    return sorted(places, key=lambda place: (-values.ravel()[place], place))


def moved(weights, masks, rate, scores):
    """Drop the ceil(rate kept) smallest of each layer, and add as many of the largest scores, by layer as its mean."""
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    worth = {name: np.abs(weights[name][mask]).mean() for name, mask in masks.items()}
    left, dropped = {}, 0
    for name, mask in masks.items():
        share, sparsity = rate, 1 - mask.mean()
        if sparsity < 0.2 and worth[name] > np.mean(list(worth.values())):
            share = min(share, sparsity)
        places = ranked(np.flatnonzero(mask), np.abs(weights[name]))
        places = places[: max(1, kept[name] - math.ceil(share * kept[name] - 1e-6))]
        dropped += kept[name] - len(places)
        left[name] = places
    room = {name: mask.size - len(left[name]) for name, mask in masks.items()}
    grown = shared_out(dropped, worth, room)
    new = {}
    for name, mask in masks.items():
        free = ranked(set(range(mask.size)) - set(left[name]), scores[name])
        flat = np.zeros(mask.size, dtype=bool)
        flat[left[name] + free[: grown[name]]] = True
        new[name] = flat.reshape(mask.shape)
    return new


def hunted(weights, masks, epochs, exchange, scores, sgd):
    """The layers' densities after a client has trained alone; `epochs[e]` are its batches, `scores[e]` its draws."""
    weights = copied(weights)
    for e, batches in enumerate(epochs):
        if e:
            masks = moved(weights, masks, exchange * (1 - e / len(epochs)), scores[e - 1])
        weights = train(masked(weights, masks), batches, masks=masks, **sgd)
    return {name: mask.mean() for name, mask in masks.items()}


def scaled(found, sizes, density):
    """The mean of the clients' densities, times what makes the whole as dense as asked for; no more than 1."""
    mean = {name: np.mean([each[name] for each in found]) for name in sizes}
    scale = density * sum(sizes.values()) / sum(mean[name] * sizes[name] for name in sizes)
    return {name: min(1.0, scale * mean[name]) for name in sizes}


class FLASH(SNIP):
    """Rounds of SNIP, under the mask that was drawn."""

    def __init__(self, weights, masks, sizes, sgd):
        self.weights, self.masks, self.sizes, self.sgd = masked(weights, masks), masks, sizes, sgd
