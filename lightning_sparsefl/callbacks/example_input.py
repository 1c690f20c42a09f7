"""A module's example input, as its layers take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from itertools import takewhile
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sparsefl.sparse.forward import POSITIONAL


def for_module(sample: Any, module: nn.Module) -> Any:
    """Return an example input on the device and in the precision of a module, where users seldom create it.

    Args:
        sample: Tensors, or collections of them, such as `example_input_array`.
        module: Module with parameters.

    Example:
        >>> import torch
        >>> for_module((torch.zeros(1), torch.tensor([2])), nn.Linear(1, 1).double())
        (tensor([0.], dtype=torch.float64), tensor([2]))
    """
    first = next(module.parameters())
    return apply_to_collection(
        sample, Tensor, lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None)
    )


def example_inputs(module: LightningModule) -> tuple[Any, ...] | None:
    """Return a module's `example_input_array`, read as Lightning reads it; None if the module sets none.

    Args:
        module: Module of the user.

    Returns:
        The arguments of ``forward``: the items of a tuple or list, the values of a mapping that are named like the
        first arguments of ``forward``, or else the example itself, as in :func:`forward_inputs`.
    """
    example = module.example_input_array
    if isinstance(example, Mapping):
        return forward_inputs(module, example)
    if example is None:
        return None
    return tuple(example) if isinstance(example, tuple | list) else (example,)


def one_sample(inputs: Any) -> Any:
    """Return the first sample of each tensor of a batch, as a batch; tensors without dimensions stay as they are.

    Args:
        inputs: Tensors, or collections of them, whose first dimension is that of the samples.

    Example:
        >>> import torch
        >>> one_sample({"x": torch.tensor([[1], [2]]), "scale": torch.tensor(3)})
        {'x': tensor([[1]]), 'scale': tensor(3)}
    """
    return apply_to_collection(inputs, Tensor, lambda tensor: tensor[:1] if tensor.dim() else tensor)


def shapes_of(inputs: Any) -> list[Size]:
    """Return the shapes of the tensors of inputs, in their order.

    Args:
        inputs: Tensors, or collections of tensors and other values.

    Example:
        >>> import torch
        >>> shapes_of(({"x": torch.zeros(2, 1)}, 3, torch.zeros(4)))
        [torch.Size([2, 1]), torch.Size([4])]
    """
    return [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def forward_inputs(module: nn.Module, batch: Any) -> tuple[Any, ...]:
    """Return the part of a batch that ``forward`` takes, as its arguments.

    Of a mapping, a dataclass or a named tuple, these are the values that are named like the first arguments of
    ``forward``. Without any, it is a mapping itself, whose values
    :func:`~lightning_sparsefl.sparse.forward.split_arguments` names where ``forward`` takes keywords; of a sequence, as
    many values as ``forward`` has required arguments, at least one; of anything else, the whole.

    Args:
        module: Module with a ``forward``.
        batch: Batch of a data loader.
    """
    arguments = [a for a in signature(module.forward).parameters.values() if a.kind in POSITIONAL]
    named = _named(batch)
    values = tuple(named[argument.name] for argument in takewhile(lambda a: a.name in named, arguments))
    if values or isinstance(batch, Mapping):
        return values or (batch,)
    if isinstance(batch, Sequence) and len(batch) > 0 and not isinstance(batch, str):
        required = sum(argument.default is Parameter.empty for argument in arguments)
        return tuple(batch[:required]) if required > 1 else forward_inputs(module, batch[0])
    return (batch,)


def _named(batch: Any) -> Mapping[str, Any]:
    """Return the values of a batch that have names."""
    if isinstance(batch, Mapping):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch._asdict() if isinstance(batch, tuple) and hasattr(batch, "_asdict") else {}
