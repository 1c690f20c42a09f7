"""Slow twin of FedBABU (Oh et al., arXiv:2106.06042)."""

from reference.numpy_perfedmask import PerFedMask


class FedBABU(PerFedMask):
    """Every client trains the tensors of the body; a round without a choice of its own is PerFedMask's."""

    def __init__(self, weights, body, sizes, sgd):
        super().__init__(weights, [body] * len(sizes), sizes, sgd)
