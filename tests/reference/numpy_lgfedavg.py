"""Slow twin of LG-FedAvg (Liang et al., arXiv:2001.01523)."""

from reference.numpy_fedper import FedPer


class LGFedAvg(FedPer):
    """The last layers travel, and all participants weigh the same in their mean."""

    def __init__(self, weights, shared, clients, sgd):
        super().__init__(weights, [name for name in weights if name not in shared], dict.fromkeys(clients, 1), sgd)
