"""Versions of modules in a ``state_dict``, which some modules need in order to load one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def versions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the version of each module, by its name, from the attribute that ``state_dict()`` gives its result.

    Args:
        state: The ``state_dict``; another mapping has no versions.

    Example:
        >>> from torch import nn
        >>> versions_of(nn.Sequential(nn.BatchNorm1d(1)).state_dict()), versions_of({})
        ({'': 1, '0': 2}, {})
    """
    found = {name: known.get("version") for name, known in getattr(state, "_metadata", {}).items()}
    return {name: version for name, version in found.items() if isinstance(version, int)}


def with_versions(weights: Mapping[str, Tensor], versions: Mapping[str, int]) -> dict[str, Tensor]:
    """Return weights as a ``state_dict`` with the versions of modules, which ``load_state_dict`` passes to the modules.

    Args:
        weights: Weights by name.
        versions: Versions from :func:`versions_of`; without any, the result is an ordinary dict.

    Example:
        >>> from torch import nn
        >>> state = nn.BatchNorm1d(1).state_dict()
        >>> versions_of(with_versions(dict(state), versions_of(state)))
        {'': 2}
    """
    if not versions:
        return dict(weights)
    state = OrderedDict(weights)
    metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    state._metadata = metadata  # type: ignore[attr-defined]
    return state
