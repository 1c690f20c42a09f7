"""Ownership of masks: the layers they belong to, their part of a checkpoint, and the fits they live through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn

from lightning_sparsefl.callbacks.holding import HoldingCallback
from lightning_sparsefl.callbacks.layers import choose, pattern_list, plain_name, require_maskable
from lightning_sparsefl.callbacks.spawned import ReturnedState, is_spawned
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.masks import check, dense_like, pack, unpack
from lightning_sparsefl.types import Masks, Weights

warning_cache = WarningCache()


class MaskOwner(HoldingCallback):
    """Owner of the masks of some layers, which no other callback may mask.

    Masks belong to the callback and not to a fit: a second fit starts with those of the first, a checkpoint has them
    under a key that names the layers, and a fit in spawned processes returns them.

    Args:
        layers: Patterns of names and types; see :func:`lightning_sparsefl.callbacks.layers.choose`.
        masks: Bool tensors by name to start from, which determine the layers; None = `first_masks`.
    """

    _of_a_fit: tuple[str, ...] = ("_weights", "_around", "_begun", "log", "log_dict")
    """Attributes that refer to the module, the trainer or the optimizers, which copies of a callback leave out."""
    writes_values = False
    """Whether the callback keeps values of weights, and writes them back later."""
    masks_each_batch = False
    """Whether the masks of a batch are others than those of the batch before."""
    grows_from_zero = False
    """Whether weights that the mask takes in start at 0."""

    def __init__(self, layers: list[str] | str | None = None, masks: Masks | None = None) -> None:
        self.layers = layers
        self._masks: dict[str, Tensor] = dict(masks or {})
        self._given: tuple[str, ...] | None = None if masks is None else tuple(masks)
        self._made = masks is not None
        self._drawn_by: dict[str, Any] | None = None
        self._started = self._resumed = False
        self._returned = ReturnedState()
        self._unhook()

    def _unhook(self) -> None:
        """Set the attributes of a fit to their values outside of one."""
        self._weights: dict[str, Tensor] = {}
        self._around: tuple[Any, LightningModule] | None = None
        self._to_score = self._begun = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the references to a fit that is under way."""
        return {name: value for name, value in vars(self).items() if name not in self._of_a_fit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in the state outside of a fit."""
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

    def held(self) -> Weights:
        """Return the masked weights of this fit."""
        return self._weights

    def collect(self) -> None:
        """Take over the state with which a fit in spawned processes (``ddp_spawn``, ``ddp_fork``) has ended."""
        returned = None if self._weights else self._returned.receive()
        if returned is not None:
            self._key = returned["key"]
            self.load_state_dict(returned["state"])
            self.release()

    @property
    def resumed(self) -> bool:
        """Whether the fit goes on from a checkpoint, whose state has been loaded; for :meth:`StepClock.start`."""
        return self._resumed

    def first_masks(self, weights: Weights) -> Masks:
        """Return the masks that the first fit starts with."""
        return dense_like(weights)

    def draw_options(self) -> dict[str, Any]:
        """Return the options by which the first masks are drawn, which those of a checkpoint replace; default: none."""
        return {}

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

    def key_options(self) -> dict[str, Any]:
        """Return the layers."""
        return {"layers": pattern_list(self.layers), "masks": self._given}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Check that no other callback masks the same weights."""
        self.collect()
        super().setup(trainer, pl_module, stage)
        self._around = (trainer, pl_module)
        if stage != "fit":
            return
        self._started = self._resumed = self._begun = False
        if trainer.strategy.restore_checkpoint_after_setup:
            raise InvalidOption(
                f"`{type(self).__name__}` cannot mask parameters that `{type(trainer.strategy).__name__}` splits over "
                "processes; expected a strategy that keeps them whole, such as `trainer.strategy: ddp`."
            )
        if not any(is_overridden(hook, pl_module) for hook in ("configure_model", "setup")):  # which make layers later
            self._check(trainer, pl_module)

    def _check(self, trainer: Any, module: nn.Module) -> None:
        others = [callback for callback in trainer.callbacks if isinstance(callback, MaskOwner)]
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
        if match is None and alone and len(free) == 1 and not any(free.values()):  # saved before there were masks
            match = next(iter(free))
        if match is not None:
            states[self.state_key] = states[match]
        elif any(names & mine for names in free.values()):
            raise InvalidOption(
                f"`{kind}(layers={self.layers!r})`: the checkpoint has masks of some of these layers by "
                f"{', '.join(free)}; expected the `layers` with which it was saved."
            )

    def _rename(self, parameters: Mapping[str, Tensor]) -> None:
        """Name tensors of earlier fits as the module names its parameters, which `torch.compile` may have changed."""
        self.masks = renamed(self.masks, parameters)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Release the module; the masks stay, also in the process that has launched this one."""
        short = self.shortfall() if self._to_score and self.masks else None
        if short is not None:
            warning_cache.warn(
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
        """Release the module's tensors."""
        self._unhook()
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, how they were drawn, and whether a fit has started with them."""
        masks, started = packed(self.masks), self._started or self._resumed
        return {"masks": masks, "made": self._made, "drawn_by": self._drawn_by, "started": started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks of a checkpoint, unless it was saved before there were any, as learning-rate finders do."""
        self._made, self._resumed = state_dict["made"], state_dict["started"]
        stage = None if self._around is None else self._around[0].state.fn
        self._to_score = stage not in (None, "fit")
        masks = unpacked(state_dict["masks"])
        drawn_by = state_dict.get("drawn_by")
        if self._made and stage == "fit":
            self._compare(masks, drawn_by or {})
        self._drawn_by = drawn_by
        self.restore(masks)

    def _compare(self, masks: Masks, drawn_by: dict[str, Any]) -> None:
        """Warn of options that ask for other masks than those of a checkpoint, which stay."""
        mine = self.draw_options()
        for name in mine:
            if drawn_by.get(name, mine[name]) != mine[name]:
                self._warn_of_saved(f"{name}={mine[name]!r}", f"the masks drawn with `{name}={drawn_by[name]!r}`")
        given = renamed(self._masks, masks) if self._given is not None and not self._started else {}
        if any(name in masks and not torch.equal(mask.cpu().bool(), masks[name]) for name, mask in given.items()):
            self._warn_of_saved("masks=...", "the other masks")

    def _warn_of_saved(self, option: str, saved: str) -> None:
        warning_cache.warn(
            f"`{type(self).__name__}({option})`: the fit goes on with {saved} that the checkpoint has; start a fit "
            "without `ckpt_path`, from the checkpoint's weights, for other masks."
        )

    def restore(self, masks: Masks) -> None:
        """Take over the masks of a checkpoint."""
        self._masks = dict(masks)


def renamed(tensors: Mapping[str, Tensor], like: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors under the names of `like`, from which theirs may differ in what ``torch.compile`` adds.

    Example:
        >>> import torch
        >>> list(renamed({"net.weight": torch.ones(1)}, ["net._orig_mod.weight"]))
        ['net._orig_mod.weight']
    """
    names = {plain_name(name): name for name in like}
    return {names.get(plain_name(name), name): tensor for name, tensor in tensors.items()}


def check_masks(owner: str, masks: Masks, weights: Weights, of_earlier_fit: bool = False) -> None:
    """Check that masks fit the weights they name, and name their owner where they do not.

    Args:
        owner: Class of the callback, with the option that has the masks.
        masks: Bool tensors by name.
        weights: Tensors of the module by name.
        of_earlier_fit: Whether the masks are those of an earlier fit or of a checkpoint.

    Raises:
        IncompatibleMasks: If one does not fit.

    Example:
        >>> import torch
        >>> check_masks("StaticMask", {"w": torch.tensor([True])}, {"w": torch.zeros(2)}, of_earlier_fit=True)
        Traceback (most recent call last):
        lightning_sparsefl.errors.IncompatibleMasks: `StaticMask`: The mask of `w` has shape (1,), expected (2,). It \
is that of an earlier fit or of a checkpoint; use a new callback for another module.
    """
    try:
        check(masks, weights)
    except IncompatibleMasks as error:
        earlier = "It is that of an earlier fit or of a checkpoint; use a new callback for another module."
        text = f"`{owner}`: {error}"
        raise IncompatibleMasks(f"{text} {earlier}" if of_earlier_fit else text) from None


def of_parameters(tensors: Weights, module: nn.Module, owner: str, option: str) -> dict[str, Tensor]:
    """Return tensors under the names of a module's parameters, in their order; those of buffers are left out.

    Args:
        tensors: Tensors by name, without or with what ``torch.compile`` adds.
        module: Module of the user.
        owner: Class of the callback, for the error message.
        option: Option of the callback that has the tensors.

    Raises:
        IncompatibleMasks: If a name is of no tensor of the module, or a shape differs.

    Example:
        >>> import torch
        >>> of_parameters({"0.weight": torch.ones(1)}, nn.Sequential(nn.Linear(2, 2)), "ProximalTerm", "anchor")
        Traceback (most recent call last):
        lightning_sparsefl.errors.IncompatibleMasks: `ProximalTerm`: `0.weight` in `anchor` has shape (1,), expected \
(2, 2).
    """
    parameters = dict(module.named_parameters())
    known = parameters.keys() | module.state_dict().keys()
    tensors = renamed(tensors, known)
    for name, value in tensors.items():
        if name not in known:
            raise IncompatibleMasks(f"`{owner}`: `{name}` in `{option}` is not a tensor of the module.")
        if name in parameters and parameters[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, expected {tuple(parameters[name].shape)}"
            raise IncompatibleMasks(f"`{owner}`: `{name}` in `{option}` has shape {shapes}.")
    return {name: tensors[name] for name in parameters if name in tensors}


def packed(masks: Masks) -> dict[str, tuple[Tensor, list[int]]]:
    """Return masks as a checkpoint has them: one bit a weight, with the shape.

    Example:
        >>> import torch
        >>> packed({"w": torch.tensor([True, False, True])})
        {'w': (tensor([5], dtype=torch.uint8), [3])}
    """
    return {name: (pack(mask).cpu(), list(mask.shape)) for name, mask in masks.items()}


def unpacked(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the masks that :func:`packed` packed.

    Example:
        >>> import torch
        >>> unpacked(packed({"w": torch.tensor([True, False, True])}))
        {'w': tensor([ True, False,  True])}
    """
    return {name: unpack(bits, tuple(shape)) for name, (bits, shape) in state.items()}


def _shared(one: MaskOwner, other: MaskOwner, layer: str) -> str:
    kinds = [f"`{type(callback).__name__}`" for callback in (one, other)]
    claim = f"Two {kinds[0]} claim" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]} both claim"
    given = one._given is not None or other._given is not None
    hint = " (a federated algorithm with masks of its own, such as FedSpa, brings a `StaticMask`)" if given else ""
    return f"{claim} `{layer}`; keep one of them{hint}, or give them `layers` that do not overlap."
