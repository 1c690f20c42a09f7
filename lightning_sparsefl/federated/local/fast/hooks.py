"""Dispatch of hooks to a module and its callbacks; a hook that none of them overrides costs one look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_sparsefl.data.federated import TRANSFERS
from lightning_sparsefl.federated.local.fast.support import overridden


class Hooks:
    """Caller of the hooks of one client's run, in Lightning's order: the callbacks' before the module's.

    Args:
        trainer: Trainer that is passed to the callbacks.
        module: Module of the user.
        callbacks: Callbacks in the order of their calls.
        datamodule: Data module, whose hooks of the batch transfer take precedence over the module's.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, callbacks: Sequence[Callback], datamodule: Any = None
    ) -> None:
        self.overridden = overridden(module)
        self._trainer, self._module, self._callbacks = trainer, module, callbacks
        self._state = vars(module)  # faster than nn.Module.__setattr__, which takes longer than most hooks
        self._table: dict[str, list[tuple[Callback, Callable[..., Any]]]] = {}
        self._transfers = {name: self._transfer(name, datamodule) for name in TRANSFERS}

    @property
    def override_transfer(self) -> bool:
        """Whether a hook of the batch transfer is overridden, which expects batches that are not on the device yet."""
        return any(hook is not None for hook in self._transfers.values())

    def callbacks(self, name: str, *args: Any, monitoring: bool | None = None, **kwargs: Any) -> None:
        """Call a hook of the callbacks.

        Args:
            name: Name of the hook.
            *args: Arguments that follow the trainer and the module.
            monitoring: True for only the callbacks that monitor a metric, which Lightning calls last at the end of an
                epoch; False for only the others; None for all.
            **kwargs: Keyword arguments of the hook.
        """
        found = self._table.get(name)
        if found is None:
            found = self._table[name] = self._find(name)
        if not found:
            return
        before, self._state["_current_fx_name"] = self._state["_current_fx_name"], name
        for callback, function in found:
            if monitoring is None or monitoring is isinstance(callback, (EarlyStopping, Checkpoint)):
                function(self._trainer, self._module, *args, **kwargs)
        self._state["_current_fx_name"] = before

    def _find(self, name: str) -> list[tuple[Callback, Callable[..., Any]]]:
        empty = getattr(Callback, name)
        found = [(callback, getattr(callback, name)) for callback in self._callbacks]
        return [(c, f) for c, f in found if callable(f) and getattr(f, "__func__", f) is not empty]

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module, overridden or not."""
        before, self._state["_current_fx_name"] = self._state["_current_fx_name"], name
        output = getattr(self._module, name)(*args, **kwargs)
        self._state["_current_fx_name"] = before
        return output

    def module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module whose default does nothing, if it is overridden."""
        return self.call_module(name, *args, **kwargs) if name in self.overridden else None

    def both(self, name: str, *args: Any) -> None:
        """Call a hook of the callbacks, then of the module."""
        self.callbacks(name, *args)
        if name in self.overridden:
            self.call_module(name, *args)

    def _transfer(self, name: str, datamodule: Any) -> Callable[..., Any] | None:
        """Return a hook of the batch transfer: the data module's if it overrides it, else the module's."""
        if isinstance(datamodule, LightningDataModule) and is_overridden(name, datamodule):
            return getattr(datamodule, name)  # type: ignore[no-any-return]
        if name in self.overridden:
            return lambda *args: self.call_module(name, *args)
        return None

    def to_device(self, batch: Any, device: Any) -> Any:
        """Move a batch to a device, calling the hooks before and after the transfer."""
        before, move, after = self._transfers.values()
        if before is not None:
            batch = before(batch, 0)
        if move is not None:
            batch = move(batch, device, 0)
        elif not _is_on_device(batch, device):
            batch = move_data_to_device(batch, device)  # as LightningModule.transfer_batch_to_device does
        return batch if after is None else after(batch, 0)


def _is_on_device(batch: Any, device: torch.device) -> bool:
    """Return whether a batch is a list or tuple of tensors that need no transfer, the common case on a CPU."""
    return type(batch) in (list, tuple) and all(type(item) is Tensor and item.device == device for item in batch)
