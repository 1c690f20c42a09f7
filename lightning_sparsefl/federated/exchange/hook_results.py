"""Validation of what the hooks of a method return, so that an error message names the hook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, is_number
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.federated.exchange.update_checks import are_small
from lightning_sparsefl.types import Message, ServerState, Weights


def check_result(owner: object, hook: str, value: Any, kind: type, optional: bool = False) -> None:
    """Check the type of the value that a hook returned.

    Args:
        owner: Object that has the hook, such as a federated method.
        hook: Name of the hook.
        value: Value that the hook returned.
        kind: Expected type.
        optional: Whether the hook may return None.

    Raises:
        InvalidOption: If the value has another type.

    Example:
        >>> check_result(object(), "init", None, ServerState)
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `object.init` returned None; expected a `ServerState`, so add a \
`return`.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    got, remedy = ("None", ", so add a `return`") if value is None else (_named(type(value)), "")
    expected = f"{_named(kind)}{' or None' if optional else ''}{remedy}"
    raise InvalidOption(f"`{type(owner).__name__}.{hook}` returned {got}; expected {expected}.")


def check_plain(owner: object, hook: str, value: Mapping[str, Any]) -> None:
    """Check that a mapping from a hook can be written into a checkpoint.

    Args:
        owner: Object that has the hook.
        hook: Name of the hook.
        value: Value that the hook returned.

    Raises:
        InvalidOption: If it is not a mapping, or holds a type that could not be read again.
    """
    check_result(owner, hook, value, Mapping)
    try:
        pack_plain(value, f"{type(owner).__name__}.{hook}()")
    except TypeError as error:
        raise InvalidOption(str(error)) from error


def check_callbacks(owner: object, hook: str, value: Any) -> None:
    """Check that a hook returned callbacks.

    Args:
        owner: Object that has the hook.
        hook: Name of the hook.
        value: Value that the hook returned.

    Raises:
        InvalidOption: If it is not a list of Lightning callbacks.
    """
    check_result(owner, hook, value, Sequence)
    if not all(isinstance(each, Callback) for each in value):
        raise InvalidOption(
            f"`{type(owner).__name__}.{hook}` returned {value!r}; expected a list of Lightning callbacks."
        )


def check_amount(owner: object, hook: str, value: Any, where: str = "", share: bool = False) -> None:
    """Check a time, a cost or a factor that a hook returned.

    Args:
        owner: Object that has the hook.
        hook: Name of the hook.
        value: Value that the hook returned.
        where: Clause for the error message that says which value it is, with a space before it.
        share: Whether it is a share, which is above 0 and at most 1.

    Raises:
        InvalidOption: If it is not a finite number >= 0.

    Example:
        >>> check_amount(object(), "seconds", float("nan"), " for client 3")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `object.seconds` returned nan for client 3; expected a finite number \
>= 0.
    """
    if not is_number(value) or not (0 < value <= 1 if share else 0 <= value < math.inf):
        expected = "a number in (0, 1]" if share else "a finite number >= 0"
        raise InvalidOption(f"`{type(owner).__name__}.{hook}` returned {value!r}{where}; expected {expected}.")


def _named(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} `{kind.__name__}`"


def check_message(method: object, hook: str, message: Any, layout: Layout) -> None:
    """Check a message that a hook returned.

    Args:
        method: Federated method.
        hook: Name of the hook.
        message: Value that the hook returned.
        layout: Layout of the model's tensors.

    Raises:
        InvalidOption: If it is not a message, or has an `extra` of other values than trees.
        IncompatibleMasks: If a name, shape or dtype of its weights differs from the model's.
    """
    check_result(method, hook, message, Message)
    what = f"The message from `{type(method).__name__}.{hook}`"
    _check_trees({"weights": message.weights, "masks": message.masks, "trainable": message.trainable}, what)
    layout.check(message.weights, what)
    _check_extra(message.extra, what)


def _check_extra(extra: Any, what: str) -> None:
    if not isinstance(extra, Mapping):
        raise InvalidOption(f"{what} has {_named(type(extra))} as `extra`; expected a mapping from names to trees.")
    _check_trees({f"extra[{key!r}]": tree for key, tree in extra.items()}, what)


def _check_trees(trees: Mapping[str, Any], what: str) -> None:
    for field, tree in trees.items():
        if not isinstance(tree, Mapping):
            raise InvalidOption(f"{what} has {_named(type(tree))} as `{field}`; expected a tree of tensors.")
        for name, tensor in tree.items():
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                got = f"{_named(type(tensor))} as `{field}[{name!r}]`"
                raise InvalidOption(f"{what} has {got}; expected a dense tensor.")


def check_state(method: object, hook: str, state: Any, layout: Layout) -> None:
    """Check a state of the server that a hook returned.

    Args:
        method: Federated method.
        hook: Name of the hook.
        state: Value that the hook returned.
        layout: Layout of the model's tensors.

    Raises:
        InvalidOption: If it is not a state, lacks weights of the model, has weights that are not finite, or an `extra`
            of other values than trees.
        IncompatibleMasks: If a name or shape of its weights or masks differs from the model's, a dtype of its weights
            does, or a mask is not bool.
    """
    check_result(method, hook, state, ServerState)
    what = f"The state from `{type(method).__name__}.{hook}`"
    _check_trees({"weights": state.weights, "masks": state.masks}, what)
    _check_extra(state.extra, what)
    layout.check(state.weights, what)
    layout.check(state.masks, f"{what}, among its masks,", torch.bool)
    _require_all(state.weights, what, layout)
    if are_small(state.weights.values()):
        return
    strange = next((name for name, weight in state.weights.items() if not bool(weight.isfinite().all())), None)
    if strange is not None:
        raise InvalidOption(
            f"{what} has weights {strange!r} that are not finite; expected finite ones, as after a smaller step of the "
            "server. The round before is committed."
        )


def check_weights(method: object, hook: str, weights: Any, layout: Layout) -> None:
    """Check weights of the whole model that a hook returned.

    Args:
        method: Federated method.
        hook: Name of the hook.
        weights: Value that the hook returned.
        layout: Layout of the model's tensors.

    Raises:
        InvalidOption: If it is not a tree of tensors, or lacks weights of the model.
        IncompatibleMasks: If a name, shape or dtype differs from the model's.
    """
    check_result(method, hook, weights, Mapping)
    what = f"The tree from `{type(method).__name__}.{hook}`"
    _check_trees({"weights": weights}, what)
    layout.check(weights, what)
    _require_all(weights, what, layout)


def _require_all(weights: Weights, what: str, layout: Layout) -> None:
    missing = next((name for name in layout.names if name not in weights), None)
    if missing is not None:
        raise InvalidOption(f"{what} lacks the weights {missing!r}; expected all tensors of the model.")
