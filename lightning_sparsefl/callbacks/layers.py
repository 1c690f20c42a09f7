"""Which layers a callback works on, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import maskable
from lightning_sparsefl.types import Weights

_SHOWN = 12


def choose(weights: Weights, layers: Sequence[str] | str | None, owner: str) -> tuple[str, ...]:
    """Names of the layers that patterns choose, in the order of `weights`; one with ``!`` in front takes away.

    A layer is a tensor of two or more dimensions, so that ``conv1.*`` chooses a kernel and not its bias.

    Args:
        weights: A module's parameters by name.
        layers: Globs over whole names, capitals and all. None, and globs that only take away, begin with every layer.
        owner: The callback, to be named in a message.

    Raises:
        InvalidOption: If a pattern matches no layer, or none is left.

    Example:
        >>> import torch
        >>> weights = {"conv.weight": torch.ones(2, 2), "conv.bias": torch.ones(2), "head.weight": torch.ones(2, 2)}
        >>> choose(weights, None, "StaticMask"), choose(weights, ["!head*"], "StaticMask")
        (('conv.weight', 'head.weight'), ('conv.weight',))
        >>> choose(weights, "fc*", "StaticMask")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `StaticMask`: the pattern 'fc*' in `layers` matches no layer; \
expected one for `conv.weight`, `head.weight`.
    """
    names = maskable(weights)
    patterns = [layers] if isinstance(layers, str) else list(layers or ())
    matched = {pattern: {n for n in names if fnmatchcase(n, pattern.removeprefix("!"))} for pattern in patterns}
    for pattern, found in matched.items():
        if not found:
            raise InvalidOption(
                f"`{owner}`: the pattern {pattern!r} in `layers` matches no layer; expected one for {_listed(names)}."
            )
    added = [found for pattern, found in matched.items() if not pattern.startswith("!")]
    taken = set().union(*(found for pattern, found in matched.items() if pattern.startswith("!")))
    chosen = (set().union(*added) if added else set(names)) - taken
    if not chosen:
        raise InvalidOption(
            f"`{owner}(layers={layers!r})` leaves no layer to mask; expected patterns that leave some of "
            f"{_listed(names)}."
        )
    return tuple(name for name in names if name in chosen)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) or "a tensor of two or more dimensions (there is none)"
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
