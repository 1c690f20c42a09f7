"""State keys of callbacks of which a trainer may have several."""

from __future__ import annotations

import itertools
from typing import Any

from lightning.pytorch import Callback, LightningModule

_unattached = itertools.count()


class NumberedCallback(Callback):
    """Base class of callbacks with a state, whose key in a checkpoint is numbered among those of one class.

    A second callback with equal options, such as a `GradientSum` before and another one after a callback that masks,
    has the key of the first one and the number 2.
    """

    _key: str | None = None

    def key_options(self) -> dict[str, Any]:
        """Return the options that tell the callback from others of its class; default: none."""
        return {}

    @property
    def state_key(self) -> str:
        """The class, the options of the key, and the number among callbacks that have the same ones.

        Before `setup` each reading differs: the Trainer refuses callbacks of one key when it is built, and the number
        is known when all callbacks are.
        """
        return f"{type(self).__qualname__} {next(_unattached)}" if self._key is None else self._key

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Give the callback its number among those of its class."""
        kind, key = type(self), self._unnumbered
        alike = [id(other) for other in trainer.callbacks if type(other) is kind and other._unnumbered == key]
        place = alike.index(id(self)) if id(self) in alike else 0
        self._key = f"{key} {place + 1}" if place else key

    @property
    def _unnumbered(self) -> str:
        options = self.key_options()
        return self._generate_state_key(**options) if options else type(self).__qualname__
