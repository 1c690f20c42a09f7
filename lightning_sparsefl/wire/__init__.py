"""Encoding of messages as bytes, their exact sizes, and a file format for sparse weights."""

from lightning_sparsefl.wire.codec import Codec
from lightning_sparsefl.wire.file import export_sparse, load_sparse
from lightning_sparsefl.wire.frame import Size

__all__ = ["Codec", "Size", "export_sparse", "load_sparse"]
