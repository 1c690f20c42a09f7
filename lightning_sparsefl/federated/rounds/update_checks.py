"""Whether an update answers its message; asked of every update before anything of it is kept or merged.

There are two kinds of fault. What a client's own numbers can be blamed for, values and losses that are not finite, is
that client's failure and obeys `federation.on_client_error`. What only the method's code can have done wrong (names,
shapes, dtypes, `kind`, `weight`, votes) is an :class:`InvalidUpdate`, which ends the run in either case: every client
would meet it, and leaving them all out would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.evaluation.scores import not_finite
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Masks, Message, Update, Weights

_KINDS = ("weights", "difference")


def check_update_schema(
    update: Update, message: Message, layout: Layout, may_vote: Callable[[Message], Masks], client: int
) -> None:
    """Compare an update with the model and with what was sent.

    Args:
        update: As the method's `train` returned it.
        message: What the client had received.
        layout: Of the model.
        may_vote: The method's; asked only where the update brings votes of its own, since others follow from it.
        client: Number of the client, for the sentence.

    Raises:
        InvalidUpdate: If they do not fit.
    """
    who = f"The update of client {client}"
    if update.kind not in _KINDS:
        raise InvalidUpdate(f"{who} has the `kind` {update.kind!r}; expected one of {_KINDS}.")
    if type(update.weight) is not int or update.weight < 1:
        raise InvalidUpdate(f"{who} has the `weight` {update.weight!r}; expected a positive integer, samples or 1.")
    for name, tensor in update.weights.items():
        _check_tensor(f"{who} holds {name!r}", name, tensor, layout, layout.dtypes.get(name))
        if update.kind == "difference" and name not in message.weights:
            raise InvalidUpdate(f"{who} holds a difference of {name!r}, which was not sent; return it as weights.")
    for key, tree in update.extra.items():
        _check_extra(f"{who} holds `extra[{key!r}]`", tree, message.extra.get(key, {}))
    _check_held(f"{who} holds `shared['masks']`", (update.shared or {}).get("masks", {}), layout)
    if update.votes is not None:
        for name, vote in update.votes.items():
            _check_tensor(f"{who} votes on {name!r}", name, vote, layout, torch.bool)
        _check_votes(who, update.votes, update.weights, may_vote(message))


def _check_tensor(what: str, name: str, tensor: Tensor, layout: Layout, dtype: torch.dtype | None) -> None:
    if name not in layout.shapes:
        raise InvalidUpdate(f"{what}, which the model does not have; return only the model's names.")
    if tensor.shape != layout.shapes[name]:
        raise InvalidUpdate(f"{what} with shape {tuple(tensor.shape)}; expected {tuple(layout.shapes[name])}.")
    if tensor.dtype != dtype:
        raise InvalidUpdate(f"{what} as {tensor.dtype}; expected {dtype}.")


def _check_extra(what: str, tree: Weights, sent: Weights) -> None:
    for name, tensor in tree.items():
        if not tensor.is_floating_point():
            raise InvalidUpdate(f"{what} with {name!r} as {tensor.dtype}; expected floats, since they are averaged.")
        if name in sent and tensor.shape != sent[name].shape:
            raise InvalidUpdate(
                f"{what} with {name!r} of shape {tuple(tensor.shape)}; expected {tuple(sent[name].shape)} as sent."
            )


def _check_held(what: str, masks: Any, layout: Layout) -> None:
    if not isinstance(masks, Mapping):
        raise InvalidUpdate(f"{what} as {type(masks).__name__}; expected a tree of masks, or another key.")
    for name, mask in masks.items():
        if (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or mask.shape != layout.shapes.get(name, mask.shape)
        ):
            raise InvalidUpdate(f"{what} with {name!r}, which is no mask of the model's shape; expected booleans.")


def _check_votes(who: str, votes: Masks, weights: Weights, allowed: Masks) -> None:
    """A missing vote is dense, so it needs leave for the whole tensor; what is not sent casts none."""
    for name in allowed.keys() & weights.keys():
        vote, may = votes.get(name), allowed[name]
        if vote is not may and _any(~may if vote is None else vote > may):
            raise InvalidUpdate(
                f"{who} votes on coordinates of {name!r} that `may_vote` forbids; vote only where the message lets "
                "the client hold and change, or override `may_vote`."
            )


def _any(mask: Tensor) -> bool:
    """As ``Tensor.any``, which takes ten times as long on the CPU."""
    return mask.numel() > 0 and bool(mask.view(torch.uint8).max())


def non_finite_reason(update: Update) -> str | None:
    """What is wrong with the numbers that a client returned, as a clause; None if nothing is.

    Losses, weights, extra trees and the tensors of `shared` must be finite. Metrics that are no losses may be undefined
    on a client's data, and `memory` is the client's own affair.

    Args:
        update: Of a form that :func:`check_update_schema` accepts.
    """
    for name in not_finite(update.metrics):
        if "loss" in name:
            return f"its {name} is {update.metrics[name]}"
    # all of them are told by one sum, which is finite only if all terms are, and costs a fiftieth
    tensors = dict(_floats("", {"weights": update.weights, "extra": update.extra, "shared": update.shared}))
    if not tensors or math.isfinite(float(torch.stack([tensor.sum().double() for tensor in tensors.values()]).sum())):
        return None
    bad = next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    return None if bad is None else f"its update of {bad} holds values that are not finite"


def _floats(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The float tensors of nested values, named by their place."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floats(f"{where}[{key!r}]" if where else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _floats(f"{where}[{index}]", item)
