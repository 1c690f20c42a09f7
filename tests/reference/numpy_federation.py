"""Slow twins of the federated methods: network, local training and server, from the papers' equations.

Only NumPy in float64 and the standard library; nothing is imported from torch or the package. Weights are dicts of
arrays, masks dicts of bool arrays, True = kept. What chance decides is handed in: the cohort, the batches, the first
masks, random scores.
"""

import itertools
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


def pruned_penalty(weights, masks, layers, strength):
    """The gradient of strength * sum_z ||(w m)^(z)||_2 with respect to w m: strength v / ||v||, 0 where v is 0."""
    slopes = {}
    for name in layers:
        held = weights[name] * masks[name]
        norm = math.sqrt(float((held**2).sum()))
        slopes[name] = strength * held / norm if norm > 0 else np.zeros_like(held)
    return slopes


def train_with_feedback(
    received, batches, masks, layers, strength, *, lr, momentum=0.0, weight_decay=0.0, clip=None, mu=0.0
):
    """SGD on dense weights by gradients of pruned ones: g = grad F(m w), v <- momentum v + g + decay w, w <- w - lr v.

    F has the penalty on the norms of the layers and mu / 2 ||m w - received||^2.
    """
    dense = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in dense.items()}
    for x, y in batches:
        pruned = masked(dense, masks)
        slopes = gradient(pruned, x, y)
        for name, slope in pruned_penalty(dense, masks, layers, strength).items():
            slopes[name] = slopes[name] + slope
        slopes = {name: slope + mu * (pruned[name] - received[name]) for name, slope in slopes.items()}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * dense[name]
            dense[name] = dense[name] - lr * velocity[name]
    return dense


def largest_of_all(weights, allowed, count):
    """Masks of the `count` largest magnitudes of all tensors together, where allowed; of equal ones the earlier."""
    names = list(allowed)
    sizes = np.concatenate([np.where(allowed[name], np.abs(weights[name]), -np.inf).ravel() for name in names])
    places = np.zeros(len(sizes), dtype=bool)
    places[np.argsort(-sizes, kind="stable")[:count]] = True
    ends = np.cumsum([allowed[name].size for name in names])[:-1]
    return {n: part.reshape(allowed[n].shape) for n, part in zip(names, np.split(places, ends), strict=True)}


class FedDIP:
    """Long et al., arXiv:2309.06805, Algorithm 1, eqs. 5, 8, 9 and 11; tau counts rounds from 1.

    `masks` is the server's first mask, `fixed` names the tensors that keep theirs and have no penalty.
    """

    def __init__(self, weights, masks, sizes, sgd, *, rounds, first, last, every, peak, stairs, mu, recover, fixed):
        self.masks, self.sizes, self.sgd, self.mu = copied(masks), sizes, sgd, mu
        self.weights = masked(weights, self.masks)
        self.first, self.last, self.every, self.rounds = first, last, every, rounds
        self.peak, self.stairs, self.recover, self.tau = peak, stairs, recover, 0
        self.layers = [name for name in masks if name not in fixed]

    def round(self, batches):
        self.tau += 1
        stair = 1 + min(self.tau * self.stairs // self.rounds, self.stairs - 1)
        strength = self.peak * (stair - 1) / self.stairs
        trained = {
            k: train_with_feedback(self.weights, batches[k], self.masks, self.layers, strength, mu=self.mu, **self.sgd)
            for k in batches
        }
        total = sum(self.sizes[k] for k in batches)
        mean = {name: sum(self.sizes[k] * trained[k][name] for k in batches) / total for name in self.weights}
        if self.tau % self.every == 0:
            self.reconfigure(mean)
        self.weights = masked(mean, self.masks)

    def reconfigure(self, dense):
        share = self.last + (self.first - self.last) * (1 - self.tau / self.rounds) ** 3
        everything = {name: np.ones(dense[name].shape, dtype=bool) for name in self.layers}
        allowed = everything if self.recover else {name: self.masks[name] for name in self.layers}
        count = round(share * sum(mask.size for mask in everything.values()))
        self.masks.update(largest_of_all(dense, allowed, min(count, sum(int(m.sum()) for m in allowed.values()))))

    def personal(self, client):
        return self.weights


# ---- freezing


def train_some(received, batches, names, *, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """SGD on the named tensors; the others have no gradient, no velocity, no decay, and no part in the norm."""
    weights = copied(received)
    velocity = {name: np.zeros_like(weights[name]) for name in names}
    for x, y in batches:
        slopes = {name: slope for name, slope in gradient(weights, x, y).items() if name in velocity}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
    return weights


def first_fit(sizes, budget, order):
    """Groups in their order, each one that still fits."""
    chosen, left = [], budget
    for group in order:
        if sizes[group] <= left:
            chosen.append(group)
            left -= sizes[group]
    return set(chosen)


def mask_problem(plan, sizes, budgets):
    """P^mask (eq. 9) term by term: sum_n d max_j k_nj - sum_j |pi_j| k_nj + (psi_n - trained_n).

    `plan[n]` is the set of groups that client n trains, and k_nj = m_nj / sum_n' m_n'j.
    """
    total = 0.0
    for own, budget in zip(plan, budgets, strict=True):
        shares = {j: 1 / sum(j in other for other in plan) for j in own}
        total += sum(sizes) * max(shares.values(), default=0.0)
        total -= sum(sizes[j] * share for j, share in shares.items())
        total += budget - sum(sizes[j] for j in own)
    return total


def all_plans(sizes, budgets):
    """Every plan within the budgets in which a client trains something if anything fits."""
    subsets = [set(s) for n in range(len(sizes) + 1) for s in itertools.combinations(range(len(sizes)), n)]
    choices = []
    for budget in budgets:
        fitting = [s for s in subsets if sum(sizes[j] for j in s) <= budget]
        choices.append([s for s in fitting if s] or [set()])
    return itertools.product(*choices)


def best_plan(sizes, budgets):
    """The smallest objective among the plans that leave the fewest groups to nobody that fit somebody."""
    wanted = {j for j, size in enumerate(sizes) if size <= max(budgets)}
    return min(
        (len(wanted.difference(*plan)), mask_problem(plan, sizes, budgets)) for plan in all_plans(sizes, budgets)
    )


class PerFedMask:
    """Setayesh et al., ICLR 2023, Algorithm 1; `trains[k]` names the tensors of client k.

    With the names of the body for everybody it is FedBABU (Oh et al., arXiv:2106.06042).
    """

    def __init__(self, weights, trains, sizes, sgd):
        self.weights, self.trains, self.sizes, self.sgd = copied(weights), trains, sizes, sgd

    def round(self, batches):
        trained = {k: train_some(self.weights, batches[k], self.trains[k], **self.sgd) for k in batches}
        for name in self.weights:
            owners = [k for k in batches if name in self.trains[k]]
            if owners:  # k_n = n_k / sum over those who trained it
                total = sum(self.sizes[k] for k in owners)
                self.weights[name] = sum(self.sizes[k] * trained[k][name] for k in owners) / total

    def personal(self, client):
        return self.weights

    def finetuned(self, batches):
        return train_some(self.weights, batches, list(self.weights), **self.sgd)


# ---- narrow networks; a width is the numbers of the units that each hidden layer keeps


def reach(weights, width):
    """For each tensor, the index of what a narrow network has of it: rows of its units, columns of those it reads."""
    places, reads = {}, None
    for (weight, bias), units in itertools.zip_longest(layers(weights), width):
        rows = np.arange(weights[weight].shape[0]) if units is None else np.array(units)
        columns = np.arange(weights[weight].shape[1]) if reads is None else reads
        places[weight], places[bias], reads = np.ix_(rows, columns), rows, rows
    return places


def narrow_gradient(weights, x, y, rate=1.0, own=None):
    """Of the mean loss, where hidden layers put out max(0, (a W^T + b) / rate), and logits of no own class are 0."""
    inputs, a, last = [], x, layers(weights)[-1]
    for weight, bias in layers(weights):
        inputs.append(a)
        a = a @ weights[weight].T + weights[bias]
        a = a if (weight, bias) == last else np.maximum(a / rate, 0.0)
    own = np.ones(a.shape[1]) if own is None else own
    delta = probabilities(a * own)
    delta[np.arange(len(y)), y] -= 1.0
    delta = delta * own / len(y)
    slopes = {}
    for (weight, bias), a in reversed(list(zip(layers(weights), inputs, strict=True))):
        slopes[weight], slopes[bias] = delta.T @ a, delta.sum(axis=0)
        delta = (delta @ weights[weight]) * (a > 0) / rate
    return slopes


def train_narrow(received, batches, *, rate=1.0, own=None, lr, momentum=0.0, weight_decay=0.0, clip=None, names=None):
    """SGD on the arrays of a narrow network, or on the named ones of them."""
    weights = copied(received)
    velocity = {name: np.zeros_like(value) for name, value in weights.items() if names is None or name in names}
    for x, y in batches:
        slopes = narrow_gradient(weights, x, y, rate, own)
        slopes = {name: slopes[name] for name in velocity}
        if clip is not None:
            slopes = clipped(slopes, clip)
        for name, slope in slopes.items():
            velocity[name] = momentum * velocity[name] + slope + weight_decay * weights[name]
            weights[name] = weights[name] - lr * velocity[name]
    return weights


class HeteroFL:
    """Diao et al., arXiv:2010.01264, Algorithm 1: eqs. 1 and 2 on arrays that are really narrow.

    `rates[k]` is client k's width; with `classes`, `classes[k]` says which classes it has; `trains[k]` names the
    tensors that it trains.
    """

    def __init__(self, weights, rates, sgd, scaler=True, classes=None, trains=None):
        self.weights, self.rates, self.sgd = copied(weights), rates, sgd
        self.scaler, self.classes, self.trains = scaler, classes, trains

    def place(self, client):
        sizes = [self.weights[bias].size for _, bias in layers(self.weights)[:-1]]
        return reach(self.weights, [range(math.ceil(self.rates[client] * size)) for size in sizes])

    def round(self, batches):
        sums = {name: np.zeros_like(value) for name, value in self.weights.items()}
        holders = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for k in batches:
            place, own = self.place(k), None if self.classes is None else self.classes[k]
            narrow = {name: self.weights[name][place[name]] for name in self.weights}
            names = None if self.trains is None else self.trains[k]
            rate = self.rates[k] if self.scaler else 1.0
            trained = train_narrow(narrow, batches[k], rate=rate, own=own, names=names, **self.sgd)
            for name in self.weights if names is None else names:
                votes = np.ones_like(trained[name])
                if own is not None and name in layers(self.weights)[-1]:
                    votes = (votes.T * own).T
                sums[name][place[name]] += votes * trained[name]
                holders[name][place[name]] += votes
        for name, count in holders.items():
            self.weights[name] = np.where(count > 0, sums[name] / np.maximum(count, 1), self.weights[name])

    def personal(self, client):
        zeros = {name: np.zeros_like(value) for name, value in self.weights.items()}
        for name, place in self.place(client).items():
            zeros[name][place] = self.weights[name][place]
        return zeros


class SplitMix:
    """Hong et al., arXiv:2203.09747: M networks, each a dict of its own narrow arrays; the last bias is common.

    `counts[k]` is how many of them client k can train; `trains[k]` names the tensors that it trains.
    """

    def __init__(self, weights, bases, counts, sizes, sgd, trains=None):
        self.full, self.counts, self.sizes, self.sgd, self.trains = copied(weights), counts, sizes, sgd, trains
        self.bases, self.t = bases, 0
        hidden = [weights[bias].size for _, bias in layers(weights)[:-1]]
        units = [[[i for i in range(size) if i * bases // size == b] for size in hidden] for b in range(bases)]
        self.places = [reach(weights, width) for width in units]
        self.nets = [{name: weights[name][place[name]] for name in weights} for place in self.places]
        self.last = layers(weights)[-1][1]
        for net in self.nets:
            for weight, _ in layers(weights)[1:]:
                net[weight] = net[weight] * math.sqrt(bases)

    def own(self, client, turn):
        return sorted((client + turn + place) % self.bases for place in range(self.counts[client]))

    def train_own(self, client, turn, batches, names):
        """The networks of a client, trained alone, and the mean of their last biases."""
        trained = {b: train_narrow(self.nets[b], batches[b], names=names, **self.sgd) for b in self.own(client, turn)}
        return trained, sum(net[self.last] for net in trained.values()) / len(trained)

    def round(self, batches):
        """`batches[k][b]` are client k's mini-batches for network b."""
        trained = {}
        for k in batches:
            names = None if self.trains is None else self.trains[k]
            trained[k] = self.train_own(k, self.t, batches[k], names)
        nets = [dict(net) for net in self.nets]
        for b, net in enumerate(self.nets):
            for name in net:
                owners = [
                    k
                    for k in batches
                    if (b in trained[k][0] or name == self.last) and (self.trains is None or name in self.trains[k])
                ]
                ends = {k: trained[k][1] if name == self.last else trained[k][0][b][name] for k in owners}
                if owners:
                    nets[b][name] = sum(self.sizes[k] * ends[k] for k in owners) / sum(self.sizes[k] for k in owners)
        self.nets, self.t = nets, self.t + 1

    def mix(self, numbers):
        """The networks side by side in full arrays; the mean of their logits is one product with W / their number."""
        mixed = {name: np.zeros_like(value) for name, value in self.full.items()}
        for b in numbers:
            for name, place in self.places[b].items():
                share = len(numbers) if name == layers(self.full)[-1][0] else 1
                mixed[name][place] = self.nets[b][name] / share
        return mixed

    @property
    def weights(self):
        return self.mix(range(self.bases))

    def personal(self, client):
        return self.mix(self.own(client, 0))

    def logits(self, numbers, x):
        """The mean of what the networks say, one after another."""
        return sum(forward(self.nets[b], x)[1] for b in numbers) / len(numbers)
