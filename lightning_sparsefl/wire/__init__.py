"""What a message weighs, because it was encoded."""

from lightning_sparsefl.wire.codec import Codec
from lightning_sparsefl.wire.frame import Size

__all__ = ["Codec", "Size"]
