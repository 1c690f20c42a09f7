"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017, arXiv:1602.05629, Algorithm 1.

Its rules are the defaults of the other methods. Departures: none; as in the text of the paper, the mean is weighted by
the participants' numbers of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.federated.algorithm import FederatedAlgorithm


@dataclass(frozen=True, kw_only=True)
class FedAvg(FederatedAlgorithm):
    """Federated averaging: the mean of the clients' weights, weighted by their numbers of training samples."""

    can_be_private = True
