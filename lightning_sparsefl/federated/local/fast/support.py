"""The hooks and callbacks that the fast engine supports: those that a test compares with Lightning's Trainer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_sparsefl.errors import InvalidOption

SUPPORTED_CALLBACKS: frozenset[type[Callback]] = frozenset(
    {
        BackboneFinetuning,
        DeviceStatsMonitor,
        EarlyStopping,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        LambdaCallback,
        LearningRateMonitor,
        ModelPruning,
        ModelSummary,
        Timer,
        WeightAveraging,
    }
)
"""Lightning's callbacks under which the fast engine is bit-equal to a Trainer; subclasses are not included."""

_EVERY_STAGE = ("batch_end", "batch_start", "end", "epoch_end", "epoch_start", "start")
CALLED_HOOKS: frozenset[str] = frozenset(
    {
        *(f"on_{stage}_{when}" for stage in ("train", "validation", "test") for when in _EVERY_STAGE),
        *(
            "backward",
            "clip_gradients",
            "configure_gradient_clipping",
            "configure_model",
            "configure_optimizers",
            "lr_scheduler_step",
        ),
        *("on_after_backward", "on_after_batch_transfer", "on_before_backward", "on_before_batch_transfer"),
        *(
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "on_fit_end",
            "on_fit_start",
            "on_test_model_eval",
        ),
        *("on_test_model_train", "on_validation_model_eval", "on_validation_model_train"),
        *("on_validation_model_zero_grad", "optimizer_step", "optimizer_zero_grad", "setup", "teardown"),
        *("test_step", "training_step", "transfer_batch_to_device", "validation_step"),
    }
)
"""Hooks of a LightningModule that the fast engine calls in the same places and with the same arguments as a Trainer."""

SCORING_HOOKS = {
    f"{stage}_step": frozenset(name for name in CALLED_HOOKS if name.startswith(f"on_{stage}_"))
    for stage in ("validation", "test")
}
"""Hooks that are called around the steps of an evaluation, by the name of the step."""

NEVER_CALLED = frozenset(
    {
        *(f"on_predict_{when}" for when in (*_EVERY_STAGE, "model_eval")),
        *("on_load_checkpoint", "on_save_checkpoint", "predict_step"),
    }
)
"""Hooks that neither engine calls during fit or evaluation without checkpoints."""

_INNER_HOOKS = ("_apply_batch_transfer_handler", "_call_batch_hook", "_on_before_batch_transfer")
_HOOKS = frozenset(
    {
        *(name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind) if name[0] != "_"),
        *(CALLED_HOOKS | NEVER_CALLED),
        *("configure_callbacks", *_INNER_HOOKS),
    }
)
_STEPS = ("training_step", "validation_step", "test_step")
STEPS = frozenset({*_STEPS, "predict_step", "configure_model", "configure_optimizers"})
"""Hooks that are not called at the start or the end of anything, or do nothing there in a federation."""


@functools.cache
def _overridden_by(kind: Any) -> frozenset[str]:
    return frozenset(name for name in _HOOKS if getattr(kind, name) is not getattr(LightningModule, name))


def overridden(module: LightningModule) -> frozenset[str]:
    """Return the names of the Lightning hooks that a module's class or the object itself overrides."""
    kind: Any = type(module)
    return _overridden_by(kind) | (_HOOKS & vars(module).keys())


@functools.cache
def _iterates(step: Any) -> bool:
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def unsupported_hook_reason(module: LightningModule) -> str | None:
    """Return why the fast engine does not support this module, or None if it does."""
    hooks = overridden(module)
    names = sorted(hooks - CALLED_HOOKS - NEVER_CALLED)
    if names:
        return f"`{type(module).__name__}` overrides `{names[0]}`"
    for step in _STEPS:
        if step in hooks and _iterates(getattr(type(module), step)):
            return f"`{type(module).__name__}.{step}` takes `dataloader_iter`"
    return None


def unsupported_loader_reason(loader: Any) -> str | None:
    """Return why the fast engine does not support this loader, or None if it does."""
    if isinstance(loader, (CombinedLoader, dict, list, tuple)):
        return f"the loader is a `{type(loader).__name__}`, which Lightning treats as several loaders"
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return f"the loader `{type(loader).__name__}` has no length"
    return None


def _is_supported(callback: Callback) -> bool:
    kind = type(callback)
    ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    declared = vars(kind).get("stackable") is True  # of the class itself: a subclass of one of ours may do anything
    return ours or declared or kind in SUPPORTED_CALLBACKS or isinstance(callback, BaseFinetuning)


def unsupported_reason(module: LightningModule, callbacks: Iterable[Callback]) -> str | None:
    """Return why the fast engine does not support a module with these callbacks, or None if it does.

    Args:
        module: Module of the user.
        callbacks: Callbacks that the clients train with.

    Returns:
        A clause that names the unsupported hook or callback, or None.

    Example:
        >>> unsupported_reason(LightningModule(), [Timer()]) is None
        True
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> unsupported_reason(LightningModule(), [ModelCheckpoint()])
        'the fast engine does not support the callback `ModelCheckpoint`'
    """
    return unsupported_hook_reason(module) or unsupported_callback_reason(callbacks)


def unsupported_callback_reason(callbacks: Iterable[Callback]) -> str | None:
    """Return why the fast engine does not support one of the callbacks, or None if it supports all."""
    for callback in callbacks:
        if not _is_supported(callback):
            return f"the fast engine does not support the callback `{type(callback).__name__}`"
    return None


def require_automatic(module: LightningModule) -> None:
    """Raise :class:`InvalidOption` unless a module uses automatic optimization, hence has a single training loss."""
    if not module.automatic_optimization:
        raise InvalidOption(
            f"`{type(module).__name__}` optimizes manually, so there is no one training loss to take the gradient "
            "of; expected automatic optimization (option `model`), or an algorithm that needs no gradient."
        )


class UnknownAttribute:
    """Base class whose missing attributes raise an error that recommends a real Trainer."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The `trainer` of the fast engine has no attribute {name!r}; "
            "set `federation.local_engine: trainer` to train clients with a real Lightning Trainer."
        )
