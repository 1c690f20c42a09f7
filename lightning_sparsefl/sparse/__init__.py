"""Pure functions of masks: tensors in, tensors out."""

from lightning_sparsefl.sparse import density, masks, nm, prune, regrow, schedule, scores, submodel, units

__all__ = ["density", "masks", "nm", "prune", "regrow", "schedule", "scores", "submodel", "units"]
