"""Samples in the memory of the device that trains, where a batch is selected without a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_sparsefl.data.examples import Examples, Normalize
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory

_ELSEWHERE = 2**30
"""Largest number of bytes of all copies on a device that is not CUDA's and has a memory of its own."""


@dataclass
class _Known:
    """A storage that samples have been read from."""

    version: int
    """Number of writes to the storage before it was read."""
    values: Tensor | None = None
    """Its copy, of shape (elements,); None until it is read again."""


class DeviceSamples:
    """Copies of the storages that the clients' samples are views of.

    A storage is copied as a whole when it is read for the second time, in the type in which it is stored, and as long
    as all copies fit. It is copied again after a write by an operation of torch; writes through NumPy are not seen.
    Batches have the bits of those that are read on the CPU: a selection changes no value, and
    :class:`~lightning_sparsefl.data.Normalize` is a product and a sum, each rounded. Samples with other transforms,
    which may draw random numbers, stay on the CPU.

    Args:
        device: Device of the model.
        limit: Largest number of bytes of all copies. Default: 0 on a CPU, an eighth of the memory of a CUDA device, and
            1 GiB on other devices.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device, self._limit = device, _limit_of(device) if limit is None else limit
        self._known: dict[tuple[StorageWeakRef, torch.dtype], _Known] = {}
        self._transforms: dict[tuple[float, ...], Normalize] = {}

    def of(self, examples: Sequence[Examples]) -> Sequence[Examples]:
        """Return samples whose tensors are on the device; those given, unless all of them can be there.

        Args:
            examples: Samples of clients.
        """
        if not self._limit:
            return examples
        moved = [self._moved(each) for each in examples]
        there = [each for each in moved if each is not None]
        return there if len(there) == len(moved) else examples

    def _moved(self, examples: Examples) -> Examples | None:
        transform = examples.transform
        if type(examples) is not Examples or not (transform is None or type(transform) is Normalize):
            return None
        inputs, labels = self._copy(examples.inputs), self._copy(examples.labels)
        if inputs is None or labels is None:
            return None
        return Examples(inputs, labels, None if transform is None else self._transform(transform))

    def _transform(self, transform: Normalize) -> Normalize:
        key = (*transform.scale.flatten().tolist(), *transform.shift.flatten().tolist())
        if key not in self._transforms:
            self._transforms[key] = transform.to(self.device)
        return self._transforms[key]

    def _copy(self, tensor: Tensor) -> Tensor | None:
        """Return a view of a storage's copy; None without a copy."""
        if tensor.is_inference() or tensor.device.type != "cpu":
            return None
        storage, version = tensor.untyped_storage(), tensor._version
        key = (StorageWeakRef(storage), tensor.dtype)
        known = self._known.get(key)
        if known is None or known.version != version:
            self._known = {key: each for key, each in self._known.items() if not key[0].expired()}
            self._known[key] = _Known(version)
            return None
        if known.values is None:
            known.values = self._copied(torch.empty(0, dtype=tensor.dtype).set_(storage))
            if known.values is None:
                return None
        return known.values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @torch.inference_mode(False)
    def _copied(self, whole: Tensor) -> Tensor | None:
        copies = [known.values.nbytes for known in self._known.values() if known.values is not None]
        if whole.nbytes + sum(copies) > self._limit:
            return None
        try:
            return whole.to(self.device, copy=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._limit = 0  # the model needs the rest
            self._known.clear()
            return None


def _limit_of(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // 8
    return _ELSEWHERE
