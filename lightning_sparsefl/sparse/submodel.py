"""Extraction of narrow models from the kept units of a model, and return of the trained weights.

Masking multiplies by zero; a narrow model leaves the zeros out, so its time falls with its FLOPs. It computes what
the masked model computes, from weights of the same names. Layers for which this cannot be exact are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.conv1d import is_conv1d
from lightning_sparsefl.sparse.units import UnitGroup, check_kept
from lightning_sparsefl.types import Masks, Weights

_Index = dict[int, Tensor]
"""For a dimension that is cut, the positions along it that stay, ascending."""


def narrow(weights: Weights, groups: Sequence[UnitGroup], kept: Masks) -> dict[str, Tensor]:
    """Return weights, and the statistics of norms, of the kept units only.

    A tensor without units is passed on as it is.

    Args:
        weights: Weights, or masks, by their names in the ``state_dict``.
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        kept: Units of each group that stay, bool, ``(units,)``; a group that is missing stays whole.

    Raises:
        IncompatibleMasks: If `kept` does not fit the groups.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        >>> kept = {"0": torch.tensor([True, False, True])}
        >>> small = narrow(net.state_dict(), find_groups(net, torch.zeros(1, 1)), kept)
        >>> {name: tuple(value.shape) for name, value in small.items()}
        {'0.weight': (2, 1), '0.bias': (2,), '1.weight': (1, 2), '1.bias': (1,)}
    """
    indices = _indices(weights, groups, kept)
    return {name: _take(value, indices[name]) if name in indices else value for name, value in weights.items()}


def widen(
    narrowed: Weights, groups: Sequence[UnitGroup], kept: Masks, like: Weights, *, zeros: bool = False
) -> dict[str, Tensor]:
    """Return narrow weights at their places in full ones: the inverse of :func:`narrow`.

    Args:
        narrowed: Narrow weights, from :func:`narrow` or of a narrow model.
        groups: Groups of units, as in :func:`narrow`.
        kept: Units that stay, as in :func:`narrow`.
        like: Full weights, from which the dropped units are taken.
        zeros: Whether dropped units have zeros instead.

    Returns:
        The names of `narrowed`; a tensor without units is passed on as it is.

    Raises:
        IncompatibleMasks: If `kept` does not fit the groups, or a narrow tensor does not have the shape cut out.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1))
        >>> kept = {"0": torch.tensor([True, False, True])}
        >>> groups = find_groups(net, torch.zeros(1, 1))
        >>> widen({"0.weight": torch.ones(2, 1)}, groups, kept, net.state_dict(), zeros=True)
        {'0.weight': tensor([[1.],
                [0.],
                [1.]])}
    """
    indices = _indices(like, groups, kept)
    wide = dict(narrowed)
    for name in (name for name in indices if name in narrowed):
        full, index = like[name].detach(), indices[name]
        shape = tuple(len(index[dim]) if dim in index else size for dim, size in enumerate(full.shape))
        if narrowed[name].shape != shape:
            raise IncompatibleMasks(f"Narrow `{name}` has shape {tuple(narrowed[name].shape)}, expected {shape}.")
        wide[name] = torch.zeros_like(full) if zeros else full.clone()
        wide[name][_grid(index, full)] = narrowed[name].detach()
    return wide


def keep_statistics(
    trained: Weights, groups: Sequence[UnitGroup], kept: Masks, before: Weights, buffers: Collection[str]
) -> Weights:
    """Return weights after training, where dropped units have the running statistics of before it.

    Where units are multiplied by zero, their running means and variances approach zero, and would be wrong for clients
    that have the units.

    Args:
        trained: Weights and buffers after training.
        groups: Groups of units, as in :func:`narrow`.
        kept: Units that have been trained, as in :func:`narrow`.
        before: Weights and buffers before training.
        buffers: Names of the buffers; those that `trained` lacks are ignored.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        >>> groups, kept = find_groups(net, torch.zeros(2, 1)), {"0": torch.tensor([True, False])}
        >>> before, after = {"1.running_var": torch.ones(2)}, {"1.running_var": torch.tensor([3.0, 0.1])}
        >>> keep_statistics(after, groups, kept, before, ["1.running_var"])
        {'1.running_var': tensor([3., 1.])}
    """
    statistics = {name: value for name, value in trained.items() if name in buffers}
    return {**trained, **widen(narrow(statistics, groups, kept), groups, kept, before)} if statistics else trained


def cut(module: nn.Module, groups: Sequence[UnitGroup], kept: Masks) -> nn.Module:
    """Return a narrow copy of a module, which computes what the module computes under the units' masks.

    Parameters keep their names, and whether they are trained. The copy of a Lightning module is attached to no
    trainer yet.

    Args:
        module: Full module, which is not changed.
        groups: Groups of units from :func:`~lightning_sparsefl.sparse.units.find_groups`.
        kept: Units of each group that stay, bool, ``(units,)``; a group that is missing stays whole.

    Raises:
        IncompatibleMasks: If `kept` does not fit the groups.
        InvalidOption: If a layer has no exact narrow form; the message names it.

    Example:
        >>> from lightning_sparsefl.sparse.units import find_groups
        >>> net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
        >>> cut(net, find_groups(net, torch.zeros(1, 1)), {"0": torch.tensor([True, False, True])})
        Sequential(
          (0): Linear(in_features=1, out_features=2, bias=True)
          (1): Linear(in_features=2, out_features=1, bias=True)
        )
    """
    tensors = module.state_dict(keep_vars=True)
    indices = _indices(tensors, groups, kept)
    for group in groups:
        if group.masks_only and not bool(kept.get(group.name, torch.ones(1)).all()):
            raise InvalidOption(
                f"The units of `{group.name}` can be masked but not cut: {group.masks_only}; let `shrink` keep them "
                f"(`ignore=[{group.name!r}]`), or set `federation.execution: mask`."
            )
    # A deep copy takes what the memo says it has copied before, so the full tensors are never copied.
    small = copy.deepcopy(
        module, {id(tensors[name]): _narrow_like(tensors[name], index) for name, index in indices.items()}
    )
    for name in dict.fromkeys(name.rpartition(".")[0] for name in indices):
        own = {leaf: indices[f"{name}.{leaf}" if name else leaf] for leaf in _leaves(name, indices)}
        layer, full = small.get_submodule(name), module.get_submodule(name)
        _require_narrow_form(name, layer, own, groups, kept)
        fitted = _fit(name, layer, own, full)
        if name:
            parent, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(parent), leaf, fitted)
        else:
            small = fitted
    return small


def _indices(weights: Weights, groups: Sequence[UnitGroup], kept: Masks) -> dict[str, _Index]:
    """Return, for each tensor that loses positions, those that stay."""
    check_kept(groups, kept)
    stays: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if group.name in kept and not bool(kept[group.name].all()):
            dropped = ~kept[group.name].cpu()
            for slot in group.slots:
                if slot.name in weights:
                    size = weights[slot.name].shape[slot.dim]
                    along = stays.setdefault(slot.name, {}).setdefault(slot.dim, torch.ones(size, dtype=torch.bool))
                    along[slot.positions[dropped].reshape(-1)] = False
    return {name: {dim: along.nonzero().squeeze(1) for dim, along in dims.items()} for name, dims in stays.items()}


def _take(value: Tensor, index: _Index) -> Tensor:
    for dim, positions in index.items():
        value = value.index_select(dim, positions.to(value.device))
    return value


def _grid(index: _Index, full: Tensor) -> tuple[Tensor, ...]:
    """Return indices that broadcast to the block of what stays."""
    dims = max(index) + 1
    lines = [index.get(dim, torch.arange(full.shape[dim])).to(full.device) for dim in range(dims)]
    return tuple(line.view([-1 if at == dim else 1 for at in range(dims)]) for dim, line in enumerate(lines))


def _narrow_like(value: Tensor, index: _Index) -> Tensor:
    small = _take(value.detach(), index)
    return nn.Parameter(small, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else small


def _leaves(module: str, names: Iterable[str]) -> list[str]:
    """Return the names, without the module, of the tensors that it has itself."""
    split = [name.rpartition(".") for name in names]
    return [leaf for parent, _, leaf in split if parent == module]


# ---- layers that store their width


def _require_narrow_form(
    name: str, layer: nn.Module, index: Mapping[str, _Index], groups: Sequence[UnitGroup], kept: Masks
) -> None:
    """Refuse a layer of an unknown type with the names of its tensors and of the layers whose units it has.

    Args:
        name: Name of the layer; empty for the module itself.
        layer: The layer.
        index: Positions of its narrow tensors that stay.
        groups: Groups of units of the module.
        kept: Units of each group that stay.
    """
    if isinstance(layer, (nn.GroupNorm, nn.LayerNorm)) or _fit_of(layer) is not None:
        return
    cut_from = [f"{name}.{leaf}".lstrip(".") for leaf in index]
    producers = [
        group.name
        for group in groups
        if not bool(kept.get(group.name, torch.ones(1)).all()) and any(slot.name in cut_from for slot in group.slots)
    ]
    raise InvalidOption(
        f"`{', '.join(cut_from)}`: a `{type(layer).__name__}` has no known narrow form; let `shrink` keep the units of "
        f"`{', '.join(producers)}` (`ignore={producers}`), or set `federation.execution: mask`."
    )


def _fit(name: str, layer: nn.Module, index: Mapping[str, _Index], full: nn.Module) -> nn.Module:
    """Set the sizes that a layer stores to those of its narrow tensors.

    `layer` has narrow tensors already; what is returned takes its place.
    """
    if isinstance(layer, nn.GroupNorm) and isinstance(full, nn.GroupNorm):
        return NarrowGroupNorm(full, layer, index["weight"][0])
    if isinstance(layer, nn.LayerNorm) and isinstance(full, nn.LayerNorm):
        return NarrowLayerNorm(full, layer)
    fit = _fit_of(layer)
    if fit is not None:
        fit(name, layer)
    return layer


def _fit_of(layer: nn.Module) -> Callable[[str, Any], None] | None:
    """Return what sets the sizes that a layer of a known type stores."""
    if is_conv1d(layer):
        return _fit_conv1d
    return next((fit for kinds, fit in _FITS if isinstance(layer, kinds)), None)


def _fit_conv(name: str, layer: Any) -> None:
    if layer.groups > 1 and layer.weight.shape[1] == 1 and layer.groups == layer.in_channels:
        layer.groups = layer.weight.shape[0] * layer.groups // layer.out_channels
    layer.in_channels, layer.out_channels = layer.weight.shape[1] * layer.groups, layer.weight.shape[0]


def _fit_transposed(name: str, layer: Any) -> None:
    layer.in_channels, layer.out_channels = layer.weight.shape[:2]


def _fit_linear(name: str, layer: Any) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


def _fit_conv1d(name: str, layer: Any) -> None:
    layer.nx, layer.nf = layer.weight.shape


def _fit_channel_norm(name: str, layer: Any) -> None:
    layer.num_features = len(layer.weight if layer.weight is not None else layer.running_mean)


def _fit_embedding(name: str, layer: Any) -> None:
    layer.embedding_dim = layer.weight.shape[1]


def _fit_prelu(name: str, layer: Any) -> None:
    layer.num_parameters = layer.weight.numel()


def _fit_recurrent(name: str, layer: nn.RNNBase) -> None:
    sizes = [weight.shape[1] for leaf, weight in layer.named_parameters() if leaf.startswith("weight_hh")]
    if len(set(sizes)) > 1:
        raise InvalidOption(
            f"`{name}` would keep {sizes} hidden units in its layers, expected as many in each; change the units kept."
        )
    layer.hidden_size = sizes[0]
    layer.input_size = layer.get_parameter("weight_ih_l0").shape[1]


_FITS: tuple[tuple[tuple[type[nn.Module], ...], Callable[[str, Any], None]], ...] = (
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _fit_transposed),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _fit_conv),
    ((nn.Linear,), _fit_linear),
    ((nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm), _fit_channel_norm),
    ((nn.Embedding, nn.EmbeddingBag), _fit_embedding),
    ((nn.LSTM, nn.GRU, nn.RNN), _fit_recurrent),
    ((nn.PReLU,), _fit_prelu),
)


class NarrowGroupNorm(nn.Module):
    """A group norm over the channels that are left, which counts the others as the zeros they were.

    Let a channel have n values, and a group C channels, of which some are left. Then the mean of a group is the sum
    over what is left divided by ``C * n``, and each value of a dropped channel adds ``mean ** 2`` to the sum of squares
    in the variance.

    Args:
        full: Norm of the full model.
        layer: Copy of the norm with narrow parameters.
        channels: Numbers of the channels that are left, ascending.
    """

    member: Tensor
    dropped: Tensor

    def __init__(self, full: nn.GroupNorm, layer: nn.GroupNorm, channels: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, full.eps
        self.num_groups, self.num_channels = full.num_groups, len(channels)
        self.per_group = full.num_channels // full.num_groups
        member = torch.zeros(len(channels), full.num_groups).to(layer.weight)
        member[torch.arange(len(channels)), channels.to(member.device) // self.per_group] = 1
        # Persistent, they would be names that the full model does not have.
        self.register_buffer("member", member, persistent=False)
        self.register_buffer("dropped", self.per_group - member.sum(0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize ``(batch, channels, *)``; in the precision of the weights, as any norm under autocast."""
        if torch.is_autocast_enabled(inputs.device.type):
            with torch.autocast(inputs.device.type, enabled=False):
                return self._normalize(inputs.to(self.weight.dtype))
        return self._normalize(inputs)

    def _normalize(self, inputs: Tensor) -> Tensor:
        flat = inputs.reshape(*inputs.shape[:2], -1)
        mean = flat.mean(2) @ self.member / self.per_group
        centred = flat - (mean @ self.member.T).unsqueeze(2)
        squares = centred.square().mean(2) @ self.member + self.dropped * mean.square()
        scale = ((squares / self.per_group + self.eps).rsqrt() @ self.member.T) * self.weight
        return torch.addcmul(self.bias.unsqueeze(1), centred, scale.unsqueeze(2)).view_as(inputs)

    def extra_repr(self) -> str:
        """Return the description of a group norm."""
        return f"{self.num_groups}, {self.num_channels} of {self.num_groups * self.per_group}, eps={self.eps}"


class NarrowLayerNorm(nn.Module):
    """A layer norm over the features that are left, which counts the others as the zeros they were.

    Args:
        full: Norm of the full model.
        layer: Copy of the norm with narrow parameters.
    """

    def __init__(self, full: nn.LayerNorm, layer: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, full.eps
        self.normalized_shape = tuple(layer.weight.shape)
        self.share = layer.weight.numel() / full.weight.numel()
        """Features that are left, of all."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimensions; in the precision of the weights, as any norm under autocast."""
        inputs = inputs.to(self.weight.dtype)
        dims = tuple(range(-len(self.normalized_shape), 0))
        mean = inputs.mean(dims, keepdim=True) * self.share
        centred = inputs - mean
        squares = centred.square().mean(dims, keepdim=True) * self.share + (1 - self.share) * mean.square()
        scaled = centred * (squares + self.eps).rsqrt() * self.weight
        return scaled if self.bias is None else scaled + self.bias

    def extra_repr(self) -> str:
        """Return the description of a layer norm."""
        return f"{self.normalized_shape}, eps={self.eps}, share={self.share}"
