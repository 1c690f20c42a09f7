"""Parameters from which a parametrization computes a weight, and whether zeros in them are zeros of the weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_sparsefl.sparse.modes import modes_restored


def owner(name: str) -> str:
    """Return the name of the layer that has a tensor, as its own or as that of one of its parametrizations.

    Args:
        name: Name of the tensor.

    Example:
        >>> owner("net.fc.bias"), owner("net.fc.parametrizations.weight.original0")
        ('net.fc', 'net.fc')
    """
    layer, parametrized, _ = f".{name}".partition(".parametrizations.")
    return layer[1:] if parametrized else name.rpartition(".")[0]


def weight_of(module: nn.Module, name: str) -> tuple[str, str]:
    """Return the path of the module with the weight that a parameter is or makes, and the name of the weight there.

    Args:
        module: Module with the parameter.
        name: Name of the parameter.

    Example:
        >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        >>> weight_of(net, "0.parametrizations.weight.original1"), weight_of(net, "0.bias")
        (('0', 'weight'), ('0', 'bias'))
    """
    path = owner(name)
    leaf = name.removeprefix(f"{path}.")
    if leaf.startswith("parametrizations."):
        return path, leaf.split(".")[1]
    stem, _, suffix = leaf.rpartition("_")
    own = getattr(module.get_submodule(path), "_forward_pre_hooks", {})
    return path, stem if suffix in ("orig", "g", "v") and stem and own else leaf


def changes_zeros(module: nn.Module, name: str) -> str | None:
    """Return the class of a parametrization of a parameter that does not keep its zeros, or None.

    Spectral norm only scales a weight, so that zeros stay; weight norm divides by the norms of rows, which a mask may
    make zero, and others mix the entries.

    Args:
        module: Module with the parameter.
        name: Name of the parameter.

    Example:
        >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        >>> changes_zeros(net, "0.parametrizations.weight.original1"), changes_zeros(net, "0.bias")
        ('_WeightNorm', None)
    """
    return next((kind for kind, keeps in _steps(module, name) if not keeps), None)


def parametrization_of(module: nn.Module, name: str) -> str | None:
    """Return the class of the first parametrization of a parameter, or None.

    Args:
        module: Module with the parameter.
        name: Name of the parameter.

    Example:
        >>> net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))
        >>> name = "0.parametrizations.weight.original"
        >>> parametrization_of(net, name), changes_zeros(net, name), parametrization_of(net, "0.bias")
        ('_SpectralNorm', None, None)
    """
    return next((kind for kind, _ in _steps(module, name)), None)


def _steps(module: nn.Module, name: str) -> Iterator[tuple[str, bool]]:
    """Yield the classes of the parametrizations of a parameter, and whether they keep its zeros."""
    path, tensor = weight_of(module, name)
    holder, leaf = module.get_submodule(path), name.removeprefix(f"{path}.")
    if leaf.startswith("parametrizations."):
        for step in getattr(holder.parametrizations, tensor):
            yield type(step).__name__, isinstance(step, _SpectralNorm)
    for hook in holder._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and leaf in (f"{hook.name}_g", f"{hook.name}_v"):
            yield "weight_norm", False
        if isinstance(hook, SpectralNorm) and leaf == f"{hook.name}_orig":
            yield "spectral_norm", True


def computed_weight(module: nn.Module, name: str) -> Tensor:
    """Return the weight that a layer uses: the parameter itself, or what is computed from it.

    A parametrization is computed in evaluation mode, so that it changes nothing. What a hook of the layer computes, as
    those of :mod:`torch.nn.utils.prune` do, is that of the last forward pass.

    Args:
        module: Module with the parameter.
        name: Name of the parameter.

    Example:
        >>> layer = nn.utils.prune.l1_unstructured(nn.Linear(2, 2, bias=False), "weight", amount=3)
        >>> int((computed_weight(layer, "weight_orig") != 0).sum()), int((layer.weight_orig != 0).sum())
        (1, 4)
    """
    path, tensor = weight_of(module, name)
    holder = module.get_submodule(path)
    with modes_restored(holder):
        holder.eval()
        weight: Tensor = getattr(holder, tensor)
    return weight
