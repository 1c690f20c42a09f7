"""Logs of the sparsity of a module and of its changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn

from lightning_sparsefl.callbacks.example_input import example_inputs, for_module, forward_inputs, one_sample, shapes_of
from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.callbacks.mask_owner import packed, unpacked
from lightning_sparsefl.callbacks.numbered import NumberedCallback
from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.cost import count_layers, forward_flops
from lightning_sparsefl.sparse.masks import changed, counts
from lightning_sparsefl.sparse.parametrized import computed_weight
from lightning_sparsefl.types import LayerFlops, Masks

_messages = WarningCache()
_work: WeakKeyDictionary[nn.Module, tuple[tuple[torch.Size, ...], tuple[LayerFlops, ...]]] = WeakKeyDictionary()
"""Operations of modules, counted once: all clients of a federation train one module."""

_DENSITY, _LAYER = "density/all", "density/layer/"


class SparsityMonitor(NumberedCallback):
    """Logs densities at the end of epochs, counted in weights that are not zero, for whatever reason.

    Where a layer computes its weight from a parameter, as with a parametrization or with Lightning's `ModelPruning`,
    the computed weight is counted, under the name of the parameter.

    The keys are ``density/all`` (of all layers together), ``density/layer/<name>`` (of one), and
    ``mask/changed``: the fraction of positions that became zero, or ceased to be, since the last time, first since
    training started. A weight that a mask has let grow counts once it has left zero. The module is not changed.

    With `flops` also ``flops/forward``, the operations of one sample's forward pass where products with zeros are
    saved, and ``flops/forward_share``, its part of the dense module's. They are counted on the module's
    `example_input_array`, or else on the part of the first batch that its ``forward`` takes, one sample of it.

    With `pictures` each logger that takes images, such as TensorBoard's, gets ``mask/layers``, where the layers are
    zero, and ``density/per_layer``.

    Args:
        every_n_epochs: Epochs between two logs.
        per_layer: Whether each layer has a key of its own.
        flops: Whether to log FLOPs.
        pictures: Whether to draw masks and densities.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.

    Raises:
        InvalidOption: If `every_n_epochs` is below 1, or a pattern matches no layer.

    Example:
        >>> SparsityMonitor(layers=["*conv*"]).every_n_epochs
        1
    """

    @check_arguments
    def __init__(
        self,
        every_n_epochs: int = 1,
        per_layer: bool = True,
        flops: bool = True,
        pictures: bool = False,
        layers: list[str] | str | None = None,
    ) -> None:
        expected = "a whole number >= 1"
        require(every_n_epochs >= 1, "SparsityMonitor", "every_n_epochs", every_n_epochs, expected)
        self.every_n_epochs, self.per_layer, self.flops, self.pictures = every_n_epochs, per_layer, flops, pictures
        self.layers = layers
        self._seen: dict[str, Tensor] = {}
        self._resumed = False

    def key_options(self) -> dict[str, Any]:
        """Return the layers."""
        return {"layers": self.layers}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Record the positions of zeros, unless a checkpoint has some."""
        if not self._resumed:
            self._seen = self._nonzero(pl_module)
        self._resumed = False

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the operations of the module, once, and again if an epoch begins with other layers or inputs."""
        if not self.flops or (batch_idx > 0 and pl_module in _work):
            return
        try:
            sample, reason = _sample(pl_module, batch), ""
        except Exception as error:  # the batch may be anything
            sample, reason = (), type(error).__name__
        key = (*(parameter.shape for parameter in pl_module.parameters()), *shapes_of(sample))
        if pl_module not in _work or _work[pl_module][0] != key:
            _work[pl_module] = key, _counted(pl_module, sample, reason)

    def _nonzero(self, module: LightningModule) -> dict[str, Tensor]:
        names = choose(module, self.layers, "SparsityMonitor")
        return {name: computed_weight(module, name).detach() != 0 for name in names}

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log densities, changes and FLOPs."""
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            now = self._nonzero(pl_module)
            seen = {name: mask.to(now[name].device) for name, mask in self._seen.items() if name in now}
            densities = self._densities(now)
            shown = {key: value for key, value in densities.items() if self.per_layer or key == _DENSITY}
            values = shown | {"mask/changed": changed(now, seen)} | self._forward(trainer, pl_module, now)
            pl_module.log_dict(values, sync_dist=True, reduce_fx="max")  # the weights of all processes are equal
            self._seen = now
            if self.pictures and getattr(trainer, "is_global_zero", True):
                _draw(trainer, now, densities)

    def _densities(self, masks: Masks) -> dict[str, float]:
        kept, sizes = counts(masks), {name: mask.numel() for name, mask in masks.items()}
        layers = {f"{_LAYER}{name}": kept[name] / sizes[name] for name in kept if sizes[name]}
        return {_DENSITY: sum(kept.values()) / max(1, sum(sizes.values()))} | layers

    def _forward(self, trainer: Any, module: LightningModule, masks: Masks) -> dict[str, float]:
        layers = _work[module][1] if self.flops and module in _work else ()
        dense, now = forward_flops(layers), forward_flops(layers, masks)
        # each process counts on a sample of its own, and would wait for the values of one that could not
        counted = self.flops and trainer.strategy.reduce(torch.tensor(float(dense > 0), device=module.device)) == 1
        return {"flops/forward": now, "flops/forward_share": now / dense} if counted else {}

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Forget what was loaded for this run."""
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of zeros at the last log, one bit a weight."""
        return {"seen": packed(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the positions of the last log of a checkpoint."""
        self._seen = unpacked(state_dict["seen"])
        self._resumed = bool(self._seen)  # a learning-rate finder saves before there are any


def _sample(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Return one sample of the module's example, or else of a batch, as arguments of ``forward``."""
    example = example_inputs(module)
    inputs = one_sample(forward_inputs(module, batch) if example is None else example)
    return tuple(for_module(inputs, module))


def _counted(module: LightningModule, sample: tuple[Any, ...], reason: str) -> tuple[LayerFlops, ...]:
    """Return the operations of each layer; an empty tuple, with one message, where they cannot be counted."""
    try:
        if not reason:
            return count_layers(module, sample)
    except Exception as error:  # the user's `forward` may want anything
        reason = type(error).__name__
    clause = f"did not take its input ({reason}); define `example_input_array`, or set `flops=False`"
    if any(child._compiled_call_impl or hasattr(child, "_orig_mod") for child in module.modules()):
        clause = "has compiled layers, which cannot be traced; set `flops=False`"
    _messages.info(f"`SparsityMonitor` logs no FLOPs: `{type(module).__name__}.forward` {clause}.")
    return ()


def _draw(trainer: Any, masks: Masks, densities: Mapping[str, float]) -> None:
    boards = [logger for logger in trainer.loggers if hasattr(logger.experiment, "add_image")]
    if not boards:
        return
    from lightning_sparsefl.report import masks as report  # matplotlib is slow to import
    from lightning_sparsefl.report import pictures

    epoch = trainer.current_epoch
    layers = {key.removeprefix(_LAYER): value for key, value in densities.items() if key.startswith(_LAYER)}
    figures = {
        "mask/layers": report.mask_figure(masks, epoch),
        "density/per_layer": pictures.density_figure(layers, epoch, unit="epoch"),
    }
    for tag, figure in figures.items():
        image = pictures.pixels(figure)
        for board in boards:
            board.experiment.add_image(tag, image, trainer.global_step)
