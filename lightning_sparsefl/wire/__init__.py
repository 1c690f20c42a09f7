"""What a message weighs, because it was encoded; and sparse weights as a file."""

from lightning_sparsefl.wire.codec import Codec
from lightning_sparsefl.wire.file import export_sparse, load_sparse
from lightning_sparsefl.wire.frame import Size

__all__ = ["Codec", "Size", "export_sparse", "load_sparse"]
