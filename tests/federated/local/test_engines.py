"""What the client loop promises besides equal numbers: isolation, freed memory, clear refusals."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.engines import FastEngine, local_engine
from lightning_sparsefl.federated.local.fast.support import unsupported_reason
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions

LEAFSPEC = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
ENGINES = pytest.mark.parametrize("engine", [FastEngine, LightningEngine])


class Net(LightningModule):
    """An ordinary user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.acc = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.acc(logits, y)
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Manual(Net):
    """Optimizes by itself, and fails between toggling and untoggling."""

    fails = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 3)

    def training_step(self, batch: Any) -> None:
        mine, _ = self.optimizers()
        self.toggle_optimizer(mine)
        if self.fails:
            raise RuntimeError("half way")
        self.untoggle_optimizer(mine)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net, self.other)]


def data(size: int = 20) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


def loader(size: int = 20) -> DataLoader[Any]:
    return DataLoader(data(size), batch_size=5)


@pytest.fixture
def fabric() -> Fabric:
    torch.manual_seed(0)
    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def local(fabric: Fabric) -> FastEngine:
    return FastEngine(fabric, LocalOptions())


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": -2},
        {"max_epochs": -1},
        {"max_steps": -2},
        {"accumulate_grad_batches": 0},
        {"gradient_clip_algorithm": "median"},
        {"limit_train_batches": 1.5},
        {"limit_val_batches": -1},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=f"`trainer.{next(iter(options))}` is"):
        LocalOptions(**options)


class Reads(Callback):
    """Reads one attribute of the trainer, or of its loops."""

    def __init__(self, *path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name in self.path:
            trainer = getattr(trainer, name)


@pytest.mark.parametrize("path", [("tuner",), ("fit_loop", "epoch_progress"), ("fit_loop", "epoch_loop", "val_loop")])
def test_reading_what_only_a_trainer_has_says_what_to_do(local: FastEngine, path: tuple[str, ...]) -> None:
    with pytest.raises(AttributeError, match=rf"{path[-1]}.*`federation.local_engine: trainer`"):
        local.fit(Net(), loader(), callbacks=[Reads(*path)])


class Keeps(Callback):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.events: list[str] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.kept = trainer
        self.log  # noqa: B018 - attached by the loop, as by Lightning

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.events.append(f"{type(exception).__name__} {trainer.interrupted}")


class Buggy(Net):
    """Fails in its third batch, or in validation."""

    where = ""

    def training_step(self, batch: Any) -> Tensor:
        if self.where == "training" and self.global_step == 2:
            raise ZeroDivisionError
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        super().validation_step(batch)
        if self.where == "validation":
            raise ZeroDivisionError


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_client_that_fails_leaves_nothing_to_the_next(local: FastEngine, where: str, tmp_path: Path) -> None:
    module, keeps = Buggy(), Keeps()
    start = copy.deepcopy(module.state_dict())
    expected = local.fit(copy.deepcopy(module), loader(), loader())
    module.where = where
    with pytest.raises(ZeroDivisionError):
        local.fit(module, loader(), loader(), callbacks=[keeps], loggers=[CSVLogger(tmp_path)])
    assert keeps.events == ["ZeroDivisionError True"]
    assert (module._trainer, module._current_fx_name) == (None, None)
    assert module.training
    assert torch.is_grad_enabled()
    assert local.global_step == (2 if where == "training" else 4)
    module.load_state_dict(start)
    module.where = ""
    assert local.fit(module, loader(), loader()) == expected


def test_a_failed_manual_step_leaves_no_frozen_parameter(local: FastEngine) -> None:
    module = Manual()
    with pytest.raises(RuntimeError, match="half way"):
        local.fit(module, loader())
    assert all(parameter.requires_grad for parameter in module.parameters())
    module.fails = False
    assert local.fit(module, loader()) == {}


@ENGINES
def test_module_and_callbacks_come_back_as_they_were(fabric: Fabric, engine: Any) -> None:
    module, keeps = Net(), Keeps()
    storage = module.net.weight.data_ptr()
    engine(fabric, LocalOptions()).fit(module, loader(), callbacks=[keeps])
    assert module._trainer is None
    assert module.net.weight.data_ptr() == storage
    keeps.kept = None
    assert not {"log", "log_dict"} & vars(pickle.loads(pickle.dumps(keeps))).keys()


class Watched(Net):
    """Its optimizer can be watched."""

    watched: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        type(self).watched = weakref.ref(optimizer)
        return optimizer


def test_optimizers_are_freed_without_the_cycle_collector(local: FastEngine) -> None:
    gc.disable()
    try:
        local.fit(Watched(), loader())
        assert Watched.watched is not None
        assert Watched.watched() is None
    finally:
        gc.enable()


def test_metrics_speak_with_no_other_rank_and_start_empty(local: FastEngine) -> None:
    module, fresh = (Net() for _ in range(2))
    fresh.load_state_dict(module.state_dict())
    module.acc(torch.eye(3), torch.tensor([1, 2, 0]))
    assert local.fit(module, loader())["acc"] == local.fit(fresh, loader())["acc"]
    assert module.acc.distributed_available_fn() is False
    assert not module.acc.update_called
    with pytest.raises(InvalidOption, match=r"'1'.*BatchNorm"):
        isolate_metrics(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


class SeesGrad(Net):
    """Notes whether it is evaluated in inference mode."""

    def validation_step(self, batch: Any) -> None:
        super().validation_step(batch)
        self.log("inference", float(torch.is_inference_mode_enabled()))


def test_gloo_gets_no_inference_mode_and_no_advice_to_sync(local: FastEngine, tmp_path: Path) -> None:
    module = SeesGrad()
    assert local.evaluate(module, loader(), stage="validate")["inference"] == 1
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert local.evaluate(module, loader(), stage="validate")["inference"] == 0
    finally:
        torch.distributed.destroy_process_group()


class Augmented(LightningDataModule):
    """Adds one on the device; must not be set up for each client."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]

    def setup(self, stage: str) -> None:
        raise AssertionError

    prepare_data = teardown = setup  # type: ignore[assignment]


class SeesData(Net):
    """Looks at the data module and at its batches."""

    def training_step(self, batch: Any) -> Tensor:
        assert isinstance(self.trainer.datamodule, Augmented)
        self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch)


@ENGINES
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_data_module_is_shown_but_not_run(fabric: Fabric, engine: Any) -> None:
    metrics = engine(fabric, LocalOptions()).fit(SeesData(), loader(), datamodule=Augmented())
    assert float(metrics["mean"]) == pytest.approx(float(data().tensors[0].mean()) + 1, abs=1e-6)


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        yield from data()


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (lambda: [loader()], "several loaders"),
        (lambda: {"a": loader()}, "several loaders"),
        (lambda: CombinedLoader([loader()]), "CombinedLoader"),
        (lambda: DataLoader(Endless(), batch_size=5), "no length"),
    ],
)
@LEAFSPEC
def test_refuses_loaders_that_it_cannot_read(local: FastEngine, batches: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=f"{reason}.*`federation.local_engine: trainer`"):
        local.fit(Net(), batches())


class Plain(Callback):
    """A user's own callback."""


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0])


def overriding(name: str) -> Net:
    return type("Overriding", (Net,), {name: lambda self: getattr(super(Net, self), name)()})()


@pytest.mark.parametrize(
    ("module", "callbacks", "reason"),
    [
        (Net(), [EarlyStopping("loss"), ProximalTerm()], None),
        (Manual(), [], None),
        (overriding("configure_model"), [], None),
        (Net(), [Plain()], "`Plain`"),
        (Net(), [ModelCheckpoint()], "`ModelCheckpoint`"),
        (Net(), [StochasticWeightAveraging(0.1)], "`StochasticWeightAveraging`"),
        (Iterates(), [], "`Iterates.training_step` takes `dataloader_iter`"),
        *(
            (overriding(name), [], f"`Overriding` overrides `{name}`")
            for name in ("configure_callbacks", "prepare_data", "train_dataloader", "val_dataloader")
        ),
    ],
)
def test_knows_what_it_does_not_serve(module: Net, callbacks: list[Callback], reason: str | None) -> None:
    found = unsupported_reason(module, callbacks)
    assert found is None if reason is None else reason in str(found)


def test_the_fast_engine_warns_of_a_callback_that_it_does_not_support(fabric: Fabric) -> None:
    message = "The fast engine does not support the callback `StochasticWeightAveraging`, .* set `federation.local_eng"
    with pytest.warns(UserWarning, match=message):
        local_engine("fast", fabric, LocalOptions(), Net(), [ProximalTerm(0.1), StochasticWeightAveraging(0.1)])


def test_auto_falls_back_with_one_message(fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    module, options = overriding("configure_callbacks"), LocalOptions()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert isinstance(local_engine("auto", fabric, options, module, []), LightningEngine)
    records = {id(record): record.message for record in caplog.records}  # a record may reach two handlers
    messages = [message for message in records.values() if "real Lightning Trainer" in message]
    assert len(messages) == 1
    assert "`configure_callbacks`" in messages[0]
    assert isinstance(local_engine("auto", fabric, options, Net(), []), FastEngine)
    assert isinstance(local_engine("trainer", fabric, options, Net(), []), LightningEngine)
    with pytest.raises(InvalidOption, match=r"overrides `configure_callbacks`"):
        local_engine("fast", fabric, options, module, []).fit(module, loader())
    with pytest.raises(InvalidOption, match=r"`federation.local_engine` is 'quick'"):
        local_engine("quick", fabric, options, module, [])  # type: ignore[arg-type]


def test_the_real_trainer_serves_the_rest(fabric: Fabric) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            self.late = nn.Linear(3, 3)

        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch) + self.late(batch[0][:, :3]).mean()

    module = Late()
    stock = LightningEngine(fabric, LocalOptions(max_epochs=2))
    assert {"loss", "acc"} <= stock.fit(module, loader()).keys()
    assert stock.global_step == 8
    before = copy.deepcopy(module.net.state_dict())
    stock.gradient(module, next(iter(loader())))
    assert module.late.weight.grad is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in module.net.state_dict().items())


def test_manual_optimization_refuses_what_it_cannot_have(fabric: Fabric) -> None:
    for name, value in (("gradient_clip_val", 0.5), ("accumulate_grad_batches", 2)):
        with pytest.raises(InvalidOption, match=f"`trainer.{name}` is {value}.*manually"):
            FastEngine(fabric, LocalOptions(**{name: value})).fit(Manual(), loader())
    for engine in (FastEngine, LightningEngine):
        with pytest.raises(InvalidOption, match="optimizes manually"):
            engine(fabric, LocalOptions()).gradient(Manual(), next(iter(loader())))


def test_refuses_modules_without_a_step(local: FastEngine) -> None:
    with pytest.raises(InvalidOption, match=r"no `test_step`"):
        local.evaluate(Net(), loader(), stage="test")
    with pytest.raises(InvalidOption, match="no `training_step`"):
        local.fit(LightningModule(), loader())


def test_a_gradient_changes_neither_weights_nor_metrics_nor_mode(local: FastEngine) -> None:
    module, batch = Net().eval(), next(iter(loader()))
    before = copy.deepcopy(module.state_dict())
    for _ in range(2):  # the second replaces the first
        local.gradient(module, batch)
    expected = torch.autograd.grad(nn.functional.cross_entropy(module.net(batch[0]), batch[1]), module.net.weight)
    assert torch.equal(module.net.weight.grad, expected[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not module.training
    assert not module.acc.update_called
    assert module._trainer is None


class Scheduled(Net):
    """Uses what a Trainer has set up before the first step."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.note = seen.append

    def on_train_start(self) -> None:
        self.factor = 2.0

    def on_after_backward(self) -> None:
        self.net.weight.grad.mul_(self.factor)

    def training_step(self, batch: Any) -> Tensor:
        trainer, optimizer = self.trainer, self.optimizers()
        batches = (trainer.num_training_batches, trainer.is_last_batch, len(trainer.train_dataloader))
        self.note((trainer.estimated_stepping_batches, *batches, trainer.max_epochs, self.current_epoch))
        self.log("lr", optimizer.param_groups[0]["lr"])
        return super().training_step(batch) * self.factor


@pytest.mark.parametrize("limit", [0.1, 0, 1.0])
def test_a_gradient_is_that_of_a_fit_of_one_batch(fabric: Fabric, limit: float) -> None:
    modules, seen = [], list[Any]()
    for engine in (FastEngine, LightningEngine):
        torch.manual_seed(0)
        modules.append(Scheduled(seen))
        local = engine(fabric, LocalOptions(max_epochs=3, limit_train_batches=limit))
        local.gradient(modules[-1], next(iter(loader())))
    assert seen == [(1, 1, True, 1, 1, 0)] * 2
    ours, theirs = modules
    assert torch.equal(ours.net.weight.grad, theirs.net.weight.grad)


class Noted(Net):
    """Saves its hyper-parameters, prints and gathers."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any) -> Tensor:
        if self.trainer.is_last_batch:
            self.print("last", self.all_gather(batch[0].sum()).shape, self.lr_schedulers())
        return super().training_step(batch)


def test_hyperparameters_reach_the_loggers(
    local: FastEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local.fit(Noted(7), loader(), loggers=[CSVLogger(tmp_path, name="a", version=0)])
    assert "width: 7" in (tmp_path / "a" / "version_0" / "hparams.yaml").read_text()
    assert capsys.readouterr().out == "last torch.Size([]) None\n"


def test_an_engine_for_other_epochs_keeps_the_other_options(fabric: Fabric) -> None:
    for limit in (1.0, 1):  # all batches, and one batch
        engine = FastEngine(fabric, LocalOptions(limit_train_batches=limit))
        for epochs in (3, 2, 3):
            options = engine.for_epochs(epochs).options
            assert options == LocalOptions(limit_train_batches=limit, max_epochs=epochs)
            assert type(options.limit_train_batches) is type(limit)


def test_an_unknown_precision_or_device_is_refused() -> None:
    strategy = SimpleNamespace(precision=SimpleNamespace(precision="transformer-engine"))
    exotic: Any = SimpleNamespace(strategy=strategy, device=torch.device("cpu"))
    with pytest.raises(InvalidOption, match=r"`trainer.precision` is 'transformer-engine'"):
        FastEngine(exotic, LocalOptions())
    assert isinstance(local_engine("auto", exotic, LocalOptions(), Net(), []), LightningEngine)
    strategy.precision.precision, exotic.device = "32-true", torch.device("meta")
    with pytest.raises(InvalidOption, match="'meta'"):
        FastEngine(exotic, LocalOptions())


@pytest.mark.parametrize("options", [{"limit_train_batches": 0}, {"max_epochs": 0}])
def test_no_batches_no_training(fabric: Fabric, options: dict[str, Any]) -> None:
    module = Net()
    before = copy.deepcopy(module.state_dict())
    local = FastEngine(fabric, LocalOptions(**options))
    assert local.fit(module, loader()) == {}
    assert local.global_step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


class Scored(Net):
    """Logs another key for each size of the data, by step and by epoch, and a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.setups = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.acc.update(logits, batch[1])
        self.log("acc", self.acc)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), on_step=True, on_epoch=True)
        self.log(f"of_{len(batch[0])}", logits.sum(), batch_size=len(batch[0]), reduce_fx="sum")


class Hooked(Scored):
    """Sees the start of each evaluation."""

    def on_validation_start(self) -> None:
        self.setups += 1


@LEAFSPEC
@pytest.mark.parametrize(("kind", "trainers"), [(Scored, 2), (Hooked, 5)])
def test_evaluations_in_sequence_are_as_with_new_engines(
    fabric: Fabric, kind: type[Scored], trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, made = kind(), []
    before = FastTrainer.__init__
    monkeypatch.setattr(FastTrainer, "__init__", lambda self, *a, **k: (made.append(self), before(self, *a, **k))[1])
    kept = FastEngine(fabric, LocalOptions())
    scores = [kept.evaluate(module, loader(size), stage="validate") for size in (20, 7, 13)]
    with pytest.raises(RuntimeError):
        kept.evaluate(module, DataLoader(TensorDataset(torch.zeros(2, 3), torch.zeros(2).long())), stage="validate")
    scores.append(kept.evaluate(module, loader(9), stage="validate"))
    assert len(made) == trainers
    assert module._trainer is None
    new = [
        FastEngine(fabric, LocalOptions()).evaluate(module, loader(size), stage="validate") for size in (20, 7, 13, 9)
    ]
    assert scores == new
    assert {"acc", "val_loss_epoch"} <= scores[1].keys()
    assert scores[0].keys() != scores[1].keys()
    theirs = LightningEngine(fabric, LocalOptions()).evaluate(module, loader(13), stage="validate")
    assert scores[2] == theirs


def test_a_callback_of_ones_own_may_declare_that_the_fast_engine_can_call_it():
    class Declared(Callback):
        stackable = True

    class Inherits(ProximalTerm):
        """It may do what its base does not."""

    assert unsupported_reason(LightningModule(), [Declared()]) is None
    assert unsupported_reason(LightningModule(), [Inherits()]) == (
        "the fast engine does not support the callback `Inherits`"
    )


class Annealed(Net):
    """Schedules its rate over the steps of the fit."""

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=max(1, int(steps)))]


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_schedule_over_the_steps_of_a_fit_without_batches_is_made(fabric: Fabric, limit: float) -> None:
    for engine in (FastEngine, LightningEngine):
        module = Annealed()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        engine(fabric, LocalOptions(limit_train_batches=limit)).fit(module, loader())
        assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
