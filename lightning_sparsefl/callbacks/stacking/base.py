"""What callbacks of one kind do to several clients: the hooks of a stacked fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsefl.callbacks.layers import first_stepped, has_gradient

Leaves = Mapping[str, Tensor]
"""Weights of several clients by name, with the clients in dimension 0."""


class StackedPass(Protocol):
    """One batch of each of several clients, and the module's passes over it."""

    steps: Sequence[int]
    """Number of optimizer steps that each of these clients has taken."""
    number: int
    """Number of the batch in the epoch."""

    @property
    def leaves(self) -> Leaves:
        """Weights of the clients."""
        ...

    @property
    def losses(self) -> Tensor:
        """Losses of the training step, one for each client, as Lightning shows them where gradients are accumulated."""
        ...

    @property
    def batch(self) -> Any:
        """Batches, with the clients in dimension 0."""
        ...

    def gradient(
        self, weights: Leaves | None = None, loss: Callable[[], Tensor] | None = None, batch: Any = None
    ) -> dict[str, Tensor]:
        """Return the gradients of a further pass, which leaves no trace: no logs, no statistics, no random numbers.

        Args:
            weights: Weights to take the gradients at; names that are missing, and None, are those of the clients.
            loss: Function that is called after the pass and returns one loss for each client; None = the loss that
                `training_step` returns.
            batch: Batches to pass, a copy from before the training step, which may have written into its own; None =
                a copy of the present ones.
        """
        ...

    def plain(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a pass with the clients in dimension 0, for use in a hook of a layer."""
        ...

    def clients(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the clients in dimension 0 as what a layer sees; the inverse of :meth:`plain`."""
        ...

    def on_gradient(self, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        """Change the gradient of a tensor of a pass.

        Args:
            tensor: Tensor that a layer sees.
            change: Function of the gradients, with the clients in dimension 0.
        """
        ...


class StackedCallback:
    """Base class: what callbacks of one kind do to several clients.

    Its dictionaries of tensors, named in `per_client`, have the clients in dimension 0; its lists, named in `in_order`,
    have one item for each client.
    """

    per_client: ClassVar[tuple[str, ...]] = ()
    in_order: ClassVar[tuple[str, ...]] = ()
    views_module: ClassVar[bool] = False
    """Whether the callback may read attributes of the module, which are then those that all clients share."""

    changes_rates: ClassVar[bool] = False
    """Whether the callback changes the learning rates of a step, of which each client then has its own."""

    def rows(self, low: int, high: int) -> StackedCallback:
        """Return the part for the clients from `low` to before `high`, whose tensors are views.

        Args:
            low: First place in the stack.
            high: Place after the last one.
        """
        part = copy.copy(self)
        for name in self.per_client:
            setattr(part, name, {key: tensor[low:high] for key, tensor in getattr(self, name).items()})
        for name in self.in_order:
            setattr(part, name, getattr(self, name)[low:high])
        return part

    @property
    def makes_masks(self) -> bool:
        """Whether the callback masks the weights when they are loaded, before others read them."""
        return False

    @property
    def acts_in_pass(self) -> bool:
        """Whether the callback acts within the passes of a batch, which are then not recorded."""
        return type(self).before_pass is not StackedCallback.before_pass

    def writes(self, name: str) -> bool:
        """Return whether the callback may write into a weight that is frozen for all clients.

        If no callback of a stack does, such a weight is stored once, and its leaf is read only.

        Args:
            name: Name of the weight.
        """
        return True

    @property
    def writes_between(self) -> bool:
        """Whether the callback may write weights at the start or the end of a batch."""
        return False

    def phase(self, steps: int) -> Hashable:
        """Return what must agree for clients to step together.

        Args:
            steps: Number of optimizer steps that a client has taken.
        """
        return None

    def start(self, leaves: Leaves) -> None:
        """Act when the weights are loaded."""

    def further(self) -> dict[str, tuple[Tensor, str]]:
        """Return leaves of its own that the optimizer is to step, each with the name of a weight of its group."""
        return {}

    def join(self, companions: Sequence[Sequence[Any]], batches: Sequence[int]) -> None:
        """Get to know all callbacks of each client, before the weights are loaded.

        Args:
            companions: Callbacks of each client, in the order in which they act.
            batches: Number of batches of an epoch of each client.
        """

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Act when the optimizer is made.

        Args:
            optimizer: Optimizer of the stack.
            clips: Whether gradients are clipped.
            chain: Callbacks of the stack, in the order in which they act.
        """

    def start_epoch(self) -> None:
        """Act before the first batch of an epoch."""

    def after_hooks(self) -> None:
        """Act before a batch or the end of a fit, if hooks of the module have been called, which may write weights."""

    def before_batch(self, batch: StackedPass) -> None:
        """Act before a batch.

        Args:
            batch: Batch of these clients.
        """

    def before_pass(self, batch: StackedPass) -> None:
        """Act before the training step of a batch.

        Args:
            batch: Batch of these clients.
        """

    def after_backward(self, batch: StackedPass) -> None:
        """Act when the gradients are there, before any other callback changes them.

        Args:
            batch: Batch of these clients.
        """

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Act on the gradients, before they are clipped.

        Args:
            leaves: Weights of the clients, with gradients.
            steps: Number of optimizer steps that each of these clients has taken.
        """

    def before_update(self, leaves: Leaves) -> None:
        """Act on the gradients when they are clipped, right before the optimizer's step.

        Args:
            leaves: Weights of the clients, with gradients.
        """

    def after_step(self, leaves: Leaves) -> None:
        """Act on the weights, after the optimizer's step."""

    def without_step(self, leaves: Leaves) -> None:
        """Act after a batch whose gradients only wait for those of the next one.

        Args:
            leaves: Weights of the clients, with the gradients since their last step.
        """

    def after_batch(self, batch: StackedPass) -> None:
        """Act at the end of a batch, when all callbacks have acted on the weights.

        Args:
            batch: Batch of these clients.
        """

    def end_epoch(self) -> None:
        """Act when all clients have ended an epoch."""

    def finish(self, callbacks: Sequence[Any]) -> None:
        """Give each callback what its algorithm reads after the fit.

        Args:
            callbacks: The callbacks that this one stands for.
        """

    def release(self) -> None:
        """Leave the module as it was, also after a fit that failed."""


def first_stepped_of(leaves: Leaves, optimizer: Optimizer, names: Mapping[int, str]) -> Mapping[str, Any] | None:
    """Return the first group of the optimizer of a stack of which some clients have gradients, or None.

    Args:
        leaves: Weights of these clients, with gradients.
        optimizer: Optimizer of the stack.
        names: Names of the leaves of all clients, by their ``id``; others do not count.
    """
    return first_stepped(
        optimizer.param_groups, lambda leaf: id(leaf) in names and has_gradient(leaves[names[id(leaf)]])
    )


def column(values: Tensor, like: Tensor) -> Tensor:
    """Return one number for each client in a shape that multiplies a tensor of all clients.

    Args:
        values: Numbers of shape (clients,).
        like: Tensor with the clients in dimension 0, whose type and device the result has.

    Example:
        >>> import torch
        >>> column(torch.tensor([2.0, 3.0]), torch.ones(2, 4, 5)).shape
        torch.Size([2, 1, 1])
    """
    return values.to(like).view(-1, *[1] * (like.dim() - 1))
