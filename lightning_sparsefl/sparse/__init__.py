"""Pure functions of masks: tensors in, tensors out."""

from lightning_sparsefl.sparse import density, masks, prune, regrow, schedule, scores

__all__ = ["density", "masks", "prune", "regrow", "schedule", "scores"]
