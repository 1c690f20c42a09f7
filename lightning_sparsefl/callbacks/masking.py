"""Base class of the callbacks that mask weights; a subclass says which masks, and when they change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel

from lightning_sparsefl.callbacks.layers import choose, plain_name, require_maskable, stepped_by
from lightning_sparsefl.callbacks.spawned import ReturnedState, is_spawned
from lightning_sparsefl.callbacks.step_guard import StepGuard
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.apply import InPlaceMask
from lightning_sparsefl.sparse.masks import check, dense_like, pack, unpack
from lightning_sparsefl.types import Masks, Weights

_STILL = frozenset(
    (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
    )
)
"""Optimizers that leave a weight of 0 alone whose gradient and whose memory are 0, momentum and weight decay or not."""

_OF_A_FIT = ("_weights", "_stencils", "_copies", "_around", "_guards", "_waiting", "_versions", "log", "log_dict")
"""Attributes that refer to the module, the trainer or the optimizers, which copies of a callback leave out."""

_unattached = itertools.count()
_warnings = WarningCache()


class MaskingCallback(Callback):
    """Holds masks over layers that are its own: gradients are masked before clipping and the step, weights after it.

    Masking only the weights would be wrong with momentum and weight decay, whose buffers would keep moving. Copies of
    the module that other callbacks keep, such as the averages of Lightning's `WeightAveraging`, are masked with it, in
    whichever order the callbacks stand: a mean of weights under moving masks has more non-zeros than any of them.

    Weights are masked after every step of every optimizer, whatever hooks it has, and before each evaluation of the
    loss by a closure. Where the optimizers are such that a weight stays 0 by itself, and nothing changes gradients
    after they are masked, weights are only masked if something else has written them, which their version counters
    show. Those miss writes through ``weight.data``, for which the weights are masked at the end of every epoch too.

    A fit that ends without masks, or before its schedule has reached the density that was asked for, warns, and so does
    scoring a checkpoint that was saved before.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Bool tensors by name to start from, which determine the layers; None = `first_masks`.
    """

    def __init__(self, layers: list[str] | str | None = None, masks: Masks | None = None) -> None:
        self.layers = layers
        self._masks: dict[str, Tensor] = dict(masks or {})
        self._given: tuple[str, ...] | None = None if masks is None else tuple(masks)
        self._made = masks is not None
        self._started = self._resumed = False
        self._returned = ReturnedState()
        self._key: str | None = None
        self._unhook()

    def _unhook(self) -> None:
        """Set the attributes of a fit to their values outside of one."""
        self._weights: dict[str, Tensor] = {}
        self._stencils: dict[str, InPlaceMask] = {}
        self._around: tuple[Any, LightningModule] | None = None
        self._copies: list[tuple[str, Tensor]] | None = None
        self._guards: list[StepGuard] = []
        self._versions: list[int] = []
        self._waiting: list[Any] = []
        self._to_score = False
        self._still = self._prepared = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the references to a fit that is under way."""
        return {name: value for name, value in vars(self).items() if name not in _OF_A_FIT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a callback outside of a fit."""
        self._unhook()
        vars(self).update(state)

    @property
    def masks(self) -> dict[str, Tensor]:
        """The masks by parameter name; empty before the first fit, unless they were given."""
        self.collect()
        return self._masks

    @masks.setter
    def masks(self, masks: dict[str, Tensor]) -> None:
        self._masks = masks

    def collect(self) -> None:
        """Take over the state with which a fit in spawned processes (``ddp_spawn``, ``ddp_fork``) has ended."""
        returned = None if self._weights else self._returned.receive()
        if returned is not None:
            self._key = returned["key"]
            self.load_state_dict(returned["state"])
            self.release()

    def first_masks(self, weights: Weights) -> Masks:
        """Return the masks that the first fit starts with."""
        return dense_like(weights)

    def first_weights(self, weights: Weights) -> None:
        """Change the weights under new first masks, in place."""

    def started(self) -> None:
        """Act when a fit starts, before the masks are applied."""

    def shortfall(self) -> str | None:
        """Return where the schedule is and the density that it has not reached yet, as a clause; None if it has."""
        return None

    def claims(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters that this callback masks, and no other may."""
        if self._made:
            return tuple(self.masks)
        chosen = choose(module, self.layers, type(self).__name__)
        require_maskable(module, chosen, type(self).__name__)
        return chosen

    @property
    def state_key(self) -> str:
        """The class and the layers, which tell the callback from others of its class.

        Before `setup` each reading differs: the Trainer refuses callbacks of one key when it is built, in words that
        name no layer, and `setup` can say which layer and what to do.
        """
        return f"{type(self).__qualname__} {next(_unattached)}" if self._key is None else self._key

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that no other callback masks the same weights."""
        self.collect()
        layers = [self.layers] if isinstance(self.layers, str) else self.layers and list(self.layers)
        self._key = self._generate_state_key(layers=layers, masks=self._given)
        self._around, self._copies = (trainer, pl_module), None
        if stage != "fit":
            return
        self._started = self._resumed = False
        if trainer.strategy.restore_checkpoint_after_setup:
            raise InvalidOption(
                f"`{type(self).__name__}` cannot mask parameters that `{type(trainer.strategy).__name__}` splits over "
                "processes; expected a strategy that keeps them whole, such as `trainer.strategy: ddp`."
            )
        if not any(is_overridden(hook, pl_module) for hook in ("configure_model", "setup")):  # which make layers later
            self._check(trainer, pl_module)

    def _check(self, trainer: Any, module: nn.Module) -> None:
        others = [callback for callback in trainer.callbacks if isinstance(callback, MaskingCallback)]
        if self in others:
            others.remove(self)
        mine = self.claims(module)
        for other in others:
            both = set(mine).intersection(other.claims(module))
            if both:
                raise InvalidOption(_shared(self, other, next(name for name in mine if name in both)))

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find this callback's part of a checkpoint, also if its `layers` are spelled in another way there.

        Raises:
            InvalidOption: If the checkpoint has masks of this class for some of the layers, but not for the same ones.
        """
        states = checkpoint.get("callbacks", {})
        if self.state_key in states or trainer.state.fn != "fit":
            return
        present = {callback.state_key for callback in trainer.callbacks}
        kind = type(self).__qualname__
        free = {
            key: {plain_name(name) for name in state["masks"]}
            for key, state in states.items()
            if key not in present and key.partition("{")[0] == kind and isinstance(state, dict) and "masks" in state
        }
        mine = {plain_name(name) for name in self.claims(pl_module)}
        alone = sum(type(callback) is type(self) for callback in trainer.callbacks) == 1
        match = next((key for key, names in free.items() if names == mine), None)
        if match is None and alone and len(free) == 1:
            match = next(iter(free))
        if match is not None:
            states[self.state_key] = states[match]
        elif any(names & mine for names in free.values()):
            raise InvalidOption(
                f"`{kind}(layers={self.layers!r})`: the checkpoint has masks of some of these layers by "
                f"{', '.join(free)}; expected the `layers` with which it was saved."
            )

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the masks unless they have been made, and apply them."""
        parameters: dict[str, Tensor] = dict(pl_module.named_parameters())
        fresh = not self._made
        self._rename(parameters)
        if fresh:
            self.masks = dict(self.first_masks({name: parameters[name] for name in self.claims(pl_module)}))
            self._made = True
        check(self.masks, parameters)
        self._check(trainer, pl_module)
        weights = {name: parameters[name] for name in self.masks}
        self.masks = {name: mask.to(weights[name].device) for name, mask in self.masks.items()}
        self._weights = weights
        if fresh:
            self.first_weights(weights)
        self.started()
        self.hold(self.masks)

    def _rename(self, parameters: Mapping[str, Tensor]) -> None:
        """Name tensors of earlier fits as the module names its parameters, which `torch.compile` may have changed."""
        self.masks = renamed(self.masks, parameters)

    def adopt(self, masks: Masks) -> None:
        """Go over to other masks of the same layers, or of some of them, and leave the weights as they are."""
        for name, mask in masks.items():
            self._masks[name], self._stencils[name] = mask, InPlaceMask(mask, self._weights[name].dtype)
        self.mask_copies()

    def hold(self, masks: Masks) -> None:
        """Go over to other masks, and apply them."""
        self.adopt(masks)
        self.mask_weights()

    @torch.no_grad()
    def mask_weights(self) -> None:
        """Zero the weights that are not held."""
        for name, weight in self._weights.items():
            self._stencils[name].zero_(weight)
        self._look()

    def _look(self) -> None:
        """Remember the versions of the weights, all of which are 0 where they are not held."""
        self._versions = [weight._version for weight in self._weights.values()]

    def _written(self) -> bool:
        """Return whether weights have been written since `_look`."""
        return self._versions != [weight._version for weight in self._weights.values()]

    def mask_copies(self) -> None:
        """Zero what is not held in copies of the module too."""
        if self._copies is None:  # all callbacks are set up by now
            self._copies = [] if self._around is None else list(_copies(*self._around))
        for name, copy in self._copies:
            if name in self._masks:
                InPlaceMask(self._masks[name].to(copy.device), copy.dtype).zero_(copy)

    @torch.no_grad()
    def forget(self, optimizers: Iterable[Any], names: Iterable[str]) -> None:
        """Zero what optimizers remember of weights that are not held: momentum, Adam's moments, LBFGS's history."""
        names = list(names)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):  # whose vectors are of all weights together
                optimizer.state.clear()
                continue
            for name in names:
                weight = self._weights[name]
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape:
                        InPlaceMask(self.masks[name], value.dtype).zero_(value)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Forget what a restored optimizer has of weights that are not held, and guard the optimizers' steps."""
        flat = torch.optim.LBFGS if self._resumed else ()  # which remembers its masked gradients only
        self.forget((o for o in trainer.optimizers if not isinstance(o, flat)), self.masks)
        behind = trainer.callbacks[trainer.callbacks.index(self) + 1 :] if self in trainer.callbacks else ()
        self._still = all(map(_leaves_zeros, trainer.optimizers)) and not _touches_gradients(pl_module, behind)
        self._guard(trainer)

    def _guard(self, trainer: Any) -> None:
        """Be called around all steps from here on."""
        self._started, self._waiting = True, list(trainer.optimizers)
        self._guards = [StepGuard(optimizer, self) for optimizer in trainer.optimizers]

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mask weights that have been written since the last batch."""
        if self._written():
            self.mask_weights()

    def before_loss(self, again: bool) -> None:
        """Mask weights that have been written before a closure evaluates the loss, or in a step that does so again."""
        self._prepared = False
        if (again and not self._still) or self._written():
            self.mask_weights()

    def before_update(self, optimizer: Any) -> None:
        """Mask the gradients of a step that Lightning does not know of, such as one of the bare optimizer."""
        if not self._prepared:
            self._mask_gradients()

    def after_step(self, optimizer: Any) -> None:
        """Mask the weights, unless the optimizer leaves zeros alone."""
        self._note_step(optimizer)
        if self._still and not _has_step_hooks(optimizer):
            self._look()
        else:
            self.mask_weights()

    def _note_step(self, optimizer: Any) -> None:
        self._prepared = False
        if self._waiting:
            self._waiting = [each for each in self._waiting if each is not optimizer]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Mask the gradients, and weights that have been written since the last step."""
        if self._still and self._written():
            self.mask_weights()
        self._mask_gradients()
        self._prepared = True

    def _mask_gradients(self) -> None:
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._stencils[name].zero_(weight.grad)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, unless they are masked."""
        if self._written():
            self._refuse_hidden_steps(trainer, pl_module)
            self.mask_weights()
        self.mask_copies()

    def _refuse_hidden_steps(self, trainer: Any, module: LightningModule) -> None:
        """Refuse a module that changes its weights without `step`, since nothing shows when they are to be masked."""
        if module.automatic_optimization or not self._waiting:  # every optimizer has stepped
            return
        waiting = set().union(*map(stepped_by, self._waiting))
        known = set().union(*map(stepped_by, trainer.optimizers))
        for (name, weight), version in zip(self._weights.items(), self._versions, strict=True):
            hidden = id(weight) in waiting or (id(weight) not in known and weight.grad is not None)
            if weight._version != version and hidden:
                raise InvalidOption(
                    f"`{type(self).__name__}`: `{type(module).__name__}.training_step` changes `{name}` without "
                    "`step` of an optimizer that `configure_optimizers` returns, so that the mask cannot be held; "
                    "expected `optimizer.step()`, or `optimizer.step(closure)` for an optimizer such as SAM."
                )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask the weights, however they have been written."""
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
            _warnings.warn(f"`{type(self).__name__}`: {reason}.")

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the module; the masks stay, also in the process that has launched this one."""
        short = self.shortfall() if self._to_score and self.masks else None
        if short is not None:
            _warnings.warn(
                f"`{type(self).__name__}`: the checkpoint that was scored was saved {short}; expected one of a later "
                "epoch."
            )
        self.release()
        if stage == "fit" and self._key is not None and is_spawned(trainer):
            self._returned.send({"key": self._key, "state": self.state_dict()})

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the module also where the run failed, since Lightning calls no teardown then."""
        self.release()

    def release(self) -> None:
        """Release the module's tensors and the optimizers."""
        for guard in self._guards:
            guard.remove()
        self._unhook()
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and whether they have been made and a fit has started with them."""
        return {"masks": packed(self.masks), "made": self._made, "started": self._started or self._resumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold the masks of a checkpoint, unless it was saved before there were any, as learning-rate finders do."""
        masks, self._made = unpacked(state_dict["masks"]), state_dict["made"]
        self._resumed = state_dict["started"]
        self._to_score = self._around is not None and self._around[0].state.fn != "fit"
        if self._weights:  # in the middle of a fit
            masks = {name: mask.to(self._weights[name].device) for name, mask in masks.items()}
            self.hold(masks)
        else:
            self._masks = masks


def _leaves_zeros(optimizer: Any) -> bool:
    """Return whether a step leaves weights of 0 whose gradient and memory are 0; without eps some divide 0 by 0."""
    return type(optimizer) in _STILL and all(group.get("eps", 1) > 0 for group in optimizer.param_groups)


def _has_step_hooks(optimizer: Any) -> bool:
    """Return whether something may write weights within a step of the optimizer."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _touches_gradients(module: LightningModule, behind: Iterable[Callback]) -> bool:
    """Return whether the module, or a callback behind a masking one, may write gradients that are masked already."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    if not module.automatic_optimization or any(is_overridden(hook, module) for hook in hooks):
        return True
    others = (callback for callback in behind if not isinstance(callback, MaskingCallback))
    return any(type(other).on_before_optimizer_step is not Callback.on_before_optimizer_step for other in others)


def renamed(tensors: Mapping[str, Tensor], like: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors under the names of `like`, from which theirs may differ in what ``torch.compile`` adds.

    Example:
        >>> list(renamed({"net.weight": torch.ones(1)}, ["net._orig_mod.weight"]))
        ['net._orig_mod.weight']
    """
    names = {plain_name(name): name for name in like}
    return {names.get(plain_name(name), name): tensor for name, tensor in tensors.items()}


def packed(masks: Masks) -> dict[str, tuple[Tensor, list[int]]]:
    """Return masks as a checkpoint has them: one bit a weight, with the shape.

    Example:
        >>> packed({"w": torch.tensor([True, False, True])})
        {'w': (tensor([5], dtype=torch.uint8), [3])}
    """
    return {name: (pack(mask).cpu(), list(mask.shape)) for name, mask in masks.items()}


def unpacked(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the masks that :func:`packed` packed.

    Example:
        >>> unpacked(packed({"w": torch.tensor([True, False, True])}))
        {'w': tensor([ True, False,  True])}
    """
    return {name: unpack(bits, tuple(shape)) for name, (bits, shape) in state.items()}


def _copies(trainer: Any, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the named parameters of all copies of a module that callbacks keep as attributes."""
    for callback in trainer.callbacks:
        for kept in vars(callback).values():
            copy = kept.module if isinstance(kept, AveragedModel) else kept
            if copy is not module and isinstance(copy, type(module)):
                yield from copy.named_parameters()


def _shared(one: MaskingCallback, other: MaskingCallback, layer: str) -> str:
    kinds = [f"`{type(callback).__name__}`" for callback in (one, other)]
    claim = f"Two {kinds[0]} claim" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]} both claim"
    given = one._given is not None or other._given is not None
    hint = " (a federated algorithm with masks of its own, such as FedSpa, brings a `StaticMask`)" if given else ""
    return f"{claim} `{layer}`; keep one of them{hint}, or give them `layers` that do not overlap."
