"""The loss scaling of the precision "16-mixed", by which gradients overflow in some steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def loss_scale(trainer: Any) -> float:
    """Return the factor by which a trainer multiplies the loss before the backward pass; 1 without loss scaling.

    Args:
        trainer: Trainer of the module.
    """
    scaler = _scaler(trainer)
    return 1.0 if scaler is None else float(scaler.get_scale())


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
