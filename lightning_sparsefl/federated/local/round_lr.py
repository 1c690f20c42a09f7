"""Learning rates that fall with the round, on top of what the module's own schedulers do within it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback

from lightning_sparsefl.errors import InvalidOption


class RoundLR(ABC):
    """A factor for every optimizer's rates, as a function of the round."""

    @abstractmethod
    def factor(self, round: int, max_rounds: int) -> float:
        """The factor of a round.

        Args:
            round: From 0.
            max_rounds: Rounds of the run.
        """


@dataclass(frozen=True, kw_only=True)
class ExponentialRoundLR(RoundLR):
    """``gamma ** round``.

    Example:
        >>> ExponentialRoundLR(gamma=0.5).factor(2, 10)
        0.25
    """

    gamma: float = 0.998
    """Factor from one round to the next, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise InvalidOption(f"`ExponentialRoundLR(gamma={self.gamma})`: expected a number in (0, 1].")

    def factor(self, round: int, max_rounds: int) -> float:
        """See :class:`RoundLR`."""
        return float(self.gamma**round)


@dataclass(frozen=True, kw_only=True)
class StepRoundLR(RoundLR):
    """``gamma`` for each milestone passed.

    Example:
        >>> StepRoundLR(milestones=[0.5, 0.75]).factor(50, 100)
        0.1
    """

    milestones: tuple[float, ...] | list[float] = (0.5, 0.75)
    """Shares of the run, in (0, 1), after which the rate falls."""
    gamma: float = 0.1
    """Factor at each milestone."""

    def factor(self, round: int, max_rounds: int) -> float:
        """See :class:`RoundLR`."""
        return float(self.gamma ** sum(round >= milestone * max_rounds for milestone in self.milestones))


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


class ScaleLearningRates(Callback):
    """Multiplies all rates of all optimizers and schedulers when local training starts.

    Args:
        factor: Of this round.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Scale; the optimizers are fresh in every fit, so this happens once."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group.update({key: group[key] * self.factor for key in _RATES if key in group})
        for config in trainer.lr_scheduler_configs:
            self._scale(config.scheduler)

    def _scale(self, scheduler: Any) -> None:
        """The rates that a scheduler keeps itself, and those of the schedulers inside it."""
        for name in ("base_lrs", "max_lrs", "min_lrs"):
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * self.factor for rate in getattr(scheduler, name)])
        if hasattr(scheduler, "eta_min"):
            scheduler.eta_min *= self.factor
        for inner in getattr(scheduler, "_schedulers", ()):
            self._scale(inner)
