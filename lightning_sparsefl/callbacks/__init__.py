"""Lightning callbacks over `sparse/`: one object, the same behaviour in a `Trainer` and in a client."""

from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.static_mask import StaticMask

__all__ = ["LayerFreezing", "ProximalTerm", "StaticMask"]
