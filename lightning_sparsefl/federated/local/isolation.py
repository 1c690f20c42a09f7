"""Keeps one client apart from the next and from those on other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_sparsefl.errors import InvalidOption


def _alone() -> bool:
    """Whether a metric may speak with other ranks: they have other clients, so never."""
    return False


def isolate_metrics(module: nn.Module) -> None:
    """Keep a client's torchmetrics to itself, and empty them.

    In any initialised process group a ``Metric`` averages over ranks when it is computed, here over other
    clients, and hangs where they compute another number of times.

    Args:
        module: Changed in place.

    Raises:
        InvalidOption: If it has a ``SyncBatchNorm``, which mixes the clients' batches.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise InvalidOption(
                f"The model has a SyncBatchNorm, {name!r}, which would mix the batches of several clients; "
                "expected an ordinary BatchNorm (option `model`)."
            )
        if isinstance(child, Metric):
            child.distributed_available_fn = _alone
            child.reset()


@contextmanager
def restore_trainer_refs(module: LightningModule, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Give a module and callbacks back as they came: detached from the trainer that used them.

    Args:
        module: Is attached to a trainer inside.
        callbacks: Get their `log` from the module inside.
    """
    trainer, name = module._trainer, module._current_fx_name
    try:
        yield
    finally:
        module.trainer = trainer
        module._current_fx_name, module._metric_attributes = name, None
        for callback in callbacks:
            for method in ("log", "log_dict"):
                vars(callback).pop(method, None)
