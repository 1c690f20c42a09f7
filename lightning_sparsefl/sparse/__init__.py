"""Pure functions of masks: tensors in, tensors out."""

from lightning_sparsefl.sparse import (
    apply,
    density,
    freeze,
    importance,
    layer_groups,
    masks,
    nm,
    prune,
    regrow,
    rescale,
    schedule,
    scores,
    submodel,
    units,
    width,
)

__all__ = [
    "apply",
    "density",
    "freeze",
    "importance",
    "layer_groups",
    "masks",
    "nm",
    "prune",
    "regrow",
    "rescale",
    "schedule",
    "scores",
    "submodel",
    "units",
    "width",
]
