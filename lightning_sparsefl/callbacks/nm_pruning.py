"""Pruning to a pattern that hardware multiplies faster: N of every M consecutive weights.

Mishra et al., "Accelerating sparse deep neural networks", arXiv:2104.08378 (ASP), section 3: train dense, prune once
by magnitude, train on under the fixed mask. They repeat the whole training after pruning, with its learning rates;
here both parts share one fit, and `start=0` with a trained module is their recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.conv1d import inputs_come_first
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.nm import divides, is_nm, nm_masks
from lightning_sparsefl.sparse.scores import magnitude


class NMPruning(MaskingCallback):
    """Leaves, once, the `n` largest of every `m` consecutive weights of a layer's rows, and holds that mask.

    The weights of a linear layer then fit ``torch.sparse.to_sparse_semi_structured`` (2:4, on a GPU). Once pruned, a
    second `fit` keeps the mask.

    Args:
        n: Number of weights kept of a group, 1 to `m`.
        m: Length of a group.
        start: Share of the training before pruning, in [0, 1); 0 prunes a module that is trained already.
        dim: Dimension along which groups lie: None = along rows, all dimensions but the first, flattened, as PyTorch's
            kernels need them; 1 = along input channels, as TensorRT's convolutions do. Weights of transposed
            convolutions, and of the ``Conv1D`` of the package transformers, have inputs in dimension 0, along which
            their groups lie in any case, within each of the layer's own groups.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers. A layer whose rows cannot be cut into
            groups stays dense, unless a pattern chooses it.

    Raises:
        InvalidOption: If an option is out of its range, a pattern matches no layer or chooses one that cannot be cut
            into groups, another callback masks the same weights, or the length of the training is unknown.

    Example:
        >>> NMPruning(n=1, m=4).start
        0.0
    """

    stackable = True

    @check_arguments
    def __init__(
        self,
        n: int = 2,
        m: int = 4,
        start: float = 0.0,
        dim: int | None = None,
        layers: list[str] | str | None = None,
    ) -> None:
        require(m >= 1, "NMPruning", "m", m, "a whole number >= 1")
        require(1 <= n <= m, "NMPruning", "n", n, f"a whole number from 1 to m = {m}")
        require(0 <= start < 1, "NMPruning", "start", start, "a share of the training in [0, 1)")
        require(dim is None or dim >= 0, "NMPruning", "dim", dim, "None or the number of a dimension, from 0")
        super().__init__(layers)
        self.n, self.m, self.start, self.dim = n, m, start, dim
        self._clock = StepClock()
        self._pruned = False
        self._inputs_first: dict[str, int] = {}
        """Weights whose first dimension are inputs, with the number of inputs that an output reads."""

    def claims(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the layers that can be cut into groups."""
        names = super().claims(module)
        self._inputs_first = _inputs_first(module, names)
        if self._made:
            return names
        fitting = tuple(name for name in names if self._divides(name, module.get_parameter(name)))
        odd = next((name for name in names if name not in fitting), None)
        patterns = [self.layers] if isinstance(self.layers, str) else self.layers or []
        if odd is not None and any(not pattern.startswith("!") for pattern in patterns):
            shape = tuple(module.get_parameter(odd).shape)
            raise InvalidOption(
                f"`NMPruning(m={self.m})`: the rows of `{odd}`, of shape {shape}, cannot be cut into groups of "
                f"{self.m}; add '!{odd}' to `layers`, or choose another `m` or `dim`."
            )
        if not fitting:
            raise InvalidOption(
                f"`NMPruning(m={self.m})`: no layer has rows that can be cut into groups of {self.m}; choose another "
                "`m` or `dim`."
            )
        return fitting

    def _divides(self, name: str, weight: Tensor) -> bool:
        if name in self._inputs_first:
            return self._inputs_first[name] % self.m == 0
        return divides(weight.shape, self.m, self.dim)

    def _by_dim(self, tree: Mapping[str, Tensor]) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
        """Yield the dimensions along which groups lie, with the tensors of each."""
        for dim, first in ((self.dim, False), (0, True)):
            yield dim, {name: value for name, value in tree.items() if (name in self._inputs_first) == first}

    def _is_pruned(self) -> bool:
        return all(is_nm(masks, self.n, self.m, dim) for dim, masks in self._by_dim(self.masks))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Plan the pruning; prune now if it is at the start."""
        super().on_train_start(trainer, pl_module)
        self._clock.start(trainer, "NMPruning", self.resumed)
        self._pruned = self._is_pruned()
        self._prune()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mask the weights, and prune if it is time."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._clock.tick(trainer):
            self._prune()

    def _prune(self) -> None:
        if not self._pruned and self._clock.step >= floor_count(self.start, self._clock.total):
            parts = self._by_dim(magnitude(self._weights))
            masks = [nm_masks(scores, self.n, self.m, dim) for dim, scores in parts]
            self.hold({name: mask for part in masks for name, mask in part.items()})
            self._pruned = True

    def shortfall(self) -> str | None:
        """Return the step, if it is before the pruning."""
        at = f"at step {self._clock.step} of {self._clock.total}"
        return None if self._pruned else f"{at}, before it pruned at `start={self.start}`{self._clock.reason}"

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, one bit a weight, and the position in the training."""
        return super().state_dict() | {"clock": self._clock.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the masks of a checkpoint."""
        super().load_state_dict(state_dict)
        self._clock.load_state_dict(state_dict["clock"])
        if self._around is not None:
            self._inputs_first = _inputs_first(self._around[1], self._masks)
        self._pruned = self._is_pruned()


def _inputs_first(module: nn.Module, names: Collection[str]) -> dict[str, int]:
    """Return the weights whose first dimension are inputs, with the number of inputs that an output reads."""
    layers = {path: layer for path, layer in module.named_modules() if inputs_come_first(layer)}
    return {
        name: len(weight) // getattr(layer, "groups", 1)
        for path, layer in layers.items()
        for name, weight in layer.named_parameters(path)
        if name in names
    }
