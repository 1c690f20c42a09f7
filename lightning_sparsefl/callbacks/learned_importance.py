"""Training of a part of the units, and of the choice which ones.

Xue et al., "Learnable Sparse Customization in Heterogeneous Edge Computing" (FedLPS), arXiv:2412.07216, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.layers import choose, require_maskable, require_units
from lightning_sparsefl.callbacks.loss_scaling import require_unscaled_gradients
from lightning_sparsefl.callbacks.mask_owner import packed, unpacked
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import check_arguments, require, require_density
from lightning_sparsefl.callbacks.training_units import units_in_training
from lightning_sparsefl.callbacks.trial import trial, trial_loss
from lightning_sparsefl.callbacks.unit_scores import ScoreSteps
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.importance import Reduction, gate_gradients, relative
from lightning_sparsefl.sparse.units import UnitGroup, keep_units, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.sparse.width import blind_ranking
from lightning_sparsefl.types import Masks, Weights

Pattern = Literal["learned", "magnitude", "ordered", "random", "rolling"]
"""Units that are kept: those of the best learned score, those of the largest weights, the first ones, drawn ones, or a
window that moves on with every turn."""


class LearnedImportance(MaskingCallback):
    """Trains the units (channels, neurons, hidden states) that matter most, by scores that are trained with them.

    A unit that is dropped loses its outgoing row, its bias and norm, and the incoming slices of its readers; the
    module holds ``w * m`` wherever it is looked at. The values of the dropped weights are here and do not change, no
    gradient and no decay reaches them, and they are back when their unit is. Each layer keeps the same share of its
    units, those with the largest score Q; layers whose outputs the network returns stay whole.

    Each step, ``Q <- Q - lr * (dL/dQ + strength * d/dQ ||Q - sigmoid(|w|_J / layer mean)||^2)``, where Q is taken as a
    gate on the unit's output h, with a straight-through gradient: ``dL/dQ = sum of h * dL/dh``. A dropped unit has no
    output, so with `probe` the first batch of a fit passes once more, in training mode, with all units. The last term
    also moves the kept weights.

    A second `fit` goes on with the scores and the dropped values of the first one.

    Args:
        density: Fraction of each layer's units to keep, in (0, 1]; halves are rounded up, and one unit stays.
        pattern: Ranking of the units; only "learned" trains scores.
        lr: Learning rate of the scores.
        strength: How strongly scores are tied to magnitudes (the paper's lambda).
        reduction: Whether that term is the sum over all units, or the mean over each layer's units, summed over layers.
        refresh: Moment at which the units are chosen again: before every optimizer step, or once a fit.
        probe: Whether dropped units get a gradient at the start of a fit.
        seed: Seed of the pattern "random".
        turn: Number of draws of "random", and units that "rolling" has moved on, before this fit.
        layers: Patterns of names and types of the layers whose units are chosen from, such as ``"!*stem*"``; None =
            all of them.
        scores: Q to start from, by group of units; None = ``sigmoid(|w|_J / layer mean)``.
        groups: The module's groups of units, if they are known; None = they are found in the first training step.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, or the module optimizes manually.
        IncompatibleMasks: If `scores` do not fit the module.

    Example:
        >>> LearnedImportance(density=0.25, refresh="round").pattern
        'learned'
    """

    writes_values = True
    masks_each_batch = True

    @check_arguments
    def __init__(
        self,
        density: float = 0.5,
        pattern: Pattern = "learned",
        lr: float = 0.1,
        strength: float = 1.0,
        reduction: Reduction = "sum",
        refresh: Literal["step", "round"] = "step",
        probe: bool = True,
        seed: int = 0,
        turn: int = 0,
        layers: list[str] | str | None = None,
        scores: Weights | None = None,
        groups: Sequence[UnitGroup] | None = None,
    ) -> None:
        name = "LearnedImportance"
        require_density(name, density)
        require(pattern in get_args(Pattern), name, "pattern", pattern, f"one of {', '.join(get_args(Pattern))}")
        require(lr >= 0, name, "lr", lr, "a number >= 0")
        require(strength >= 0, name, "strength", strength, "a number >= 0")
        require(reduction in get_args(Reduction), name, "reduction", reduction, "'sum' or 'mean'")
        require(refresh in ("step", "round"), name, "refresh", refresh, "'step' or 'round'")
        super().__init__(layers)
        self.density, self.pattern, self.lr, self.strength = density, pattern, lr, strength
        self.reduction, self.refresh, self.probe, self.seed, self.turn = reduction, refresh, probe, seed, turn
        self.steps = ScoreSteps(scores or {}, lr, strength, reduction)
        self._kept: dict[str, Tensor] = {}
        self.groups: tuple[UnitGroup, ...] = ()
        self.given_groups = groups
        self._aside: dict[str, Tensor] = {}
        self._of_norms: Weights = {}
        self._stepped = False

    @property
    def stackable(self) -> bool:
        """Whether no pass of its own is needed, to find units or to probe them."""
        return self.given_groups is not None and not (self.probe and self.pattern == "learned")

    @property
    def scores(self) -> Weights:
        """Q of each group; empty before the first fit, and with patterns that train none."""
        self.collect()
        return self.steps.scores

    @property
    def kept(self) -> dict[str, Tensor]:
        """The chosen units of each group, as a bool tensor; empty before the first batch of the first fit."""
        self.collect()
        return self._kept

    @kept.setter
    def kept(self, kept: dict[str, Tensor]) -> None:
        self._kept = kept

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Hold the masks of a checkpoint or of an earlier fit; new ones wait for the first batch."""
        if not pl_module.automatic_optimization:
            raise InvalidOption(
                f"`LearnedImportance` does not support `{type(pl_module).__name__}`, which optimizes manually; "
                "expected `automatic_optimization = True`."
            )
        if self.pattern == "learned":
            require_unscaled_gradients(trainer, "LearnedImportance")
        super().on_fit_start(trainer, pl_module)

    def begin(self, trainer: Any, module: LightningModule) -> None:
        """Hold masks that have been made; see :meth:`MaskingCallback.begin`."""
        if self._made:
            super().begin(trainer, module)
        else:
            self._check(trainer, module)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Choose the units: at the start, and after every step if they may change."""
        if not self.groups:
            self._begin(trainer, pl_module, batch, batch_idx)
        elif self._stepped and self.refresh == "step":
            self._choose(trainer.optimizers)
        self._stepped = False
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _begin(self, trainer: Any, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find the units, and choose from them; a fit that was resumed has its choice."""
        self.groups = tuple(self.given_groups or self._found(module, batch, batch_idx))
        parameters = dict(module.named_parameters())
        everything = {group.name: torch.ones(group.size, dtype=torch.bool) for group in self.groups}
        masks = unit_masks(self.groups, self.kept or everything, parameters)
        self._weights = {name: parameters[name] for name in masks}
        self._aside = {
            n: self._aside.get(n, torch.zeros_like(w)).to(w.device, w.dtype) for n, w in self._weights.items()
        }
        self._made = True
        self.adopt(masks)
        self._check(trainer, module)
        device = next(iter(self._weights.values())).device
        self.kept = {name: units.to(device) for name, units in self.kept.items()}
        if self.pattern == "learned":
            self.steps.scores = self.steps.scores or relative(unit_norms(self.groups, self._dense()))
            check_scores(self.groups, self.scores)
            self._follow()
        if not self.resumed and self.pattern == "learned" and self.probe:
            self.kept = {}
            self._exchange({name: torch.ones_like(mask) for name, mask in masks.items()})
            self.steps.descend(self._probed(trainer, module, batch, batch_idx))
        if not self.resumed or (self._stepped and self.refresh == "step"):
            self._choose(trainer.optimizers)

    def _follow(self) -> None:
        self.steps.follow(self.groups, self._weights, unit_norms(self.groups, self._aside))

    def _found(self, module: LightningModule, batch: Any, batch_idx: int) -> list[UnitGroup]:
        """Return the groups of units that the training step trains and that `layers` choose."""
        chosen_layers = choose(module, self.layers, "LearnedImportance")
        require_maskable(module, chosen_layers, "LearnedImportance")
        rows = set(chosen_layers)
        groups = units_in_training(module, batch, batch_idx)
        untied = ", and whose weights are neither tied to others nor used twice"
        require_units(groups, module, "LearnedImportance", "linear, convolutional or recurrent", untied)
        chosen = [group for group in groups if _rows(group, module) <= rows]
        if not chosen:
            names = ", ".join(f"`{group.name}`" for group in groups)
            raise InvalidOption(
                f"`LearnedImportance(layers={self.layers!r})` leaves no units to choose from; expected patterns that "
                f"leave some of {names}."
            )
        return chosen

    def _probed(self, trainer: Any, module: LightningModule, batch: Any, batch_idx: int) -> Weights:
        """Return the gradient of the scores with all units in the module."""
        read = {slot.name for group in self.groups for slot in group.slots if slot.role == "in"}
        weights = {name: w for name, w in self._weights.items() if name in read and w.requires_grad}
        with trial(module), torch.enable_grad():
            with trainer.precision_plugin.forward_context():
                loss = trial_loss(module, batch, batch_idx)
            # before the buffers are restored, which a norm has saved for its backward pass
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        slopes = {name: slope for name, slope in zip(weights, found, strict=True) if slope is not None}
        task = gate_gradients(self.groups, {n: w.detach() for n, w in weights.items()}, slopes)
        return {name: trainer.strategy.reduce(gradient) for name, gradient in task.items()}  # alike on all processes

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take the scores' gradient."""
        if self.pattern == "learned":
            self.steps.look(trainer)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Step the scores, add the gradient that ties the weights to them, and mask all gradients."""
        if self.pattern == "learned":
            self._of_norms = self._of_norms if self._stepped else self.steps.step()
            self.steps.pull(optimizer, self._of_norms)
        self._stepped = True
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def _choose(self, optimizers: Sequence[Any]) -> None:
        """Keep the units that rank highest."""
        kept = keep_units(self._ranking(), unit_counts(self.groups, self.density))
        if not self.kept or any(not torch.equal(units, self.kept[name]) for name, units in kept.items()):
            self.kept = kept
            masks = unit_masks(self.groups, kept, self._weights)
            self._exchange(masks)
            self.forget(optimizers, masks)

    def _ranking(self) -> Weights:
        if self.pattern == "learned":
            return self.scores
        if self.pattern == "magnitude":
            return unit_norms(self.groups, self._dense())
        device = next(iter(self._weights.values())).device
        ranking = blind_ranking(self.groups, self.pattern, self.seed, self.turn)
        return {name: order.to(device) for name, order in ranking.items()}

    def _dense(self) -> dict[str, Tensor]:
        """Return the weights without a mask."""
        dense = {name: weight.detach().clone() for name, weight in self._weights.items()}
        for name, weight in dense.items():
            self._stencils[name].zero_(weight)
            weight.add_(self._aside[name])
        return dense

    @torch.no_grad()
    def _exchange(self, masks: Masks) -> None:
        """Replace the masks; values that leave the module are kept here, and are restored when they return."""
        weights = self._dense()
        self.adopt(masks)
        for name in masks:
            self._aside[name] = torch.empty_like(weights[name])
            self._stencils[name].split_(weights[name], self._aside[name])
            self._weights[name].copy_(weights[name])
        self.mask_weights(masks)
        if self.pattern == "learned":
            self._follow()

    def take_over(self, scores: Weights, kept: Masks, masks: Masks, aside: Weights) -> None:
        """Take over the state with which a fit of several clients at once has ended.

        Args:
            scores: Q of each group.
            kept: The chosen units of each group.
            masks: Masks of the weights.
            aside: Values of the dropped weights.
        """
        self.steps.scores, self.kept, self.masks = dict(scores), dict(kept), dict(masks)
        self._aside, self._made, self._stepped = dict(aside), True, True

    def release(self) -> None:
        """Release the module."""
        super().release()
        self.groups, self._of_norms = (), {}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, the chosen units, the scores, and the values of the dropped weights."""
        own = {"scores": dict(self.scores), "kept": packed(self.kept), "aside": dict(self._aside)}
        return super().state_dict() | own | {"stepped": self._stepped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the choice, the scores and the dense weights of a checkpoint."""
        super().load_state_dict(state_dict)
        self.steps.scores, self._aside = dict(state_dict["scores"]), dict(state_dict["aside"])
        self._kept, self._stepped = unpacked(state_dict["kept"]), state_dict["stepped"]


def check_scores(groups: Sequence[UnitGroup], scores: Weights) -> None:
    """Check that scores fit groups of units.

    Args:
        groups: Groups of units.
        scores: Scores of each group.

    Raises:
        IncompatibleMasks: Naming the first group whose scores do not fit.
    """
    for group in groups:
        score = scores.get(group.name)
        if score is None or score.shape != (group.size,):
            has = "missing" if score is None else f"of shape {tuple(score.shape)}"
            raise IncompatibleMasks(f"The scores of `{group.name}` are {has}, expected {group.size} numbers.")


def _rows(group: UnitGroup, module: nn.Module) -> set[str]:
    """Return the layers, as `choose` names them, whose units the group holds."""
    producing = (slot.name for slot in group.slots if slot.role == "out")
    return {n for n in producing if n.rpartition(".")[0] in group.layers and module.get_parameter(n).dim() > 1}
