"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629, Algorithm 1.

The defaults of every other method. Departures: the weights of the mean are the participants' own sample counts, as in
the paper's text; nothing else was left open.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.federated.algorithm import FederatedAlgorithm


@dataclass(frozen=True, kw_only=True)
class FedAvg(FederatedAlgorithm):
    """The mean of the clients' weights, weighted by their training samples."""

    can_be_private = True
