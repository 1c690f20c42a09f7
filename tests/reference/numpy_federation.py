"""Slow twins of FedAvg, FedProx, Local and FedSpa: network, local training and server, from the papers' equations.

Only NumPy in float64 and the standard library; nothing is imported from torch or the package. Weights are dicts of
arrays, masks dicts of bool arrays, True = kept. What chance decides is handed in: the cohort, the batches, the first
masks, random scores.
"""

import math

import numpy as np

CLIP_EPSILON = 1e-6
"""What PyTorch adds to the norm before it divides by it."""


def copied(tree):
    return {name: value.copy() for name, value in tree.items()}


def masked(weights, masks):
    return {name: value * masks[name] if name in masks else value.copy() for name, value in weights.items()}


# ---- the network: linear layers with ReLU between them, softmax cross-entropy


def layers(weights):
    """The names of each layer's weight and bias, in the order of the forward pass."""
    names = list(weights)
    return list(zip(names[0::2], names[1::2], strict=True))


def forward(weights, x):
    """The input of every layer, and the logits: a_{l+1} = max(0, a_l W_l^T + b_l), the last one without max."""
    inputs, last = [], layers(weights)[-1]
    for weight, bias in layers(weights):
        inputs.append(x)
        x = x @ weights[weight].T + weights[bias]
        if (weight, bias) != last:
            x = np.maximum(x, 0.0)
    return inputs, x


def probabilities(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def loss(weights, x, y):
    """Mean over the batch of -log p(y)."""
    chosen = probabilities(forward(weights, x)[1])[np.arange(len(y)), y]
    return -np.log(chosen).mean()


def gradient(weights, x, y):
    """Of the mean loss: dL/dlogits = (p - onehot) / B, then layer by layer backwards."""
    inputs, logits = forward(weights, x)
    delta = probabilities(logits)
    delta[np.arange(len(y)), y] -= 1.0
    delta /= len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        slopes[weight], slopes[bias] = delta.T @ a, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0)
    return {name: slopes[name] for name in weights}


# ---- local training


def clipped(slopes, limit):
    """All gradients times limit / norm where their common Euclidean norm exceeds the limit."""
    norm = math.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
    factor = min(1.0, limit / (norm + CLIP_EPSILON))
    return {name: slope * factor for name, slope in slopes.items()}


def train(received, batches, *, lr, momentum=0.0, weight_decay=0.0, clip=None, masks=None, mu=0.0):
    """SGD from the received weights, one step a batch.

    g = grad f(w) + mu (w - received);  g <- m g;  clip;  g <- g + decay w;  v <- momentum v + g;  w <- m (w - lr v)
    """
    masks = masks or {}
    weights = masked(received, masks)
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for x, y in batches:
        slopes = gradient(weights, x, y)
        slopes = {name: slope + mu * (weights[name] - received[name]) for name, slope in slopes.items()}
        slopes = masked(slopes, masks)
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
        weights = masked(weights, masks)
    return weights


# ---- masks


def layer_densities(shapes, density, rule):
    """Uniform, or Erdos-Renyi-Kernel: eps (sum s / prod s), where a tensor that would exceed 1 is dense."""
    if rule == "uniform" or density >= 1:
        return dict.fromkeys(shapes, density)
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / size[name] for name, shape in shapes.items()}
    dense = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        budget = density * sum(size[name] for name in sparse) - (1 - density) * sum(size[name] for name in dense)
        eps = budget / sum(raw[name] * size[name] for name in sparse)
        over = {name for name in sparse if eps * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in dense else eps * raw[name] for name in shapes}
        dense |= over


def kept_counts(shapes, density, rule):
    """floor(density_l N_l), at least 1."""
    shares = layer_densities(shapes, density, rule)
    return {name: max(1, math.floor(shares[name] * math.prod(shape) + 1e-9)) for name, shape in shapes.items()}


def exchange_rate(alpha, t, rounds):
    """alpha_t = alpha_0 / 2 (1 + cos(pi t / (T - 1))); 0 where there is one round only."""
    return 0.0 if rounds == 1 else 0.5 * alpha * (1 + math.cos(math.pi * t / (rounds - 1)))


def searched(mask, weight, score, rate):
    """FedSpa, Algorithm 2 on one tensor.

    Drop the n = ceil(rate kept) smallest |w| among the kept, then grow the n largest |score| among those that are not
    kept now, the dropped ones included.
    """
    kept = int(mask.sum())
    n = math.ceil(round(rate * kept, 9))
    places = mask.ravel().copy()
    size = np.where(places, np.abs(weight).ravel(), np.inf)
    places[np.argsort(size, kind="stable")[:n]] = False
    worth = np.where(places, -np.inf, np.abs(score).ravel())
    places[np.argsort(-worth, kind="stable")[:n]] = True
    assert places.sum() == kept
    return places.reshape(mask.shape)


# ---- the methods, one object a run; `batches` are this round's participants' mini-batches, by client number


class FedAvg:
    """w <- sum_k n_k w_k / sum_k n_k over the cohort (McMahan et al. 2017); with mu > 0 FedProx (Li et al. 2020)."""

    def __init__(self, weights, sizes, sgd, mu=0.0):
        self.weights, self.sizes, self.sgd, self.mu = copied(weights), sizes, sgd, mu

    def round(self, batches):
        trained = {k: train(self.weights, batches[k], mu=self.mu, **self.sgd) for k in batches}
        total = sum(self.sizes[k] for k in batches)
        self.weights = {name: sum(self.sizes[k] * trained[k][name] for k in batches) / total for name in self.weights}

    def personal(self, client):
        return self.weights


class Local:
    """Every client goes on from its own weights, at first from the common ones."""

    def __init__(self, weights, sgd):
        self.weights, self.sgd, self.own = copied(weights), sgd, {}

    def round(self, batches):
        for k in batches:
            self.own[k] = train(self.personal(k), batches[k], **self.sgd)

    def personal(self, client):
        return self.own.get(client, self.weights)


class FedSpa:
    """Huang et al., arXiv:2201.11380, Algorithms 1 to 3; `masks` holds every client's first mask."""

    def __init__(self, weights, masks, sgd, *, search, merge, rounds, exchange=0.5):
        self.weights, self.masks, self.sgd = copied(weights), {k: copied(mask) for k, mask in masks.items()}, sgd
        self.search, self.merge, self.rounds, self.exchange, self.t = search, merge, rounds, exchange, 0

    def round(self, batches, search_batch, scores=None):
        """One round.

        `search_batch[k]` is the batch of the search gradient; `scores[k]` stand in for it with random growth.
        """
        held = {k: self.masks[k] for k in batches}
        received = {k: masked(self.weights, held[k]) for k in batches}
        trained = {k: train(received[k], batches[k], masks=held[k], **self.sgd) for k in batches}
        rate = exchange_rate(self.exchange, self.t, self.rounds)
        if self.search == "dst" and rate > 0:
            for k in batches:
                score = gradient(trained[k], *search_batch[k]) if scores is None else scores[k]
                self.masks[k] = {
                    name: searched(mask, trained[k][name], score[name], rate) for name, mask in held[k].items()
                }
        for name, value in self.weights.items():
            change = sum(received[k][name] - trained[k][name] for k in batches)  # U_k = start - end
            holders = sum(held[k][name] if name in held[k] else np.ones(value.shape) for k in batches)
            by = len(batches) if self.merge == "mean" else np.maximum(holders, 1)
            self.weights[name] = value - change / by
        self.t += 1

    def personal(self, client):
        return masked(self.weights, self.masks[client])
