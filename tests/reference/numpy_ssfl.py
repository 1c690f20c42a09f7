"""Slow twin of SSFL (Ohib et al., arXiv:2405.09037)."""

from reference.numpy_network import copied, gradient, masked, weighted_mean
from reference.numpy_snip import SNIP, largest, scored


class SSFL(SNIP):
    """Rounds of SNIP; `asked[k]` is the batch by which client k scores the initial weights before the first one."""

    def __init__(self, weights, asked, sizes, sgd, share):
        scores = {k: scored(weights, gradient(weights, *batch)) for k, batch in asked.items()}
        self.masks = largest(weighted_mean(scores, sizes), share)
        self.weights, self.sizes, self.sgd = masked(copied(weights), self.masks), sizes, sgd
