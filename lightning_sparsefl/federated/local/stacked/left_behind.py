"""What a step leaves behind in the module, where it would be of all clients at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.leaves import StackedModule
from lightning_sparsefl.federated.local.stacked.logs import NotStackable

_COUNT = "_update_count"
"""Attribute in which a metric object counts its updates."""
_CONTAINERS = (list, dict, set)


class ModuleWatch:
    """A module before a step for several clients.

    Args:
        part: Tensors of the clients, which the module holds now.
    """

    def __init__(self, part: StackedModule) -> None:
        module = part.module
        self._before = [
            (name, child, {**vars(child), "_buffers": dict(child._buffers)}) for name, child in module.named_modules()
        ]
        self._sizes = [
            (f"{name}.{key}" if name else key, value, len(value))
            for name, child, before in self._before
            for key, value in before.items()
            if type(value) in _CONTAINERS and key[0] != "_"
        ]
        own = {(id(table), key) for table, key, full in part.slots if full not in part.shared}
        self._shared: list[tuple[str, Tensor, int]] = [
            (f"{name}.{key}" if name else key, value, value._version)
            for name, child in module.named_modules()
            for key, value in child._buffers.items()
            if value is not None and (id(child._buffers), key) not in own and not isinstance(child, _BatchNorm)
        ]  # a norm reads no number of its batches

    def require_no_metrics(self) -> None:
        """Raise :class:`NotStackable` if the step has updated a metric object."""
        for name, child, before in self._before:
            if vars(child).get(_COUNT) != before.get(_COUNT):
                raise NotStackable(f"updates the metric object `self.{name}`; its functional form can be stacked")

    def require_clean(self) -> None:
        """Raise :class:`NotStackable` if the step has left something of all clients, or has counted.

        Clients do not step in turns, so that a count of their steps would be wrong.
        """
        for name, tensor, version in self._shared:
            if tensor._version != version:
                raise NotStackable(f"writes into the buffer `{name}`, which all clients share")
        for name, container, size in self._sizes:
            if len(container) != size:
                raise NotStackable(f"changes the length of `self.{name}`, which all clients share")
        for name, child, before in self._before:
            _require_equal(f"{name}." if name else "", child, before)


def _require_equal(path: str, child: Any, before: dict[str, Any]) -> None:
    for key, value in vars(child).items():
        if functorch.is_batched(value) or (isinstance(value, Tensor) and value is not before.get(key)):
            raise NotStackable(f"keeps a tensor in `self.{path}{key}`")
        if isinstance(value, (int, float)) and value != before.get(key) and key != _COUNT:
            raise NotStackable(f"changes the number `self.{path}{key}`, which all clients share")
    for key, value in child._buffers.items():
        if value is not before["_buffers"].get(key):
            raise NotStackable(f"assigns the buffer `{path}{key}` instead of writing into it")
