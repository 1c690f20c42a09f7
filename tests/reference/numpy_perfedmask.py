"""Slow twin of PerFedMask (Setayesh et al., ICLR 2023)."""

import itertools

import numpy as np

from reference.numpy_network import clipped, copied, gradient


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
    """Algorithm 1; `trains[k]` names the tensors of client k."""

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
