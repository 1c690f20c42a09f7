"""Measurement of how far a fit's steps lead for a constant gradient.

FedNova's norm of the accumulated gradients' coefficients (Wang et al., arXiv:2007.07481, section 4), and the sum of
learning rates by which SCAFFOLD divides a client's change (Karimireddy et al., arXiv:1910.06378, option II).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.optim import SGD, Optimizer

from lightning_sparsefl.callbacks.layers import first_stepped
from lightning_sparsefl.callbacks.loss_scaling import is_skipped
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.reported_steps import ReportedCallback

_READ = ("lr", "momentum", "dampening", "nesterov")
_messages = WarningCache()


class StepMeter(ReportedCallback):
    """Sums the coefficients with which the gradients of a fit enter the weights, for SGD.

    With learning rate lr and momentum, each step does ``c <- momentum c + 1 - mu path`` and ``path <- path + lr c``,
    with Nesterov's momentum ``path <- path + lr (1 - mu path + momentum c)``. If all gradients of a fit were g, the
    weights would change by ``-path g``. The values are read before each step, so schedules are included, from the first
    group of parameters that has gradients. Put it behind :class:`MetaStep`, of whose batches it would count those
    without a step as well.

    Args:
        mu: Strength of a proximal term that is part of the gradients, as in :class:`ProximalTerm`; 0 = none.
        mean_gradient: Whether the mean gradient is to be computed as the change over `path`; a message then says where
            this is not exact.
        owner: Name for messages, such as that of the method that adds this callback; None = this class.

    Raises:
        InvalidOption: If `mu` is negative, or `training_step` steps a bare optimizer.

    Example:
        >>> meter = StepMeter(mu=0)
        >>> for _ in range(5):
        ...     meter.count({"lr": 0.1, "momentum": 0.9})
        >>> meter.steps, round(meter.path, 5), round(meter.norm, 4)
        (5, 1.31441, 13.1441)
    """

    @check_arguments
    def __init__(self, mu: float, *, mean_gradient: bool = False, owner: str | None = None) -> None:
        require(mu >= 0, "StepMeter", "mu", mu, "a number >= 0")
        super().__init__()
        self.mu, self.mean_gradient, self._owner = mu, mean_gradient, owner or "StepMeter"
        self._start()

    def _start(self) -> None:
        self.steps, self.path = 0, 0.0
        self._coefficient, self._rate = 0.0, 0.0

    @property
    def norm(self) -> float:
        """The path in units of the first learning rate above 0; without momentum and schedule, the number of steps."""
        return self.path / self._rate if self._rate else 0.0

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Begin a fit at 0, unless a checkpoint has more."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._start()

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Report what the sums do not hold for."""
        super().on_fit_start(trainer, pl_module)
        if trainer.optimizers:
            self.report(trainer.optimizers[0], len(trainer.optimizers), bool(trainer.gradient_clip_val))

    def report(self, optimizer: Optimizer, count: int = 1, clips: bool = False) -> None:
        """Report once what the sums do not hold for.

        Args:
            optimizer: Optimizer whose steps are counted.
            count: Number of optimizers of the module.
            clips: Whether gradients are clipped.
        """
        if not isinstance(optimizer, SGD):
            _messages.info(f"`{self._owner}` counts the steps of {type(optimizer).__name__} as those of SGD.")
        trained = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
        if count > 1 or any(_settings(group) != _settings(trained[0]) for group in trained):
            _messages.info(
                f"`{self._owner}` counts by the first group of parameters with gradients; others have other options."
            )
        if clips and self.mean_gradient:
            _messages.info("Gradients are clipped, so that mean gradients do not follow from changes of the weights.")

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Count a step of the first optimizer, unless it has no gradients, or loss scaling skips it."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        groups = optimizer.param_groups
        group = first_stepped(groups) if groups is trainer.optimizers[0].param_groups else None
        if group is not None and not is_skipped(trainer, (p for each in groups for p in each["params"])):
            self.count(group)

    def count(self, group: Mapping[str, Any]) -> None:
        """Count a step.

        Args:
            group: Options of the step: ``lr``, and if there are any ``momentum``, ``dampening`` and ``nesterov``.
        """
        rate, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
        gradient = 1 - self.mu * self.path
        if momentum and self.steps:
            self._coefficient = momentum * self._coefficient + (1 - float(group.get("dampening", 0.0))) * gradient
        else:  # the first step of torch's SGD has no dampening
            self._coefficient = gradient
        step = gradient + momentum * self._coefficient if group.get("nesterov", False) else self._coefficient
        self.path += rate * step
        self._rate = self._rate or rate
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"steps": self.steps, "path": self.path, "coefficient": self._coefficient, "rate": self._rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        self.steps, self.path = state_dict["steps"], state_dict["path"]
        self._coefficient, self._rate = state_dict["coefficient"], state_dict["rate"]


def _settings(group: Mapping[str, Any]) -> list[Any]:
    return [group.get(name) for name in _READ]
