"""A sample input for tracing a module's forward pass, to find its units and the FLOPs of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.units import UnitGroup, find_groups
from lightning_sparsefl.types import LayerFlops


def example_of(module: LightningModule, data: Any) -> Any:
    """Return a batch of one sample in the module's precision and on its device, or None if its shape is unknown.

    Args:
        module: Module whose `example_input_array` is the sample; without one, zeros of `data.sample_shape` are.
        data: Data module of the clients.
    """
    sample: Any = module.example_input_array
    shape = getattr(data, "sample_shape", None)
    if sample is None and shape is not None:
        sample = torch.zeros(1, *shape)
    first = next(module.parameters())
    return apply_to_collection(
        sample, Tensor, lambda t: t.to(first.device, first.dtype if t.is_floating_point() else None)
    )


def layers_of(module: LightningModule, data: Any) -> tuple[LayerFlops, ...]:
    """Return the FLOPs of a module's layers; an empty tuple, with a warning, if its forward pass cannot be traced."""
    sample = example_of(module, data)
    if sample is None:
        rank_zero_warn("FLOPs are not counted: the data has no `sample_shape` and the module no `example_input_array`.")
        return ()
    try:
        with _temporary_running_statistics(module):
            return count_layers(module, sample)
    except Exception as error:
        rank_zero_warn(
            f"FLOPs are not counted: `{type(module).__name__}.forward` fails on one sample "
            f"({type(error).__name__}: {error}); set its `example_input_array`."
        )
        return ()


def units_of(module: LightningModule, data: Any) -> tuple[UnitGroup, ...]:
    """Return the groups of units of a module.

    Raises:
        InvalidOption: If there is no sample to trace the module with, or the module has no units.
    """
    sample = example_of(module, data)
    name = type(module).__name__
    if sample is None:
        raise InvalidOption(
            f"The units of `{name}` cannot be found: the data has no `sample_shape`; set the model's "
            "`example_input_array`."
        )
    with _temporary_running_statistics(module):
        groups = find_groups(module, *(sample if isinstance(sample, tuple) else (sample,)))
    if not groups:
        raise InvalidOption(
            f"`{name}` has no units; expected a hidden layer whose channels or neurons can be dropped (option `model`)."
        )
    names = module.state_dict().keys()  # without the temporary statistics
    return tuple(replace(g, slots=tuple(slot for slot in g.slots if slot.name in names)) for g in groups)


@contextmanager
def _temporary_running_statistics(module: nn.Module) -> Iterator[None]:
    """Register running statistics in batch norms that have none, since one sample may be too few to compute them."""
    norms = [
        norm
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is None and norm.weight is not None
    ]
    try:
        for norm in norms:
            for name, like in (("running_mean", torch.zeros_like), ("running_var", torch.ones_like)):
                norm.register_buffer(name, like(norm.weight.detach()))
        yield
    finally:
        for norm in norms:
            for name in ("running_mean", "running_var"):
                norm.register_buffer(name, None)
