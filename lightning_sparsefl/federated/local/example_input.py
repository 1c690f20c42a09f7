"""A sample input for tracing a module's forward pass, to find its units and the FLOPs of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.data import IterableDataset

from lightning_sparsefl.callbacks.example_input import example_inputs, for_module, forward_inputs, one_sample, shapes_of
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.unit_removal import difference
from lightning_sparsefl.sparse.units import UnitGroup, find_groups, unit_masks
from lightning_sparsefl.types import LayerFlops, Masks


def example_of(module: LightningModule, data: Any) -> tuple[Any, ...]:
    """Return one sample of a module's inputs, as a batch, in the module's precision and on its device.

    It is the module's `example_input_array`, or else zeros of `data.sample_shape`, or else the inputs of the first
    training sample of client 0. The state of the random generators is restored.

    Args:
        module: Module of the user.
        data: Data module of the clients.

    Returns:
        The arguments of ``forward``.

    Raises:
        InvalidOption: If there is no such sample.
    """
    sample = example_inputs(module)
    sample = _sample_of_data(module, data) if sample is None else _first_of(sample, module, data)
    return tuple(for_module(sample, module))


def _sample_of_data(module: LightningModule, data: Any) -> tuple[Any, ...]:
    shape = getattr(data, "sample_shape", None)
    return forward_inputs(module, _first_sample(module, data)) if shape is None else (torch.zeros(1, *shape),)


def _first_of(example: tuple[Any, ...], module: LightningModule, data: Any) -> tuple[Any, ...]:
    """Return the first sample of a larger batch; warn if the data do not show which dimension is that of samples."""
    shapes = shapes_of(example)
    if not shapes or not shapes[0] or shapes[0][0] == 1 or _is_listed(example[0]):
        return example
    try:
        own = shapes_of(_sample_of_data(module, data))
    except InvalidOption:
        own = []
    if own == [torch.Size((1, *shape[1:])) for shape in shapes]:
        return tuple(one_sample(example))
    rank_zero_warn(
        f"FLOPs are those of all of `{type(module).__name__}.example_input_array`, whose first dimension is "
        f"{shapes[0][0]}; expected a batch of one sample."
    )
    return example


def _is_listed(argument: Any) -> bool:
    """Return whether an argument is a list of one sample, which has no dimension of samples, as for detectors."""
    return isinstance(argument, list) and len(argument) == 1


def _first_sample(module: LightningModule, data: Any) -> Any:
    """Return a batch with the first training sample of client 0, without advancing the sampler of its loader."""
    try:
        with isolate_rng():
            loader = data.client_train_dataloader(0)
            dataset = loader.dataset
            fetch = getattr(dataset, "__getitems__", None)
            if fetch is not None and loader.batch_sampler is not None:  # as the loader does
                return loader.collate_fn(fetch([0]))
            sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
            if loader.batch_sampler is not None:
                return loader.collate_fn([sample])
            return one_sample(loader.collate_fn(sample))
    except Exception as error:
        raise InvalidOption(
            f"`{type(module).__name__}` has no `example_input_array`, the data no `sample_shape`, and the first "
            f"training sample of client 0 cannot be read ({type(error).__name__}: {error}); set one of the first two."
        ) from error


def layers_of(module: LightningModule, data: Any) -> tuple[LayerFlops, ...] | None:
    """Return the FLOPs of a module's layers; None, with a warning, if its forward pass cannot be traced.

    Args:
        module: Module of the user.
        data: Data module of the clients.
    """
    name = type(module).__name__
    try:
        sample = example_of(module, data)
    except InvalidOption as error:
        rank_zero_warn(f"FLOPs are not counted: {error}")
        return None
    if not is_overridden("forward", module, LightningModule):
        rank_zero_warn(f"FLOPs are not counted: `{name}` has no `forward`, which is traced to count them; define it.")
        return None
    try:
        with _temporary_running_statistics(module):
            return count_layers(module, sample)
    except Exception as error:
        rank_zero_warn(
            f"FLOPs are not counted: `{name}.forward` fails on one sample ({type(error).__name__}: {error}); "
            f"{_remedy(module)}."
        )
        return None


def _remedy(module: LightningModule) -> str:
    """Return what to do about a forward pass that fails when it is traced, as a clause."""
    if any(hasattr(part, "_orig_mod") for part in module.modules()):
        return "expected a model without `torch.compile`, which cannot be traced"
    if module.example_input_array is None:
        return "set its `example_input_array` to arguments of `forward`"
    return "expected its `example_input_array` to be arguments with which `forward` can be traced"


def units_of(module: LightningModule, data: Any) -> tuple[UnitGroup, ...]:
    """Return the groups of units of a module.

    Args:
        module: Module of the user.
        data: Data module of the clients.

    Raises:
        InvalidOption: If there is no sample with which the module can be traced, or the module has no units.
    """
    name = type(module).__name__
    try:
        sample = example_of(module, data)
    except InvalidOption as error:
        raise InvalidOption(f"The units of `{name}` cannot be found: {error}") from error
    try:
        with _temporary_running_statistics(module):
            groups = find_groups(module, *sample)
    except InvalidOption as error:
        cause = error.__cause__
        if cause is None:
            raise
        raise InvalidOption(
            f"The units of `{name}` cannot be found: its `forward` fails on one sample ({type(cause).__name__}: "
            f"{cause}); {_remedy(module)}."
        ) from cause
    if not groups:
        raise InvalidOption(
            f"`{name}` has no units; expected a hidden layer whose channels or neurons can be dropped (option `model`)."
        )
    names = module.state_dict().keys()  # without the temporary statistics
    return tuple(replace(g, slots=tuple(slot for slot in g.slots if slot.name in names)) for g in groups)


def require_cuttable(module: LightningModule, data: Any, groups: Sequence[UnitGroup]) -> None:
    """Raise if a module without half of its units does not compute what it computes under their masks.

    Args:
        module: Module of the user.
        data: Data module of the clients.
        groups: Groups of units of the module, from :func:`units_of`.

    Raises:
        InvalidOption: If the ``forward`` pass depends on the number of units.
    """
    halves = {group.name: torch.arange(group.size) < (group.size + 1) // 2 for group in groups if not group.masks_only}
    apart = {name: half.flip(0) if place % 2 else half for place, (name, half) in enumerate(halves.items())}
    chosen = (halves, apart) if len(halves) > 1 else (halves,)  # others in every second group
    try:
        smaller = [cut(module, groups, kept) for kept in chosen]
    except InvalidOption:  # raised again if a client is to drop units of such a layer
        return
    sample, state = example_of(module, data), module.state_dict()
    for kept, small in zip(chosen, smaller, strict=True):
        found = difference_on(sample, module, small, unit_masks(groups, kept, state))
        if found is not None:
            raise InvalidOption(
                f"`federation.execution` is 'cut', but without half of its units `{type(module).__name__}` {found}, "
                "since its `forward` depends on their number, as in `x / x.shape[-1]`; set it to 'mask'."
            )


def difference_on(sample: tuple[Any, ...], module: nn.Module, small: nn.Module, masks: Masks) -> str | None:
    """Return how a smaller module differs on one sample, as :func:`~lightning_sparsefl.sparse.unit_removal.difference`.

    Args:
        sample: Arguments of ``forward``.
        module: Full module, which may have batch norms without running statistics, as may the smaller one.
        small: Module without the units that the masks drop.
        masks: Masks of the units' weights.
    """
    with _temporary_running_statistics(module), _temporary_running_statistics(small):
        return difference(module, small, masks, sample)


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
