"""Facts about a model that both ends know before the first message."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Weights
from lightning_sparsefl.wire.dense import DTYPES


class Schema:
    """Names, shapes and types of a model's tensors, and a fingerprint of them.

    Args:
        weights: Weights of the model; only names, shapes and types are used.

    Raises:
        InvalidOption: If a tensor has a type that cannot be encoded.
    """

    def __init__(self, weights: Weights) -> None:
        self.names = tuple(weights)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.shapes = tuple(value.shape for value in weights.values())
        self.dtypes = tuple(value.dtype for value in weights.values())
        self.nbytes = sum(value.numel() * value.element_size() for value in weights.values())
        facts = [(name, tuple(value.shape), dtype_number(value.dtype, name)) for name, value in weights.items()]
        self.fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=4).digest()

    def shape(self, name: str) -> torch.Size | None:
        """Return the shape of the tensor with a name, or None if the model has no such tensor."""
        return self.shapes[self.index[name]] if name in self.index else None

    def fits(self, name: str, value: Tensor) -> bool:
        """Return whether a tensor has the shape and the type of the model's tensor with that name."""
        index = self.index.get(name)
        return index is not None and self.shapes[index] == value.shape and self.dtypes[index] == value.dtype


def dtype_number(dtype: torch.dtype, name: str) -> int:
    """Return the number that encodes a type.

    Args:
        dtype: Type of the tensor.
        name: Name of the tensor, for the error message.

    Raises:
        InvalidOption: If the type cannot be encoded.

    Example:
        >>> dtype_number(torch.float64, "w")
        1
    """
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise InvalidOption(f"`{name}` is {dtype}, which cannot be encoded; expected one of {known}.")
    return DTYPES.index(dtype)
