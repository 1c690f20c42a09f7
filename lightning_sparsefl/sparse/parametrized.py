"""Parameters from which a parametrization computes a weight, and whether zeros in them are zeros of the weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_sparsefl.sparse.modes import evaluating, random_restored, restored


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
    for hook in module.get_submodule(path)._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod)):
            weight = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
            if leaf in (f"{weight}_g", f"{weight}_v", f"{weight}_orig"):
                return path, weight
    return path, leaf


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
    path, tensor = weight_of(module, name)
    holder, leaf = module.get_submodule(path), name.removeprefix(f"{path}.")
    if leaf.startswith("parametrizations."):
        steps = getattr(holder.parametrizations, tensor)
        return next((type(step).__name__ for step in steps if not isinstance(step, _SpectralNorm)), None)
    hooks = [hook.name for hook in holder._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    return "weight_norm" if leaf != tensor and tensor in hooks else None


def computed_weight(module: nn.Module, name: str) -> Tensor:
    """Return the weight that a layer uses: the parameter itself, or what is computed from it.

    A parametrization is computed in evaluation mode, and its buffers and the random numbers are restored. What a hook
    of the layer computes, as those of :mod:`torch.nn.utils.prune` do, is that of the last forward pass.

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
    if name.removeprefix(f"{path}.") == tensor:
        return module.get_parameter(name)
    with evaluating(holder), random_restored(holder.parameters()), restored(holder.buffers()):
        weight: Tensor = getattr(holder, tensor)
    return weight
