"""Validation of what the hooks of a method return, so that an error message names the hook."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption, InvalidUpdate, is_number
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.orders import Order
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.federated.exchange.update_checks import are_small, check_update_schema
from lightning_sparsefl.sparse.masks import enforce
from lightning_sparsefl.types import Masks, Message, ServerState, Update, Weights


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


def check_plain(owner: object, hook: str, value: Mapping[str, Any]) -> Any:
    """Check that a mapping from a hook can be written into a checkpoint; return it as plain values.

    Args:
        owner: Object that has the hook.
        hook: Name of the hook.
        value: Value that the hook returned.

    Raises:
        InvalidOption: If it is not a mapping, or holds a type that could not be read again.
    """
    check_result(owner, hook, value, Mapping)
    try:
        return pack_plain(value, f"{type(owner).__name__}.{hook}()")
    except TypeError as error:
        raise InvalidOption(str(error)) from error


def check_hashable(owner: object, hook: str, value: Any) -> None:
    """Check that a value from a hook can be compared by its hash.

    Args:
        owner: Object that has the hook.
        hook: Name of the hook.
        value: Value that the hook returned.

    Raises:
        InvalidOption: If it cannot.
    """
    try:
        hash(value)
    except TypeError:
        raise InvalidOption(
            f"`{type(owner).__name__}.{hook}` returned {reprlib.repr(value)}; expected a hashable value, such as a "
            "number or a tuple of numbers."
        ) from None


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
        IncompatibleMasks: If a name, shape or dtype of its weights differs from the model's, or one of its masks does
            or is not bool.
    """
    check_result(method, hook, message, Message)
    what = f"The message from `{type(method).__name__}.{hook}`"
    _check_trees({"weights": message.weights, "masks": message.masks, "trainable": message.trainable}, what)
    layout.check(message.weights, what)
    for field, masks in {"masks": message.masks, "trainable": message.trainable}.items():
        layout.check(masks, f"{what}, in `{field}`,", torch.bool)
    _check_extra(message.extra, what)


def _check_extra(extra: Any, what: str) -> None:
    if not isinstance(extra, Mapping):
        raise InvalidOption(f"{what} has {_named(type(extra))} as `extra`; expected a mapping from names to trees.")
    _check_trees({f"extra[{key!r}]": tree for key, tree in extra.items()}, what)


def _check_trees(trees: Mapping[str, Any], what: str) -> None:
    for field, tree in trees.items():
        if not isinstance(tree, Mapping):
            raise InvalidOption(f"{what} has {_named(type(tree))} as `{field}`; expected a tree of tensors.")
        _check_tensors(tree, what, field)


def _check_tensors(tree: Mapping[str, Any], what: str, field: str) -> None:
    for name, tensor in tree.items():
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            place = f"`{field}[{name!r}]`" if field else repr(name)
            raise InvalidOption(f"{what} has {_named(type(tensor))} as {place}; expected a dense tensor.")


def check_state(method: object, hook: str, state: Any, layout: Layout) -> ServerState:
    """Check a state of the server that a hook returned, and set its weights under its masks to zero.

    Args:
        method: Federated method.
        hook: Name of the hook.
        state: Value that the hook returned.
        layout: Layout of the model's tensors.

    Returns:
        The state, so that its weights are the model that is scored and saved.

    Raises:
        InvalidOption: If it is not a state, lacks weights of the model, has weights that are not finite, or an `extra`
            with NaN or of other values than trees.
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
    if not are_small(state.weights.values()):
        strange = next((name for name, weight in state.weights.items() if not bool(weight.isfinite().all())), None)
        if strange is not None and hook == "init":
            kind, remedy = ("buffer", ", or `persistent=False`") if strange in layout.buffers else ("parameter", "")
            raise InvalidOption(
                f"{what} has the {kind} {strange!r} with values that are not finite; expected finite ones, such as "
                f"-1e9 in a mask of attention{remedy}, since the server merges it."
            )
        if strange is not None:
            raise InvalidOption(
                f"{what} has weights {strange!r} that are not finite; expected finite ones, as after a smaller step of "
                "the server. The round before is committed."
            )
    _require_numbers(state.extra, what, "" if hook == "init" else " The round before is committed.")
    masked: ServerState = replace(state, weights=enforce(state.weights, state.masks))
    return masked


def _require_numbers(extra: Mapping[str, Weights], what: str, rest: str) -> None:
    for key, tree in extra.items():
        for name, tensor in tree.items():
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                raise InvalidOption(
                    f"{what} has NaN in `extra[{key!r}][{name!r}]`; expected numbers, also where a sum is divided by "
                    f"the number of clients that took part, which may be 0.{rest}"
                )


def check_tree(method: object, hook: str, tree: Any, layout: Layout, dtype: torch.dtype | None = None) -> None:
    """Check a tree of the model's tensors that a hook returned.

    Args:
        method: Federated method.
        hook: Name of the hook.
        tree: Value that the hook returned.
        layout: Layout of the model's tensors.
        dtype: Type of all tensors, such as that of masks; None = the model's types.

    Raises:
        InvalidOption: If it is not a tree of tensors.
        IncompatibleMasks: If a name, shape or dtype differs from the model's.
    """
    check_result(method, hook, tree, Mapping)
    what = f"The tree from `{type(method).__name__}.{hook}`"
    _check_tensors(tree, what, "")
    layout.check(tree, what, dtype)


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
    check_tree(method, hook, weights, layout)
    _require_all(weights, f"The tree from `{type(method).__name__}.{hook}`", layout)


def _require_all(weights: Weights, what: str, layout: Layout) -> None:
    missing = next((name for name in layout.names if name not in weights), None)
    if missing is not None:
        raise InvalidOption(f"{what} lacks the weights {missing!r}; expected all tensors of the model.")


def check_update(method: Any, update: Update, message: Message, order: Order, layout: Layout) -> None:
    """Check the structure of an update against the model and the message; see :func:`check_update_schema`.

    Args:
        method: Federated method.
        update: Update from its `train` or `survey`.
        message: Message that the client received.
        order: Order that the update answers.
        layout: Layout of the model's tensors.

    Raises:
        InvalidUpdate: If the structure is wrong.
    """
    check_update_schema(
        update, message, layout, lambda sent: allowed_votes(method, sent, layout), origin(method, order)
    )


def origin(method: object, order: Order) -> str:
    """Return the client and the hook that an update is from, as the subject of an error message.

    Args:
        method: Federated method.
        order: Order that the update answers.
    """
    hook = "survey" if order.task == "survey" else "train"
    return f"The update of client {order.client} from `{type(method).__name__}.{hook}`"


def allowed_votes(method: Any, message: Message, layout: Layout) -> Masks:
    """Return where an upload may vote, by the method's `may_vote`.

    Args:
        method: Federated method.
        message: Message that the client received.
        layout: Layout of the model's tensors.

    Raises:
        InvalidUpdate: If the method returns anything but masks of the model's tensors.
    """
    masks: Masks = method.may_vote(message)
    try:
        check_tree(method, "may_vote", masks, layout, torch.bool)
    except (IncompatibleMasks, InvalidOption) as error:
        raise InvalidUpdate(str(error)) from None
    return masks
