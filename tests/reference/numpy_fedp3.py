"""Slow twin of FedP3 (Yi et al., arXiv:2404.09816)."""

import math

import numpy as np

from reference.numpy_network import copied, train


def largest(weight, keep):
    """True for the floor(keep N) weights with the largest magnitudes; of equal ones the lower index stays."""
    order = sorted(range(weight.size), key=lambda place: (-abs(weight.flat[place]), place))
    mask = np.zeros(weight.size, dtype=bool)
    mask[order[: math.floor(keep * weight.size + 1e-9)]] = True
    return mask.reshape(weight.shape)


class FedP3:
    """`hidden` lists the names of each hidden layer, in order; `head` names the tensors of the last one."""

    def __init__(self, weights, hidden, head, clients, sgd, *, owned, keep, own_head):
        self.weights, self.initial, self.sgd, self.kept = copied(weights), copied(weights), sgd, {}
        self.hidden, self.head, self.clients = hidden, head, clients
        self.owned, self.keep, self.own_head = owned, keep, own_head

    def owns(self, k):
        """Block g of the clients owns the layers g, g + 1, ..."""
        block = k * len(self.hidden) // self.clients
        turns = [(block + place) % len(self.hidden) for place in range(self.owned)]
        return {name for turn in turns for name in self.hidden[turn]}

    def received(self, k):
        sent = {}
        for name, value in self.weights.items():
            if name in self.head:
                sent[name] = self.kept.get(k, self.initial)[name] if self.own_head else value
            elif name in self.owns(k) or value.ndim < 2:
                sent[name] = value
            else:
                sent[name] = value * largest(value, self.keep)
        return sent

    def work(self, k, batches, mask):
        """What the mask leaves out takes no part, and comes back with the value that it arrived with."""
        start = self.received(k)
        x = train(start, batches, masks=mask, **self.sgd)
        return {name: np.where(mask[name], value, start[name]) if name in mask else value for name, value in x.items()}

    def round(self, batches, local_masks):
        self.kept |= {k: self.work(k, batches[k], local_masks[k]) for k in batches}
        for name in self.weights:
            voters = [k for k in batches if name in self.owns(k) or name in self.head]
            if voters:
                self.weights[name] = sum(self.kept[k][name] for k in voters) / len(voters)

    def personal(self, client):
        return self.kept.get(client, self.received(client))
