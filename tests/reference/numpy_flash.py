"""Slow twin of FLASH in its forms SPDST and JMWST, and hetero-FLASH (Babakniya et al., arXiv:2208.13092)."""

import math

import numpy as np

from reference.numpy_feddst import largest_of
from reference.numpy_network import copied, masked, train, weighted_mean
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


class Moving(FLASH):
    """Rounds in which clients move the mask after their first epoch, where the round is one of `every` (0 = never).

    `capacities[k]` is the share of each layer's mask that client k trains.
    """

    def __init__(self, weights, masks, sizes, sgd, *, density, exchange, every, epochs, merge, sensitivity, capacities):
        super().__init__(weights, copied(masks), sizes, sgd)
        self.density, self.exchange, self.every, self.epochs, self.merge = density, exchange, every, epochs, merge
        self.sensitivity, self.capacities, self.t = sensitivity, capacities, 0

    def part(self, client):
        """The masks of the client's largest weights."""
        part = {}
        for name, mask in self.masks.items():
            places = ranked(np.flatnonzero(mask), np.abs(self.weights[name]))
            own = np.zeros(mask.size, dtype=bool)
            own[places[: max(1, math.floor(self.capacities[client] * len(places) + 1e-6))]] = True
            part[name] = own.reshape(mask.shape)
        return part

    def personal(self, client):
        return masked(self.weights, self.part(client))

    def client(self, k, batches, scores):
        """The weights and the mask of a client after its epochs; `scores` are the draws of its one move."""
        masks = self.part(k)

        def move(weights, step):
            if step + 1 == len(batches) // self.epochs:
                rate = self.exchange * (1 - (step + 1) / len(batches))
                masks.update(moved(weights, masks, rate, scores))
            return masked(weights, masks)

        after = None if scores is None else move
        return train(self.weights, batches, masks=masks, after=after, **self.sgd), masks

    def round(self, batches, scores):
        moves = bool(self.every) and self.t % self.every == 0
        trained = {k: self.client(k, batches[k], scores[k] if moves else None) for k in batches}
        mean, votes = self.merged(trained)
        if moves:
            self.masks = largest_of(mean, self.goals(mean, votes, len(trained)))
        elif self.merge == "count":
            mean |= {name: np.where(votes[name] > 0, mean[name], self.weights[name]) for name in votes}
        self.weights = masked(mean, self.masks)
        self.t += 1

    def merged(self, trained):
        """The mean of the weights, and the number of clients that keep each of them."""
        mean, votes = plain_mean({k: weights for k, (weights, _) in trained.items()}), {}
        for name in self.masks:
            votes[name] = sum(masks[name].astype(int) for _, masks in trained.values())
            if self.merge == "count":
                mean[name] = np.where(votes[name] > 0, mean[name] * len(trained) / np.maximum(votes[name], 1), 0.0)
        return mean, votes

    def goals(self, mean, votes, clients):
        """The number of weights of each layer of a mask that has moved."""
        kept = {"masks": lambda name: votes[name].sum() / clients, "weights": lambda name: (mean[name] != 0).sum()}
        sizes = {name: mask.size for name, mask in self.masks.items()}
        shares = {name: kept[self.sensitivity](name) / size for name, size in sizes.items()}
        densities = scaled([shares], sizes, self.density)
        return {name: max(1, math.floor(share * sizes[name] + 1e-6)) for name, share in densities.items()}


def plain_mean(trees):
    """Every client counts once."""
    return weighted_mean(trees, dict.fromkeys(trees, 1))
