"""The tensors of several clients as one set of leaves, and the module's own code on all of them at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.federated.local.isolation import tell_contents
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules import (
    REMOVES_GRADIENT,
    FlatViews,
    Gradients,
    KernelCopies,
    LayerRules,
    OtherTensors,
    address,
)
from lightning_sparsefl.federated.local.stacked.states.attributes import AttributeRows, AttributeStates

Slot = tuple[dict[str, Any], str, str]
"""A table of a submodule, the name in it, and the full name of the tensor."""


class StackedModule:
    """A module's parameters and floating-point buffers for several clients, with the clients in dimension 0.

    The module itself lends its code: within :meth:`call` its tables of parameters and buffers hold batched views of the
    leaves, and before and after it they hold its own tensors. Tied weights are one leaf. A tensor that is the same for
    all clients and stays so is stored once: its leaf repeats one row, and is read only.

    Args:
        module: Module of the user.
        size: Number of clients.
        shared: Names of tensors that are the same for all clients, and that nothing changes.
        changed: Attributes that steps change, so that each client has its own: path of a submodule, and name.
    """

    def __init__(
        self,
        module: nn.Module,
        size: int,
        shared: Collection[str] = (),
        changed: Collection[tuple[str, str]] = (),
    ) -> None:
        self.module, self.size, self.shared = module, size, frozenset(shared)
        self.is_part = False
        self.attributes = AttributeStates(module, changed, size).part(0, size)
        self.leaves: dict[str, Tensor] = {}
        self.slots: list[Slot] = []
        self.own: dict[str, Tensor] = {}
        kept, names = set(module.state_dict()), dict[int, str]()
        for prefix, child in module.named_modules():
            for table in (child._parameters, child._buffers):
                for name, tensor in table.items():
                    full = f"{prefix}.{name}" if prefix else name
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    if table is child._buffers and full not in kept:
                        continue
                    full = names.setdefault(id(tensor), full)
                    self.slots.append((table, name, full))
                    if full not in self.leaves:
                        self.own[full] = tensor
                        self.leaves[full] = self._leaf(full, tensor)
        self.attributes.states.storages = frozenset(map(address, self.leaves.values()))
        self.own_ids = frozenset(map(id, self.own.values()))
        self.convolves = any(
            isinstance(child, nn.Conv2d) and names.get(id(child._parameters.get("weight"))) not in self.shared
            for child in module.modules()
        )

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.shared:
            return _empty(tensor, 1).expand(self.size, *tensor.shape)
        return _empty(tensor, self.size).requires_grad_(tensor.requires_grad)

    @torch.no_grad()
    def load(self, trees: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy each client's weights into its rows.

        Args:
            trees: Tensors by name, one tree for each client.
        """
        for name, leaf in self.leaves.items():
            if name in self.shared:
                leaf[0].copy_(trees[0][name])
            elif all(tree[name] is trees[0][name] for tree in trees):
                leaf.copy_(trees[0][name])
            else:
                for row, tree in zip(leaf, trees, strict=True):
                    row.copy_(tree[name])

    def tell_contents(self) -> None:
        """Tell that what clients leave in containers of the module is discarded; see :func:`.tell_contents`."""
        kind = type(self.module).__name__
        tell_contents(name.replace("self", kind, 1) for name in self.attributes.states.changed_contents())

    def row(self, index: int) -> dict[str, Tensor]:
        """Return views of one client's tensors.

        Args:
            index: Place of the client in the stack.
        """
        return {name: self.leaves[name].detach()[index] for name in self.own}

    def part(self, low: int, high: int) -> StackedModule:
        """Return the clients from `low` to before `high`, whose leaves are views of these.

        Args:
            low: First place.
            high: Place after the last one.
        """
        if (low, high) == (0, self.size):
            return self
        part = copy.copy(self)
        part.size, part.attributes, part.is_part = high - low, self.attributes.states.part(low, high), True
        part.leaves = {
            name: _alias(leaf.detach()[low:high]).requires_grad_(leaf.requires_grad)
            for name, leaf in self.leaves.items()
        }
        return part

    def call(self, function: Callable[[Any, int], Any], batch: Any) -> Any:
        """Call a function of the module for all clients.

        Args:
            function: Function of a batch and of the number of the level, which uses the module.
            batch: Batch whose tensors have the clients in dimension 0.

        Returns:
            What the function returns, with plain tensors that have the clients in dimension 0.

        Raises:
            NotStackable: If one was raised within the function, even if the user's code has caught it.
        """
        if self.size == 1:  # without a level, a step of one client takes half the time
            batch = map_tensors(batch, lambda tensor: tensor.squeeze(0))
            tensors = {name: self._seen(name, leaf.squeeze(0)) for name, leaf in self.leaves.items()}
            with self._alike(), self.attributes.shown(0), self._alone(tensors):
                output = map_tensors(function(batch, 0), lambda tensor: tensor.unsqueeze(0))
            for name, tensor in tensors.items():
                self._require_own_memory(tensor, self.leaves[name].detach()[0])
            return output
        with functorch.vmap_level(self.size) as level:
            batch = map_tensors(batch, lambda tensor: functorch.wrap(*self._laid_out(tensor), level))
            with self._at(level, self._views(level)):
                output = function(batch, level)
            return map_tensors(output, lambda tensor: unwrapped(tensor, level, self.size))

    def call_with_gradients(self, function: Callable[[Mapping[str, Tensor], int], None]) -> bool:
        """Call a function of the module for all clients, which sees the gradients of their weights.

        Args:
            function: Function of the weights by name and of the number of the level, which uses the module.

        Returns:
            Whether the function has assigned gradients, which may have another layout.

        Raises:
            NotStackable: If one was raised within the function, even if the user's code has caught it.
        """
        with functorch.vmap_level(self.size) as level:  # for one client as well, so that sums have the same order
            views = self._views(level)
            gradients = Gradients(views, self.leaves, level)
            with self._at(level, views, gradients):
                function(views, level)
        return gradients.store()

    @contextmanager
    def _at(self, level: int, views: Mapping[str, Tensor], gradients: Gradients | None = None) -> Iterator[None]:
        """Let the module hold the tensors of all clients at a level within the context, where rules are active."""
        copies = self._copies() if self.convolves else None
        with (
            self._alike(),
            self.attributes.shown(level),
            self._shown(views),
            LayerRules(self.size, level, self.own_ids, gradients, copies),
            NotStackable.noted() as noted,
        ):
            yield
        if noted:
            raise noted[0]
        if copies is not None:
            copies.require_unwritten()

    @contextmanager
    def _alone(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module hold the tensors of one client within the context, outside of a level."""
        copies = self._copies() if self.convolves else None
        flat = nullcontext() if copies is None else FlatViews(copies)
        with self._shown(tensors), OtherTensors(self.own_ids), flat:
            yield
        if copies is not None:
            copies.require_unwritten()

    def _copies(self) -> KernelCopies:
        """Return a receiver of copies of weights and of gradients."""
        grads = [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]
        return KernelCopies(self.attributes.states.storages.union(map(address, grads)))

    def _require_own_memory(self, tensor: Tensor, row: Tensor) -> None:
        """Raise :class:`NotStackable` unless a tensor that the module has had is still a view of a row of its leaf."""
        if not _is_same_memory(tensor, row):
            raise NotStackable("replaces the numbers of a weight (`data`) instead of writing into them")

    def view(self, place: int) -> dict[str, Tensor]:
        """Return the tensors of one client, with views of its gradients.

        Args:
            place: Place of the client among these.
        """
        tensors = {}
        for name, leaf in self.leaves.items():
            tensors[name] = tensor = leaf.detach()[place]
            if leaf.requires_grad:
                tensor.requires_grad_()
                tensor._is_param = True
            if leaf.grad is not None:
                tensor.grad = leaf.grad.detach()[place]
        return tensors

    @contextmanager
    def showing(self, tensors: Mapping[str, Tensor], place: int, attributes: AttributeRows) -> Iterator[None]:
        """Let the module hold the tensors and attributes of one client within the context.

        Gradients that are replaced are copied into those that they replace.

        Args:
            tensors: Result of :meth:`view`.
            place: Place of the client among these.
            attributes: Attributes of the client.

        Raises:
            NotStackable: If a gradient is removed, given to a weight that has none, or kept in an attribute as well as
                assigned, if a weight is replaced, or if a hook is registered.
        """
        with attributes.shown(0), self._alone(tensors):
            yield
        replaced = []
        for name, tensor in tensors.items():
            self._require_own_memory(tensor, self.leaves[name].detach()[place])
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise NotStackable("registers a hook for the gradient of a weight")
            replaced += self._replaced(self.leaves[name].grad, place, tensor.grad)
        kept = attributes.addresses() if replaced else set()
        if not kept.isdisjoint(address(grad) for _, grad in replaced):
            raise NotStackable("assigns a gradient that an attribute has as well")
        with torch.no_grad():
            copies = [grad.clone() for _, grad in replaced]  # first, since gradients may be swapped
            for (row, _), copied in zip(replaced, copies, strict=True):
                row.copy_(copied)

    def _replaced(self, grads: Tensor | None, place: int, grad: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Return the row of the gradients of all clients with one client's gradient, unless that is a view of it."""
        if grads is None and grad is None:
            return []
        if grads is None or grad is None:
            raise NotStackable(REMOVES_GRADIENT)
        row = grads.detach()[place]
        return [] if _is_same_memory(grad, row) else [(row, grad.detach())]

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Refuse that some of the clients write into what is stored once for all of them within the context."""
        before = [self.leaves[name]._version for name in self.shared]
        yield
        if self.is_part and before != [self.leaves[name]._version for name in self.shared]:
            raise NotStackable("writes into a weight that is the same for all clients")

    def _views(self, level: int) -> dict[str, Tensor]:
        with functorch.Outside():  # no level lets a tensor require gradients
            rows = {name: self._seen(name, self.leaves[name][0]) for name in self.shared}
        return {
            name: rows[name] if name in rows else self._seen(name, functorch.wrap(leaf, 0, level))
            for name, leaf in self.leaves.items()
        }

    def _seen(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as the module sees it: as a parameter that requires gradients, if it is trained."""
        evaluates = not torch.is_grad_enabled()
        if self.leaves[name].requires_grad or (evaluates and self.own[name].requires_grad):
            tensor._is_param = True
            if evaluates and not functorch.is_batched(tensor):
                tensor.requires_grad_()
        return tensor

    def _laid_out(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return a batch tensor and its dimension of clients; images get the layout of :mod:`.rules`."""
        if not self.convolves or tensor.dim() != 5:
            return tensor, 0
        return tensor.permute(1, 3, 4, 0, 2).contiguous().permute(0, 3, 4, 1, 2), 1

    @contextmanager
    def _shown(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the module's tensors within the context."""
        before = [table[name] for table, name, _ in self.slots]
        flags = [tensor.requires_grad for tensor in tensors.values()]
        for table, name, full in self.slots:
            table[name] = tensors[full]
        try:
            yield
            if flags != [tensor.requires_grad for tensor in tensors.values()]:
                raise NotStackable("sets `requires_grad` of a tensor")
            for table, name, full in self.slots:
                if table.get(name) is not tensors[full]:
                    kind = "parameter" if isinstance(self.own[full], nn.Parameter) else "buffer"
                    raise NotStackable(f"assigns the {kind} `{full}` instead of writing into it")
        finally:
            for (table, name, _), tensor in zip(self.slots, before, strict=True):
                table[name] = tensor


def _empty(tensor: Tensor, size: int) -> Tensor:
    """Return the leaf of a tensor; kernels of images are stored channels last, so that no convolution copies them."""
    if tensor.dim() == 4:
        out, into, height, width = tensor.shape
        return tensor.new_empty(size, out, height, width, into).permute(0, 1, 4, 2, 3)
    return tensor.new_empty(size, *tensor.shape)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _alias(view: Tensor) -> Tensor:
    """Return a tensor with the memory of a view that is no view, so that it stays a leaf when a step writes into it."""
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def unwrapped(tensor: Tensor, level: int, size: int) -> Tensor:
    """Return the plain tensor of all clients, with the clients in dimension 0.

    Args:
        tensor: Tensor within a level.
        level: Number of the level.
        size: Number of clients, for a tensor that is the same for all.
    """
    value, dim = functorch.unwrap(tensor, level) if functorch.is_batched(tensor) else (tensor, None)
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def shared_names(trees: Sequence[Mapping[str, Tensor]], names: Collection[str]) -> list[str]:
    """Return the names of the tensors that are equal in all trees.

    Args:
        trees: Tensors by name, one tree for each client.
        names: Names to compare.
    """
    first = trees[0]
    return [name for name in names if all(t[name] is first[name] or torch.equal(t[name], first[name]) for t in trees)]


def layout_of(tree: Any) -> Hashable:
    """Return the structure of a batch with the layouts of its tensors, which are equal for batches that can be stacked.

    Args:
        tree: Tensor, or mappings, lists and tuples of tensors and None.

    Raises:
        NotStackable: If the batch has other values, of which each client has its own.

    Example:
        >>> layout_of({"x": torch.zeros(2, 3)}) == layout_of({"x": torch.ones(2, 3)}) != layout_of({"x": torch.ones(3)})
        True
    """
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype)
    if isinstance(tree, Mapping):
        return (type(tree), tuple((key, layout_of(value)) for key, value in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree), tuple(layout_of(value) for value in tree))
    if tree is not None:
        raise NotStackable(f"gets batches with a `{type(tree).__name__}`, of which each client has its own")
    return None


def stack_trees(trees: Sequence[Any]) -> Any:
    """Return batches of equal :func:`layout_of` as one, with the clients in dimension 0 of its tensors.

    Args:
        trees: Batches of the clients.

    Example:
        >>> stack_trees([(torch.zeros(1),), (torch.ones(1),)])
        (tensor([[0.],
                [1.]]),)
    """
    columns = zip(*(tensors_of(tree) for tree in trees), strict=True)
    rows = iter([torch.stack(column) for column in columns])
    return map_tensors(trees[0], lambda _: next(rows))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a nested structure in their order.

    Args:
        tree: Tensor, or mappings, lists and tuples of tensors and other values.
    """
    found: list[Tensor] = []
    map_tensors(tree, found.append)
    return found


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a nested structure with a function applied to its tensors.

    Args:
        tree: Tensor, or mappings, lists and tuples of tensors and other values.
        function: Function of a tensor.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree
