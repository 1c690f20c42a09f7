"""Training of the first blocks of a model with early exits.

Kim, Yu, Kim, Moon, "DepthFL: Depthwise federated learning for heterogeneous clients", ICLR 2023, section 3, and Ilhan,
Su, Liu, "ScaleFL: Resource-adaptive federated learning with heterogeneous clients", CVPR 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.loss_scaling import loss_scale
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.exits import mutual_slopes, teaching_slopes


def require_exits(module: nn.Module, owner: str) -> None:
    """Refuse a module without early exits.

    Args:
        module: Module of the user.
        owner: Name of what needs exits, for the message.

    Raises:
        InvalidOption: If the module has no `exits` and `depth`, or `exits` names modules that it does not have.
    """
    exits, names = getattr(module, "exits", None), dict(module.named_modules())
    if not isinstance(exits, dict) or not exits or not isinstance(getattr(module, "depth", None), int):
        raise InvalidOption(
            f"{owner} trains models with early exits, but `{type(module).__name__}` has none; expected a module with "
            "`exits`, the name of each block's last module and of its exit, and `depth`, such as `ExitResNet18` "
            "(option `model`)."
        )
    for name in (*exits, *exits.values()):
        if name not in names:
            raise InvalidOption(
                f"`{type(module).__name__}.exits` names `{name}`, which is not a module; change `exits`."
            )


class EarlyExits(Callback):
    """Trains the first blocks with their exits, by the sum of the exits' losses, and by what exits teach each other.

    The module's `training_step` takes the mean of its exits' losses, whose gradient is multiplied by their number. The
    gradient of ``strength / (L - 1) sum over j != i of KL(softmax_j || softmax_i)``, j being constant, joins at the
    logits of each exit i.

    Args:
        depth: Number of blocks to train.
        strength: Strength of the mutual distillation, >= 0.

    Example:
        >>> EarlyExits(depth=2, strength=0.5).depth
        2
    """

    def __init__(self, depth: int, strength: float = 0.0) -> None:
        self.depth, self.strength = depth, strength
        self._forget()

    def _forget(self) -> None:
        self._handles: list[Any] = []
        self._logits: dict[int, Tensor] = {}
        self._before: tuple[Any, int] | None = None
        self._trainer: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Limit the module's depth, and register the hooks."""
        require_exits(pl_module, "`EarlyExits`")
        self._trainer, self._before = trainer, (pl_module, pl_module.depth)
        pl_module.depth = self.depth
        for place, name in enumerate(list(pl_module.exits.values())[: self.depth]):
            self._handles.append(pl_module.get_submodule(name).register_forward_hook(self._at(place)))

    def _at(self, place: int) -> Any:
        def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            if layer.training and output.requires_grad:
                self._logits[place] = output.detach()
                output.register_hook(lambda slope: self._slope(place, slope))

        return note

    def _slope(self, place: int, slope: Tensor) -> Tensor:
        """Return the gradient by the logits of an exit."""
        slope = slope * self.factor(place)
        if not self.distills:
            return slope
        scale = loss_scale(self._trainer) / self._trainer.accumulate_grad_batches
        own = self.slopes([self._logits[at].to(slope.dtype) for at in range(self.depth)])[place]
        added: Tensor = own * (scale * self.strength)
        return slope + added

    @property
    def distills(self) -> bool:
        """Whether exits learn from each other."""
        return bool(self.strength) and self.depth > 1

    def factor(self, place: int) -> float:
        """Return the factor of an exit's loss in the objective, whose mean over the exits the module takes.

        Args:
            place: Number of the exit, from 0.
        """
        return self.depth

    def slopes(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient by each exit's logits of what exits learn from each other, at a strength of 1.

        Args:
            logits: Logits of each exit, classes in the last dimension.
        """
        return mutual_slopes(logits)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks, and restore the depth."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks also where the run failed, since Lightning calls no teardown then."""
        self._release()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._before is not None:
            self._before[0].depth = self._before[1]
        self._forget()


class TaughtExits(EarlyExits):
    """Trains the first blocks with their exits, where deeper exits count more and the last one teaches the others.

    The objective of L exits is ``2 / (L (L + 1)) sum over j of j CE_j``, and the term of
    :func:`~lightning_sparsefl.sparse.exits.teaching_slopes` times `strength`.

    Args:
        depth: Number of blocks to train.
        strength: Strength of the distillation, >= 0.
        temperature: Temperature of the distilled probabilities, above 0.

    Example:
        >>> [TaughtExits(depth=2).factor(place) / 2 for place in range(2)]
        [0.3333333333333333, 0.6666666666666666]
    """

    def __init__(self, depth: int, strength: float = 0.0, temperature: float = 3.0) -> None:
        super().__init__(depth, strength)
        self.temperature = temperature

    def factor(self, place: int) -> float:
        """Return L times the weight of the exit's loss."""
        return 2 * (place + 1) / (self.depth + 1)

    def slopes(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of what the others learn from the last exit."""
        return teaching_slopes(logits, self.temperature)
