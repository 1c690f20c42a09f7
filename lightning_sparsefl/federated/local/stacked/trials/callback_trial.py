"""Trial of a client's callbacks: the start of one fit, in which those that do not go together raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.stacked.states.undo import CallbackStates, attributes_kept


class _Begun(Exception):
    """Raised when all callbacks have begun a fit."""


class _Last(Callback):
    """Ends a fit before its first batch."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the fit."""
        raise _Begun


def begin_together(
    engine: FastEngine, module: LightningModule, loader: Any, callbacks: Sequence[Callback], datamodule: Any
) -> bool:
    """Return whether callbacks begin a fit of one client without an error.

    Two callbacks that mask the same weights, for example, do not. The callbacks are left as they were, and so is the
    module except for its weights.

    Args:
        engine: Engine of one client.
        module: Module of the user.
        loader: Loader of the client's training batches, of which none is used.
        callbacks: Callbacks of the client.
        datamodule: Object that becomes `trainer.datamodule`.
    """
    before = CallbackStates(callbacks)
    modes = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        with attributes_kept(module):
            engine.fit(module, loader, callbacks=[*callbacks, _Last()], datamodule=datamodule)
    except _Begun:
        return True
    except Exception:
        return False
    finally:
        before.restore()
        for parameter, trained in modes:
            parameter.requires_grad_(trained)
    return True
