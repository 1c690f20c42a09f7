"""Training of the first blocks of a model with early exits.

Kim, Yu, Kim, Moon, "DepthFL: Depthwise federated learning for heterogeneous clients", ICLR 2023, section 3, and Ilhan,
Su, Liu, "ScaleFL: Resource-adaptive federated learning with heterogeneous clients", CVPR 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.loss_scaling import loss_scale
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.exits import blocks_of, mutual_slopes, teaching_slopes
from lightning_sparsefl.sparse.parametrized import owner

_AFTER_LOGITS = tuple(f"torch.nn.modules.{kind}" for kind in ("activation", "batchnorm", "normalization"))
"""Modules of layers whose outputs are not scaled when the linear layer before them is."""


def require_exits(module: nn.Module, owner: str) -> None:
    """Refuse a module without early exits.

    Args:
        module: Module of the user.
        owner: Name of what needs exits, for the message.

    Raises:
        InvalidOption: If the module has no `exits` and `depth`, `exits` names a module that it does not have or an exit
            twice, a block but the last ends with a module without parameters, or an exit does not end with its linear
            layer.
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
    if len(set(exits.values())) < len(exits):
        raise InvalidOption(
            f"`{type(module).__name__}.exits` is {exits!r}; expected an exit of its own for each block."
        )
    for block in list(exits)[:-1]:  # whatever is created after the last one is its own
        if next(names[block].parameters(), None) is None:
            raise InvalidOption(
                f"`{type(module).__name__}.exits` names `{block}` as the last module of a block, but it has no "
                "parameters; name the last one that has some."
            )
    for name in exits.values():
        last = _last_layer(names[name])
        if type(last).__module__.startswith(_AFTER_LOGITS):
            raise InvalidOption(
                f"The exit `{name}` of `{type(module).__name__}` ends with {type(last).__name__}; expected its linear "
                "layer last, which is scaled to choose the exits that predict."
            )


def _last_layer(layer: nn.Module) -> nn.Module:
    """Return the last layer of nested sequences."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[-1]
    return layer


def deeper_layers(module: nn.Module, depth: int) -> list[str]:
    """Return the names of the layers with parameters of blocks that a network does not have.

    Args:
        module: Module of the user, with early exits.
        depth: Number of blocks of the network.
    """
    exits: Any = module.exits
    blocks = blocks_of([name for name, _ in module.named_parameters()], exits)
    return list(dict.fromkeys(owner(name) for name, block in blocks.items() if block >= depth and owner(name)))


def refusal_of(name: str, depth: int) -> Callable[..., NoReturn]:
    """Return a hook before a layer that refuses a module whose first blocks compute with a layer of a later one.

    Args:
        name: Name of the layer.
        depth: Number of blocks of the network.
    """

    def refuse(*_: Any) -> NoReturn:
        raise InvalidOption(
            f"`{name}` runs in the network of the first {'block' if depth == 1 else f'{depth} blocks'}, but belongs to "
            "a later one, since it is created after the last module of the block that `exits` names; create it before, "
            "or within that block or its exit."
        )

    return refuse


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
        for name in deeper_layers(pl_module, self.depth):
            layer = pl_module.get_submodule(name)
            self._handles.append(layer.register_forward_pre_hook(refusal_of(name, self.depth)))

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
