"""Weights as views of one flat vector, so that loading them is one copy and merging them one sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.types import Weights

_SMALLEST_FLOAT = 2
"""Bytes of the smallest floating-point types that torch computes with."""


class FlatTree(dict[str, Tensor]):
    """A weights tree whose tensors are views of `vector`, in the layout's order."""

    def __init__(self, tensors: Mapping[str, Tensor], vector: Tensor) -> None:
        super().__init__(tensors)
        self.vector = vector

    @property
    def is_view(self) -> bool:
        """Whether all tensors are views of the vector, and not copies of another dtype."""
        return all(tensor.dtype == self.vector.dtype for tensor in self.values())

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Raise TypeError, since the vector would not change."""
        raise TypeError(f"Weights are read-only; to change {name!r}, build another tree: {{**weights, {name!r}: ...}}.")


class Layout:
    """The position of each tensor of a tree in the vector: parameters first, then floating-point buffers.

    Args:
        parameters: Parameters of the module, without duplicates.
        buffers: Floating-point buffers of the module that are part of its ``state_dict``.
        frozen: Names of the parameters that require no gradient in the user's module.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], frozen: Iterable[str] = ()
    ) -> None:
        tensors = {**parameters, **buffers}
        self.names = tuple(tensors)
        self.buffers = frozenset(buffers)
        self.frozen = frozenset(frozen)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self.sizes)
        dtypes = [tensor.dtype for tensor in tensors.values()]
        self.dtypes = dict(zip(self.names, dtypes, strict=True))
        self.dtype = reduce(torch.promote_types, dtypes)  # which holds all values: float32 for float16 and bfloat16

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that require gradients in the user's module."""
        return [name for name in self.names if name not in self.buffers and name not in self.frozen]

    @property
    def uniform(self) -> bool:
        """Whether all tensors have the same dtype, so that they can be views of the vector."""
        return len(set(self.dtypes.values())) == 1

    def split(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the named views of a vector.

        Args:
            vector: Vector of shape (size,).
        """
        for name, piece in zip(self.names, vector.split(self.sizes), strict=True):
            yield name, piece.view(self.shapes[name])

    def tree(self, vector: Tensor) -> FlatTree:
        """Return the tree of a vector, whose tensors are views if their dtypes are that of the vector.

        Args:
            vector: Vector of shape (size,).
        """
        return FlatTree({name: view.to(self.dtypes[name]) for name, view in self.split(vector)}, vector)

    def flatten(self, tree: Weights) -> Tensor:
        """Return the vector of a tree, without a copy for a `FlatTree` of this layout.

        Args:
            tree: Tree that has every name of the layout.
        """
        if isinstance(tree, FlatTree) and tree.vector.numel() == self.size:
            return tree.vector
        return torch.cat([tree[name].reshape(-1) for name in self.names])

    def check(self, tree: Mapping[str, Tensor], what: str, dtype: torch.dtype | None = None) -> None:
        """Raise :class:`IncompatibleMasks` if a name, shape or dtype of a tree differs from the model's.

        Weights of another dtype would be sent with other bytes, and come back from a checkpoint as the model's.

        Args:
            tree: Tree to check.
            what: Description of the tree for the error message.
            dtype: Type of all tensors, such as that of masks; None = the model's types.
        """
        self.check_shapes(tree, what)
        for name, tensor in tree.items():
            expected = self.dtypes[name] if dtype is None else dtype
            if tensor.dtype != expected:
                raise IncompatibleMasks(f"{what} holds {name!r} as {tensor.dtype}; expected {expected}.")

    def check_shapes(self, tree: Mapping[str, Tensor], what: str) -> None:
        """Raise :class:`IncompatibleMasks` if a name or shape of a tree differs from the model's.

        Args:
            tree: Tree to check.
            what: Description of the tree for the error message.
        """
        for name, tensor in tree.items():
            if name not in self.shapes:
                raise IncompatibleMasks(
                    f"{what} holds {name!r}, which the model does not have; return only the model's names."
                )
            if tensor.shape != self.shapes[name]:
                raise IncompatibleMasks(
                    f"{what} holds {name!r} with shape {tuple(tensor.shape)}; expected {tuple(self.shapes[name])}."
                )


def require_trainable(module: nn.Module) -> None:
    """Raise :class:`InvalidOption` unless a module has a trainable parameter.

    Args:
        module: Module to check.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidOption(
            f"`{type(module).__name__}` has no trainable parameter; expected at least one with requires_grad=True, "
            "created in `__init__` (option `model`)."
        )


def _require_dense(tensors: Mapping[str, Tensor]) -> None:
    """Raise :class:`InvalidOption` if a tensor cannot be a part of a vector, or be sent."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or (tensor.is_floating_point() and tensor.dtype.itemsize < _SMALLEST_FLOAT):
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise InvalidOption(
                f"`{name}` of the model is {kind}; expected a dense one, of 16 bits or more, or a buffer that is "
                "registered with `persistent=False`, which stays on the client (option `model`)."
            )


def weight_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold weights by name; whole numbers, as of a quantized layer, cannot be trained.

    Args:
        module: Module of the user.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.codes = nn.Parameter(torch.tensor([3, 1]), requires_grad=False)
        >>> list(weight_parameters(layer))
        ['weight', 'bias']
    """
    return {n: p for n, p in module.named_parameters() if p.is_floating_point() or p.is_complex()}


class FlatModule:
    """A module whose float tensors are views of one vector, created once per process.

    Args:
        module: Module of the user, already on its device.

    Raises:
        InvalidOption: If the module has no trainable parameter, or a tensor that cannot be a part of the vector.
    """

    def __init__(self, module: nn.Module) -> None:
        require_trainable(module)
        state = module.state_dict()
        _require_dense({name: value for name, value in state.items() if isinstance(value, Tensor)})
        parameters, kept = weight_parameters(module), state.keys()
        buffers = {n: b for n, b in module.named_buffers() if n in kept and b.is_floating_point()}
        self.module = module
        self.layout = Layout(parameters, buffers, (n for n, p in parameters.items() if not p.requires_grad))
        self._tensors = {**parameters, **buffers}
        self.vector = torch.cat([t.detach().reshape(-1).to(self.layout.dtype) for t in self._tensors.values()])
        self._views = dict(self.layout.split(self.vector))
        self._bind()

    def _bind(self) -> None:
        """Make the module's tensors views of the vector."""
        if self.layout.uniform:
            for name, view in self._views.items():
                self._tensors[name].data = view

    def load(self, weights: Weights) -> None:
        """Copy a tree into the module; tensors whose names it lacks keep their values.

        Args:
            weights: Weights to copy.

        Raises:
            IncompatibleMasks: If a name or shape differs from the module's.
        """
        self._rebind_replaced()
        if self.layout.uniform and self._is_whole(weights):
            self.vector.copy_(weights.vector)
            return
        self.require_fitting(weights)
        with torch.no_grad():
            for name, tensor in weights.items():
                self._tensors[name].data.copy_(tensor)

    def require_fitting(self, weights: Weights) -> None:
        """Raise :class:`IncompatibleMasks` if a name or shape of a tree differs from the module's.

        Args:
            weights: Weights that are to be loaded.
        """
        if not self._is_whole(weights):
            self.layout.check_shapes(weights, "A tree that is loaded into the module")

    def _is_whole(self, weights: Weights) -> TypeGuard[FlatTree]:
        """Return whether a tree is a vector of all weights, as :meth:`read` returns."""
        return isinstance(weights, FlatTree) and weights.vector.numel() == self.layout.size

    def read(self) -> FlatTree:
        """Return a copy of the module's weights.

        Raises:
            InvalidOption: If training replaced a parameter, as Lightning's `ModelPruning` does.
            ValueError: If training changed the shape of a tensor; it then has its own shape again.
        """
        for name, shape in self._rebind_replaced().items():
            raise ValueError(
                f"training changed the shape of {name!r} from {tuple(self.layout.shapes[name])} to {shape}; expected "
                "the shapes of the module not to change"
            )
        if self.layout.uniform:
            return self.layout.tree(self.vector.clone())
        pieces = [self._tensors[name].detach().reshape(-1).to(self.layout.dtype) for name in self.layout.names]
        return self.layout.tree(torch.cat(pieces))

    def _rebind_replaced(self) -> dict[str, tuple[int, ...]]:
        """Bind buffers and parameter data again that training replaced instead of changing them in place.

        Returns:
            Shapes of tensors that training gave another shape, and that have their own one again.

        Raises:
            InvalidOption: If training added a parameter, or removed a tensor.
        """
        changed: dict[str, tuple[int, ...]] = {}
        parameters = weight_parameters(self.module)
        current = {**parameters, **dict(self.module.named_buffers())}
        for name, view in self._views.items():
            if name not in current:
                raise InvalidOption(
                    f"Training removed or renamed {name!r}; expected the module's names not to change. "
                    "Remove the callback that renames them (`trainer.client_callbacks`)."
                )
            now, bound = current[name], self._tensors[name]
            fits = now.shape == view.shape
            if now is bound and fits and (not self.layout.uniform or now.data_ptr() == view.data_ptr()):
                continue
            if fits:
                view.copy_(now.detach())
            else:
                changed[name] = tuple(now.shape)
                now.data = view.to(now.dtype, copy=True)
            self._tensors[name] = now
            if self.layout.uniform:
                now.data = view
        if not parameters.keys() <= self._views.keys():
            added = next(name for name in parameters if name not in self._views)
            raise InvalidOption(
                f"Training added {added!r} to `{type(self.module).__name__}`; expected its layers to be made in "
                "`__init__` or `configure_model` (option `model`), so that clients share them."
            )
        return changed
