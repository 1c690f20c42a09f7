"""The loss scaling of the precision "16-mixed", by which gradients overflow in some steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_sparsefl.errors import InvalidOption


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def loss_scale(trainer: Any) -> float:
    """Return the factor by which a trainer multiplies the loss before the backward pass; 1 without loss scaling.

    Args:
        trainer: Trainer of the module.
    """
    scaler = _scaler(trainer)
    return 1.0 if scaler is None else float(scaler.get_scale())


def require_unscaled_gradients(trainer: Any, owner: str) -> None:
    """Refuse optimizers that unscale gradients within their step, after callbacks have read or changed them.

    Args:
        trainer: Trainer of the module, whose optimizers are set up.
        owner: Class of the callback, for the error message.

    Raises:
        InvalidOption: If the precision scales the loss, and an optimizer unscales gradients itself.
    """
    if _scaler(trainer) is None:
        return
    for optimizer in trainer.optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # as Lightning asks for it
            raise InvalidOption(
                f"`{owner}` reads or changes gradients, which the fused `{type(optimizer).__name__}` of this module "
                "unscales only later; expected `fused=False` in the optimizer, or another `precision` than '16-mixed'."
            )


def is_skipped(trainer: Any, parameters: Iterable[Tensor]) -> bool:
    """Return whether loss scaling skips the step that is due, since a gradient is not finite.

    Without loss scaling no step is skipped, so that a training that diverges shows.

    Args:
        trainer: Trainer of the module.
        parameters: Parameters of the optimizer, with the unscaled gradients.
    """
    if _scaler(trainer) is None:
        return False
    return any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters)
