"""Repeated training, pruning and return to an early state.

Frankle and Carbin, "The lottery ticket hypothesis: finding sparse, trainable neural networks", ICLR 2019,
arXiv:1803.03635 (iterative pruning with resetting). Frankle et al., "Linear mode connectivity and the lottery ticket
hypothesis", ICML 2020, arXiv:1912.05671 (rewinding to an early step instead of the first).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.mask_owner import renamed
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import (
    check_arguments,
    require,
    require_density,
    require_one_each,
    spread,
    too_dense,
)
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.prune import shrink, shrink_globally
from lightning_sparsefl.sparse.scores import magnitude
from lightning_sparsefl.types import Masks


class LotteryRewind(MaskingCallback):
    """Finds a lottery ticket within one fit, and trains it.

    The fit is cut into cycles. Each but the last ends with a pruning by magnitude, and with a return to the step after
    `rewind` of the first cycle: all parameters and buffers of the module are again what they were there, under the new
    masks, and what the optimizers remember, such as momentum, is that of the start of the fit. The first cycle begins
    at step 0 and the others at that step, so all end at the same step of the cycle. After pruning number j of n =
    ``cycles - 1`` the density is ``d_0 * (d / d_0) ** (j / n)``, so that each drops the same fraction of what is left.

    Learning rates go back as well, with their schedulers: as in the papers, each cycle is a training of its own. Plan a
    scheduler for one cycle, ``callback.cycle_steps(trainer.estimated_stepping_batches)`` steps, and not for the whole
    fit, whose end it would never reach. The trainer's counters are not reset. The papers give each cycle the steps of a
    whole training; for that, fit ``cycles - (cycles - 1) * rewind`` times as long.

    Groups of parameters that have been added to an optimizer since, as by `BackboneFinetuning`, keep their options.

    A second `fit` starts from the density that the first one reached: after a whole one the masks stay, nothing is
    rewound, and a larger density is refused.

    Args:
        density: Fraction of the layers' weights that is left in the end, in (0, 1].
        cycles: Trainings, of which each but the last ends with a pruning; at least 2.
        rewind: Share of the first cycle after which the state is that to rewind to, in [0, 1); 0 is the first paper's
            return to the initial weights.
        scope: "global" ranks the weights of all layers together; "layer" keeps the same density in each layer,
            ``max(1, floor(density * weights))``.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer, another callback masks the same
            weights, a layer cannot reach its density, or the length of the training is unknown.

    Example:
        >>> LotteryRewind(density=0.1, cycles=3, rewind=0.2).cycle_ends(2600)
        [1000, 1800]
    """

    writes_values = True

    @check_arguments
    def __init__(
        self,
        density: float = 0.2,
        cycles: int = 4,
        rewind: float = 0.1,
        scope: Literal["layer", "global"] = "global",
        layers: list[str] | str | None = None,
    ) -> None:
        require_density("LotteryRewind", density)
        require(cycles >= 2, "LotteryRewind", "cycles", cycles, "a whole number >= 2")
        require(0 <= rewind < 1, "LotteryRewind", "rewind", rewind, "a share of the first cycle in [0, 1)")
        require(scope in ("layer", "global"), "LotteryRewind", "scope", scope, "'layer' or 'global'")
        super().__init__(layers)
        self.density, self.cycles, self.rewind, self.scope = density, cycles, rewind, scope
        self._clock = StepClock()
        self._done = 0
        self._initial: dict[str, int] = {}
        self._weights_then: dict[str, Tensor] = {}
        self._optimizers_then: list[dict[str, Any]] = []
        self._schedulers_then: list[tuple[str, dict[str, Any]]] = []

    def cycle_ends(self, total: int) -> list[int]:
        """Return the steps of a fit after which weights are pruned: the ends of all cycles but the last.

        Args:
            total: Number of steps of the fit.

        Example:
            >>> LotteryRewind(cycles=4, rewind=0.0).cycle_ends(100)
            [25, 50, 75]
        """
        later = 1 - self.rewind
        whole = 1 + (self.cycles - 1) * later
        return [max(1, floor_count((1 + cycle * later) / whole, total)) for cycle in range(self.cycles - 1)]

    def cycle_steps(self, total: int) -> int:
        """Return the most steps that a learning-rate scheduler takes before it is rewound.

        Args:
            total: Number of steps of the fit.

        Example:
            >>> LotteryRewind(cycles=4, rewind=0.5).cycle_steps(100)
            40
        """
        ends = [*self.cycle_ends(total), total]
        later = max(end - start for start, end in itertools.pairwise(ends))
        return max(ends[0], floor_count(self.rewind, ends[0]) + later)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the cycles."""
        super().on_train_start(trainer, pl_module)
        self._clock.start(trainer, "LotteryRewind", self.resumed)
        if not self.resumed:
            self._weights_then, self._optimizers_then, self._schedulers_then = {}, [], []  # of a fit that was ended
            self._initial = counts(self.masks)
            self._done = 0 if self._drops() else self.cycles - 1
            if self._done == 0:
                self._optimizers_then = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]
        else:
            self._drops()
        self._keep_if_due(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights; keep the state, or prune and return to it, if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._clock.tick(trainer):
            return
        passed = sum(end <= self._clock.step for end in self.cycle_ends(self._clock.total))
        if passed > self._done:
            self._keep_if_due(trainer, pl_module)  # if an estimate of the fit's length has just become a shorter one
            self._done = passed
            self.adopt(self._pruned())
            self._return(trainer, pl_module)
        else:
            self._keep_if_due(trainer, pl_module)

    def _keep_if_due(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store the state to return to, once, unless nothing will return to it."""
        back = floor_count(self.rewind, self.cycle_ends(self._clock.total)[0])
        if self._done == 0 and not self._weights_then and self._clock.step >= back:
            self._keep(trainer, pl_module)

    def shortfall(self) -> str | None:
        """Return the density at which pruning stands, if it is above that which was asked for."""
        return too_dense(self.masks, sum(self._left(1.0)), self._clock)

    def _pruned(self) -> Masks:
        left, score = self._left(self._done / (self.cycles - 1)), magnitude(self._weights)
        if self.scope == "layer":
            return shrink(score, self.masks, dict(zip(self.masks, left, strict=True)))
        return shrink_globally(score, self.masks, left[0])

    def _left(self, progress: float) -> list[int]:
        """Return how many weights each layer, or all together, keep at a share of the prunings (geometric schedule)."""
        left = []
        for initial, size in self._pools().values():
            start = initial / max(1, size)
            share = self.density if progress == 1 else start ** (1 - progress) * self.density**progress
            left.append(min(size, max(1, floor_count(share, size))))
        return left

    def _pools(self) -> dict[str, tuple[int, int]]:
        """Return the weights that are ranked together: how many were held when the fit began, of how many."""
        sizes = {name: mask.numel() for name, mask in self.masks.items()}
        if self.scope == "global":
            return {"all layers": (sum(self._initial.values()), sum(sizes.values()))}
        return {name: (self._initial[name], size) for name, size in sizes.items()}

    def _drops(self) -> bool:
        """Return whether there is anything to prune."""
        if self.scope == "layer":
            spread("LotteryRewind", self._weights, self.density, "uniform")
        else:
            require_one_each("LotteryRewind", "density", self.density, self._left(1.0)[0], self._weights)
        pools = self._pools()
        for (name, (held, _)), count in zip(pools.items(), self._left(1.0), strict=True):
            if count > held:
                raise InvalidOption(
                    f"`LotteryRewind(density={self.density})`: `{name}` has {held} weights left, fewer than the "
                    f"{count} that it should end with, and what was dropped stays so; expected a lower density."
                )
        return self._left(1.0) != [held for held, _ in pools.values()]

    @torch.no_grad()
    def _keep(self, trainer: Any, pl_module: LightningModule) -> None:
        """Store the state to return to."""
        self._weights_then = {name: value.clone() for name, value in _tensors(pl_module).items()}
        for then, optimizer in zip(self._optimizers_then, trainer.optimizers, strict=True):
            then["param_groups"] = copy.deepcopy(optimizer.state_dict()["param_groups"])
        self._schedulers_then = [
            (type(config.scheduler).__name__, copy.deepcopy(config.scheduler.state_dict()))
            for config in trainer.lr_scheduler_configs
        ]

    @torch.no_grad()
    def _return(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restore the stored state under the present masks."""
        self._weights_then = renamed(self._weights_then, _tensors(pl_module))
        for name, value in _tensors(pl_module).items():
            kept = self._weights_then.get(name)
            if kept is not None and kept.shape == value.shape:  # a buffer may have been made or enlarged since
                value.copy_(kept)
        self.mask_weights()
        for then, optimizer in zip(self._optimizers_then, trainer.optimizers, strict=True):
            _rewind(optimizer, copy.deepcopy(then))
        self.forget(trainer.optimizers, self.masks)
        # weight averaging puts a scheduler of its own there in the course of a fit, which is not rewound
        for (kind, then), config in zip(self._schedulers_then, trainer.lr_scheduler_configs, strict=False):
            if type(config.scheduler).__name__ == kind:
                config.scheduler.load_state_dict(_extended(copy.deepcopy(then), config.scheduler.state_dict()))
        if self._done == self.cycles - 1:  # a state that nothing returns to would only make checkpoints larger
            self._weights_then, self._optimizers_then, self._schedulers_then = {}, [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, the cycle, and the state to return to while a return is due."""
        then = {"weights": self._weights_then, "optimizers": self._optimizers_then, "schedulers": self._schedulers_then}
        plan = {"clock": self._clock.state_dict(), "initial": dict(self._initial), "done": self._done}
        return super().state_dict() | plan | {"then": {kind: copy.copy(value) for kind, value in then.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks and the cycles of a checkpoint.

        Raises:
            InvalidOption: If the checkpoint has returned for the last time of fewer cycles, and kept no state since.
        """
        done = state_dict["done"]
        if 0 < done < self.cycles - 1 and not state_dict["then"]["weights"]:
            raise InvalidOption(
                f"`LotteryRewind(cycles={self.cycles})`: the checkpoint is of a fit of {done + 1} cycles that has "
                f"returned for the last time and keeps no state to return to; expected `cycles={done + 1}`."
            )
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        self._initial, self._done, then = dict(state_dict["initial"]), state_dict["done"], state_dict["then"]
        self._weights_then, self._optimizers_then = dict(then["weights"]), list(then["optimizers"])
        self._schedulers_then = list(then["schedulers"])


def _extended(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the stored state of a scheduler, with the present entries for groups that have been added since."""
    pairs = {name: (value, now.get(name)) for name, value in then.items() if isinstance(value, list)}
    longer = {n: [*old, *new[len(old) :]] for n, (old, new) in pairs.items() if isinstance(new, list)}
    return then | longer


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    """Return parameters and buffers, as a checkpoint names them, to be written to; also buffers that it leaves out."""
    saved = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {**{name: buffer.detach() for name, buffer in module.named_buffers()}, **saved}


def _rewind(optimizer: Any, then: dict[str, Any]) -> None:
    """Restore the stored state of an optimizer.

    Options that have been added to its groups since, such as a rate of SWA, stay; groups that have been added since
    keep their options, and their parameters have no state.
    """
    noted = [dict(group) for group in optimizer.param_groups]
    groups = then["param_groups"]
    added = optimizer.state_dict()["param_groups"][len(groups) :]  # such as those of an unfrozen backbone
    optimizer.load_state_dict({**then, "param_groups": groups + added})
    for group, notes in zip(optimizer.param_groups, noted, strict=True):
        group.update({name: value for name, value in notes.items() if name not in group})
