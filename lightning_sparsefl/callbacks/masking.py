"""Base class of the callbacks that mask weights; a subclass says which masks, and when they change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel

from lightning_sparsefl.callbacks.layers import plain_name, stepped_by
from lightning_sparsefl.callbacks.mask_owner import MaskOwner, check_masks, warning_cache
from lightning_sparsefl.callbacks.step_guard import StepGuard, StepListener
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.apply import InPlaceMask
from lightning_sparsefl.types import Masks, Weights

_STILL = frozenset(
    (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
    )
)
"""Optimizers that leave a weight of 0 alone whose gradient and whose memory are 0, momentum and weight decay or not."""


class MaskingCallback(MaskOwner):
    """Holds masks over layers that are its own: gradients are masked before clipping and the step, weights after it.

    Masking only the weights would be wrong with momentum and weight decay, whose buffers would keep moving. Copies of
    the module that other callbacks keep, such as the averages of Lightning's `WeightAveraging`, are masked with it, in
    whichever order the callbacks stand: a mean of weights under moving masks has more non-zeros than any of them.

    Weights are masked after every step of their optimizer, whatever hooks it has, and before each evaluation of the
    loss by a closure. Where the optimizers are such that a weight stays 0 by itself, and nothing changes gradients
    after they are masked, weights are only masked if something else has written them, which their version counters
    show. Those miss writes through ``weight.data``, for which the weights are masked at the end of every epoch too.

    A subclass defines `first_masks`, and moves masks with :meth:`hold` in a hook of its own, such as
    `on_before_optimizer_step`, where the gradients are still dense; it calls the hooks of this class, and adds the
    position of its schedule (:class:`lightning_sparsefl.callbacks.clock.StepClock`) to `state_dict`. Where weights grow
    from 0, it sets `grows_from_zero`.

    A fit that ends without masks, or before its schedule has reached the density that was asked for, warns, and so does
    scoring a checkpoint that was saved before.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Bool tensors by name to start from, which determine the layers; None = `first_masks`.
    """

    _of_a_fit = (*MaskOwner._of_a_fit, "_stencils", "_copies", "_guards", "_waiting", "_versions", "_starts", "_fresh")

    def _unhook(self) -> None:
        """Set the attributes of a fit to their values outside of one."""
        super()._unhook()
        self._stencils: dict[str, InPlaceMask] = {}
        self._copies: list[tuple[str, Tensor]] | None = None
        self._guards: list[StepGuard] = []
        self._waiting: list[Any] = []
        self._versions: dict[str, int] = {}
        self._still = self._prepared = self._followed = self._fresh = False
        self._starts: Weights | None = None

    def first_weights(self, weights: Weights) -> None:
        """Change the weights under new first masks, in place.

        Args:
            weights: Weights of the layers that no fit has changed.
        """

    def train_from(self, starts: Weights) -> None:
        """Restrict :meth:`first_weights` in the next fit to weights that are still those of the model's start.

        A client's callback is new in each local fit, and only the first of these fits starts with first weights.

        Args:
            starts: Weights that the model started with, by name.
        """
        self._starts = starts

    def _is_first(self, name: str, weight: Tensor) -> bool:
        """Return whether a weight is that of the model's start, where it is not 0."""
        if self._starts is None:
            return True
        start = self._starts.get(plain_name(name))
        return start is not None and start.shape == weight.shape and bool(((weight == start) | (weight == 0)).all())

    def started(self) -> None:
        """Act when a fit starts, before the masks are applied."""

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the masks unless they have been made, and apply them."""
        self.begin(trainer, pl_module)

    def begin(self, trainer: Any, module: LightningModule) -> None:
        """Begin a fit, once: with its `on_fit_start`, or with that of a callback that reads masked weights.

        Args:
            trainer: Trainer of the fit.
            module: Module of the user.
        """
        if self._begun:
            return
        self._begun = True
        parameters: dict[str, Tensor] = dict(module.named_parameters())
        fresh = not self._made
        self._rename(parameters)
        if fresh:
            self.masks = dict(self.first_masks({name: parameters[name] for name in self.claims(module)}))
            self._made, self._drawn_by, self._fresh = True, self.draw_options(), True
            if not any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # which thaw weights
                self.warn_of_frozen(parameters)
        name, given = type(self).__name__, self._given is not None
        check_masks(f"{name}(masks=...)" if given else name, self.masks, parameters, not fresh and not given)
        self._check(trainer, module)
        weights = {name: parameters[name] for name in self.masks}
        self.masks = {name: mask.to(weights[name].device) for name, mask in self.masks.items()}
        self._weights = weights
        if fresh:
            self.first_weights({name: weight for name, weight in weights.items() if self._is_first(name, weight)})
        self.started()
        self.hold(self.masks)

    def warn_of_frozen(self, parameters: Mapping[str, Tensor]) -> None:
        """Warn of masked weights that are frozen, such as those of a pretrained part, unless they were asked for.

        Args:
            parameters: Parameters of the module by name.
        """
        frozen = [name for name in self.masks if not parameters[name].requires_grad]
        self._warn_of(frozen, "frozen weights, which cannot adapt (`requires_grad=False`)")

    def _warn_of(self, names: Sequence[str], what: str) -> None:
        """Warn of masked weights, if there are any, unless they were asked for."""
        if self.layers is None and names:
            more = f" and {len(names) - 1} more" if names[1:] else ""
            warning_cache.warn(
                f"`{type(self).__name__}` masks {what}: {names[0]!r}{more}; leave them dense with "
                f"`layers={_without(names, self.masks)}`, or choose them in `layers`."
            )

    def _warn_of_unstepped(self, optimizers: Iterable[Any]) -> None:
        """Warn of new masks of weights that no optimizer steps, such as those of a copy of the network, by default."""
        stepped = set().union(*map(stepped_by, optimizers))
        names = [name for name, weight in self._weights.items() if weight.requires_grad and id(weight) not in stepped]
        if self._fresh and stepped:
            self._warn_of(names, "weights that no optimizer steps, by masks of their own")

    def adopt(self, masks: Masks) -> None:
        """Replace the masks of the same layers, or of some of them, and leave the weights as they are.

        A caller zeroes the weights, and calls :meth:`forget`, itself; :meth:`hold` does both.
        """
        for name, mask in masks.items():
            self._masks[name], self._stencils[name] = mask, InPlaceMask(mask, self._weights[name].dtype)
        self.mask_copies()

    def hold(self, masks: Masks) -> None:
        """Replace the masks, and apply the new ones: to the weights, and to what the optimizers remember of them."""
        self.adopt(masks)
        self.mask_weights(masks)
        if self._started and self._around is not None:  # an optimizer that remembers a dropped weight would move it
            self.forget(self._around[0].optimizers, masks)
        if self._prepared:  # by the former masks
            self._prepare()

    @torch.no_grad()
    def mask_weights(self, names: Collection[str] | None = None) -> None:
        """Zero what is not held of the weights that have these names or have been written; None = of all."""
        for name, weight in self._weights.items():
            if names is None or name in names or weight._version != self._versions.get(name):
                self._stencils[name].zero_(weight)
        self._note_versions()

    def _note_versions(self) -> None:
        """Store the versions of the weights, all of which are 0 where they are not held."""
        self._versions = {name: weight._version for name, weight in self._weights.items()}

    def _written(self) -> bool:
        """Return whether weights have been written since `_note_versions`."""
        return any(weight._version != self._versions.get(name) for name, weight in self._weights.items())

    def _mask_written(self) -> None:
        """Mask the weights that have been written since `_note_versions`; a graph may need the others."""
        if self._written():
            self.mask_weights(())

    def mask_copies(self) -> None:
        """Zero what is not held in copies of the module too."""
        if self._copies is None:  # all callbacks are set up by now
            self._copies = [] if self._around is None else list(_copies(*self._around))
        for name, copy in self._copies:
            if name in self._masks:
                InPlaceMask(self._masks[name].to(copy.device), copy.dtype).zero_(copy)

    @torch.no_grad()
    def forget(self, optimizers: Iterable[Any], names: Iterable[str]) -> None:
        """Reset what optimizers remember of weights that are not held: momentum, Adam's moments, LBFGS's history."""
        names = list(names)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):  # whose vectors are of all weights together
                optimizer.state.clear()
                continue
            for name in names:
                forget(optimizer, self._weights[name], self.masks[name])

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Forget what a restored optimizer has of weights that are not held, and guard the optimizers' steps."""
        # of a fit that goes on, LBFGS remembers masked gradients only, and Rprop learning rates that may have changed
        kept = (torch.optim.LBFGS, torch.optim.Rprop) if self.resumed else ()
        self.forget((o for o in trainer.optimizers if not isinstance(o, kept)), self.masks)
        behind = trainer.callbacks[trainer.callbacks.index(self) + 1 :] if self in trainer.callbacks else ()
        self._followed = any(map(_acts_before_steps, behind))
        moved = self._followed or _touches_gradients(pl_module) or any(map(_acts_after_steps, trainer.callbacks))
        self._still = all(map(leaves_zeros, trainer.optimizers)) and not moved
        self._guard(trainer)

    def _guard(self, trainer: Any) -> None:
        """Register for calls around all optimizer steps."""
        self._warn_of_unstepped(trainer.optimizers)
        self._started, self._waiting = True, list(trainer.optimizers)
        self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mask weights that have been written since the last batch."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._mask_written()

    def before_loss(self, again: bool) -> None:
        """Mask weights that have been written before a closure evaluates the loss, or in a step that does so again."""
        self._prepared = False
        if again and not self._still:
            self.mask_weights()
        self._mask_written()

    def before_update(self, optimizer: Any) -> None:
        """Mask for a step that Lightning does not know of, or again what callbacks behind this one have written."""
        if self._followed or not self._prepared:
            self._prepare()

    def after_step(self, optimizer: Any) -> None:
        """Mask the weights of the optimizer, unless it leaves zeros alone; a graph may need the others."""
        self._note_step(optimizer)
        if self._still and not _has_step_hooks(optimizer):
            self._note_versions()
        else:
            stepped = stepped_by(optimizer)
            self.mask_weights({name for name, weight in self._weights.items() if id(weight) in stepped})

    def _note_step(self, optimizer: Any) -> None:
        self._prepared = False
        if self._waiting:
            self._waiting = [each for each in self._waiting if each is not optimizer]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Mask the gradients, and weights that have been written since the last step."""
        self._prepare()
        self._prepared = True

    def _prepare(self) -> None:
        self._mask_written()
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._stencils[name].zero_(weight.grad)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, unless they are masked."""
        if self._written():
            self._refuse_hidden_steps(trainer, pl_module)
            self.mask_weights(())
        self.mask_copies()

    def _refuse_hidden_steps(self, trainer: Any, module: LightningModule) -> None:
        """Refuse a module that changes its weights without `step`, since nothing shows when they are to be masked."""
        if module.automatic_optimization or not self._waiting:  # every optimizer has stepped
            return
        waiting = set().union(*map(stepped_by, self._waiting))
        known = set().union(*map(stepped_by, trainer.optimizers))
        for name, weight in self._weights.items():
            hidden = id(weight) in waiting or (id(weight) not in known and weight.grad is not None)
            if weight._version != self._versions.get(name) and hidden:
                raise InvalidOption(
                    f"`{type(self).__name__}`: `{type(module).__name__}.training_step` changes `{name}` without "
                    "`step` of an optimizer that `configure_optimizers` returns, so that the mask cannot be held; "
                    "expected `optimizer.step()`, or `optimizer.step(closure)` for an optimizer such as SAM."
                )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask the weights, however they have been written."""
        super().on_train_epoch_end(trainer, pl_module)
        self.mask_weights()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Mask what a callback may have put into the module to be validated."""
        if batch_idx == 0:
            self.mask_weights()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask what a callback may have put into the module at the end, and warn if the density was not reached."""
        self.mask_weights()
        reason: str | None = "the fit ends without masks, so that all weights are dense"
        if self.masks or self._given == ():
            short = self.shortfall()
            reason = None if short is None else f"the fit ended {short}"
        if self._started and reason is not None:
            warning_cache.warn(f"`{type(self).__name__}`: {reason}.")

    def release(self) -> None:
        """Release the module's tensors and the optimizers."""
        for guard in self._guards:
            guard.remove()
        super().release()

    def restore(self, masks: Masks) -> None:
        """Take over the masks of a checkpoint, and hold them if it is loaded in the middle of a fit."""
        if self._weights:
            self.hold({name: mask.to(self._weights[name].device) for name, mask in masks.items()})
        else:
            super().restore(masks)


def _without(names: Sequence[str], masked: Iterable[str]) -> list[str]:
    """Return patterns that take these layers away and no other one, by the first part of names that is theirs alone.

    Example:
        >>> _without(["ema.0.weight", "ema.2.weight", "net.0.weight"], ["net.0.weight", "net.2.weight"])
        ['!ema.*', '!net.0.weight']
    """
    others = set(map(plain_name, masked)) - set(map(plain_name, names))
    patterns: dict[str, list[str]] = {}
    for name in map(plain_name, names):
        parts = name.split(".")
        starts = [".".join(parts[:end]) + "." for end in range(1, len(parts))]
        alone = next((start for start in starts if not any(other.startswith(start) for other in others)), None)
        patterns.setdefault(alone or name, []).append(name)
    return [f"!{start}*" if len(found) > 1 else f"!{found[0]}" for start, found in patterns.items()]


def make_masks(trainer: Any, module: LightningModule) -> None:
    """Let the callbacks that mask begin the fit, so that one before them reads the weights that it starts with.

    Args:
        trainer: Trainer of the fit.
        module: Module of the user.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, MaskingCallback):
            callback.begin(trainer, module)


def forget(optimizer: Any, weight: Tensor, mask: Tensor, rows: slice = slice(None)) -> None:
    """Reset what an optimizer remembers of the entries of a weight that are not held.

    Args:
        optimizer: Optimizer, whose memory has the shapes of its weights.
        weight: Weight, which need not be the optimizer's.
        mask: Mask of the weight, or of some of its rows.
        rows: These rows.
    """
    remembered = [
        (key, value[rows] if weight.dim() else value)
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    ]
    if not remembered:
        return
    firsts = next(_firsts(group) for group in optimizer.param_groups if _has(group, weight))
    for key, value in remembered:
        InPlaceMask(mask, value.dtype).zero_(value)
        if first := firsts.get(key):
            value.masked_fill_(~mask, first)


def _has(group: Mapping[str, Any], weight: Tensor) -> bool:
    return any(parameter is weight for parameter in group["params"])


def leaves_zeros(optimizer: Any) -> bool:
    """Return whether a step leaves weights of 0 whose gradient and memory are 0; without eps some divide 0 by 0.

    Args:
        optimizer: Optimizer of the weights.

    Example:
        >>> weights = [torch.zeros(2)]
        >>> leaves_zeros(torch.optim.Adam(weights)), leaves_zeros(torch.optim.Adam(weights, eps=0.0))
        (True, False)
    """
    return type(optimizer) in _STILL and all(map(_adds_eps, optimizer.param_groups))


def _adds_eps(group: Mapping[str, Any]) -> bool:
    """Return whether `eps` is above 0 in the types of the parameters; 1e-8 is 0 in half precision."""
    eps = float(group.get("eps", 1))
    return all(bool(torch.tensor(eps, dtype=dtype)) for dtype in {p.dtype for p in group["params"]})


def _firsts(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the values other than 0 with which an optimizer's memory of a weight begins, by their keys."""
    if "etas" in group:  # of Rprop, also behind one client's part of the optimizer of a stack
        return {"step_size": float(group["lr"])}
    if "initial_accumulator_value" in group:
        return {"sum": float(group["initial_accumulator_value"])}
    return {}


def _has_step_hooks(optimizer: Any) -> bool:
    """Return whether something may write weights within a step of the optimizer."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _touches_gradients(module: LightningModule) -> bool:
    """Return whether the module may write gradients that are masked already."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    return not module.automatic_optimization or any(is_overridden(hook, module) for hook in hooks)


def _acts_before_steps(callback: Callback) -> bool:
    """Return whether a callback behind a masking one may write gradients, or weights for the step, that are masked."""
    overrides = type(callback).on_before_optimizer_step is not Callback.on_before_optimizer_step
    return overrides and not isinstance(callback, MaskingCallback)


def _acts_after_steps(callback: Callback) -> bool:
    """Return whether a callback may write weights right after a step, such as those that are frozen."""
    return isinstance(callback, StepListener) and not isinstance(callback, MaskingCallback)


def _copies(trainer: Any, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the named parameters of all copies of a module that callbacks keep as attributes."""
    for callback in trainer.callbacks:
        for kept in vars(callback).values():
            copy = kept.module if isinstance(kept, AveragedModel) else kept
            if copy is not module and isinstance(copy, type(module)):
                yield from copy.named_parameters()
