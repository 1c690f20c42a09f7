"""What every callback promises: alike in a Trainer and in a client, exact, resumable, and gone without a trace."""

from __future__ import annotations

import inspect
import math
from fnmatch import fnmatch
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors import safe_open
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import callbacks, export_sparse, load_sparse
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*never moves its mask.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
]

BATCHES, EPOCHS = 7, 4
EXPORTED = {name: getattr(callbacks, name) for name in callbacks.__all__}
BY_DEFAULT = {
    name: (kind, {})
    for name, kind in EXPORTED.items()
    if all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StaticMask, uniform": (callbacks.StaticMask, {"density": 0.3, "layer_density": "uniform", "layers": "!net.0*"}),
    "StaticMask, by layer": (callbacks.StaticMask, {"density": 0.3, "layer_density": {"net.4*": 0.5, "net.5*": 1.0}}),
    "DynamicMask, RigL": (callbacks.DynamicMask, {"density": 0.3, "every_n_steps": 3}),
    "DynamicMask, SET": (callbacks.DynamicMask, {"growth": "random", "every_n_steps": 2, "layer_density": "uniform"}),
    "GradualPruning, steps": (callbacks.GradualPruning, {"start": 0.1, "end": 0.9, "every_n_steps": 3}),
    "GradualPruning, global": (callbacks.GradualPruning, {"scope": "global", "every_n_steps": 2, "layers": "!net.0*"}),
    "GradualPruning, by layer": (
        callbacks.GradualPruning,
        {"every_n_steps": 2, "layer_density": {"net.0*": 0.6}, "layers": "type:Linear"},
    ),
    "NMPruning, late": (callbacks.NMPruning, {"n": 1, "m": 2, "start": 0.4, "layers": ["net.[45]*"]}),
    "GlobalMagnitudePruning, epochs": (callbacks.GlobalMagnitudePruning, {"fraction": 0.3, "epochs": [0, 1, 3]}),
    "DynamicPruningWithFeedback, late": (
        callbacks.DynamicPruningWithFeedback,
        {"start": 0.2, "end": 0.8, "every_n_steps": 2, "layers": ["net.*"]},
    ),
    "LotteryRewind, from the start, by layer": (
        callbacks.LotteryRewind,
        {"density": 0.1, "cycles": 3, "rewind": 0.0, "scope": "layer", "layers": "!net.0*"},
    ),
    "LearnedImportance, steps": (callbacks.LearnedImportance, {"density": 0.3, "lr": 1.0, "reduction": "mean"}),
    "LearnedImportance, rounds": (callbacks.LearnedImportance, {"refresh": "round", "probe": False, "lr": 1.0}),
    "LearnedImportance, magnitude": (callbacks.LearnedImportance, {"pattern": "magnitude", "layers": "!net.0*"}),
    "LearnedImportance, rolling": (callbacks.LearnedImportance, {"pattern": "rolling", "turn": 3, "density": 0.6}),
    "SparsityMonitor, seldom": (callbacks.SparsityMonitor, {"every_n_epochs": 3}),
    "GradientOffset": (callbacks.GradientOffset, {"offset": {"net.0.weight": torch.full((8, 5), 0.01)}}),
    "ProximalTerm, strong": (callbacks.ProximalTerm, {"strength": 0.5}),
    "GroupPenalty, steep": (callbacks.GroupPenalty, {"strength": 0.5, "stairs": 5, "layers": "!net.0*"}),
    "GroupPenalty, level": (callbacks.GroupPenalty, {"strength": 0.1, "stairs": None}),
}
CASES = {**BY_DEFAULT, **VARIANTS}
MASKING = {name: case for name, case in CASES.items() if issubclass(case[0], MaskingCallback)}


class Net(L.LightningModule):
    """A user's module, with buffers."""

    def __init__(self, optimizer: Any = None, dropout: float = 0.0, seed: int = 1) -> None:
        super().__init__()
        self.optimizer = optimizer or sgd
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 6), nn.Linear(6, 3)
            )

    def training_step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Wide(Net):
    """With a layer that is large enough for its zeros to matter in a file."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net[4], self.net[5] = nn.Linear(8, 60), nn.Linear(60, 3)


def sgd(parameters: Any) -> Any:
    return SGD(parameters, 0.2, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> Any:
    return Adam(parameters, 0.02, weight_decay=0.01)


def loader(shuffle: bool = False) -> Any:
    x = torch.randn(4 * BATCHES, 5, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


def trainer_of(folder: Any, callbacks: list[Callback], **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        quiet["enable_checkpointing"] = False
    return L.Trainer(**{"max_epochs": EPOCHS, "default_root_dir": folder, "callbacks": callbacks, **quiet, **options})


def steps_of_epoch(accumulate: int) -> int:
    return math.ceil(BATCHES / accumulate)


class Promise(Callback):
    """After every batch: exactly as many weights are kept as the callback's options say, and no other is there."""

    def __init__(self, callback: MaskingCallback) -> None:
        self.callback, self.step, self.batches, self.last = callback, 0, 0, 0
        self.kept: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step, self.last = self.step + (trainer.global_step != self.last), trainer.global_step
        self.batches += 1
        masks = self.callback.masks
        counts = {name: int(mask.sum()) for name, mask in masks.items()}
        promised = PROMISES[type(self.callback)](
            self.callback,
            {name: tuple(mask.shape) for name, mask in masks.items()},
            (self.step, EPOCHS * steps_of_epoch(trainer.accumulate_grad_batches), trainer.current_epoch),
            self.kept,
        )
        assert (counts if isinstance(promised, dict) else sum(counts.values())) == promised, self.step
        self.kept = promised
        for name, mask in masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            # a grown weight is zero at first, and so is a norm's bias
            if not isinstance(self.callback, callbacks.DynamicMask) and weight.dim() > 1:
                assert weight[mask].all()


def drawn(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    return kept_counts(shapes, spread(callback, shapes))


def spread(callback: Any, shapes: Any) -> Any:
    rule = getattr(callback, "layer_density", "uniform")
    if isinstance(rule, str):
        return {"erk": erk, "uniform": uniform}[rule](shapes, callback.density)
    said = {name: [value for pattern, value in rule.items() if fnmatch(name, pattern)] for name in shapes}
    return {name: values[0] if values else callback.density for name, values in said.items()}


def grouped(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    pruned = step >= math.floor(callback.start * total + 1e-6)
    return {name: size * callback.n // callback.m if pruned else size for name, size in sizes.items()}


def scheduled(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    first = math.floor(callback.start * total + 1e-6)
    last = math.ceil(callback.end * total - 1e-6)
    moves = [s for s in range(first, step + 1) if (s - first) % callback.every_n_steps == 0 or s == last]
    at = min(moves[-1], last) if moves else first
    left = (1 - (at - first) / (last - first)) ** 3
    share = callback.density + (1 - callback.density) * left
    if getattr(callback, "scope", "global") == "global":
        return math.floor(share * sum(sizes.values()) + 1e-6)
    final = spread(callback, shapes)
    shares = {name: final[name] + (1 - final[name]) * left for name in sizes}
    return {name: max(1, math.floor(shares[name] * size + 1e-6)) for name, size in sizes.items()}


def by_epoch(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    kept = sum(math.prod(shape) for shape in shapes.values())
    for _ in [epoch for epoch in callback.epochs if epoch <= when[2]]:
        kept -= math.ceil(callback.fraction * kept - 1e-6)
    return kept


def by_cycle(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    (step, total, _), sizes = when, {name: math.prod(shape) for name, shape in shapes.items()}
    ends = callback.cycle_ends(total)
    share = callback.density ** (sum(end <= step for end in ends) / len(ends))
    if callback.scope == "global":
        return math.floor(share * sum(sizes.values()) + 1e-6)
    return {name: max(1, math.floor(share * size + 1e-6)) for name, size in sizes.items()}


def by_units(callback: Any, shapes: Any, when: Any, before: Any) -> Any:
    """A dropped unit of a hidden layer takes its row, its bias, its norm, and its reader's column along."""
    first, second = (max(1, math.floor(callback.density * size + 0.5)) for size in (8, 6))
    first = 8 if callback.layers else first
    kept = dict.fromkeys(("net.0.bias", "net.1.weight", "net.1.bias"), first) | {"net.4.bias": second}
    kept |= {"net.0.weight": 5 * first, "net.4.weight": first * second, "net.5.weight": 3 * second}
    return {name: kept[name] for name in shapes}


PROMISES = {
    callbacks.StaticMask: drawn,
    callbacks.DynamicMask: drawn,
    callbacks.GradualPruning: scheduled,
    callbacks.NMPruning: grouped,
    callbacks.DynamicPruningWithFeedback: scheduled,
    callbacks.GlobalMagnitudePruning: by_epoch,
    callbacks.LotteryRewind: by_cycle,
    callbacks.LearnedImportance: by_units,
}

RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum, clipped, accumulated": (sgd, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "adam, bf16": (adam, {"precision": "bf16-mixed"}),
}


def test_every_callback_takes_part():
    assert {kind.__name__ for kind, _ in CASES.values()} == set(EXPORTED) - {"LayerFreezing"}  # needs masks
    masking = {kind for kind in EXPORTED.values() if issubclass(kind, MaskingCallback)}
    assert masking == set(PROMISES) == {kind for kind, _ in MASKING.values()}


@pytest.mark.slow_after_first("recipe")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_a_client_trains_as_a_trainer_does_and_density_is_as_promised(case, recipe, tmp_path):
    (kind, arguments), (optimizer, options), runs = CASES[case], RECIPES[recipe], []
    for engine in ("trainer", "client"):
        module, callback = Net(optimizer, dropout=0.2), kind(**arguments)
        attached = [callback, Promise(callback)] if case in MASKING else [callback]
        torch.manual_seed(5)
        if engine == "trainer":
            trainer = trainer_of(tmp_path, attached, num_sanity_val_steps=0, **options)
            trainer.fit(module, loader(shuffle=True), loader())
            metrics = trainer.callback_metrics
        else:
            rest = dict(options)
            fabric = Fabric(accelerator="cpu", devices=1, precision=rest.pop("precision", "32-true"))
            local = FastEngine(fabric, LocalOptions(max_epochs=EPOCHS, **rest))
            metrics = local.fit(module, loader(shuffle=True), loader(), callbacks=attached)
        assert all(other.batches == EPOCHS * BATCHES for other in attached[1:])
        runs.append((module.state_dict(), {name: float(value) for name, value in metrics.items()}, callback))
    (weights, metrics, callback), (others, other_metrics, other) = runs
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert metrics == other_metrics
    assert alike(callback.state_dict(), other.state_dict())


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class Kill(Callback):
    """Ends a run in the middle of its third epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 2 and batch_idx == 3:
            raise RuntimeError("killed")


@pytest.mark.slow_after_first("recipe")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_is_as_if_nothing_had_happened(case, recipe, tmp_path):
    (kind, arguments), (optimizer, options) = CASES[case], RECIPES[recipe]

    def run(folder: str, seed: int = 1, extra: Any = (), **more: Any) -> tuple[Net, Any, L.Trainer]:
        module, callback = Net(optimizer, seed=seed), kind(**arguments)
        saver = ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
        trainer = trainer_of(tmp_path, [callback, saver, *extra], **options)
        trainer.fit(module, loader(), **more)
        return module, callback, trainer

    straight, callback, trainer = run("straight")
    with pytest.raises(RuntimeError, match="killed"):
        run("killed", extra=[Kill()])
    path = tmp_path / "killed" / "epoch=1.ckpt"
    resumed, other, again = run("killed", seed=9, ckpt_path=path, weights_only=True)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in straight.state_dict().items())
    assert alike(callback.state_dict(), other.state_dict())
    assert alike(trainer.optimizers[0].state_dict(), again.optimizers[0].state_dict())
    assert trainer.callback_metrics == again.callback_metrics


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_an_ordinary_one(case, tmp_path):
    (kind, arguments), module = CASES[case], Net()
    names, keys = [name for name, _ in module.named_parameters()], list(module.state_dict())
    trainer = trainer_of(tmp_path, [kind(**arguments)])
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert [name for name, _ in module.named_parameters()] == names
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert list(content["state_dict"]) == keys
    bare = Net(seed=7)
    bare.load_state_dict(content["state_dict"], strict=True)
    loaded = Net.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(bare.state_dict()[name], value)
        assert torch.equal(loaded.state_dict()[name], value)


@pytest.mark.parametrize("case", MASKING)
def test_masks_survive_every_other_verb(case, tmp_path):
    kind, arguments = MASKING[case]
    module, callback = Net(), kind(**arguments)
    trainer = trainer_of(tmp_path, [callback])
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    zeros = sum(int((module.get_parameter(name) == 0).sum()) for name in callback.masks)
    assert zeros > 0
    for verb in ("validate", "test", "predict"):
        getattr(trainer, verb)(module, loader())
        fresh = Net(seed=3)
        getattr(trainer_of(tmp_path, [kind(**arguments)]), verb)(
            fresh, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True
        )
        for name, value in weights.items():
            assert torch.equal(module.state_dict()[name], value)
            assert torch.equal(fresh.state_dict()[name], value)


@pytest.mark.parametrize("case", MASKING)
def test_what_was_trained_is_exported_without_its_zeros(case, tmp_path):
    kind, arguments = MASKING[case]
    module, callback = Wide(), kind(**arguments)
    trainer_of(tmp_path, [callback]).fit(module, loader())
    path = tmp_path / "weights.safetensors"
    export_sparse(module, path)
    loaded, state = load_sparse(path), module.state_dict()
    assert list(loaded) == list(state)
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    fresh = Wide(seed=3)
    fresh.load_state_dict(loaded, strict=True)
    assert alike(fresh.state_dict(), dict(state))
    largest = max((name for name in callback.masks), key=lambda name: callback.masks[name].numel())
    mask = callback.masks[largest]
    assert mask.numel() > int(mask.sum()) + mask.numel() / 8  # so that leaving out zeros is smaller
    with safe_open(path, framework="pt") as file:
        assert len(file.get_tensor(largest)) == int((state[largest] != 0).sum())


@pytest.mark.parametrize("case", MASKING)
def test_a_module_trains_on_in_a_second_fit(case, tmp_path):
    """Its masks stay where they are or lose weights; DPF's and the dynamic ones move, at the density they reached."""
    kind, arguments = MASKING[case]
    module, callback = Net(), kind(**arguments)
    trainer_of(tmp_path, [callback]).fit(module, loader())
    first = {name: mask.clone() for name, mask in callback.masks.items()}
    trainer_of(tmp_path, [callback]).fit(module, loader())
    kept = [sum(int(mask.sum()) for mask in masks.values()) for masks in (first, callback.masks)]
    if kind is callbacks.GlobalMagnitudePruning:
        assert kept[1] == by_epoch_from(kept[0], callback)
    else:
        assert kept[0] == kept[1]
    for name, mask in callback.masks.items():
        assert not module.get_parameter(name)[~mask].any()


def by_epoch_from(kept: int, callback: Any) -> int:
    for _ in callback.epochs:
        kept -= math.ceil(callback.fraction * kept - 1e-6)
    return kept
