"""Schedules of the learning rate over rounds, which multiply those of the module's own schedulers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback

from lightning_sparsefl.errors import check_types, is_number, require
from lightning_sparsefl.federated.exchange.hook_results import check_amount
from lightning_sparsefl.sparse.density import ceil_count


class RoundLR(ABC):
    """Base class of schedules: a factor of all learning rates as a function of the round."""

    follows_length = False
    """Whether the factor depends on `max_rounds`; a resume with another number then warns."""

    @abstractmethod
    def factor(self, round: int, max_rounds: int) -> float:
        """Return the factor of the learning rates in a round.

        Args:
            round: Index of the round, from 0.
            max_rounds: Number of rounds of the run.
        """


def checked_factor(schedule: RoundLR, round: int, max_rounds: int) -> float:
    """Return the factor of a schedule for a round.

    Args:
        schedule: The schedule.
        round: Index of the round, from 0.
        max_rounds: Number of rounds of the run.

    Raises:
        InvalidOption: If it is not a finite number >= 0.
    """
    factor = schedule.factor(round, max_rounds)
    check_amount(schedule, "factor", factor, f" for round {round}")
    return factor


@dataclass(frozen=True, kw_only=True)
class ExponentialRoundLR(RoundLR):
    """Exponential decay: the factor is ``gamma ** round``.

    Example:
        >>> ExponentialRoundLR(gamma=0.5).factor(2, 10)
        0.25
    """

    gamma: float = 0.998
    """Factor from one round to the next, in (0, 1]."""

    def __post_init__(self) -> None:
        check_types(self, "trainer.round_lr.")
        require(0 < self.gamma <= 1, "trainer.round_lr.gamma", self.gamma, "a number in (0, 1]")

    def factor(self, round: int, max_rounds: int) -> float:
        """See :class:`RoundLR`."""
        return float(self.gamma**round)


@dataclass(frozen=True, kw_only=True)
class StepRoundLR(RoundLR):
    """Step decay: the factor is ``gamma`` to the power of the number of milestones reached.

    Example:
        >>> StepRoundLR(milestones=[0.5, 0.75]).factor(50, 100)
        0.1
    """

    follows_length = True

    milestones: tuple[float, ...] | list[float] = (0.5, 0.75)
    """Fractions of the run, in (0, 1), at which the rate is multiplied by `gamma`."""
    gamma: float = 0.1
    """Factor at each milestone, above 0."""

    def __post_init__(self) -> None:
        check_types(self, "trainer.round_lr.")
        require(self.gamma > 0, "trainer.round_lr.gamma", self.gamma, "a number above 0")
        fits = all(is_number(milestone) and 0 < milestone < 1 for milestone in self.milestones)
        expected = "fractions of the run, in (0, 1)"
        require(fits, "trainer.round_lr.milestones", self.milestones, expected)

    def factor(self, round: int, max_rounds: int) -> float:
        """See :class:`RoundLR`."""
        # a product such as 0.55 * 100 is slightly above its whole number
        return float(self.gamma ** sum(round >= ceil_count(milestone, max_rounds) for milestone in self.milestones))


_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


class ScaleLearningRates(Callback):
    """Callback that multiplies the rates of all optimizers and schedulers when local training starts.

    Args:
        factor: Factor of this round.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Scale the rates once per fit, since each fit has new optimizers."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.update({key: group[key] * self.factor for key in _RATES if key in group})
        for config in trainer.lr_scheduler_configs:
            self._scale(config.scheduler)

    def _scale(self, scheduler: Any) -> None:
        """Scale the rates stored in a scheduler and in the schedulers that it contains."""
        for name in ("base_lrs", "max_lrs", "min_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * self.factor for rate in getattr(scheduler, name)])
        if hasattr(scheduler, "eta_min"):
            scheduler.eta_min *= self.factor
        for inner in getattr(scheduler, "_schedulers", ()):
            self._scale(inner)
