"""Calls the hooks that a module and its callbacks really override; the others cost one look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.federated.local.support import overridden

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Hooks:
    """The hooks of one client's run, called as Lightning does: callbacks first, each under its name.

    Args:
        trainer: What the callbacks get as `trainer`.
        module: The user's module.
        callbacks: In their order.
        datamodule: May override the hooks round the batch transfer.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, callbacks: Sequence[Callback], datamodule: Any = None
    ) -> None:
        self.overridden = overridden(module)
        self._trainer, self._module, self._callbacks = trainer, module, callbacks
        self._state = vars(module)  # nn.Module.__setattr__ would take longer than most hooks
        self._table: dict[str, list[tuple[Callback, Callable[..., Any]]]] = {}
        self._transfers = {name: self._transfer(name, datamodule) for name in _TRANSFERS}

    def callbacks(self, name: str, *args: Any, monitoring: bool | None = None, **kwargs: Any) -> None:
        """Call a hook of the callbacks.

        Args:
            name: Of the hook.
            *args: After the trainer and the module.
            monitoring: True for only those that watch a metric, which Lightning calls last at the end of an
                epoch; False for only the others.
            **kwargs: Further arguments.
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

    def always(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module, overridden or not."""
        before, self._state["_current_fx_name"] = self._state["_current_fx_name"], name
        output = getattr(self._module, name)(*args, **kwargs)
        self._state["_current_fx_name"] = before
        return output

    def module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module whose default does nothing, if it is overridden."""
        return self.always(name, *args, **kwargs) if name in self.overridden else None

    def both(self, name: str, *args: Any) -> None:
        """Call a hook of the callbacks, then of the module."""
        self.callbacks(name, *args)
        if name in self.overridden:
            self.always(name, *args)

    def _transfer(self, name: str, datamodule: Any) -> Callable[..., Any] | None:
        """The hook round the batch transfer, the data module's before the module's."""
        if isinstance(datamodule, LightningDataModule) and is_overridden(name, datamodule):
            return getattr(datamodule, name)  # type: ignore[no-any-return]
        if name in self.overridden or name == "transfer_batch_to_device":
            return lambda *args: self.always(name, *args)
        return None

    def to_device(self, batch: Any, device: Any) -> Any:
        """Move a batch, with the hooks before and after."""
        before, move, after = self._transfers.values()
        if before is not None:
            batch = before(batch, 0)
        batch = move(batch, device, 0)  # type: ignore[misc]
        return batch if after is None else after(batch, 0)
