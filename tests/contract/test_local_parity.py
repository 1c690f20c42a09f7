"""The client loop trains as Lightning's Trainer does: weights bit for bit, metrics, learning rates, order of hooks."""

from __future__ import annotations

import copy
import pickle
from collections import UserList
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import callbacks as stock_callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.support import CALLED_HOOKS, SUPPORTED_CALLBACKS
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
]


class Net(pl.LightningModule):
    """Logs in every usual way, and draws random numbers."""

    def __init__(self, configure: Callable[[Net], Any] | None = None) -> None:
        super().__init__()
        self.configure = configure
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.test_acc = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        self.log_dict({"low": loss, "rate": 1.0}, on_step=False, on_epoch=True, reduce_fx="min")
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), on_step=True, on_epoch=True)

    def test_step(self, batch: Any) -> None:
        x, y = batch
        logits = self.net(x)
        self.test_acc(logits, y)
        self.log_dict({"test_acc": self.test_acc, "test_loss": nn.functional.cross_entropy(logits, y)})
        self.log("hidden", logits.mean(), logger=False)

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        if self.configure is not None:
            return self.configure(self)
        return SGD(self.parameters(), 0.5, momentum=0.9, weight_decay=1e-3)


class PlainLoss(Net):
    """Returns a tensor, the common case."""

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = super().training_step(batch, 0)["loss"]
        return loss


class Gan(pl.LightningModule):
    """Optimizes by itself, with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, judge = self.optimizers()
        x, _ = batch
        self.toggle_optimizer(maker)
        made = -self.judge(self.make(x)).mean()
        maker.zero_grad()
        self.manual_backward(made)
        self.clip_gradients(maker, 0.5, "norm")
        maker.step()
        self.untoggle_optimizer(maker)
        with self.toggled_optimizer(judge):
            judged = (self.judge(self.make(x).detach()) - self.judge(x)).mean()
            judge.zero_grad()
            self.manual_backward(judged)
            judge.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log_dict({"made": made, "judged": judged})

    def configure_optimizers(self) -> Any:
        maker, judge = Adam(self.make.parameters(), 1e-2), SGD(self.judge.parameters(), 1e-2)
        return [maker, judge], [schedules.StepLR(maker, 1, 0.5)]


class Odd(Net):
    """Skips batches, ends epochs early, and takes the longer ways."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Trace(Callback):
    """Every hook of a callback, with the trainer's counters and the learning rates."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def record(self, name: str, trainer: Any, args: Sequence[Any]) -> None:
        lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        counters = (trainer.global_step, trainer.current_epoch, trainer.is_last_batch, trainer.state.stage)
        self.calls.append((name, *counters, trainer.fit_loop.total_batch_idx, lrs, simple(args)))

    def state_dict(self) -> dict[str, Any]:
        return {}


def _traced(name: str) -> Callable[..., None]:
    def hook(self: Trace, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.record(name, trainer, [*args, *kwargs.values()])

    return hook


CALLBACK_HOOKS = [n for n in dir(Callback) if n.startswith("on_") and "checkpoint" not in n and "sanity" not in n]
for _name in ("setup", "teardown", *CALLBACK_HOOKS):
    setattr(Trace, _name, _traced(_name))


def simple(value: Any) -> Any:
    """An argument as something that compares."""
    if isinstance(value, Tensor):
        return value.detach().double().sum().item()
    if isinstance(value, (list, tuple)):
        return [simple(item) for item in value]
    if isinstance(value, dict):
        return {key: simple(item) for key, item in value.items()}
    if value is None or isinstance(value, (int, float, str)):
        return value
    return "callable" if callable(value) else type(value).__name__


@dataclass
class Run:
    """What one training left behind."""

    weights: dict[str, Tensor]
    metrics: dict[str, Any]
    trace: list[Any]
    steps: int
    rows: list[str] = field(default_factory=list)


def loaders(seed: int = 0, size: int = 61) -> tuple[Any, Any]:
    """Training and validation batches; the training order comes from torch's global generator."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=rng)
    data = TensorDataset(x, x[:, :3].argmax(1))
    return DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)


def plain(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def trainer_kwargs(**options: Any) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 5,
        **options,
    }


def by_lightning(
    module: Any, make: Any = list, validate: bool = True, seed: int = 0, logger: Any = None, **options: Any
) -> Run:
    trace, (train, val) = Trace(), loaders(seed)
    torch.manual_seed(seed)
    trainer = pl.Trainer(**trainer_kwargs(callbacks=[trace, *make()], logger=logger or False, **options))
    trainer.fit(module, train, val if validate else None)
    return Run(module.state_dict(), plain(trainer.callback_metrics), trace.calls, trainer.global_step)


def by_us(
    module: Any,
    make: Any = list,
    validate: bool = True,
    seed: int = 0,
    logger: Any = None,
    engine: Any = FastEngine,
    precision: Any = "32-true",
    local: Any = None,
    **options: Any,
) -> Run:
    trace, (train, val) = Trace(), loaders(seed)
    if local is None:
        local = engine(fabric(precision), LocalOptions(log_every_n_steps=5, **options))
    torch.manual_seed(seed)
    loggers = [logger] if logger else []
    metrics = local.fit(module, train, val if validate else None, callbacks=[trace, *make()], loggers=loggers)
    return Run(module.state_dict(), plain(metrics), trace.calls, local.global_step)


def fabric(precision: Any = "32-true") -> Fabric:
    return Fabric(accelerator="cpu", devices=1, precision=precision)


def same(ours: Run, theirs: Run) -> None:
    """Assert that two runs are one."""
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in theirs.weights.items():
        assert tensor.dtype == ours.weights[name].dtype, name
        assert torch.equal(ours.weights[name], tensor), name
    assert ours.metrics == pytest.approx(theirs.metrics, abs=0, rel=0, nan_ok=True)
    assert ours.steps == theirs.steps
    for mine, other in zip(ours.trace, theirs.trace, strict=False):
        assert mine == other
    assert len(ours.trace) == len(theirs.trace)


def compare(module: Any, make: Any = list, validate: bool = True, **options: Any) -> Run:
    options = {"max_epochs": 3, **options}
    theirs = by_lightning(copy.deepcopy(module), make, validate, **options)
    ours = by_us(copy.deepcopy(module), make, validate, **options)
    same(ours, theirs)
    assert theirs.steps > 0
    return ours


def plateau(module: Net) -> Any:
    optimizer = SGD(module.parameters(), 0.5, momentum=0.9)
    scheduler = schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def plateau_by_step(module: Net) -> Any:
    config = plateau(module)
    config["lr_scheduler"] |= {"monitor": "loss_step", "interval": "step", "frequency": 2}
    return config


def one_cycle(module: Net) -> Any:
    optimizer = SGD(module.parameters(), 0.1)
    scheduler = schedules.OneCycleLR(optimizer, 0.3, total_steps=module.trainer.estimated_stepping_batches)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def step_lr(module: Net) -> Any:
    optimizer = SGD(module.parameters(), 0.5)
    return [optimizer], [schedules.StepLR(optimizer, 1, 0.7)]


def adam(module: Net) -> Any:
    return Adam(module.parameters(), 1e-2)


def lbfgs(module: Net) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)


def trainable_only(module: Net) -> Any:
    return SGD([p for p in module.parameters() if p.requires_grad], 0.1)


@pytest.fixture(autouse=True)
def _one_start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sgd": (PlainLoss, {}),
    "adam": (lambda: Net(adam), {}),
    "plateau": (lambda: Net(plateau), {}),
    "plateau by step": (lambda: Net(plateau_by_step), {}),
    "one cycle": (lambda: Net(one_cycle), {}),
    "one cycle, accumulated": (lambda: Net(one_cycle), {"accumulate_grad_batches": 3}),
    "step lr": (lambda: Net(step_lr), {}),
    "clip norm": (Net, {"gradient_clip_val": 0.1}),
    "clip value": (PlainLoss, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulate 3": (PlainLoss, {"accumulate_grad_batches": 3}),
    "gan": (Gan, {"validate": False}),
    "lbfgs": (lambda: Net(lbfgs), {"max_epochs": 1}),
    "bf16-mixed": (Net, {"precision": "bf16-mixed"}),
    "bf16-true": (PlainLoss, {"precision": "bf16-true"}),
    "64-true": (Net, {"precision": "64-true"}),
    "limit train number": (Net, {"limit_train_batches": 3, "limit_val_batches": 2}),
    "limit train share": (Net, {"limit_train_batches": 0.5, "limit_val_batches": 0}),
    "max steps": (lambda: Net(step_lr), {"max_steps": 11, "max_epochs": -1}),
    "max steps at an epoch": (Net, {"max_steps": 8, "max_epochs": 2}),
    "no validation": (lambda: Net(step_lr), {"validate": False}),
    "skipped batches": (lambda: Odd(step_lr), {}),
    "skipped, accumulated": (lambda: Odd(one_cycle), {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_as_lightning_does(case: str) -> None:
    build, options = CASES[case]
    run = compare(build(), **options)
    assert len(run.trace) > 20


class Loud(PlainLoss):
    """Has gradients that the first loss scale takes out of half precision's range."""

    def training_step(self, batch: Any) -> Tensor:
        return 300 * super().training_step(batch)


def test_every_client_starts_with_a_fresh_loss_scale() -> None:
    module = Loud(adam)
    half = Fabric(accelerator="cpu", devices=1, plugins=[FabricMixedPrecision("16-mixed", "cpu")])
    local = FastEngine(half, LocalOptions(max_epochs=2, log_every_n_steps=5))
    plugin = MixedPrecision("16-mixed", "cpu")
    theirs = by_lightning(copy.deepcopy(module), max_epochs=2, plugins=[plugin])
    assert plugin.scaler.get_scale() != 2.0**16
    for _ in range(2):
        same(by_us(copy.deepcopy(module), local=local), theirs)


READ = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "current_epoch", "global_step", "datamodule"),
    *("num_training_batches", "num_val_batches", "estimated_stepping_batches", "is_last_batch", "callback_metrics"),
    *("logged_metrics", "progress_bar_metrics", "logger", "loggers", "precision", "world_size", "is_global_zero"),
    *("global_rank", "local_rank", "node_rank", "num_nodes", "num_devices", "device_ids", "should_stop", "scaler"),
    *("fast_dev_run", "training", "validating", "testing", "predicting", "evaluating", "sanity_checking"),
    *("interrupted", "default_root_dir", "log_dir", "early_stopping_callback", "early_stopping_callbacks"),
    *("checkpoint_callback", "checkpoint_callbacks", "progress_bar_callback", "limit_train_batches"),
    *("limit_val_batches", "limit_test_batches", "log_every_n_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch"),
    *("reload_dataloaders_every_n_epochs", "overfit_batches", "num_sanity_val_steps", "barebones"),
    *("enable_validation", "ckpt_path", "received_sigterm", "train_dataloader", "val_dataloaders"),
    *("test_dataloaders", "accelerator", "lr_scheduler_configs", "optimizers", "precision_plugin", "model"),
    *("lightning_module", "val_check_batch"),
)


class Reader(Callback):
    """Reads the trainer in many places."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def read(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append({name: simple(getattr(trainer, name)) for name in READ})
        self.seen.append((trainer.state.fn, trainer.state.status, module.global_step, simple(module.optimizers())))

    on_fit_start = on_train_start = on_train_batch_end = on_validation_start = read  # type: ignore[assignment]
    on_validation_batch_start = on_train_epoch_end = on_train_end = on_fit_end = read  # type: ignore[assignment]


def test_shows_what_a_trainer_shows() -> None:
    module, readers = Net(one_cycle), (Reader(), Reader())
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}
    by_lightning(copy.deepcopy(module), lambda: [readers[0]], default_root_dir="~/runs", **options)
    by_us(copy.deepcopy(module), lambda: [readers[1]], default_root_dir="~/runs", **options)
    for theirs, ours in zip(*(reader.seen for reader in readers), strict=True):
        assert ours == theirs


def freeze_first() -> Callback:
    class Unfreeze(stock_callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    return Unfreeze()


class Backbone(Net):
    """With the attribute that `BackboneFinetuning` looks for."""

    def __init__(self) -> None:
        super().__init__(trainable_only)
        self.backbone = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


def stopping() -> Callback:
    return EarlyStopping("val_loss", patience=0, mode="max")


CALLBACKS: dict[str, tuple[Callable[[], Any], Callable[[], Callback], dict[str, Any]]] = {
    "BackboneFinetuning": (Backbone, lambda: stock_callbacks.BackboneFinetuning(1), {}),
    "BaseFinetuning": (lambda: Net(trainable_only), freeze_first, {}),
    "DeviceStatsMonitor": (Net, lambda: stock_callbacks.DeviceStatsMonitor(cpu_stats=False), {}),
    "EMAWeightAveraging": (Net, lambda: stock_callbacks.EMAWeightAveraging(decay=0.9), {}),
    "EarlyStopping": (lambda: Net(step_lr), stopping, {"max_epochs": 6}),
    "EarlyStopping in training": (Net, lambda: EarlyStopping("loss_epoch", patience=0, min_delta=10.0), {}),
    "GradientAccumulationScheduler": (Net, lambda: stock_callbacks.GradientAccumulationScheduler({1: 2}), {}),
    "LambdaCallback": (
        Net,
        lambda: stock_callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: module.net[0].bias.data.add_(0.1)
        ),
        {},
    ),
    "LearningRateMonitor": (lambda: Net(one_cycle), LearningRateMonitor, {}),
    "ModelPruning": (
        Net,
        lambda: stock_callbacks.ModelPruning("l1_unstructured", amount=0.2, use_global_unstructured=True),
        {},
    ),
    "ModelSummary": (Net, stock_callbacks.ModelSummary, {}),
    "Timer": (Net, lambda: stock_callbacks.Timer(duration="00:00:10:00"), {}),
    "WeightAveraging": (Net, stock_callbacks.WeightAveraging, {}),
}


@pytest.mark.parametrize("case", CALLBACKS)
def test_runs_stock_callbacks_as_lightning_does(case: str, tmp_path: Path) -> None:
    build, make, options = CALLBACKS[case]
    module, runs, rows = build(), [], []
    for number, run in enumerate((by_lightning, by_us)):
        logger = CSVLogger(tmp_path, name=str(number), version=0)
        runs.append(run(copy.deepcopy(module), lambda: [make()], logger=logger, **{"max_epochs": 3, **options}))
        rows.append((tmp_path / str(number) / "version_0" / "metrics.csv").read_text())
    same(runs[1], runs[0])
    assert rows[0] == rows[1]
    assert rows[0].count("\n") > 3


def test_every_covered_callback_is_compared() -> None:
    assert {kind.__name__ for kind in SUPPORTED_CALLBACKS} <= {name.split()[0] for name in CALLBACKS}


def test_early_stopping_stopped(tmp_path: Path) -> None:
    run = by_us(Net(step_lr), lambda: [stopping()], max_epochs=6)
    assert run.steps < 6 * 8


class Meddler(Callback):
    """Logs from its own hooks, and stops training in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(batch_idx), on_step=True, on_epoch=True, reduce_fx="sum")
        trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 3

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log_dict({"passes": float(trainer.global_step)})


def test_a_callback_may_log_and_stop_in_mid_epoch() -> None:
    run = compare(Net(step_lr), lambda: [Meddler()])
    assert run.steps == 8 + 4
    assert {"seen_epoch", "passes"} <= run.metrics.keys()


class ManyLogs(PlainLoss):
    """Logs scalars again and again, with options that change the shortcut of repeated calls."""

    def training_step(self, batch: Any) -> Tensor:
        loss, size = super().training_step(batch), len(batch[1])
        self.log("weighted", loss, batch_size=size + self.trainer.global_step)
        self.log("in a vector", loss[None], on_epoch=True)
        self.log("count", torch.tensor(size).float(), reduce_fx="sum")
        self.log("by position", loss, False, None, True, True, "max")
        self.log("number", float(size))
        self.log(name="by keyword", value=loss.detach(), on_step=True, on_epoch=True)
        return loss


class Copying(Callback):
    """Copies the module in the middle of a fit, and logs through the module."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.copies = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]
        pl_module.log("by a callback", torch.tensor(float(trainer.global_step)))


def test_logs_repeated_values_as_lightning_does() -> None:
    compare(ManyLogs(), lambda: [Copying()])


def test_a_module_and_its_copies_keep_their_own_log() -> None:
    module, copying = ManyLogs(), Copying()
    by_us(module, lambda: [copying], max_epochs=1)
    for each in (module, *copying.copies):
        assert each.log.__self__ is each
        assert each._trainer is None
    assert "log" not in vars(module)
    with pytest.warns(UserWarning, match="reference is not registered on the model"):
        copying.copies[0].log("x", torch.tensor(1.0))


class Fickle(PlainLoss):
    """Logs a key with other options from the third step on."""

    fickle = True

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log("changing", loss, on_step=self.fickle and self.trainer.global_step > 1, on_epoch=True)
        return loss


def test_other_options_for_a_logged_key_are_refused_as_by_lightning() -> None:
    local, module = FastEngine(fabric(), LocalOptions(max_epochs=1)), Fickle()
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
            by_us(module, local=local)


def test_a_client_that_failed_leaves_no_logged_values_behind() -> None:
    local, module = FastEngine(fabric(), LocalOptions(max_epochs=1)), Fickle()
    other = copy.deepcopy(module)
    with pytest.raises(MisconfigurationException):
        by_us(module, local=local)
    module.load_state_dict(other.state_dict())
    module.fickle = other.fickle = False
    same(by_us(module, local=local), by_lightning(other, max_epochs=1))


class ByEpoch(torch.utils.data.Sampler[int]):
    """Orders samples by the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        return iter(torch.randperm(16, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def test_samplers_are_told_the_epoch() -> None:
    module, data = Net(), loaders()[1].dataset
    states = []
    for fit in (
        FastEngine(fabric(), LocalOptions(max_epochs=3)).fit,
        pl.Trainer(**trainer_kwargs(max_epochs=3)).fit,
    ):
        train, val = (DataLoader(data, batch_size=4, sampler=ByEpoch()) for _ in range(2))
        trained = copy.deepcopy(module)
        torch.manual_seed(0)
        fit(trained, train, val)
        states.append((trained.state_dict(), train.sampler.epoch, val.sampler.epoch))
    assert states[0][1:] == states[1][1:]
    assert all(torch.equal(states[0][0][name], tensor) for name, tensor in states[1][0].items())


def _tracing_module() -> type[Net]:
    """A module that overrides every hook that the loop calls, and notes its arguments."""

    def override(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, simple(args), simple(kwargs), self._current_fx_name))
            return getattr(super(Traced, self), name)(*args, **kwargs)

        return hook

    class Traced(Net):
        def __init__(self, configure: Any) -> None:
            super().__init__(configure)
            self.calls = UserList[Any]()  # a list would be restored after the fit

        def on_after_backward(self) -> None:
            self.log("norm", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)
            self.calls.append("on_after_backward")

        def on_validation_model_train(self) -> None:
            self.calls.append("on_validation_model_train")
            self.train()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.calls.append("test_step")
            super().test_step(batch)

    for name in CALLED_HOOKS - vars(Traced).keys():
        setattr(Traced, name, override(name))
    return Traced


@pytest.mark.parametrize("accumulate", [1, 3])
def test_calls_a_modules_hooks_as_lightning_does(accumulate: int) -> None:
    module = _tracing_module()(plateau)
    theirs, ours = copy.deepcopy(module), copy.deepcopy(module)
    options = {"max_epochs": 2, "gradient_clip_val": 0.3, "accumulate_grad_batches": accumulate}
    same(by_us(ours, **options), by_lightning(theirs, **options))
    first, second = (evaluated(trained) for trained in (ours, theirs))
    assert first == second
    assert ours.calls == theirs.calls
    called = {call if isinstance(call, str) else call[0] for call in ours.calls}
    assert called == CALLED_HOOKS


def evaluated(module: Any) -> Any:
    """By us for a module that was never in a Trainer, else by Lightning."""
    _, val = loaders()
    results = []
    for stage in ("validate", "test"):
        if module._trainer is None:
            local = FastEngine(fabric(), LocalOptions())
            results.append(local.evaluate(module, val, stage=stage))  # type: ignore[arg-type]
        else:
            trainer = pl.Trainer(**trainer_kwargs(log_every_n_steps=50))
            getattr(trainer, stage)(module, val, verbose=False)
            results.append(plain(trainer.callback_metrics))
    return results


@pytest.mark.parametrize("engine", [FastEngine, LightningEngine])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluates_as_lightning_does(stage: Any, engine: Any) -> None:
    module, (_, val) = Net(), loaders()
    trace, local = Trace(), engine(fabric(), LocalOptions(limit_val_batches=3, limit_test_batches=0.8))
    other, trainer = Trace(), None
    ours = local.evaluate(module, val, stage=stage, callbacks=[trace])
    trainer = pl.Trainer(**trainer_kwargs(callbacks=[other], limit_val_batches=3, limit_test_batches=0.8))
    (row,) = getattr(trainer, stage)(module, val, verbose=False)
    assert ours == plain(trainer.callback_metrics)
    assert ours.items() >= row.items()
    assert trace.calls == other.calls
    assert len(ours) >= 3


def test_two_clients_equal_two_trainers() -> None:
    local = FastEngine(fabric(), LocalOptions(max_epochs=2, log_every_n_steps=5))
    module = Net(plateau)
    start = copy.deepcopy(module.state_dict())
    for seed in (3, 4):
        module.load_state_dict(start)
        theirs = by_lightning(copy.deepcopy(module), seed=seed, max_epochs=2)
        same(by_us(module, seed=seed, local=local), theirs)


class Changing(PlainLoss):
    """Logs other keys, and known keys in another way, from client to client."""

    client = 0

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log(f"of client {self.client}", loss)
        self.log("always", loss, on_step=False, on_epoch=True)
        self.log("in double", loss.double(), on_step=False, on_epoch=True)
        self.log("twice", loss, on_step=False, on_epoch=True)
        self.log("twice", loss, False, None, False, True)
        self.log("of all processes", loss, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("in turns", loss, on_step=self.client % 2 == 0, on_epoch=True)
        if self.client != 1:
            self.log("not by client 1", loss, on_step=False, on_epoch=True)
        return loss


def test_several_clients_log_as_several_trainers() -> None:
    local, module = FastEngine(fabric(), LocalOptions(max_epochs=2, log_every_n_steps=5)), Changing()
    start = copy.deepcopy(module.state_dict())
    for module.client in range(4):
        module.load_state_dict(start)
        theirs = by_lightning(copy.deepcopy(module), seed=module.client, max_epochs=2)
        same(by_us(module, seed=module.client, local=local), theirs)
        assert ("not by client 1" in theirs.metrics) is (module.client != 1)


@pytest.mark.parametrize("case", ["sgd", "one cycle", "gan", "bf16-mixed", "accumulate 3"])
def test_the_stock_engine_equals_both(case: str) -> None:
    build, options = CASES[case]
    module, options = build(), {"max_epochs": 2, **options}
    stock = by_us(copy.deepcopy(module), engine=LightningEngine, **options)
    same(stock, by_lightning(copy.deepcopy(module), **options))


def test_gradients_of_both_engines_are_the_losses() -> None:
    module, (train, _) = PlainLoss(), loaders()
    batch = next(iter(train))
    for training in (False, True):
        module.train(training)
        grads = []
        for take in (
            by_hand,
            FastEngine(fabric(), LocalOptions()).gradient,
            LightningEngine(fabric(), LocalOptions()).gradient,
        ):
            torch.manual_seed(5)
            take(module, batch)
            grads.append([parameter.grad.clone() for parameter in module.parameters()])
            assert module.training is training
        for other in grads[1:]:
            assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def by_hand(module: Any, batch: Any) -> None:
    module.zero_grad()
    nn.functional.cross_entropy(module.net(batch[0]), batch[1]).backward()
