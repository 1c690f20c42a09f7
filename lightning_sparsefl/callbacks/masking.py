"""What the callbacks that mask weights have in common; each of them says which masks, and when they change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_sparsefl.callbacks.layers import choose
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

_unattached = itertools.count()


class MaskingCallback(Callback):
    """Holds masks over layers that are its own: gradients are masked before clipping and the step, weights after it.

    Masking only the weights would be wrong with momentum and weight decay, whose buffers would keep moving. Copies of
    the module that other callbacks keep, such as the averages of Lightning's `WeightAveraging`, are masked with it, in
    whichever order the callbacks stand: a mean of weights under moving masks has more non-zeros than any of them.

    Where the optimizers are such that a weight stays 0 by itself, and nobody gets at gradients after they are masked,
    the weights are only masked if somebody else has written them, which their version counters tell. Those miss writes
    through ``weight.data``, for which the weights are masked at the end of every epoch too.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Named bool tensors to start from, which say by themselves which layers; None = `first_masks`.
    """

    def __init__(self, layers: list[str] | str | None = None, masks: Masks | None = None) -> None:
        self.layers = layers
        self.masks: dict[str, Tensor] = dict(masks or {})
        self._given: tuple[str, ...] | None = None if masks is None else tuple(masks)
        self._made = masks is not None
        self._key: str | None = None
        self._weights: dict[str, Tensor] = {}
        self._stencils: dict[str, InPlaceMask] = {}
        self._around: tuple[Any, LightningModule] | None = None
        self._copies: list[tuple[str, Tensor]] | None = None
        self._still = False
        self._versions: list[int] = []
        self._hooks: list[Any] = []

    def first_masks(self, weights: Weights) -> Masks:
        """The masks that the first fit starts with."""
        return dense_like(weights)

    def started(self) -> None:
        """Called when a fit starts, before the masks are applied."""

    def claims(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the parameters that this callback masks, and no other may."""
        return tuple(self.masks) if self._made else choose(module, self.layers, type(self).__name__)

    @property
    def state_key(self) -> str:
        """The class, with what tells it from others of the class where there are such.

        Before `setup` each reading differs: the Trainer refuses callbacks of one key when it is built, in words that
        name no layer, and `setup` can say which layer and what to do.
        """
        return f"{type(self).__qualname__} {next(_unattached)}" if self._key is None else self._key

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """See that no other callback masks the same weights."""
        alone = sum(type(other) is type(self) for other in trainer.callbacks) == 1
        options = {"layers": self.layers, "masks": self._given}
        self._key = type(self).__qualname__ if alone else self._generate_state_key(**options)
        self._around, self._copies = (trainer, pl_module), None
        if stage == "fit" and not is_overridden("configure_model", pl_module):  # which makes the layers later
            self._check(trainer, pl_module)

    def _check(self, trainer: Any, module: nn.Module) -> None:
        names = (name for name, _ in module.named_parameters())
        wrapped = next((name for name in names if "_orig_mod" in name.split(".")), None)
        if wrapped is not None:
            raise InvalidOption(
                f"`{type(self).__name__}`: `torch.compile` has renamed a layer to `{wrapped}`; compile the layer in "
                "place with `layer.compile()`, or the whole module with `trainer.fit(torch.compile(module))`."
            )
        others = [callback for callback in trainer.callbacks if isinstance(callback, MaskingCallback)]
        if self in others:
            others.remove(self)
        mine = self.claims(module)
        for other in others:
            both = set(mine).intersection(other.claims(module))
            if both:
                raise InvalidOption(_shared(self, other, next(name for name in mine if name in both)))

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the masks if there are none yet, and apply them."""
        parameters = dict(pl_module.named_parameters())
        if not self._made:
            self.masks = dict(self.first_masks({name: parameters[name] for name in self.claims(pl_module)}))
            self._made = True
        check(self.masks, parameters)
        self._check(trainer, pl_module)
        self._weights = {name: parameters[name] for name in self.masks}
        self.masks = {name: mask.to(self._weights[name].device) for name, mask in self.masks.items()}
        self.started()
        self.hold(self.masks)

    def adopt(self, masks: Masks) -> None:
        """Go over to other masks of the same layers, or of some of them, and leave the weights as they are."""
        for name, mask in masks.items():
            self.masks[name], self._stencils[name] = mask, InPlaceMask(mask, self._weights[name].dtype)
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
        """Remember the weights as they are, all that are not held at 0."""
        self._versions = [weight._version for weight in self._weights.values()]

    def _written(self) -> bool:
        """Whether somebody has written weights since."""
        return self._versions != [weight._version for weight in self._weights.values()]

    def mask_copies(self) -> None:
        """Zero what is not held in copies of the module too."""
        if self._copies is None:  # all callbacks are set up by now
            self._copies = [] if self._around is None else list(_copies(*self._around))
        for name, copy in self._copies:
            if name in self.masks:
                InPlaceMask(self.masks[name].to(copy.device), copy.dtype).zero_(copy)

    @torch.no_grad()
    def forget(self, optimizers: Iterable[Any], names: Iterable[str]) -> None:
        """Zero what optimizers remember of weights that are not held: momentum, Adam's moments."""
        for name in names:
            weight = self._weights[name]
            for optimizer in optimizers:
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape:
                        InPlaceMask(self.masks[name], value.dtype).zero_(value)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Forget what a restored optimizer has of weights that are not held, and see whether they stay 0 from here."""
        self.forget(trainer.optimizers, self.masks)
        behind = trainer.callbacks[trainer.callbacks.index(self) + 1 :] if self in trainer.callbacks else ()
        self._still = all(map(_leaves_zeros, trainer.optimizers)) and not _touches_gradients(pl_module, behind)
        if self._still:  # a step of theirs is no write of somebody else
            self._hooks = [o.register_step_post_hook(lambda *_: self._look()) for o in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Mask the gradients, and weights that somebody has written since the last step."""
        if self._still and self._written():
            self.mask_weights()
        for name, weight in self._weights.items():
            if weight.grad is not None:
                self._stencils[name].zero_(weight.grad)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, unless they are masked."""
        if not self._still or self._written():
            self.mask_weights()
        self.mask_copies()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask the weights, whoever has written them."""
        self.mask_weights()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Mask what a callback may have put into the module to be validated."""
        if batch_idx == 0:
            self.mask_weights()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mask what a callback may have put into the module at the end."""
        self.mask_weights()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Let go of the module; the masks stay."""
        self.release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Also where the run failed, since Lightning calls no teardown then."""
        self.release()

    def release(self) -> None:
        """Let go of the module's tensors."""
        self._weights, self._stencils, self._copies, self._around = {}, {}, None, None
        for hook in self._hooks:
            hook.remove()
        self._still, self._hooks = False, []

    def state_dict(self) -> dict[str, Any]:
        """The masks, one bit a weight."""
        return {"masks": packed(self.masks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold the masks of a checkpoint."""
        self.masks, self._made = unpacked(state_dict["masks"]), True


def _leaves_zeros(optimizer: Any) -> bool:
    """Whether a step leaves weights of 0 alone whose gradient and memory are 0; without eps some divide 0 by 0."""
    return type(optimizer) in _STILL and all(group.get("eps", 1) > 0 for group in optimizer.param_groups)


def _touches_gradients(module: LightningModule, behind: Iterable[Callback]) -> bool:
    """Whether the module, or a callback behind a masking one, may write gradients that are masked already."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    if not module.automatic_optimization or any(is_overridden(hook, module) for hook in hooks):
        return True
    others = (callback for callback in behind if not isinstance(callback, MaskingCallback))
    return any(type(other).on_before_optimizer_step is not Callback.on_before_optimizer_step for other in others)


def packed(masks: Masks) -> dict[str, tuple[Tensor, list[int]]]:
    """Masks as a checkpoint has them: one bit a weight, with the shape.

    Example:
        >>> packed({"w": torch.tensor([True, False, True])})
        {'w': (tensor([5], dtype=torch.uint8), [3])}
    """
    return {name: (pack(mask).cpu(), list(mask.shape)) for name, mask in masks.items()}


def unpacked(state: dict[str, Any]) -> dict[str, Tensor]:
    """The masks that :func:`packed` packed.

    Example:
        >>> unpacked(packed({"w": torch.tensor([True, False, True])}))
        {'w': tensor([ True, False,  True])}
    """
    return {name: unpack(bits, tuple(shape)) for name, (bits, shape) in state.items()}


def _copies(trainer: Any, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """The named parameters of all copies of a module that callbacks keep as attributes."""
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
