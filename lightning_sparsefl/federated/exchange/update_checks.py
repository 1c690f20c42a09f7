"""Validation of an update against its message, before any part of it is stored or merged.

There are two kinds of faults. Faults that a client's data can cause (values that are not finite or extremely large,
weights or sizes above its limits) are a failure of that client, handled by `federation.on_client_error`. Faults that
only the method's code can cause (names, shapes, dtypes, `kind`, votes) raise :class:`InvalidUpdate`, which always ends
the run: they affect every client, and skipping all of them would hide the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.exchange.flat import FlatTree, Layout
from lightning_sparsefl.types import Masks, Message, Update, Weights

KINDS = ("weights", "difference")
"""Values of `Update.kind`."""
_MOST_METRICS = 256
_FACTOR, _ROOM = 4, 64 * 1024
"""Maximum sizes of `extra` and of `shared`: a multiple of the size of the model plus a number of bytes."""
_DEEPEST = 32
"""Number of levels of nested records, as on the wire."""
_LARGEST = 2.0**64
"""Maximum value; squares of larger values overflow float32, so that no client could train from a mean over them."""


def check_update_schema(
    update: Update, message: Message, layout: Layout, may_vote: Callable[[Message], Masks], who: str
) -> None:
    """Check the structure of an update against the model and the message.

    Args:
        update: Update of a client.
        message: Message that the client received.
        layout: Layout of the model's tensors.
        may_vote: Hook of the method; called only if the update has votes, since the default votes satisfy it.
        who: Description of the update for the error message.

    Raises:
        InvalidUpdate: If the structure is wrong.
    """
    _check_mappings(who, update)
    for field, record in {"shared": update.shared, "memory": update.memory}.items():
        _check_keys(f"{who} has in `{field}`", record or {})
    _check_metrics(who, update.metrics)
    if update.kind not in KINDS:
        raise InvalidUpdate(f"{who} has the `kind` {update.kind!r}; expected one of {KINDS}.")
    if type(update.weight) is not int or update.weight < 1:
        raise InvalidUpdate(f"{who} has the `weight` {update.weight!r}; expected a positive integer, samples or 1.")
    for name, tensor in update.weights.items():
        _check_tensor(f"{who} holds {name!r}", name, tensor, layout, layout.dtypes.get(name))
        if update.kind == "difference" and name not in message.weights:
            raise InvalidUpdate(
                f"{who} holds a difference of {name!r}, which was not sent to the client; return it as weights."
            )
    for key, tree in update.extra.items():
        _check_extra(f"{who} holds `extra[{key!r}]`", tree, message.extra.get(key, {}))
    check_held(f"{who} holds `shared['masks']`", (update.shared or {}).get("masks", {}), layout)
    if update.votes is not None:
        for name, vote in update.votes.items():
            _check_tensor(f"{who} votes on {name!r}", name, vote, layout, torch.bool)
        _check_votes(who, update.votes, update.weights, may_vote(message))


def _check_mappings(who: str, update: Update) -> None:
    fields = {"weights": update.weights, "extra": update.extra, "metrics": update.metrics}
    if isinstance(update.extra, Mapping):
        fields |= {f"extra[{key!r}]": tree for key, tree in update.extra.items()}
    optional = {"shared": update.shared, "memory": update.memory, "votes": update.votes}
    fields |= {name: value for name, value in optional.items() if value is not None}
    for name, value in fields.items():
        if not isinstance(value, Mapping):
            raise InvalidUpdate(
                f"{who} has a `{type(value).__name__}` as `{name}`; expected a mapping of names to values."
            )


def _check_keys(what: str, value: Any, depth: int = 0) -> None:
    """Check that the keys of nested mappings are strings; what is nested deeper is refused where it is packed."""
    strange = [key for key in value if not isinstance(key, str)] if isinstance(value, Mapping) else []
    if strange:
        raise InvalidUpdate(f"{what} the key {strange[0]!r}; expected keys that are strings.")
    if depth < _DEEPEST:
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, Mapping | list | tuple):
                _check_keys(what, item, depth + 1)


def _check_metrics(who: str, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidUpdate(f"{who} has the metric {name!r}; expected a name.")
        scalar = isinstance(value, Tensor) and value.numel() == 1
        if not scalar and not isinstance(value, Real):
            raise InvalidUpdate(f"{who} has a `{type(value).__name__}` as the metric {name!r}; expected a number.")


def _check_tensor(what: str, name: str, tensor: Tensor, layout: Layout, dtype: torch.dtype | None) -> None:
    if name not in layout.shapes:
        raise InvalidUpdate(f"{what}, which the model does not have; return only the model's names.")
    if not isinstance(tensor, Tensor):
        raise InvalidUpdate(f"{what} as `{type(tensor).__name__}`; expected a tensor.")
    if tensor.shape != layout.shapes[name]:
        raise InvalidUpdate(f"{what} with shape {tuple(tensor.shape)}; expected {tuple(layout.shapes[name])}.")
    if tensor.dtype != dtype:
        raise InvalidUpdate(f"{what} as {tensor.dtype}; expected {dtype}.")


def _check_extra(what: str, tree: Weights, sent: Weights) -> None:
    for name, tensor in tree.items():
        dtype = tensor.dtype if isinstance(tensor, Tensor) else f"`{type(tensor).__name__}`"
        if not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype == torch.bool)):
            raise InvalidUpdate(
                f"{what} with {name!r} as {dtype}; expected tensors of floats or bools, since they are averaged."
            )
        if name in sent and tensor.shape != sent[name].shape:
            raise InvalidUpdate(
                f"{what} with {name!r} of shape {tuple(tensor.shape)}; expected {tuple(sent[name].shape)} as sent."
            )


def check_held(what: str, masks: Any, layout: Layout) -> None:
    """Check a client's next masks.

    Args:
        what: Description of the masks for the error message.
        masks: Masks by name; names that the model does not have are the method's own.
        layout: Layout of the model's tensors.

    Raises:
        InvalidUpdate: If they are not masks, or one has another shape than the model's tensor.
    """
    if not isinstance(masks, Mapping):
        raise InvalidUpdate(f"{what} as {type(masks).__name__}; expected a tree of masks, or another key.")
    for name, mask in masks.items():
        if (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or mask.shape != layout.shapes.get(name, mask.shape)
        ):
            raise InvalidUpdate(f"{what} with {name!r}, which is not a bool mask of the model's shape.")


def _check_votes(who: str, votes: Masks, weights: Weights, allowed: Masks) -> None:
    """Check that votes are allowed; a sent tensor without a mask of votes has votes on all of its coordinates."""
    for name in sorted(allowed.keys() & weights.keys()):  # so that the error always names the same tensor
        vote, may = votes.get(name), allowed[name]
        if vote is not may and _any(~may if vote is None else vote > may):
            raise InvalidUpdate(
                f"{who} votes on coordinates of {name!r} that `may_vote` forbids; vote only on coordinates that the "
                "masks of the message keep and make trainable, or override `may_vote`."
            )


def _any(mask: Tensor) -> bool:
    """Return whether any value is True, in a tenth of the time of ``Tensor.any`` on the CPU."""
    return mask.numel() > 0 and bool(mask.view(torch.uint8).max())


def non_finite_reason(update: Update) -> str | None:
    """Return why the values of an update cannot be merged, as a clause, or None if they can.

    Losses, weights, extra trees and the tensors of `shared` must be finite and at most 2**64, since squares of larger
    values overflow float32. Metrics other than losses may be undefined on a client's data, and `memory` is not sent.

    Args:
        update: Update that :func:`check_update_schema` accepts.
    """
    for name in not_finite(update.metrics):
        if "loss" in name:
            return f"its {name} is {update.metrics[name]}"
    found = {"weights": update.weights, "extra": update.extra, "shared": update.shared}
    whole = isinstance(update.weights, FlatTree) and update.weights.is_view
    weights = update.weights.vector if whole else update.weights  # type: ignore[attr-defined]
    if are_small(tensor for _, tensor in _floats("", {**found, "weights": weights})):
        return None
    for name, tensor in _floats("", found):
        if not bool(torch.isfinite(tensor).all()):
            return f"its update of {name} holds values that are not finite"
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        if largest > _LARGEST:
            return f"its update of {name} holds values up to {largest:.3g}; expected at most {_LARGEST:.3g}"
    return None


def are_small(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are known to be finite and small, without a look at each tensor.

    Args:
        tensors: Floating-point tensors.
    """
    squares = [_square(tensor) for tensor in tensors]
    return not squares or math.isfinite(float(torch.stack(squares).sum()))


def _square(tensor: Tensor) -> Tensor:
    """Return the sum of squares computed in float32, which is finite only if all squares are, as float64."""
    flat = tensor.detach().reshape(-1).float()
    return flat.dot(flat).double()


def excess_reason(update: Update, num_examples: int, layout: Layout) -> str | None:
    """Return which limit of its client an update exceeds, as a clause, or None if it exceeds none.

    Args:
        update: Update that :func:`check_update_schema` accepts.
        num_examples: Number of the client's training samples, the maximum weight of its update.
        layout: Layout of the model's tensors, whose size limits the sizes of `extra` and `shared`.
    """
    if update.weight > max(num_examples, 1):
        return (
            f"its update has the weight {update.weight}; expected at most {max(num_examples, 1)}, its training samples"
        )
    if len(update.metrics) > _MOST_METRICS:
        return f"its update has {len(update.metrics)} metrics; expected at most {_MOST_METRICS}"
    carried = {"extra": update.extra, "shared": update.shared}
    if not any(carried.values()):
        return None
    model = sum(size * layout.dtypes[name].itemsize for name, size in zip(layout.names, layout.sizes, strict=True))
    room = _FACTOR * model + _ROOM
    for name, value in carried.items():
        if value and _exceeds(value, room):
            return f"its update's `{name}` takes more than {room} bytes, {_FACTOR} times the model and 64 KiB"
    return None


def _exceeds(value: Any, room: int) -> bool:
    """Return whether nested plain values and tensors take more than `room` bytes, counting 8 for a number."""
    left = [value]
    while left and room >= 0:
        item = left.pop()
        if isinstance(item, Tensor):
            room -= item.numel() * item.itemsize
        elif isinstance(item, str | bytes):
            room -= len(item)
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item
        room -= 8
    return room < 0


def _floats(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the float tensors of nested values with their paths."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floats(f"{where}[{key!r}]" if where else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _floats(f"{where}[{index}]", item)


def not_finite(metrics: Mapping[str, float]) -> Iterator[str]:
    """Return the names of metrics that are not finite.

    Args:
        metrics: Values by name.

    Example:
        >>> list(not_finite({"train_loss": float("nan"), "train_acc": 0.5}))
        ['train_loss']
    """
    return (name for name, value in metrics.items() if not math.isfinite(value))
