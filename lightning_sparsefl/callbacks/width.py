"""Training of a narrow network in place of a wide one: HeteroFL, arXiv:2010.01264, section 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import intersect
from lightning_sparsefl.sparse.parametrized import owner
from lightning_sparsefl.types import Masks, Message


class OutputHook(Callback):
    """Changes the outputs of some layers in training; in evaluation they are unchanged.

    Args:
        layers: Names of modules.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self.layers = tuple(layers)
        self._handles: list[Any] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Register the hooks."""
        if stage == "fit":
            self.register(pl_module)

    def register(self, module: nn.Module) -> None:
        """Register the hooks.

        Args:
            module: Module with the layers.
        """
        self._handles = [module.get_submodule(name).register_forward_hook(self._hook) for name in self.layers]

    def _hook(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        return self.changed(output) if layer.training and isinstance(output, Tensor) else output

    def changed(self, output: Tensor) -> Tensor:
        """Return the replacement of a layer's output."""
        raise NotImplementedError

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        self.release()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks also where the run failed, since Lightning calls no teardown then."""
        self.release()

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class OutputScaler(OutputHook):
    """Divides the outputs of layers by the width, since a sum over fewer inputs is smaller (HeteroFL's Scaler).

    Recurrent layers, whose outputs are bounded, are left alone.

    Args:
        layers: Names of modules.
        rate: Width of the network, in (0, 1].

    Raises:
        InvalidOption: If the weights are in a module with other layers, whose output is not that of the weights.
    """

    def __init__(self, layers: Iterable[str], rate: float) -> None:
        super().__init__(layers)
        self.rate = rate

    def register(self, module: nn.Module) -> None:
        """Register the hooks.

        Args:
            module: Module with the layers.
        """
        for name in self.layers:
            children = dict(module.get_submodule(name).named_children())
            if name == "" or children.keys() - {"parametrizations"}:
                raise InvalidOption(
                    f"`algorithm.scaler` scales the outputs of layers, but `{name or type(module).__name__}` has "
                    "weights with units beside other layers; expected weights in a layer of their own, or "
                    "`algorithm.scaler: false`."
                )
        super().register(module)

    def changed(self, output: Tensor) -> Tensor:
        """Return ``output / rate``."""
        return output / self.rate


class LabelMask(OutputHook):
    """Sets the logits of classes that a client does not have to 0 (HeteroFL's masked cross-entropy).

    Args:
        head: Names of the tensors of the layer that outputs the logits, ``(*, classes)``.
        client: Number of the client, whose classes the data module's `client_label_counts` gives.

    Raises:
        InvalidOption: If the data module has no counts of labels, or the head has too few outputs.
    """

    def __init__(self, head: Sequence[str], client: int) -> None:
        super().__init__([owner(head[0])])
        self.head, self.client = tuple(head), client
        self.classes: Tensor | None = None
        """Classes of the client as a bool tensor, ``(classes,)``; None before the fit."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Determine the client's classes."""
        if stage == "fit":
            self.find(trainer.datamodule, pl_module)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Follow the module, which a Trainer moves to its device after `setup`."""
        if self.classes is not None:
            self.classes = self.classes.to(pl_module.device)

    def find(self, data: Any, module: nn.Module) -> None:
        """Determine the client's classes.

        Args:
            data: Data module of the clients.
            module: Module with the head.
        """
        self.classes = self._own(data, module.get_submodule(self.layers[0]))

    def _own(self, data: Any, head: nn.Module) -> Tensor:
        if not hasattr(data, "client_label_counts"):
            raise InvalidOption(
                f"`label_mask` needs the labels of client {self.client}, but `{type(data).__name__}` has no "
                "`client_label_counts`; expected a data module that has it (option `data`)."
            )
        if isinstance(head, nn.Embedding | nn.EmbeddingBag):
            raise InvalidOption(
                f"`label_mask` needs the layer that outputs the logits, but `{self.layers[0]}` is an embedding; name "
                "another `head`, or set `label_mask` to false."
            )
        weight: Tensor = head.weight  # type: ignore[assignment]
        with torch.random.fork_rng(devices=[]):  # it may read the training loader, whose order is drawn
            counts: Tensor = data.client_label_counts(self.client).to(weight.device)
        if len(counts) > len(weight):
            raise InvalidOption(f"`{self.layers[0]}` puts out {len(weight)} logits, expected {len(counts)} classes.")
        own = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        own[: len(counts)] = counts > 0
        return own

    def changed(self, output: Tensor) -> Tensor:
        """Return the logits of the client's own classes, and zeros for the others."""
        return output if self.classes is None else output * self.classes


def votes_on_own_classes(message: Message, callbacks: Iterable[Callback]) -> Masks | None:
    """Return the votes of a client: what it trained, but of the head the rows of its own classes alone.

    Args:
        message: Message that the client received.
        callbacks: Callbacks of the fit; without a :class:`LabelMask` among them, all rows vote.

    Returns:
        Masks of the votes; None = all that the client holds and may change.
    """
    labels = next((callback for callback in callbacks if isinstance(callback, LabelMask)), None)
    if labels is None or labels.classes is None or bool(labels.classes.all()):
        return None
    own = {name: _rows(labels.classes, message.weights[name]) for name in labels.head}
    return intersect(intersect(message.trainable, message.masks), own)


def _rows(classes: Tensor, weight: Tensor) -> Tensor:
    """Return a mask of a tensor with one row per class."""
    return classes.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight)
