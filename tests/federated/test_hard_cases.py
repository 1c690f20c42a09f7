"""What ordinary modules, data and callbacks do that an engine could trip over."""

import copy
import csv
import warnings
from collections import UserList

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_sparsefl import (
    CS,
    FIARSE,
    SNIP,
    DisPFL,
    FedAvg,
    FedDIP,
    FedDST,
    FederatedAlgorithm,
    FederatedTrainer,
    Federation,
    FedLPS,
    FedSpa,
    HeteroFL,
    LotteryFL,
    PerFedMask,
    SparsyFed,
    SplitMix,
)
from lightning_sparsefl.data import FederatedBlobs, FederatedDataset
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.sampling.draws import split_unseen
from lightning_sparsefl.models import MLP

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


ONCE = MLP(num_classes=4, sample_shape=(1, 1, 8))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.starts = UserList()  # a list would be restored after each fit

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


del Net.test_step


def blobs(**options):
    settings = {"num_clients": 5, "num_classes": 4, "dim": 8, "val_fraction": 0.2, "batch_size": 16, "drop_last": True}
    return FederatedBlobs(**{**settings, **options})


def mlp():
    torch.manual_seed(0)
    return MLP(num_classes=4, sample_shape=(1, 1, 8))


@pytest.fixture
def trainer(tmp_path):
    def make(algorithm=None, *, federation=None, **options):
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_rounds": 3,
            "default_root_dir": str(tmp_path),
            "logger": False,
            "enable_progress_bar": False,
            "seed": 0,
            "federation": Federation(clients_per_round=3, pictures_every_n_rounds=0, **(federation or {})),
        }
        return FederatedTrainer(algorithm=algorithm or FedAvg(), **{**settings, **options})

    return make


def test_stock_callbacks_wait_for_the_rounds_that_are_evaluated(trainer, tmp_path):
    stop = EarlyStopping("global/val_loss", patience=1, mode="max")
    best = ModelCheckpoint(tmp_path / "best", monitor="global/val_acc", mode="max", save_top_k=1)
    summary = trainer(callbacks=[stop, best], check_val_every_n_round=2, max_rounds=12).fit(mlp(), blobs())
    assert summary["rounds"] % 2 == 0
    assert 4 <= summary["rounds"] < 12
    assert best.best_model_path


def test_modules_that_the_user_keeps_in_evaluation_mode_stay_there(trainer):
    class Frozen(Net):
        def on_train_epoch_start(self):
            self.net[2].eval()

        def training_step(self, batch, batch_idx):
            self.starts.append(self.net[2].training)
            return super().training_step(batch, batch_idx)

    for algorithm in (FedAvg(), FedSpa()):
        module = Frozen()
        module.net[2].eval()
        trainer(algorithm, federation={"local_engine": "fast"}).fit(module, blobs())
        fits = [started for started in module.starts if started]
        assert not fits


def test_buffers_that_are_assigned_anew_do_not_leak_from_client_to_client(trainer):
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("level", torch.zeros(()))

        def on_train_start(self):
            self.starts.append((int(self.seen), float(self.level)))

        def training_step(self, batch, batch_idx):
            self.seen = self.seen + 1
            self.level = self.level + 1
            return super().training_step(batch, batch_idx)

    module = Counts()
    federation = {"buffers": "server", "local_engine": "fast"}
    trainer(FedSpa(), federation=federation).fit(module, blobs())
    fits = module.starts[::2] if len(module.starts) > 9 else module.starts
    assert set(fits) == {(0, 0.0)}


def test_integer_buffers_are_those_of_the_checkpoint(trainer):
    class Permuted(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("order", torch.randperm(8))

        def forward(self, x):
            return self.net(x.flatten(1)[:, self.order])

    torch.manual_seed(1)
    first, other = Permuted(), Permuted()
    assert not torch.equal(first.order, other.order)
    run = trainer(max_rounds=6)
    summary = run.fit(first, blobs())
    scores = trainer().validate(other, blobs(), str(run.run_folder / "checkpoints" / "last.ckpt"))
    assert scores["global/val_acc"] == summary["global/val_acc"]


def test_all_ranks_take_the_first_ranks_buffers_and_the_same_split(trainer, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    class Split(L.LightningDataModule):
        def __init__(self, client):
            super().__init__()
            self.client = client

        def setup(self, stage=None):
            g = torch.Generator().manual_seed(self.client)
            x = torch.randn(64, 8, generator=g)
            self.train, self.val = random_split(TensorDataset(x, x[:, :4].argmax(1)), [48, 16])

        def train_dataloader(self):
            return DataLoader(self.train, batch_size=16, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.val, batch_size=16)

    content = []
    for devices, strategy in ((1, "auto"), (2, "client_parallel_fork")):
        torch.manual_seed(devices)
        module = mlp()
        module.example_input_array = torch.zeros(1, 1, 1, 8)
        run = trainer(devices=devices, strategy=strategy, timeout=60)
        run.fit(module, [Split(client) for client in range(4)])
        content.append({name: tensor.numpy().tobytes() for name, tensor in module.state_dict().items()})
    assert content[0] == content[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_model_checkpoint_keeps_what_it_knew(trainer, tmp_path):
    def copies():
        return ModelCheckpoint(
            tmp_path / "best", filename="{epoch}", monitor="global/val_acc", mode="max", save_top_k=2
        )

    trainer(callbacks=[copies()], max_rounds=3).fit(mlp(), blobs())
    best = copies()
    trainer(callbacks=[best], max_rounds=6).fit(mlp(), blobs(), "last")
    assert len(list((tmp_path / "best").glob("*.ckpt"))) == 2
    assert len(best.best_k_models) == 2


def test_model_checkpoint_never_writes_the_engines_own_checkpoint(trainer):
    last = ModelCheckpoint(save_last=True, save_weights_only=True, save_top_k=0)
    run = trainer(callbacks=[last], federation={"checkpoint_every_n_rounds": 3}, max_rounds=4)
    run.fit(mlp(), blobs())
    content = torch.load(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["sparsefl"]["state"]["round"] == 4


def test_a_copy_elsewhere_starts_a_run_folder_of_its_own(trainer, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "checkpoints"
    copies = ModelCheckpoint(elsewhere, filename="{epoch}", save_top_k=-1)
    first = trainer(callbacks=[copies], logger=CSVLogger(tmp_path, "csv"))
    first.fit(mlp(), blobs())
    rows = (first.run_folder / "metrics.csv").read_text()
    second = trainer()
    second.fit(mlp(), blobs(), str(elsewhere / "epoch=1.ckpt"))
    assert second.run_folder != first.run_folder
    assert (first.run_folder / "metrics.csv").read_text() == rows
    assert [path.name for path in elsewhere.parent.iterdir()] == ["checkpoints"]


def test_hyper_parameters_that_a_checkpoint_cannot_hold_stay_out(trainer):
    class Odd(MLP):
        def __init__(self, odd=None, size=(1, 2)):
            super().__init__(num_classes=4, sample_shape=(1, 1, 8))
            self.save_hyperparameters()

    run = trainer()
    run.fit(Odd(odd={"act": nn.ReLU}), blobs())
    content = torch.load(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["hyper_parameters"]["size"] == (1, 2)
    assert "odd" not in content["hyper_parameters"]


def test_a_finished_run_gives_its_weights(trainer):
    trained, again = mlp(), mlp()
    trainer().fit(trained, blobs())
    trainer().fit(again, blobs(), "last")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())


def test_an_algorithm_decides_what_an_upload_votes_on(trainer):
    class HeadAtHome(FederatedAlgorithm):
        def may_vote(self, message):
            return {name: torch.zeros_like(w, dtype=torch.bool) for name, w in message.weights.items() if ".4." in name}

    class Same(Net):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()

    module, first = Same(), Same()
    trainer(HeadAtHome(), federation={"wire": "encode"}).fit(module, blobs())
    assert torch.equal(module.net[4].weight, first.net[4].weight)
    assert not torch.equal(module.net[1].weight, first.net[1].weight)


def test_an_error_in_an_evaluation_ends_all_ranks_with_its_sentence(trainer, monkeypatch):
    class Broken(Net):
        def validation_step(self, batch, batch_idx):
            if len(batch[0]) < 100:  # a client's own set, not the pooled one, which the other rank scores
                raise ZeroDivisionError("mine")

    with pytest.raises(Exception, match=r"mine"):
        trainer(devices=2, strategy="client_parallel_fork", timeout=60).fit(Broken(), blobs(num_train=2000))


def test_a_client_that_fails_is_charged_for_its_download(trainer, monkeypatch):
    train = FedAvg.train

    def fails_for_one(self, message, client):
        if client.id == 1:
            raise ValueError("no luck")
        return train(self, message, client)

    monkeypatch.setattr(FedAvg, "train", fails_for_one)
    run = trainer(federation={"on_client_error": "skip"}, max_rounds=4)
    summary = run.fit(mlp(), blobs())
    with (run.run_folder / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["downlink_bytes"]]
    failed = [row for row in rows if row["failure"]]
    assert failed
    assert all(int(row["downlink_bytes"]) > 0 and row["uplink_bytes"] == "0" for row in failed)
    assert summary["comm/downlink_bytes_total"] == sum(int(row["downlink_bytes"]) for row in rows)


def test_a_loader_with_a_generator_of_its_own_repeats(trainer):
    class Own(FederatedBlobs):
        def client_train_dataloader(self, client):
            made = self.__dict__.setdefault("loaders", {})
            if client not in made:
                stock = super().client_train_dataloader(client)
                made[client] = DataLoader(
                    stock.dataset,
                    16,
                    shuffle=True,
                    collate_fn=stock.collate_fn,
                    generator=torch.Generator().manual_seed(5),
                )
            return made[client]

    def data():
        return Own(num_clients=5, num_classes=4, dim=8, val_fraction=0.2, batch_size=16)

    straight, resumed = mlp(), mlp()
    trainer(max_rounds=4).fit(straight, data())
    trainer(max_rounds=2, default_root_dir=trainer().options.default_root_dir + "/b").fit(mlp(), data())
    trainer(max_rounds=4, default_root_dir=trainer().options.default_root_dir + "/b").fit(resumed, data(), "last")
    assert all(torch.equal(resumed.state_dict()[name], t) for name, t in straight.state_dict().items())


def test_nested_schedulers_follow_the_round(trainer):
    from lightning_sparsefl.federated import ExponentialRoundLR

    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            constant = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) for _ in range(2)]
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, constant, milestones=[2])
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def training_step(self, batch, batch_idx):
            self.starts.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    module = Scheduled()
    data = blobs(batch_size=8, num_clients=3)
    trainer(max_rounds=2, round_lr=ExponentialRoundLR(gamma=0.5)).fit(module, data)
    half = len(module.starts) // 2
    assert module.starts[:half] == pytest.approx([0.1] * half)
    assert module.starts[half:] == pytest.approx([0.05] * half)


def test_undefined_metrics_other_than_losses_do_not_fail_a_client(trainer):
    class Undefined(Net):
        def training_step(self, batch, batch_idx):
            self.log("train_recall_of_class_7", float("nan"))
            return super().training_step(batch, batch_idx)

    assert trainer().fit(Undefined(), blobs())["rounds"] == 3


def test_the_users_random_numbers_and_threads_are_left_as_they_were(trainer):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    trainer(num_threads=2).fit(copy.deepcopy(ONCE), blobs())
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("method", "consequence"),
    [
        (HeteroFL(), "HeteroFL trains the full model"),
        (PerFedMask(), "PerFedMask freezes no layer but the head"),
        (SplitMix(bases=2), "SplitMix trains all base networks"),
        (FedLPS(ratio="capacity"), "FedLPS trains the full model"),
    ],
)
def test_capacities_of_1_that_make_a_method_trivial_cost_a_warning(method, consequence, trainer):
    with pytest.warns(UserWarning, match=f"`federation.capacities` is 1 for all clients, so that {consequence}"):
        trainer(algorithm=method).fit(mlp(), blobs())


def test_other_capacities_and_methods_cost_no_warning(trainer, recwarn):
    trainer(algorithm=FedLPS()).fit(mlp(), blobs())
    trainer(algorithm=HeteroFL(), federation={"capacities": [0.5, 1.0]}).fit(mlp(), blobs())
    assert not [warning for warning in recwarn if "capacities" in str(warning.message)]


def test_fedlps_says_why_it_needs_a_validation_step(trainer):
    class TestsOnly(MLP):
        validation_step = L.LightningModule.validation_step

    with pytest.raises(
        InvalidOption, match=r"is FedLPS, whose bandit scores .* `validation_step`, but `TestsOnly` has"
    ):
        trainer(algorithm=FedLPS()).fit(TestsOnly(num_classes=4, sample_shape=(1, 1, 8)), blobs(eval_split="test"))


def test_a_mask_of_what_weight_norm_divides_by_is_refused(trainer):
    def normed():
        net = Net()
        net.net[1] = nn.utils.parametrizations.weight_norm(net.net[1])
        return net

    words = (
        r"`algorithm` cannot mask `net\.1\..*weight.*`, .*`_WeightNorm`.*; remove the parametrization before training"
    )
    for engine in ("auto", "fast"):
        with pytest.raises(InvalidOption, match=words):
            trainer(algorithm=FedSpa(density=0.5), federation={"local_engine": engine}).fit(normed(), blobs())
    for method in (FedDIP(), CS(), FIARSE(), SparsyFed()):  # before anything is trained
        with pytest.raises(InvalidOption, match=words):
            trainer(algorithm=method).profile(normed(), blobs())
    assert trainer().fit(normed(), blobs())


class ShuffledScores(FederatedBlobs):
    """Validates on the first batches of an order that generators of the data module draw."""

    def __init__(self) -> None:
        super().__init__(num_clients=3, num_classes=4, dim=8, val_fraction=0.5, batch_size=16)
        self.drawn = torch.Generator().manual_seed(5)

    def client_val_dataloader(self, client):
        return super().client_val_dataloader(client).dataset.loader(4, shuffle=True, generator=self.drawn)

    def val_dataloader(self):
        return self.client_val_dataloader(0)


@pytest.mark.parametrize("local_engine", ["fast", "trainer"])
def test_evaluations_do_not_depend_on_those_before(trainer, local_engine):
    options = {"federation": {"local_engine": local_engine}, "limit_val_batches": 2}
    trainer(max_rounds=1, **options).fit(mlp(), ShuffledScores())
    resumed = trainer(max_rounds=2, **options).fit(mlp(), ShuffledScores(), ckpt_path="last")
    assert resumed == trainer(max_rounds=2, **options).fit(mlp(), ShuffledScores())


class OnlyTests(L.LightningModule):
    """A module that cannot be validated."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 4))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_mistakes_are_told_before_anything_is_trained(trainer):
    class NoStep(L.LightningModule):
        pass

    with pytest.raises(InvalidOption, match="`NoStep` has no `training_step`"):
        trainer().fit(NoStep(), blobs())
    with pytest.raises(
        InvalidOption, match=r"no val set .* `data.val_fraction` above 0, or set `data.eval_split: test`"
    ):
        trainer().fit(mlp(), blobs(val_fraction=0.0))
    no_validation_set = {"val_fraction": 0.0, "eval_split": "test"}
    with pytest.raises(InvalidOption, match=r"no val set .* above 0, or set `trainer.validate_locally: false`"):
        trainer(validate_locally=True).fit(mlp(), blobs(**no_validation_set))
    with pytest.raises(InvalidOption, match=r"no `validation_step`, which `trainer\.validate_locally` calls; define"):
        trainer(validate_locally=True).fit(OnlyTests(), blobs(eval_split="test"))
    with pytest.raises(InvalidOption, match=r"with which LotteryFL scores clients in training; define it\."):
        trainer(algorithm=LotteryFL()).fit(OnlyTests(), blobs(eval_split="test"))
    with pytest.raises(InvalidOption, match=r"no val set .* above 0, or use `test` for the test sets"):
        trainer().validate(mlp(), blobs(**no_validation_set))
    with pytest.raises(InvalidOption, match="`data` lists a DataLoader"):
        trainer().fit(mlp(), [DataLoader([1])])


class Scored(L.LightningDataModule):
    """Data of one client, with or without a set to validate with."""

    def __init__(self, validates: bool) -> None:
        super().__init__()
        self.validates = validates

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4, 1, 1, 8), torch.zeros(4, dtype=torch.int64)), batch_size=2)

    def val_dataloader(self):
        return self.train_dataloader() if self.validates else None


def test_a_client_without_its_set_to_score_is_told_before_anything_is_trained(trainer, tmp_path):
    data = [Scored(True), Scored(True), Scored(False)]
    words = "client 2 has no `val_dataloader`; define one, or set `data.eval_split: test`"
    with pytest.raises(InvalidOption, match=words):
        trainer().fit(mlp(), data)
    assert not list(tmp_path.rglob("version_*"))
    assert trainer(federation={"eval_clients": 1}).fit(mlp(), data)  # which leaves out client 2
    with pytest.raises(InvalidOption, match="expected at most one rank per client"):
        trainer(devices=9, strategy="client_parallel_fork").fit(mlp(), blobs())
    with pytest.raises(InvalidOption, match=r"`federation\.on_client_error` is 'ignore'"):
        Federation(on_client_error="ignore")
    with pytest.raises(InvalidOption, match=r"fewer than one full batch"):
        trainer().fit(mlp(), blobs(batch_size=512))
    lazy = Net()
    lazy.net[4] = nn.LazyLinear(4)
    with pytest.raises(InvalidOption, match="lazy layers"):
        trainer().fit(lazy, blobs())


class Tokens(Net):
    """Looks up tokens, with dense or sparse gradients of the table."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(20, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 4))

    test_step = Net.validation_step


@pytest.mark.parametrize("algorithm", [FedSpa(), FedDST(search_every=1), SNIP(), DisPFL()])
def test_gradients_of_sparse_embeddings_count_as_dense_ones(algorithm, trainer):
    tokens = torch.randint(0, 20, (200, 2), generator=torch.Generator().manual_seed(0))
    finals = []
    for sparse in (False, True):
        data = FederatedDataset(TensorDataset(tokens, tokens[:, 0] % 4), num_clients=4, test_fraction=0.2, seed=0)
        run = trainer(algorithm, precision="64-true")
        run.fit(Tokens(sparse), data)
        path = run.run_folder / "checkpoints" / "last.ckpt"
        finals.append(torch.load(path, weights_only=True)["state_dict"])
    for name, weight in finals[0].items():
        torch.testing.assert_close(finals[1][name], weight, rtol=0, atol=1e-12)


class OneSmall(FederatedBlobs):
    """Blobs of which the last client has few, drawn again and again if it is asked for."""

    draws = None

    def assign(self, labels, seed):
        *most, last = super().assign(labels, seed)
        return [*most, last[:12]]

    def client_train_dataloader(self, client):
        loader = super().client_train_dataloader(client)
        if self.draws is None or client < self.num_clients - 1:
            return loader
        sampler = torch.utils.data.RandomSampler(loader.dataset, replacement=True, num_samples=self.draws)
        return DataLoader(loader.dataset, batch_size=16, sampler=sampler, drop_last=True)


def few(**options):
    return OneSmall(num_clients=5, num_classes=4, dim=8, batch_size=16, eval_split="test", **options)


@pytest.mark.parametrize("errors", ["raise", "skip"])
@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        (
            {},
            {"drop_last": True},
            r"Client 4 has 12 examples, fewer than one full batch; lower `data.batch.*min_exam",
        ),
        ({"limit_train_batches": 0.5}, {}, "is 0.5, less than one of a client's 1 batch"),
        ({"limit_train_batches": 0.01}, {}, "is 0.01, less than one of a client's 1 batch; .* of at least 1.0"),
        (
            {"limit_train_batches": 0.5, "federation": {"local_engine": "trainer"}},
            {},
            "is 0.5, less than one of a client's 1 batch",
        ),
    ],
    ids=["drop_last", "limit", "limit of all", "limit of a Trainer"],
)
def test_a_client_without_a_batch_is_told_before_anything_is_trained(trainer, tmp_path, options, data, words, errors):
    federation = {"on_client_error": errors, **options.get("federation", {})}
    with pytest.raises(InvalidOption, match=words):
        trainer(**{"max_rounds": 1, **options, "federation": federation}).fit(mlp(), few(**data))
    assert not list(tmp_path.rglob("version_*"))


def test_clients_without_a_batch_may_be_unseen_or_draw_more_samples_than_they_have(trainer):
    assert list(split_unseen(4, 5, 1)[1]) == [4]
    unseen = trainer(max_rounds=1, seed=4, federation={"unseen_clients": 1}).fit(mlp(), few(drop_last=True))
    assert unseen["rounds"] == 1
    data = few(drop_last=True)
    data.draws = 40
    assert trainer(max_rounds=1).fit(mlp(), data)["rounds"] == 1


def test_other_settings_do_not_go_on_with_a_run(trainer):
    trainer(max_rounds=2).fit(mlp(), blobs())
    with pytest.raises(ValueError, match=r"`data\.batch_size` was 16, and is 8 now"):
        trainer().fit(mlp(), blobs(batch_size=8), "last")
    with pytest.raises(ValueError, match=r"`trainer\.max_epochs` was 1, and is 2 now"):
        trainer(max_epochs=2).fit(mlp(), blobs(), "last")


def test_fine_tuning_runs_once_at_the_end_and_is_in_the_table(trainer):
    calls = []

    class Tuned(FederatedAlgorithm):
        def finetune(self, message, client):
            calls.append((client.round, client.id))
            return client.fit(message.weights).weights

    summary = trainer(Tuned()).fit(mlp(), blobs())
    assert sorted(calls) == [(2, client) for client in range(5)]  # at the rates of the last round
    assert summary["finetuned/val_loss"] != summary["personal/val_loss"]
    assert {"finetuned/val_acc_std", "finetuned/val_acc_worst10"} <= summary.keys()


def test_a_warning_of_every_batch_is_shown_once(trainer):
    class Warns(MLP):
        def training_step(self, batch, batch_idx):
            warnings.warn("no positive samples", UserWarning, stacklevel=1)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            warnings.warn("no negative samples", UserWarning, stacklevel=1)
            super().validation_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().fit(Warns(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    said = [str(warning.message) for warning in caught if " samples" in str(warning.message)]
    assert said == ["no positive samples", "no negative samples"]
    assert {warning.filename for warning in caught if " samples" in str(warning.message)} == {__file__}


@pytest.mark.parametrize("engine", ["fast", "stacked"])
@pytest.mark.parametrize("option", ["limit_train_batches", "limit_val_batches"])
def test_a_fraction_of_less_than_one_batch_is_refused_by_its_option(option, engine, trainer):
    run = trainer(federation={"local_engine": engine}, **{option: 0.01})
    with pytest.raises(InvalidOption, match=rf"`trainer.{option}` is 0.01, less than one of a client's \d+ batch"):
        run.fit(mlp(), blobs())
