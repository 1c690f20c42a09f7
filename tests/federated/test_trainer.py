"""The front door: any module, any data, stock callbacks and loggers at the round level."""

import copy
import csv
import json
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FedAvg, FedBABU, FederatedTrainer, Federation, FedRep, FedSpa, HeteroFL
from lightning_sparsefl.callbacks import DynamicMask, ProximalTerm, StaticMask, StepMeter
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.models import MLP
from lightning_sparsefl.types import Update

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning calls what torch renames


class UserModule(L.LightningModule):
    """Uses what modules use: the trainer, its own optimizers, metric objects, hyper-parameters."""

    def __init__(self, hidden=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 4)
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        assert self.trainer.max_epochs == 2
        assert self.trainer.training
        assert len(self.trainer.optimizers) == 1
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log_dict({"train_loss": loss, "lr": self.optimizers().param_groups[0]["lr"]})
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class GAN(L.LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        real = batch[0].flatten(1)
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        self.manual_backward((self.critic(fake.detach()) - self.critic(real)).mean())
        second.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_gap", self.critic(batch[0].flatten(1)).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.generator.parameters(), 0.01), torch.optim.SGD(self.critic.parameters(), 0.01)


class OneClient(L.LightningDataModule):
    """An ordinary data module of one client."""

    def __init__(self, seed, size):
        super().__init__()
        self.seed, self.size = seed, size

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.size, 8, generator=g)
        self.data = TensorDataset(x, x[:, :4].argmax(1))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=16)


def blobs(**options):
    settings = {"num_clients": 5, "num_classes": 4, "dim": 8, "val_fraction": 0.2, "batch_size": 16, "drop_last": True}
    return FederatedBlobs(**{**settings, **options})


@pytest.fixture
def trainer(tmp_path):
    def make(algorithm=None, **options):
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_rounds": 3,
            "max_epochs": 2,
            "default_root_dir": str(tmp_path),
            "logger": False,
            "enable_progress_bar": False,
            "federation": Federation(clients_per_round=3, pictures_every_n_rounds=0),
            "seed": 0,
        }
        return FederatedTrainer(algorithm=algorithm or FedAvg(), **{**settings, **options})

    return make


def test_a_users_module_trains_unmodified(trainer):
    module = UserModule()
    before = copy.deepcopy(module.state_dict())
    run = trainer(max_rounds=6)
    summary = run.fit(module, blobs())
    assert summary["personal/val_acc"] > 0.5
    assert any(not torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    again = UserModule.load_from_checkpoint(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert again.hparams.hidden == 8
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_manual_optimization_trains(trainer):
    module = GAN()
    module.example_input_array = torch.zeros(1, 8)
    module.forward = lambda x: module.critic(x)
    before = module.generator.weight.detach().clone()
    trainer().fit(module, blobs())
    assert not torch.equal(module.generator.weight, before)


@pytest.mark.parametrize(("method", "frozen"), [(FedRep(), "generator"), (FedBABU(), "critic")])
@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_manual_optimization_of_layers_that_are_all_frozen_names_them_and_the_options(method, frozen, engine, trainer):
    module = GAN()
    module.forward = lambda x: module.critic(module.generator(x.flatten(1)[:, :4]))
    federation = Federation(clients_per_round=3, local_engine=engine)
    words = rf"has frozen `{frozen}\.weight`, `{frozen}\.bias`, and .* let `algorithm\.own`, `algorithm\.head`"
    with pytest.raises(ClientFailed, match=words) as caught:
        trainer(method, federation=federation).fit(module, blobs())
    assert "does not require grad" in str(caught.value.__cause__.__cause__)


def test_gradient_search_refuses_manual_optimization(trainer):
    module = GAN()
    module.forward = lambda x: module.critic(x.flatten(1))
    with pytest.raises(InvalidOption, match="manual"):
        trainer(FedSpa()).fit(module, blobs())


def test_a_list_of_ordinary_data_modules_is_a_federation(trainer):
    module = UserModule()
    module.example_input_array = torch.zeros(1, 8)
    summary = trainer(max_rounds=8).fit(module, [OneClient(seed, 24 + 8 * seed) for seed in range(4)])
    assert summary["clients"] == 4
    assert summary["personal/val_acc"] > 0.45  # four classes


def test_fit_returns_the_numbers_of_the_summary(trainer):
    stop = EarlyStopping("density/all", patience=1, check_on_train_epoch_end=True)
    run = trainer(callbacks=[stop], max_rounds=9)
    scores = run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    summary = json.loads((run.run_folder / "summary.json").read_text())
    assert (summary.pop("algorithm"), summary.pop("stopped_by")) == ("FedAvg", stop.state_key)
    assert scores == summary


def test_stock_callbacks_see_rounds_as_epochs(trainer, tmp_path):
    best = ModelCheckpoint(tmp_path / "best", filename="{epoch}", monitor="global/val_acc", mode="max", save_top_k=2)
    stop = EarlyStopping("global/val_loss", patience=1, mode="max")  # loss falls: stops after two rounds
    run = trainer(callbacks=[best, stop], max_rounds=10)
    summary = run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    assert summary["rounds"] < 10
    assert len(list((tmp_path / "best").glob("*.ckpt"))) == 2
    content = torch.load(best.best_model_path, weights_only=True)
    assert content["sparsefl"]["state"]["round"] == content["epoch"]


def test_a_copy_made_by_model_checkpoint_stands_alone(trainer, tmp_path):
    copies = ModelCheckpoint(tmp_path / "copies", filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    module = MLP(num_classes=4, sample_shape=(1, 1, 8))
    straight = trainer(FedSpa(), callbacks=[copies], max_rounds=4).fit(copy.deepcopy(module), blobs())
    middle = str(tmp_path / "copies" / "epoch=1.ckpt")
    resumed = trainer(FedSpa(), max_rounds=4).fit(copy.deepcopy(module), blobs(), middle)
    assert resumed == straight


def test_stock_loggers_write_rounds(trainer, tmp_path):
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "tb")]
    run = trainer(logger=loggers)
    run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    with open(loggers[0].log_dir + "/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert all(row["comm/uplink_bytes"] for row in rows)
    assert run.run_folder == Path(loggers[1].log_dir)


def test_our_callbacks_among_the_round_level_ones_move_to_the_clients(trainer):
    run = trainer(callbacks=[StaticMask(density=0.25)])
    assert [type(callback) for callback in run.client_callbacks] == [StaticMask]
    assert run.callbacks == []
    module = MLP(num_classes=4, sample_shape=(1, 1, 8))
    run.fit(module, blobs())
    weight = module.net[1].weight if isinstance(module.net, nn.Sequential) else next(iter(module.parameters()))
    assert 0.1 < (weight != 0).float().mean() < 0.6


@pytest.mark.slow_after_first
@pytest.mark.filterwarnings("ignore:.*(masks frozen weights|never moves its mask)")
@pytest.mark.parametrize("engine", ["trainer", "stacked"])
@pytest.mark.parametrize("algorithm", [FedAvg(), FedRep()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("kind", [StaticMask, DynamicMask])
def test_masks_of_clients_rescale_the_first_weights_of_a_run_only(kind, algorithm, engine, trainer):
    """And not those that each local fit begins with, which would grow from round to round."""
    callback, sizes = kind(density=0.5, rescale=True, seed=3), []
    for rounds in (1, 3):
        torch.manual_seed(0)
        module = MLP(num_classes=4, sample_shape=(1, 1, 8), lr=1e-9)
        first = {name: value.clone() for name, value in module.state_dict().items()}
        federation = Federation(clients_per_round=3, local_engine=engine)
        run = trainer(algorithm, federation=federation, client_callbacks=[callback], max_rounds=rounds)
        run.fit(module, blobs())
        ratios = [(value / first[n])[value != 0] for n, value in module.state_dict().items() if value.dim() > 1]
        sizes.append(torch.cat(ratios).max())
    assert sizes[0] > 1.2
    assert sizes[1] <= sizes[0] + 1e-5


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (EMAWeightAveraging(), "EMAWeightAveraging, which acts on a fit, .*`trainer.client_callbacks`"),
        (ModelPruning("l1_unstructured", amount=0.5), "ModelPruning, which acts on a fit"),
        (StochasticWeightAveraging(0.1), "StochasticWeightAveraging, which acts on a fit"),
        (LearningRateFinder(), "LearningRateFinder, which acts on a fit"),
        (BatchSizeFinder(), "BatchSizeFinder, which changes the data module of a fit, .* set `data.batch_size`"),
        (LearningRateMonitor(), "LearningRateMonitor, which logs the steps of one fit, .* remove it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, L.Callback) else "",
)
def test_callbacks_for_rounds_that_act_on_a_fit_are_refused(callback, words, trainer):
    with pytest.raises(InvalidOption, match=rf"`trainer\.callbacks` has {words}"):
        trainer(callbacks=[callback])


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (LearningRateMonitor(), "LearningRateMonitor, which needs a logger"),
        (ModelCheckpoint(), "a ModelCheckpoint without `dirpath`, whose files of all clients"),
        (BatchSizeFinder(), "BatchSizeFinder, which changes the data module of a fit"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, L.Callback) else "",
)
def test_callbacks_for_clients_that_need_more_than_a_fit_are_refused(callback, words, trainer, tmp_path):
    with pytest.raises(InvalidOption, match=rf"`trainer\.client_callbacks` has {words}"):
        trainer(client_callbacks=[callback])
    assert trainer(client_callbacks=[ModelCheckpoint(tmp_path)]).client_callbacks


def test_a_progress_bar_of_the_user_replaces_ours(trainer):
    assert [type(each).__name__ for each in trainer(enable_progress_bar=True).callbacks] == ["RoundProgressBar"]
    bar = TQDMProgressBar()
    assert trainer(enable_progress_bar=True, callbacks=[bar]).callbacks == [bar]


def test_an_evaluation_keeps_the_folder_of_the_run(trainer):
    run, module = trainer(), MLP(num_classes=4, sample_shape=(1, 1, 8))
    run.fit(module, blobs())
    folder = run.run_folder
    run.validate(module, blobs(), ckpt_path="last")
    assert run.run_folder == folder is not None
    assert run.log_dir == str(folder)


class ReadsCallbacks(FedAvg):
    def train(self, message, client):
        own = [StepMeter(mu=0.0)]
        result = client.fit(message.weights, callbacks=own)
        assert result.callbacks == own
        return Update(weights=result.weights, weight=client.num_examples)


@pytest.mark.parametrize("engine", ["trainer", "fast", "stacked"])
def test_a_fit_returns_the_callbacks_that_were_passed_to_it(engine, trainer):
    federation = Federation(clients_per_round=3, local_engine=engine)
    others = [] if engine == "stacked" else [ProximalTerm(strength=0.1)]
    run = trainer(algorithm=ReadsCallbacks(), federation=federation, client_callbacks=others)
    run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs())


def test_a_batch_of_one_sample_in_an_evaluation_names_the_options(trainer):
    """Norms without running statistics, as HeteroFL's, use the statistics of each batch in an evaluation, too."""
    net = MLP(num_classes=4, sample_shape=(1, 1, 8))
    net.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    run = trainer(algorithm=HeteroFL(), federation=Federation(clients_per_round=3, capacities=[0.5, 1.0]))
    with pytest.raises(InvalidOption, match=r"a batch of one sample of the test set; .* `data\.eval_bat.*min_exam"):
        run.fit(net, blobs(eval_split="test", num_test=257))


def test_client_callbacks_are_fresh_for_each_client(trainer):
    class Counts(L.Callback):
        total = 0

        def __init__(self):
            self.fits = 0

        def on_fit_start(self, trainer, pl_module):
            self.fits += 1
            assert self.fits == 1
            Counts.total += 1

    federation = Federation(clients_per_round=3, local_engine="fast")
    trainer(client_callbacks=[Counts()], federation=federation).fit(UserModule(), blobs())
    assert Counts.total == 9


def test_validation_inside_local_training_feeds_schedulers(trainer):
    class Plateau(UserModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_acc"}}

    trainer(validate_locally=True).fit(Plateau(), blobs())
    with pytest.raises(ClientFailed, match="val_acc"):
        trainer().fit(Plateau(), blobs())


class InPrecision(MLP):
    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precisions(trainer, precision):
    module = InPrecision(num_classes=4, sample_shape=(1, 1, 8))
    summary = trainer(precision=precision).fit(module, blobs())
    assert summary["rounds"] == 3
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert next(module.parameters()).dtype == expected


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_the_module_has_the_weights_and_the_precision_of_the_checkpoint_after_several_ranks(trainer, precision):
    module = InPrecision(num_classes=4, sample_shape=(1, 1, 8))
    run = trainer(precision=precision, devices=2, strategy="client_parallel_fork", max_rounds=1, max_epochs=1)
    run.fit(module, blobs())
    stored = torch.load(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    dtypes = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
    for name, value in module.state_dict().items():
        assert value.dtype == stored[name].dtype == dtypes[precision]
        assert torch.equal(value, stored[name])


def test_fast_dev_run_is_one_round_of_two_clients_and_one_batch(trainer):
    run = trainer(fast_dev_run=True)
    summary = run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    assert summary["rounds"] == 1
    with (run.run_folder / "clients.csv").open() as file:
        assert sum(row["trained"] == "1" for row in csv.DictReader(file)) == 2


def test_fast_dev_run_has_one_client_where_the_others_are_unseen(trainer):
    run = trainer(fast_dev_run=True, federation=Federation(clients_per_round=1, unseen_clients=3))
    assert run.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), blobs(num_clients=4))["rounds"] == 1


def test_too_few_survivors_end_the_run(trainer, monkeypatch):
    def fails(self, message, client):
        raise RuntimeError("no luck")

    monkeypatch.setattr(FedAvg, "train", fails)
    federation = Federation(clients_per_round=3, on_client_error="skip", min_clients=2)
    words = r"no luck; no other client of the round succeeded, so that nothing can be merged; correct the cause\."
    with pytest.raises(ClientFailed, match=words):
        trainer(federation=federation).fit(UserModule(), blobs())


def test_the_users_error_is_the_cause(trainer):
    class Broken(UserModule):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("mine")

    with pytest.raises(ClientFailed, match="ZeroDivisionError: mine") as caught:
        trainer().fit(Broken(), blobs())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.round, caught.value.rank) == (0, 0)


def test_a_crash_after_training_leaves_the_last_checkpoint(trainer, monkeypatch):
    """A full disk: the round that could not be written is lost, the one before is not."""
    from lightning_sparsefl.federated.storage import checkpoint

    save, calls = checkpoint.save, []

    def full_disk(path, data, again):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(path, data, again)

    monkeypatch.setattr(checkpoint, "save", full_disk)
    module = MLP(num_classes=4, sample_shape=(1, 1, 8))
    with pytest.raises(OSError, match="No space"):
        trainer().fit(copy.deepcopy(module), blobs())
    monkeypatch.undo()
    run = trainer()
    resumed = run.fit(copy.deepcopy(module), blobs(), "last")
    assert resumed["rounds"] == 3
    assert resumed == trainer().fit(copy.deepcopy(module), blobs())


def test_bad_input(trainer):
    with pytest.raises(InvalidOption, match="expected a method of"):
        FederatedTrainer(algorithm="FedAvg")
    with pytest.raises(InvalidOption, match=r"`trainer\.callbacks` is 3; expected callbacks of Lightning"):
        trainer(callbacks=[3])
    with pytest.raises(InvalidOption, match=r"`trainer\.client_callbacks` is 'StepMeter'; expected callbacks"):
        trainer(client_callbacks="StepMeter")
    with pytest.raises(InvalidOption, match="without `num_clients`"):
        trainer().fit(UserModule(), None)
    with pytest.raises(InvalidOption, match="expected a `lightning"):
        trainer().fit(nn.Linear(1, 1), blobs())
    with pytest.raises(InvalidOption, match=r"`model` is compiled as a whole; .* one of its submodules instead"):
        trainer().fit(torch.compile(UserModule()), blobs())
    with pytest.raises(InvalidOption, match="has no `test_step`"):
        trainer().fit(UserModule(), blobs(eval_split="test"))
    frozen = UserModule().requires_grad_(False)
    with pytest.raises(InvalidOption, match="no trainable parameter"):
        trainer().fit(frozen, blobs())
    with pytest.raises(InvalidOption, match=r"`federation\.capacities` has 9 numbers"):
        trainer(federation=Federation(clients_per_round=2, capacities=[1.0] * 9)).fit(UserModule(), blobs())
    with pytest.raises(InvalidOption, match=r"expected numbers in \(0, 1\]"):
        Federation(capacities=[0.0])
