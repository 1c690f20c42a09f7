"""Show how sparse a module is, and how its sparsity moves."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.callbacks.masking import packed, unpacked
from lightning_sparsefl.callbacks.options import require
from lightning_sparsefl.sparse.masks import changed, counts
from lightning_sparsefl.types import Masks


class SparsityMonitor(Callback):
    """Logs densities at the end of epochs, counted in weights that are not zero, whoever made the others so.

    The keys are ``sparsity/density`` (of all layers together), ``sparsity/layer/<name>`` (of one), and
    ``mask/changed``: the fraction of positions that became zero, or ceased to be, since the last time, first since
    training started. A weight that a mask has let grow counts once it has left zero. The module is not touched.

    Args:
        every_n_epochs: Epochs between two logs.
        per_layer: Whether each layer has a key of its own.
        layers: Patterns of layer names, such as ``["*conv*", "!head*"]``; None = all tensors of two or more
            dimensions.

    Raises:
        InvalidOption: If `every_n_epochs` is below 1, or a pattern matches no layer.

    Example:
        >>> SparsityMonitor(layers=["*conv*"]).every_n_epochs
        1
    """

    def __init__(self, every_n_epochs: int = 1, per_layer: bool = True, layers: list[str] | str | None = None) -> None:
        expected = "a whole number >= 1"
        require(every_n_epochs >= 1, "SparsityMonitor", "every_n_epochs", every_n_epochs, expected)
        self.every_n_epochs, self.per_layer, self.layers = every_n_epochs, per_layer, layers
        self._seen: dict[str, Tensor] = {}
        self._resumed = False

    @property
    def state_key(self) -> str:
        """Tells monitors of different layers apart."""
        return self._generate_state_key(layers=self.layers)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note where zeros are now, unless a checkpoint has said so."""
        if not self._resumed:
            self._seen = self._nonzero(pl_module)
        self._resumed = False

    def _nonzero(self, module: LightningModule) -> dict[str, Tensor]:
        parameters = dict(module.named_parameters())
        return {name: parameters[name].detach() != 0 for name in choose(parameters, self.layers, "SparsityMonitor")}

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            now = self._nonzero(pl_module)
            seen = {name: mask.to(now[name].device) for name, mask in self._seen.items() if name in now}
            pl_module.log_dict(self._densities(now) | {"mask/changed": changed(now, seen)})
            self._seen = now

    def _densities(self, masks: Masks) -> dict[str, float]:
        kept, sizes = counts(masks), {name: mask.numel() for name, mask in masks.items()}
        layers = {f"sparsity/layer/{name}": kept[name] / sizes[name] for name in kept if sizes[name]}
        return {"sparsity/density": sum(kept.values()) / max(1, sum(sizes.values()))} | (
            layers if self.per_layer else {}
        )

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget what was loaded for this run."""
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Where zeros were at the last log, one bit a weight."""
        return {"seen": packed(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the last log of a checkpoint."""
        self._seen, self._resumed = unpacked(state_dict["seen"]), True
