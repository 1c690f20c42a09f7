"""Train under a fixed mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts, maskable, uniform
from lightning_sparsefl.sparse.masks import check, pack, unpack
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.types import Masks, TrainerLike


class StaticMask(Callback):
    """Holds a mask: gradients are masked before clipping and before the step, weights after it.

    Masking only the weights would be wrong with momentum and weight decay, whose buffers would keep moving
    (Huang et al., FedSpa, eq. 3).

    Args:
        density: Fraction of the maskable weights to keep, in (0, 1]; the mask is drawn when training starts.
        layer_density: How the density is spread over layers, by the Erdos-Renyi-Kernel rule or evenly.
        seed: Of the draw.
        masks: Named bool tensors to hold instead of a drawn mask; a missing name is dense.

    Raises:
        InvalidOption: If the density is outside (0, 1].
        IncompatibleMasks: If `masks` do not fit the module.

    Example:
        >>> import torch
        >>> callback = StaticMask(masks={"weight": torch.eye(2, dtype=torch.bool)})
        >>> int(callback.masks["weight"].sum())
        2
    """

    def __init__(
        self,
        density: float = 0.5,
        layer_density: Literal["erk", "uniform"] = "erk",
        seed: int = 0,
        masks: Masks | None = None,
    ) -> None:
        if layer_density not in ("erk", "uniform"):
            raise InvalidOption(f"`StaticMask(layer_density={layer_density!r})`: expected 'erk' or 'uniform'.")
        self._spread = {"erk": erk, "uniform": uniform}[layer_density]
        self._spread({"probe": (1, 1)}, density)  # an unfit density fails here, not an hour later
        self.density, self.seed = density, seed
        self.masks: dict[str, Tensor] = dict(masks or {})
        self._drawn = masks is not None
        self._held: tuple[list[Tensor], list[Tensor]] = ([], [])

    def on_fit_start(self, trainer: TrainerLike, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Draw the mask if none is held yet, and apply it."""
        parameters = dict(pl_module.named_parameters())
        if not self._drawn:
            self.masks, self._drawn = self._draw(parameters), True
        check(self.masks, parameters)
        names = [name for name in self.masks if name in parameters]
        self._held = (
            [parameters[name] for name in names],
            [self.masks[name].to(parameters[name].device, parameters[name].dtype) for name in names],
        )
        self._mask_weights()

    def _draw(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes = {name: parameters[name].shape for name in maskable(parameters)}
        counts = kept_counts(shapes, self._spread(shapes, self.density))
        return dict(random_masks(shapes, counts, generator(self.seed, "static mask")))

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Mask the gradients."""
        pairs = [(p.grad, m) for p, m in zip(*self._held, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_mul_([grad for grad, _ in pairs], [mask for _, mask in pairs])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights."""
        self._mask_weights()

    @torch.no_grad()
    def _mask_weights(self) -> None:
        if self._held[0]:
            torch._foreach_mul_(*self._held)

    def state_dict(self) -> dict[str, Any]:
        """The mask, one bit a weight."""
        return {"masks": {name: (pack(mask.cpu()), list(mask.shape)) for name, mask in self.masks.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold the mask of a checkpoint."""
        self.masks = {name: unpack(packed, shape) for name, (packed, shape) in state_dict["masks"].items()}
        self._drawn = True
