"""Named trees of masks and weights: apply, combine, compare, check and pack them.

A mask is a bool tensor, True = kept. A name that is missing from a tree of masks is dense, so ``{}`` keeps
everything and an all-True mask says the same as no mask. Nothing here changes its arguments.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.sparse.apply import INTEGERS
from lightning_sparsefl.sparse.density import listed
from lightning_sparsefl.sparse.versions import versions_of, with_versions
from lightning_sparsefl.types import Masks, Weights

_SQUEEZE = 0x0102040810204080
"""Factor of eight 0/1 bytes that gathers byte i in bit 56 + i; no two terms overlap, so nothing carries."""
_REPEAT = 0x0101010101010101
_SELECT = 0x8040201008040201 - (1 << 64)
"""Bit i of byte i, as a signed 64-bit integer."""


def apply(weights: Weights, masks: Masks) -> dict[str, Tensor]:
    """Return weights with zeros where a mask is False.

    A tensor without a mask is passed on as it is, not copied. The product keeps the gradient, and a weight
    that is not finite stays so. No zero is negative, so that equal weights have equal bits. The result for a
    ``state_dict`` has the versions of its modules, and can be loaded.

    Args:
        weights: Weights by name.
        masks: Masks of the same shapes, on any device; those whose names `weights` lacks are ignored.

    Example:
        >>> apply({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([True, False])})
        {'w': tensor([1., 0.])}
    """
    masked = {name: _product(value, masks[name]) if name in masks else value for name, value in weights.items()}
    return with_versions(masked, versions_of(weights)) if hasattr(weights, "_metadata") else masked


def _product(value: Tensor, mask: Tensor) -> Tensor:
    product = value * mask.to(value.device)
    return product.add_(0) if product.is_floating_point() else product  # -0.0 + 0 is 0.0


def enforce(weights: Weights, masks: Masks) -> Weights:
    """Return weights that are zero where a mask is False, with the very tensors, or the very tree, that are so already.

    Unlike :func:`apply`, it neither copies such a tensor nor keeps values under a mask that are not finite: the result
    is what a receiver decodes of the kept values.

    Args:
        weights: Weights by name.
        masks: Masks of the same shapes, on any device; those whose names `weights` lacks are ignored.

    Example:
        >>> enforce({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([True, False])})
        {'w': tensor([1., 0.])}
    """
    zeroed = {name: _zeroed(weights[name], mask) for name, mask in masks.items() if name in weights}
    if all(value is weights[name] for name, value in zeroed.items()):
        return weights
    return {**weights, **zeroed}


def _zeroed(value: Tensor, mask: Tensor) -> Tensor:
    bits = value.view(INTEGERS[value.element_size()]) if value.is_floating_point() else value
    off = ~mask.to(value.device)
    clean = not bool(((bits != 0) & off).any())  # by bits, since a negative zero is another value to a codec
    return value if clean else value.masked_fill(off, 0)


def counts(masks: Masks) -> dict[str, int]:
    """Return the number of kept positions of each mask.

    Example:
        >>> counts({"w": torch.tensor([True, False, True])})
        {'w': 2}
    """
    if not masks:
        return {}
    stacked = torch.stack([torch.count_nonzero(mask) for mask in masks.values()])
    return dict(zip(masks, stacked.tolist(), strict=True))


def kept(masks: Masks) -> int:
    """Return the number of kept positions of all masks together.

    Example:
        >>> kept({"w": torch.tensor([True, False, True]), "v": torch.tensor([True])})
        3
    """
    return sum(counts(masks).values())


def density(masks: Masks) -> float:
    """Return the fraction kept, in [0, 1], over the tensors that have a mask; 1 without masks.

    Example:
        >>> density({"w": torch.tensor([True, False, True, False])})
        0.5
    """
    total = sum(mask.numel() for mask in masks.values())
    return kept(masks) / total if total else 1.0


def dense_like(weights: Weights) -> dict[str, Tensor]:
    """Return all-True masks for every tensor of `weights`.

    Example:
        >>> dense_like({"w": torch.zeros(2)})
        {'w': tensor([True, True])}
    """
    return {name: torch.ones_like(value, dtype=torch.bool) for name, value in weights.items()}


def intersect(a: Masks, b: Masks) -> dict[str, Tensor]:
    """Return masks that keep what both keep, on the devices of the first ones.

    Example:
        >>> intersect({"w": torch.tensor([True, True])}, {"w": torch.tensor([True, False])})
        {'w': tensor([ True, False])}
    """
    both = {name: mask if mask is b.get(name, mask) else mask & b[name].to(mask.device) for name, mask in a.items()}
    return both | {name: mask for name, mask in b.items() if name not in a}


def union(a: Masks, b: Masks) -> dict[str, Tensor]:
    """Return masks that keep what either keeps; a name that one of them lacks is dense, so the result lacks it.

    Example:
        >>> union({"w": torch.tensor([True, False])}, {"w": torch.tensor([False, False])})
        {'w': tensor([ True, False])}
        >>> union({"w": torch.tensor([True, False])}, {})
        {}
    """
    return {name: mask if mask is b[name] else mask | b[name] for name, mask in a.items() if name in b}


def overlap(a: Masks, b: Masks) -> float:
    """Return the Jaccard index, in [0, 1], over the names that are in both; 1 if neither keeps anything there.

    Example:
        >>> overlap({"w": torch.tensor([True, True, False])}, {"w": torch.tensor([True, False, False])})
        0.5
    """
    names = [name for name in a if name in b]
    either = kept({name: a[name] | b[name] for name in names})
    return kept({name: a[name] & b[name] for name in names}) / either if either else 1.0


def changed(a: Masks, b: Masks) -> float:
    """Return the fraction of positions, in [0, 1], that differ, over the names that are in either.

    Example:
        >>> changed({"w": torch.tensor([True, False])}, {"w": torch.tensor([True, True])})
        0.5
        >>> changed({"w": torch.tensor([True, False])}, {})
        0.5
    """
    total = sum(mask.numel() for mask in a.values()) + sum(b[name].numel() for name in b if name not in a)
    return _differing(a, b) / total if total else 0.0


def mean_distance(a: Masks, b: Masks) -> float:
    """Return the fraction of positions that differ, in [0, 1], as a mean over the tensors of two trees; 0 without any.

    Example:
        >>> masks = {"w": torch.tensor([True, True]), "v": torch.tensor([True])}
        >>> mean_distance(masks, {"w": torch.tensor([True, False]), "v": torch.tensor([True])})
        0.25
    """
    shares = [changed({name: mask}, {name: b[name]}) for name, mask in a.items()]
    return sum(shares) / len(shares) if shares else 0.0


def same(a: Masks, b: Masks) -> bool:
    """Return whether both keep the same positions.

    Example:
        >>> same({"w": torch.tensor([True, True])}, {})
        True
    """
    return a is b or _differing(a, b) == 0


def _differing(a: Masks, b: Masks) -> int:
    """Return the number of positions that one keeps and the other does not."""
    flips = {name: mask ^ b[name] for name, mask in a.items() if name in b and mask is not b[name]}
    alone = {name: ~mask for name, mask in a.items() if name not in b}
    return kept(flips) + kept(alone) + kept({name: ~mask for name, mask in b.items() if name not in a})


def subtract(a: Weights, b: Weights) -> dict[str, Tensor]:
    """Return ``a - b``, tensor by tensor; a tensor that `b` lacks is passed on as it is.

    Raises:
        IncompatibleMasks: If `b` has a name that `a` lacks.

    Example:
        >>> subtract({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
        {'w': tensor([2.])}
    """
    _require_known(b, a)
    return {name: value - b[name] if name in b else value for name, value in a.items()}


def add(a: Weights, b: Weights) -> dict[str, Tensor]:
    """Return ``a + b``, tensor by tensor; a tensor that `b` lacks is passed on as it is.

    Raises:
        IncompatibleMasks: If `b` has a name that `a` lacks.

    Example:
        >>> add({"w": torch.tensor([3.0]), "v": torch.tensor([0.0])}, {"w": torch.tensor([1.0])})
        {'w': tensor([4.]), 'v': tensor([0.])}
    """
    _require_known(b, a)
    return {name: value + b[name] if name in b else value for name, value in a.items()}


def interpolate(a: Weights, b: Weights, share: float) -> dict[str, Tensor]:
    """Return ``share * a + (1 - share) * b``, tensor by tensor; a tensor that `a` lacks is passed on as it is.

    Args:
        a: Weights by name, some or all of those of `b`.
        b: Weights by name.
        share: Share of `a`; above 1 the result lies beyond `a`.

    Raises:
        IncompatibleMasks: If `a` has a name that `b` lacks.

    Example:
        >>> interpolate({"w": torch.tensor([4.0])}, {"w": torch.tensor([0.0]), "v": torch.tensor([1.0])}, 0.25)
        {'w': tensor([1.]), 'v': tensor([1.])}
    """
    _require_known(a, b)
    return {name: share * a[name] + (1 - share) * value if name in a else value for name, value in b.items()}


def descend(weights: Weights, slopes: Weights, lr: float) -> dict[str, Tensor]:
    """Return weights after a step of gradient descent; a tensor without a gradient is passed on as it is.

    Args:
        weights: Weights by name.
        slopes: Gradients by name.
        lr: Learning rate.

    Raises:
        IncompatibleMasks: If `slopes` has a name that `weights` lacks.

    Example:
        >>> descend({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, lr=0.25)
        {'w': tensor([0.5000])}
    """
    _require_known(slopes, weights)
    return {name: value - lr * slopes[name] if name in slopes else value for name, value in weights.items()}


def _require_known(tree: Weights, weights: Weights) -> None:
    unknown = next((name for name in tree if name not in weights), None)
    if unknown is not None:
        raise IncompatibleMasks(f"`{unknown}` is not among the weights, which have {listed(weights, 4)}.")


def check(masks: Masks, weights: Weights) -> None:
    """Check that every mask is a bool tensor of the shape of the weights it names.

    Raises:
        IncompatibleMasks: Naming the first tensor that does not fit.

    Example:
        >>> check({"w": torch.tensor([True, False])}, {"w": torch.zeros(2)})
        >>> check({"w": torch.tensor([True])}, {"w": torch.zeros(2)})
        Traceback (most recent call last):
        lightning_sparsefl.errors.IncompatibleMasks: The mask of `w` has shape (1,), expected (2,).
    """
    _require_known(masks, weights)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise IncompatibleMasks(f"The mask of `{name}` is {mask.dtype}, expected torch.bool.")
        if mask.shape != weights[name].shape:
            shapes = f"{tuple(mask.shape)}, expected {tuple(weights[name].shape)}"
            raise IncompatibleMasks(f"The mask of `{name}` has shape {shapes}.")


def digest(masks: Masks) -> str:
    """Return a 128-bit fingerprint in hexadecimal, equal exactly when :func:`same` holds.

    Example:
        >>> digest({"w": torch.tensor([True, True])}) == digest({})
        True
    """
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(masks):
        if not bool(masks[name].all()):
            hashed.update(repr((name, tuple(masks[name].shape))).encode())
            hashed.update(pack(masks[name]).cpu().numpy().tobytes())
    return hashed.hexdigest()


def pack(mask: Tensor) -> Tensor:
    """Pack eight positions into a byte, the first in the lowest bit, the last byte filled up with zeros.

    Args:
        mask: Bool tensor of any shape, n elements.

    Returns:
        uint8, ``(ceil(n / 8),)``, on the same device.

    Example:
        >>> pack(torch.tensor([True, False, True]))
        tensor([5], dtype=torch.uint8)
    """
    size = mask.numel()
    padded = mask.new_zeros((size + 7) // 8 * 8)
    padded[:size] = mask.reshape(-1)
    return ((padded.view(torch.int64) * _SQUEEZE) >> 56).bitwise_and_(255).to(torch.uint8)


def unpack(packed: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return the mask that :func:`pack` packed.

    Args:
        packed: Bytes, uint8, ``(ceil(n / 8),)``.
        shape: Shape of the mask, n elements.

    Raises:
        IncompatibleMasks: If `packed` has another length than `shape` needs.

    Example:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    size = torch.Size(shape).numel()
    if packed.numel() != (size + 7) // 8:
        raise IncompatibleMasks(
            f"{packed.numel()} packed bytes, expected {(size + 7) // 8} for a mask of shape {tuple(shape)}."
        )
    spread = (packed.to(torch.int64) * _REPEAT).bitwise_and_(_SELECT)
    return (spread.view(torch.uint8) != 0)[:size].reshape(shape)
