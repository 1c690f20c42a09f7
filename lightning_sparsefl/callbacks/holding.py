"""Parameters and layers that a callback refers to during a fit, and the refusal of a module that replaces them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.numbered import NumberedCallback
from lightning_sparsefl.errors import InvalidOption


class HoldingCallback(NumberedCallback):
    """Base class of callbacks that look up parameters or layers once in a fit, and refuse that others replace them.

    Without the refusal, a callback would act on parameters that the module no longer uses: its hooks, such as
    `on_fit_start` and `on_train_epoch_start`, run after those of callbacks. They are compared at the first batch and at
    the end of every epoch. A subclass that overrides one of the two hooks calls the one of this class.
    """

    def held(self) -> Mapping[str, Tensor | nn.Module]:
        """Return the parameters and layers of this fit by name; default: none."""
        return {}

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse parameters that have been replaced since the fit started, once an epoch."""
        if batch_idx == 0:
            require_held(self.held(), pl_module, type(self).__name__)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse parameters that have been replaced in the epoch."""
        require_held(self.held(), pl_module, type(self).__name__)


def require_held(held: Mapping[str, Tensor | nn.Module], module: nn.Module, owner: str) -> None:
    """Refuse a module that has replaced or removed parameters or layers.

    One that stays in the module may change its name, as ``torch.compile`` and ``torch.nn.utils.prune`` do.

    Args:
        held: Parameters and layers by the name that they had.
        module: Module of the user.
        owner: Class of the callback, for the error message.

    Raises:
        InvalidOption: Naming the first of them.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> held = dict(net.named_parameters())
        >>> require_held(held, net, "StaticMask")
        >>> net[0] = nn.Linear(2, 2)
        >>> require_held(held, net, "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask`: `0.weight` has been replaced since the fit started, so \
that the callback would act on what the module no longer uses; expected layers to be replaced in `setup` or \
`configure_model`, and values to be written in place, as `load_state_dict` does without `assign=True`.
    """
    if not held:
        return
    now: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    now |= dict(module.named_modules(remove_duplicate=False))
    there = {id(each) for each in now.values()}
    for name, each in held.items():
        if now.get(name, each) is not each or id(each) not in there:
            raise InvalidOption(
                f"`{owner}`: `{name}` has been replaced since the fit started, so that the callback would act on what "
                "the module no longer uses; expected layers to be replaced in `setup` or `configure_model`, and values "
                "to be written in place, as `load_state_dict` does without `assign=True`."
            )
