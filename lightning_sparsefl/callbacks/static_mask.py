"""Training under a fixed mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import (
    LayerDensity,
    check_arguments,
    drawn,
    require,
    require_density,
    require_layer_density,
    rescale_first_weights,
    rescales,
)
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import kept
from lightning_sparsefl.types import Masks, Weights


class StaticMask(MaskingCallback):
    """Holds a mask: gradients are masked before clipping and before the step, weights after it.

    Masking only the weights would be wrong with momentum and weight decay, whose buffers would keep moving
    (Huang et al., FedSpa, eq. 3). A second `fit` keeps the mask of the first. A fit that is resumed keeps the
    checkpoint's mask, and warns of options for another one.

    Args:
        density: Fraction of the layers' weights to keep, in (0, 1]; the mask is drawn when training starts.
        layer_density: How the density is spread over layers: by the Erdos-Renyi-Kernel rule, evenly, or by name
            pattern, as in ``{"*conv*": 0.5, "head*": 1.0}``, where layers that match none have `density`.
        seed: Seed of the draw.
        masks: Bool tensors by name to hold instead of a drawn mask, where a missing name is dense; or "nonzero" to hold
            the weights of `layers` that are not 0 when training starts, as in a module that is pruned already.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.
        rescale: Whether to multiply the first weights of each output by the root of its fan-in over the kept part of
            it, so that sparse signals do not fade; None = only in modules without normalization layers. With `masks`,
            weights are never rescaled, and in a federation only those that the run starts with.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, or `masks` is "nonzero" and a layer is 0 everywhere or no weight is 0.
        IncompatibleMasks: If `masks` do not fit the module.

    Example:
        >>> import torch
        >>> callback = StaticMask(masks={"weight": torch.eye(2, dtype=torch.bool)})
        >>> int(callback.masks["weight"].sum())
        2
    """

    @check_arguments
    def __init__(
        self,
        density: float = 0.5,
        layer_density: LayerDensity = "erk",
        seed: int = 0,
        masks: Masks | Literal["nonzero"] | None = None,
        layers: list[str] | str | None = None,
        rescale: bool | None = None,
    ) -> None:
        require_layer_density("StaticMask", layer_density)
        require_density("StaticMask", density)
        given = masks if isinstance(masks, Mapping) else None
        known = given is not None or masks in (None, "nonzero")
        require(known, "StaticMask", "masks", masks, "bool tensors by name, 'nonzero', or None")
        apart = given is None or layers is None
        require(apart, "StaticMask", "layers", layers, "None beside `masks`, which name theirs")
        super().__init__(layers, given)
        self.density, self.layer_density, self.seed, self.rescale = density, layer_density, seed, rescale
        self._nonzero = masks == "nonzero"

    def draw_options(self) -> dict[str, Any]:
        """Return the densities and the seed, unless the mask is of the weights that are not 0."""
        if self._nonzero:
            return super().draw_options()
        return {"density": self.density, "layer_density": self.layer_density, "seed": self.seed}

    def first_weights(self, weights: Weights) -> None:
        """Rescale the first weights to the fan-in that the drawn masks keep."""
        if self._around is not None and not self._nonzero and rescales(self.rescale, self._around[1]):
            rescale_first_weights(self._around[1], weights, self.masks)

    def warn_of_frozen(self, parameters: Mapping[str, Tensor]) -> None:
        """Warn of frozen weights that a drawn mask zeroes; one of the weights that are not 0 zeroes none."""
        if not self._nonzero:
            super().warn_of_frozen(parameters)

    def first_masks(self, weights: Weights) -> Masks:
        """Draw masks from the seed, or keep the weights that are not 0."""
        if self._nonzero:
            return _nonzero(weights)
        return drawn("StaticMask", weights, self.density, self.layer_density, self.seed, "static mask")


def _nonzero(weights: Weights) -> Masks:
    """Return masks of the weights that are not 0.

    Raises:
        InvalidOption: If a layer is 0 everywhere, or no weight is 0.

    Example:
        >>> import torch
        >>> _nonzero({"w": torch.tensor([0.5, 0.0])})
        {'w': tensor([ True, False])}
    """
    masks = {name: weight.detach() != 0 for name, weight in weights.items()}
    empty = next((name for name, mask in masks.items() if not mask.any()), None)
    if empty is not None:
        raise InvalidOption(
            f"`StaticMask(masks='nonzero')`: `{empty}` is 0 everywhere; expected weights that are not 0, or `layers` "
            f"without it ('!{empty}')."
        )
    if all(mask.all() for mask in masks.values()):
        raise InvalidOption(
            f"`StaticMask(masks='nonzero')`: all {kept(masks)} weights differ from 0; expected a module that is pruned "
            "already, or a `density` instead of `masks`."
        )
    return masks
