"""Central differential privacy: the server adds Gaussian noise to the sum of clipped updates.

DP-FedAvg of McMahan, Ramage, Talwar, Zhang (ICLR 2018, arXiv:1710.06963) with a fixed denominator, except that cohorts
have a fixed size and are drawn without replacement. Two federations are neighbours if one client, with all of its data,
is replaced by another. Google's dp-accounting computes epsilon with the bound of Wang, Balle and Kasiviswanathan
(AISTATS 2019, arXiv:1808.00087, theorem 27). The noise comes from a cipher with a secret key
(:mod:`~lightning_sparsefl.federated.aggregation.noise`), and so do the cohorts. docs/merging.md describes what epsilon
covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from lightning_sparsefl.errors import InvalidOption, InvalidUpdate, check_types
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.noise import NormalStream, derive_key
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Merged, Message, Update, Weights

_SMALLEST, _LARGEST = 1e-9, 1e6
"""Range of noise multipliers within which dp-accounting neither overflows nor underflows."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Options of central differential privacy: the server's noise, its secret key, and delta."""

    noise_multiplier: float
    """Standard deviation of the noise in the sum of updates, in units of `federation.clip_update`; in [1e-9, 1e6]."""
    delta: float
    """Probability that the guarantee of epsilon fails, in (0, 1), and below 1 / number of clients."""
    key_file: str | None = field(default=None, repr=False, compare=False)
    """File with the secret key of noise and cohorts, 64 hexadecimal digits as printed by ``openssl rand -hex 32``.
    Every machine of a simulation needs it for training and for resuming; on Flower only the server does. Its content is
    never stored or shown."""

    def __post_init__(self) -> None:
        check_types(self, "federation.privacy.")
        if not _SMALLEST <= self.noise_multiplier <= _LARGEST:
            raise InvalidOption(
                f"`federation.privacy.noise_multiplier` is {self.noise_multiplier}; expected a number in "
                f"[{_SMALLEST:g}, {_LARGEST:g}]."
            )
        if not 0 < self.delta < 1:
            raise InvalidOption(f"`federation.privacy.delta` is {self.delta}; expected a number in (0, 1).")

    def epsilon(self, rounds: int, cohort: int, clients: int) -> float:
        """Return the smallest epsilon that is proven to hold.

        Args:
            rounds: Number of merged rounds.
            cohort: Number of clients in a round.
            clients: Number of clients that cohorts are drawn from.

        Raises:
            InvalidOption: If dp-accounting is not installed.
        """
        compute = _dp_accounting().rdp.compute_epsilon
        bounds = _round(self.noise_multiplier, cohort, clients)
        return min(float(compute(orders, rounds * divergences, self.delta)[0]) for orders, divergences in bounds)


def _dp_accounting() -> Any:
    try:
        import dp_accounting  # imported here, since it is slow and optional
    except ImportError as error:
        raise InvalidOption(
            "`federation.privacy` computes epsilon with dp-accounting, which is not installed; "
            "`pip install 'lightning-sparsefl[privacy]'`, or set `federation.privacy: null`."
        ) from error
    return dp_accounting


@lru_cache(maxsize=16)
def _round(noise_multiplier: float, cohort: int, clients: int) -> list[tuple[Any, Any]]:
    """Compute two bounds of one round's Renyi divergences, each with its orders; divergences add up over rounds.

    The second bound ignores the sampling of clients; it is the smaller one for large cohorts.
    """
    accounting = _dp_accounting()
    # replacing a client changes the sum by up to twice the limit, which dp-accounting leaves to its caller
    gaussian = accounting.GaussianDpEvent(noise_multiplier / 2)
    sampled = accounting.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    bounds = []
    for event in (sampled, gaussian):
        accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event)
        bounds.append((accountant.orders, accountant.rdp))
    return bounds


class NoisySum(Accumulator):
    """Unweighted mean of clipped differences with noise.

    The noise is added once, after the sum over the ranks. It is the same on all ranks, since it is a function of the
    secret, the context and the exact sum.

    Args:
        layout: Layout of the model's tensors.
        server: Weights before the round.
        deviation: Standard deviation of the noise in the sum.
        cohort: Divisor of the sum, which does not depend on failed clients; there are at most as many updates.
        secret: Key of the noise, 32 bytes.
        context: Identifiers of the use: its purpose, the run and the round.
    """

    def __init__(
        self,
        layout: Layout,
        server: Weights,
        *,
        deviation: float,
        cohort: int,
        secret: bytes,
        context: tuple[int | str, ...],
    ) -> None:
        # not by the numbers of samples, of which the grid of the released weights would tell
        super().__init__(layout, Grid.of(layout, server, total_weight=cohort), silence_counts=True)
        self._deviation, self._cohort, self._secret, self._context = deviation, cohort, secret, context

    def check(self, update: Update, message: Message) -> None:
        """Check whether all values of an update get noise; the arguments are those of :meth:`Accumulator.check`.

        Raises:
            InvalidUpdate: If the update contains values that would get no noise.
        """
        super().check(update, message)
        if update.extra or update.shared is not None:
            carried = "extra" if update.extra else "shared"
            raise InvalidUpdate(
                f"An update has `{carried}`, to which `federation.privacy` adds no noise; expected only weights "
                "(`can_be_private` of the algorithm), or `federation.privacy: null`."
            )
        self._check_frozen(update, message)

    def add(self, update: Update, message: Message, num_examples: int) -> None:
        """Add one client's clipped update with the weight 1; the arguments are those of :meth:`Accumulator.add`.

        Raises:
            InvalidUpdate: If the update contains values that would get no noise.
        """
        self.check(update, message)
        super().add(replace(update, weight=1), message, 1)

    def _check_frozen(self, update: Update, message: Message) -> None:
        for name in self.layout.frozen & update.weights.keys():
            value = update.weights[name]
            before = 0 if update.kind == "difference" else message.weights[name]
            if bool((value != before).any()):
                raise InvalidUpdate(
                    f"An update changes {name!r}, which gets no noise by `federation.privacy`, since the model has "
                    "`requires_grad=False` there; expected that training leaves it as it is, or a parameter that "
                    "requires a gradient from `__init__` on (option `model`)."
                )

    def result(self, reports: Mapping[int, Mapping[str, float]]) -> Merged:
        """Add the noise and return the mean, without the clients' metrics and the numbers of votes, which have none.

        Args:
            reports: Metrics by client; ignored.
        """
        self._add_noise()
        self._counts.fill_(self._cohort)
        return replace(super().result({}), voters={})

    def _add_noise(self) -> None:
        """Add noise to every coordinate that clients may change, then round to the grid of the sum.

        The votes determine these coordinates; they are the same for all clients of a private run. A tensor that nobody
        sends, such as a personal layer, gets no noise, and neither does a frozen parameter, which no update may change.
        """
        self._fold_large()
        stream = NormalStream(derive_key(self._secret, self._context, self._sum))
        sums, everywhere = self._pieces(self._sum), self._voters is None or self._dense_voters > 0
        votes = sums if self._voters is None else self._pieces(self._voters)
        kept = [not_sent == self._updates for not_sent in self._not_sent]
        for name, constant, total, voters, own in zip(self.layout.names, self._grid, sums, votes, kept, strict=True):
            if name in self.layout.buffers or name in self.layout.frozen or own:
                continue
            noise = stream.draw(total.numel()).to(self.device) * self._deviation
            total += noise if everywhere else noise * (voters > 0)
            total.add_(constant).sub_(constant)
