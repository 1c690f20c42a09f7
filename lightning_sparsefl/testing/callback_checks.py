"""Promises of a Lightning callback, checked in small fits; those of masks are asked of callbacks that have `masks`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from safetensors import safe_open
from torch import Tensor

from lightning_sparsefl.testing.contents import comparable, require_equal
from lightning_sparsefl.testing.promises import Difference, promise, require
from lightning_sparsefl.testing.small_fit import SmallFit, loader
from lightning_sparsefl.wire import export_sparse, load_sparse


@promise
def trains_in_a_client_as_in_a_trainer(callback: Callback, bench: SmallFit) -> None:
    """Check that weights, metrics and state are equal after a fit in a Trainer and in a client.

    The client loop calls the hooks that a Trainer calls, in the same order; see docs/limits.md for what it lacks.
    """
    ends = []
    for place in ("trainer", "client"):
        module, attached = bench.module(seed=1), bench.attach(callback)
        torch.manual_seed(5)
        if place == "trainer":
            trainer = bench.trainer(attached, num_sanity_val_steps=0)
            trainer.fit(module, loader(shuffle=True), loader())
            metrics: Mapping[str, Any] = trainer.callback_metrics
        else:
            metrics = bench.fit_in_a_client(module, attached, loader(shuffle=True))
        ends.append(_end(module, attached[0], {name: float(value) for name, value in metrics.items()}))
    in_trainer, in_client = ends
    require_equal(in_trainer, in_client, "fit", "between a Trainer and a client")


@promise
def is_the_same_after_a_resume(callback: Callback, bench: SmallFit) -> None:
    """Check that a fit that is killed and resumed, after an epoch or within one, ends as the one that was not.

    Whatever a callback remembers is in its ``state_dict``. Within an epoch all batches are the same, since a resumed
    loader of PyTorch starts anew.
    """
    each_epoch = {"filename": "{epoch}", "save_on_train_epoch_end": True, "save_top_k": -1}
    each_step = {"filename": "step", "every_n_train_steps": 1, "enable_version_counter": False}
    _require_resumable(callback, bench, "after an epoch", each_epoch, "epoch=1.ckpt", alike=False)
    _require_resumable(callback, bench, "within an epoch", each_step, "step.ckpt", alike=True)


def _require_resumable(
    callback: Callback, bench: SmallFit, place: str, saves: Mapping[str, Any], name: str, *, alike: bool
) -> None:
    """Raise :class:`Difference` unless a fit that is killed and resumed ends as the one that was not."""

    def run(folder: Path, seed: int, *more: Callback, **options: Any) -> Any:
        module, attached = bench.module(seed=seed), bench.attach(callback)
        trainer = bench.trainer([*attached, ModelCheckpoint(folder, **saves), *more])
        trainer.fit(module, loader(alike=alike), **options)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return _end(module, attached[0], metrics, trainer.optimizers[0].state_dict())

    straight, folder = run(bench.folder / place / "straight", 1), bench.folder / place / "killed"
    try:
        run(folder, 1, _Kill())
    except _Killed:
        pass
    else:
        raise Difference("training ended before its third epoch")
    resumed = run(folder, 9, ckpt_path=folder / name, weights_only=True)
    require_equal(straight, resumed, "fit", f"between a fit and the same one killed and resumed {place}")


class _Killed(Exception):
    """End of a run that is to be resumed."""


class _Kill(Callback):
    """Ends a run in the middle of its third epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 2 and batch_idx == 3:
            raise _Killed


@promise
def saves_an_ordinary_checkpoint(callback: Callback, bench: SmallFit) -> None:
    """Check that a checkpoint loads into the module without the callback, and that the module is left as it was."""
    module = bench.module(seed=1)
    names, keys = [name for name, _ in module.named_parameters()], list(module.state_dict())
    trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    trainer = bench.fit(module, bench.attach(callback))
    trainer.save_checkpoint(bench.folder / "ordinary.ckpt")
    require([name for name, _ in module.named_parameters()] == names, "the parameters have other names after the fit")
    for name, parameter in module.named_parameters():
        as_before = parameter.requires_grad == trains[name] and parameter.is_leaf
        require(as_before, f"`{name}` is {'not ' if trains[name] else ''}trainable after the fit, and was not before")
    content = torch.load(bench.folder / "ordinary.ckpt", weights_only=True)
    require(list(content["state_dict"]) == keys, "the checkpoint has other names than the module")
    bare = bench.module(seed=7)
    bare.load_state_dict(content["state_dict"], strict=True)
    require_equal(_weights(module), _weights(bare), "weights", "between the module and its checkpoint")
    for name, layer in module.named_modules():
        before, after, path = _added(bare.get_submodule(name)), _added(layer), name or type(module).__name__
        require(after == before, f"`{path}` has {after} after the fit, and had {before} before")


@promise
def fits_several_times(callback: Callback, bench: SmallFit) -> None:
    """Check that a module trains on in a second fit with the same callback, which keeps its masks."""
    module, attached = bench.module(seed=1), bench.attach(callback)
    for fit in ("first", "second"):
        bench.fit(module, attached)
        _require_masked(dict(module.named_parameters()), attached[0], f"after the {fit} fit")
        for name, value in module.state_dict().items():
            require(not value.is_floating_point() or bool(value.isfinite().all()), f"`{name}` is not finite")


# ---- of callbacks with masks


@promise
def holds_its_masks(callback: Callback, bench: SmallFit) -> None:
    """Check that weights without a place in `masks` are zero after every batch.

    A gradient of zero is not enough: momentum and weight decay move weights too.
    """
    module, attached = bench.module(seed=1), bench.attach(callback)
    watch = _Watch(attached[0], "after a batch")
    bench.fit(module, [*attached, watch])
    require(watch.seen > 0, "it has no masks during the fit")


@promise
def keeps_masks_in_every_verb(callback: Callback, bench: SmallFit) -> None:
    """Check that validation, test and prediction leave the weights as they are, from memory and from a checkpoint."""
    module, attached = bench.module(seed=1), bench.attach(callback)
    trainer = bench.fit(module, attached)
    trainer.save_checkpoint(bench.folder / "verbs.ckpt")
    weights = _weights(module)
    zeros = sum(int((module.get_parameter(name) == 0).sum()) for name in masks_of(attached[0]))
    require(zeros > 0, "no weight is zero after the fit")
    for verb, quiet in (("validate", {"verbose": False}), ("test", {"verbose": False}), ("predict", {})):
        getattr(trainer, verb)(module, loader(), **quiet)
        require_equal(weights, _weights(module), "weights", f"before and after `{verb}`")
        again, options = bench.module(seed=3), {"ckpt_path": bench.folder / "verbs.ckpt", "weights_only": True, **quiet}
        getattr(bench.trainer(bench.attach(callback)), verb)(again, loader(), **options)
        require_equal(weights, _weights(again), "weights", f"between a fit and `{verb}` of its checkpoint")


@promise
def holds_masks_under_averaging(callback: Callback, bench: SmallFit) -> None:
    """Check that averages of weights, as of Lightning's `EMAWeightAveraging`, are masked where they are scored.

    A mean of weights under masks that move has more weights than any of them.
    """
    for first in ("the callback", "the average"):
        module, attached = bench.module(seed=1), bench.attach(callback)
        watch = _Watch(attached[0], f"in validation, where {first} stands first")
        average = EMAWeightAveraging(decay=0.8)
        pair = [*attached, average] if first == "the callback" else [average, *attached]
        bench.fit(module, [*pair, watch])
        _require_masked(dict(module.named_parameters()), attached[0], "after the fit with an average")


@promise
def exports_without_zeros(callback: Callback, bench: SmallFit) -> None:
    """Check that `export_sparse` leaves zeros out, and that its file loads as the module was."""
    module, attached = bench.module(seed=1), bench.attach(callback)
    bench.fit(module, attached)
    path = bench.folder / "weights.safetensors"
    export_sparse(module, path)
    require_equal(_weights(module), comparable(load_sparse(path)), "weights", "between the module and its file")
    masks = masks_of(attached[0])
    largest = max(masks, key=lambda name: masks[name].numel(), default="")
    size = masks[largest].numel() if largest else 0
    if size >= 256 and size > int(masks[largest].sum()) + size / 8:  # others are stored whole, which is smaller
        left = int((module.get_parameter(largest) != 0).sum())
        with safe_open(path, framework="pt") as file:
            stored = len(file.get_tensor(largest))
        require(stored == left, f"the file has {stored} weights of `{largest}`, of which {left} are not zero")


class _Watch(Callback):
    """After every batch of training and validation: what is not in the masks is zero."""

    def __init__(self, callback: Callback, when: str) -> None:
        self.callback, self.when, self.seen = callback, when, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        _require_masked(dict(pl_module.named_parameters()), self.callback, self.when)
        self.seen += bool(masks_of(self.callback))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        _require_masked(dict(pl_module.named_parameters()), self.callback, self.when)


def masks_of(callback: Callback) -> dict[str, Tensor]:
    """Return the masks of a callback: its attribute `masks`, bool tensors by the names of parameters.

    Args:
        callback: Callback, with or without masks.
    """
    masks = getattr(callback, "masks", None)
    return dict(masks) if isinstance(masks, Mapping) else {}


def _require_masked(weights: Mapping[str, Tensor], callback: Callback, when: str) -> None:
    for name, mask in masks_of(callback).items():
        require(name in weights, f"`masks` has `{name}`, which is no parameter")
        grown = int((weights[name][~mask] != 0).sum())
        require(not grown, f"{grown} weights of `{name}` that `masks` leaves out are not zero {when}")


def _added(layer: torch.nn.Module) -> str:
    """Return what may have been added to a layer: hooks, and another ``forward``."""
    hooks = sum(len(value) for name, value in vars(layer).items() if name.endswith("_hooks"))
    return f"{hooks} hooks{' and a forward method of its own' if 'forward' in vars(layer) else ''}"


def _weights(module: LightningModule) -> Any:
    return comparable(module.state_dict())


def _end(module: LightningModule, callback: Callback, metrics: Mapping[str, float], *more: Any) -> Any:
    """Return what a fit leaves, in comparable form."""
    return {
        "weights": _weights(module),
        "metrics": comparable(metrics),
        "state": comparable(callback.state_dict()),
        "optimizer": comparable(list(more)),
    }
