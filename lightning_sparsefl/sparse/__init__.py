"""Pure functions of masks: tensors in, tensors out."""

from lightning_sparsefl.sparse import (
    apply,
    density,
    freeze,
    layer_groups,
    masks,
    nm,
    prune,
    regrow,
    schedule,
    scores,
    submodel,
    units,
)

__all__ = [
    "apply",
    "density",
    "freeze",
    "layer_groups",
    "masks",
    "nm",
    "prune",
    "regrow",
    "schedule",
    "scores",
    "submodel",
    "units",
]
