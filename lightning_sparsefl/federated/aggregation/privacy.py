"""Central differential privacy: the server adds Gaussian noise to the sum of clipped updates.

DP-FedAvg of McMahan, Ramage, Talwar, Zhang (ICLR 2018, arXiv:1710.06963) with a fixed denominator, but for its cohorts:
here they have a fixed size and are drawn without replacement. Two federations are neighbours if one client, with all
of its data, is replaced by another. Epsilon is counted by Google's dp-accounting, by the bound of Wang, Balle and
Kasiviswanathan (AISTATS 2019, arXiv:1808.00087, theorem 27). What it covers, and what not: docs/merging.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.types import Merged, Message, Update, Weights


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Noise, and the delta that epsilon is counted for."""

    noise_multiplier: float
    """Standard deviation of the noise in the sum of updates, in units of `federation.clip_update`, above 0."""
    delta: float
    """Probability that epsilon does not hold, in (0, 1); at most 1 / clients."""

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise InvalidOption(f"`federation.privacy.noise_multiplier` is {self.noise_multiplier}; expected above 0.")
        if not 0 < self.delta < 1:
            raise InvalidOption(f"`federation.privacy.delta` is {self.delta}; expected a number in (0, 1).")

    def epsilon(self, rounds: int, cohort: int, clients: int) -> float:
        """The smallest epsilon that is known to hold.

        Args:
            rounds: That were merged.
            cohort: Clients in a round.
            clients: That they are drawn from.

        Raises:
            InvalidOption: If dp-accounting is not installed.
        """
        compute = _dp_accounting().rdp.compute_epsilon
        bounds = _round(self.noise_multiplier, cohort, clients)
        return min(float(compute(orders, rounds * divergences, self.delta)[0]) for orders, divergences in bounds)


def _dp_accounting() -> Any:
    try:
        import dp_accounting  # here, since it takes seconds and is an extra
    except ImportError as error:
        raise InvalidOption(
            "`federation.privacy` counts epsilon with dp-accounting, which is not installed; "
            "`pip install 'lightning-sparsefl[privacy]'`, or set `federation.privacy: null`."
        ) from error
    return dp_accounting


@lru_cache(maxsize=16)
def _round(noise_multiplier: float, cohort: int, clients: int) -> list[tuple[Any, Any]]:
    """Two bounds of one round's Renyi divergences, each with its orders; over rounds they add up.

    The second one forgets that most clients are not drawn; for large cohorts it is the smaller one.
    """
    accounting = _dp_accounting()
    # replacing a client moves the sum by twice the limit, and dp-accounting leaves that to its caller
    gaussian = accounting.GaussianDpEvent(noise_multiplier / 2)
    sampled = accounting.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    bounds = []
    for event in (sampled, gaussian):
        accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event)
        bounds.append((accountant.orders, accountant.rdp))
    return bounds


class NoisySum(Accumulator):
    """The mean of clipped differences, with noise; clients count alike, whatever their samples.

    The noise is added once, after the sum over the ranks, and is the same on each of them.

    Args:
        layout: Of the model.
        server: The weights before the round.
        total_weight: Upper bound of the updates' number.
        deviation: Standard deviation of the noise in the sum.
        cohort: What the sum is divided by, whoever failed.
        key: Of the noise.
    """

    def __init__(
        self,
        layout: Layout,
        server: Weights,
        total_weight: int,
        *,
        deviation: float,
        cohort: int,
        key: tuple[int | str, ...],
    ) -> None:
        super().__init__(layout, server, total_weight, silence_counts=True)
        self._deviation, self._cohort, self._key = deviation, cohort, key

    def add(self, update: Update, message: Message, num_examples: int) -> None:
        """Add one client's clipped update, with the weight 1.

        Raises:
            InvalidUpdate: If it carries what no noise is added to.
        """
        if update.extra or update.shared is not None:
            carried = "extra" if update.extra else "shared"
            raise InvalidUpdate(
                f"An update carries `{carried}`, which `federation.privacy` adds no noise to; expected weights alone "
                "(`can_be_private` of the algorithm), or `federation.privacy: null`."
            )
        super().add(replace(update, weight=1), message, 1)

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """Add the noise and divide; the clients' metrics are kept from the method."""
        self._sum += self._noise()
        self._counts.fill_(self._cohort)
        return super().result({})

    def _noise(self) -> Tensor:
        """On every parameter that clients may change; the same for all of them, so that any one's votes tell."""
        drawn = torch.randn(self.layout.size, dtype=torch.float64, generator=generator(*self._key))
        noise = drawn.to(self.device) * self._deviation
        for name, piece in zip(self.layout.names, self._pieces(noise), strict=True):
            if name in self.layout.buffers:
                piece.zero_()
        return noise if self._voters is None or self._dense_voters else noise * (self._voters > 0)
