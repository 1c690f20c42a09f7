"""Clients that fail in every way, ranks that die, and the one local fit run again."""

import copy
import csv
import itertools
import os
import signal
import time
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_sparsefl import SNIP, FedAvg, FederatedTrainer, Federation, FedLPS, FedSpa
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import ClientFailed, EvaluationFailed, InvalidOption, InvalidUpdate, RankFailed
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.federated.exchange import deadline
from lightning_sparsefl.federated.exchange import failures as faults
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.federated.sampling.draws import uniform_cohort
from lightning_sparsefl.models import MLP

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
FORK = {"devices": 2, "strategy": "client_parallel_fork"}


def mlp():
    torch.manual_seed(0)
    return MLP(num_classes=4, sample_shape=(1, 1, 8))


def blobs():
    return FederatedBlobs(num_clients=6, num_classes=4, dim=8, val_fraction=0.2, batch_size=16)


@pytest.fixture
def trainer(tmp_path):
    def make(algorithm, *, folder="runs", federation=None, **options):
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_rounds": 3,
            "default_root_dir": str(tmp_path / folder),
            "logger": False,
            "enable_progress_bar": False,
            "seed": 0,
            "federation": Federation(**{"clients_per_round": 6, "pictures_every_n_rounds": 0, **(federation or {})}),
        }
        return FederatedTrainer(algorithm=algorithm, **{**settings, **options})

    return make


def last_epoch(path):
    last = path / "runs" / "FedAvg" / "version_0" / "checkpoints" / "last.ckpt"
    return torch.load(last, weights_only=True)["epoch"]


def table(run, name="clients.csv"):
    with (run.run_folder / name).open() as file:
        return list(csv.DictReader(file))


class Hours:
    """A clock that clients wind."""

    now = 0.0


class Misfortune(L.Callback):
    """What happens inside the fit of a client."""

    def __init__(self, client):
        self.client = client

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.client == 0:
            raise ZeroDivisionError("mine")
        if self.client == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")
        if self.client == 2:
            Hours.now += 4.0


@dataclass(frozen=True, kw_only=True)
class Unlucky(FedAvg):
    """Clients 0 to 3 fail, each in its own way."""

    def callbacks(self, message, client):
        return [Misfortune(client.id)]

    def train(self, message, client):
        update = super().train(message, client)
        if client.id != 3:
            return update
        return replace(update, weights={n: w / 0 for n, w in update.weights.items()})


@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("asked", [{}, {"on_client_error": "skip"}], ids=["raise", "skip"])
def test_an_option_that_fits_no_client_is_no_failure_of_one(asked, ranks, trainer, monkeypatch, tmp_path):
    """FedLPS needs the metric `federation.monitor`, and asks for it before it trains."""
    fit, trained = ClientWorker.fit, tmp_path / "trained"
    monkeypatch.setattr(ClientWorker, "fit", lambda *args, **options: trained.touch() or fit(*args, **options))
    run = trainer(FedLPS(), federation={"monitor": "train_f1", "local_engine": "fast", **asked}, **ranks)
    with pytest.raises(
        (InvalidOption, RankFailed), match=r"`federation.monitor` is 'train_f1'.* `val_f1` in validation"
    ):
        run.fit(mlp(), blobs())
    assert not trained.exists()


class Plateau(MLP):
    """Monitors a metric that it may not log."""

    logs = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.logs:
            self.log("mine", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "mine"}}


@dataclass(frozen=True, kw_only=True)
class LastFits(FedAvg):
    """FedAvg with a last local fit, which fails for client 1."""

    def finetune(self, message, client):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plateau, "logs", client.id != 1)
            return client.fit(message.weights, epochs=1).weights


@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
def test_a_client_whose_finetuning_fails_ends_the_run_or_is_left_out(ranks, trainer, caplog):
    run = trainer(LastFits(), max_rounds=1, **ranks)
    with pytest.raises(
        ClientFailed, match=r"Client 1 has no scores in round 1 .*mine.*: skip` leaves it out of the scores\.$"
    ):
        run.fit(Plateau(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    run = trainer(LastFits(), federation={"on_client_error": "skip"}, max_rounds=1, folder="skip", **ranks)
    summary = run.fit(Plateau(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    if not ranks:  # the log of other processes is not captured
        assert "Client 1 has no scores in round 1: " in caplog.text
    assert summary["finetuned/val_loss"] > 0
    assert [row["client"] for row in table(run, "finetuned.csv") if not row["finetuned/val_loss"]] == ["1"]


class Misspelt(Plateau):
    """Monitors a metric that it logs under a similar name."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "mined"}}


@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_a_similar_name_of_a_monitored_metric_is_suggested(engine, trainer):
    run = trainer(FedAvg(), federation={"local_engine": engine})
    with pytest.raises(ClientFailed, match=r"mined.*; did you mean 'mine'\?;"):
        run.fit(Misspelt(num_classes=4, sample_shape=(1, 1, 8)), blobs())


class Draws(MLP):
    """Sends a figure to a logger, which neither clients nor evaluations have."""

    def on_train_epoch_end(self):
        self.logger.experiment.add_figure("weights", None)


class DrawsScores(MLP):
    def on_validation_epoch_end(self):
        self.logger.log_image("scores", [])


class ReturnsNothing(MLP):
    def forward(self, samples):
        return None

    def training_step(self, batch, batch_idx):
        return self(batch[0]).log_softmax(1).mean()


@pytest.mark.filterwarnings("ignore:FLOPs are not counted", "ignore:.*one after another")
def test_a_forward_that_returns_nothing_is_not_taken_for_a_logger(trainer):
    with pytest.raises(ClientFailed, match="'NoneType' object has no attribute 'log_softmax'") as failure:
        trainer(FedAvg()).fit(ReturnsNothing(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    assert "logger" not in str(failure.value)


@pytest.mark.parametrize(("kind", "failure"), [(Draws, ClientFailed), (DrawsScores, EvaluationFailed)])
def test_the_use_of_a_logger_where_there_is_none_is_explained(kind, failure, trainer):
    with pytest.raises(failure, match=r"clients and evaluations have no logger, so write `if self\.logger:` before"):
        trainer(FedAvg()).fit(kind(num_classes=4, sample_shape=(1, 1, 8)), blobs())


class Regrets(L.Callback):
    """Fails when it is told of the error of a client."""

    def on_exception(self, trainer, pl_module, exception):
        raise KeyError("of the callback")


def test_a_failure_at_the_end_does_not_hide_the_error_of_the_client(trainer, tmp_path):
    finalized = []

    class Logger(L.pytorch.loggers.CSVLogger):
        def finalize(self, status):
            finalized.append(status)

    run = trainer(Unlucky(), callbacks=[Regrets()], logger=Logger(tmp_path / "logs"))
    message = r"The end of the failed run was not complete \(KeyError: 'of the callback'\)"
    with pytest.raises(ClientFailed, match="mine"), pytest.warns(UserWarning, match=message):
        run.fit(mlp(), blobs())
    assert finalized == ["failed"]


class Normalised(MLP):
    """Has a batch norm of torch's own, which takes no batch of one sample."""

    def __init__(self):
        super().__init__(num_classes=4, sample_shape=(1, 1, 8))
        self.net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_a_last_batch_of_one_sample_names_the_option_that_leaves_it_out(trainer):
    options = {
        "num_clients": 6,
        "num_classes": 4,
        "dim": 8,
        "num_train": 6 * 17,
        "batch_size": 16,
        "eval_split": "test",
    }
    failed = pytest.raises(ClientFailed, match=r"one sample .* set `data.drop_last: true`.*min_examples")
    with pytest.warns(UserWarning, match="3 clients train one after another"), failed as found:
        trainer(FedAvg()).fit(Normalised(), FederatedBlobs(**options))
    assert found.value.__cause__ is None  # whose traceback the command line would print
    trainer(FedAvg()).fit(Normalised(), FederatedBlobs(**options, drop_last=True))


@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_clients_that_fail_are_left_out_and_listed(engine, trainer, monkeypatch):
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: Hours.now))
    options = {"on_client_error": "skip", "client_timeout": 5.0, "local_engine": engine, "min_clients": 2}
    run = trainer(Unlucky(), federation=options, max_rounds=1)
    module = mlp()
    run.fit(module, blobs())
    reasons = {int(row["client"]): row["failure"] for row in table(run) if row["failure"]}
    assert reasons.pop(0) == "ZeroDivisionError: mine"
    assert reasons.pop(1) == (
        "it ran out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB); lower `data.batch_size`"
    )
    assert reasons.pop(2) == "it took 8.0 seconds and is not done, where `federation.client_timeout` is 5"
    assert reasons.pop(3) == "its update of weights['net.fc1.weight'] holds values that are not finite"
    assert not reasons
    assert table(run, "metrics.csv")[0]["clients/failed"] == "4"
    alone = mlp()
    monkeypatch.setattr(FedAvg, "train", _only(4, 5))
    trainer(FedAvg(), folder="alone", federation={"on_client_error": "skip"}, max_rounds=1).fit(alone, blobs())
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in module.state_dict().items())


class EverySecond(MLP):
    """Fails for every second client."""

    def on_train_start(self):
        self._fails = next(self.fits) % 2 == 0


class Reshaped(EverySecond):
    def on_train_end(self):
        if self._fails:
            self.net.fc1.weight.data = torch.zeros(1, 8)


class Exhausted(EverySecond):
    def training_step(self, batch, batch_idx):
        if self._fails:
            next(iter(()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["fast", "trainer"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Reshaped, "changed the shape of 'net.fc1.weight' from (8, 8) to (1, 8)"),
        (Exhausted, "`training_step` raised StopIteration"),
    ],
)
def test_a_strange_client_fails_and_the_next_one_does_not(engine, kind, said, trainer):
    run = trainer(FedAvg(), federation={"on_client_error": "skip", "local_engine": engine}, max_rounds=1)
    module = kind(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,))
    kind.fits = itertools.count()
    run.fit(module, blobs())
    reasons = [row["failure"] for row in table(run) if row["failure"]]
    assert 0 < len(reasons) < 6
    assert all(said in reason for reason in reasons)


@dataclass(frozen=True)
class Unreadable(FedAvg):
    """The data of client 0 has a name that is no text, and that of client 1 is in the message as a whole."""

    def train(self, message, client):
        if client.id < 2:
            raise OSError("cannot decode " + ("image_\udcff.png" if client.id == 0 else "x" * 2**20))
        return super().train(message, client)


@pytest.mark.parametrize("wire", ["count", "encode"])
def test_what_a_client_says_of_its_failure_is_storable(wire, trainer):
    run = trainer(Unreadable(), federation={"on_client_error": "skip", "wire": wire}, max_rounds=1)
    run.fit(mlp(), blobs())
    name, long = (row["failure"] for row in table(run) if row["failure"])
    assert name == "OSError: cannot decode image_\\udcff.png"
    assert long.startswith("OSError: cannot decode xxx")
    assert long.endswith("x ... (1048599 characters)")
    assert len(long) < 2100


def _only(*clients):
    train = FedAvg.train

    def some(self, message, client):
        if client.id not in clients:
            raise ValueError("not today")
        return train(self, message, client)

    return some


def test_too_few_left_says_which_option(trainer):
    with pytest.raises(ClientFailed, match=r"this leaves 3 clients, but `federation\.min_clients` is 5; lower it\.\n"):
        trainer(Unlucky(), federation={"on_client_error": "skip", "min_clients": 5}).fit(mlp(), blobs())


def test_a_mistake_of_the_method_ends_the_run_even_where_clients_are_skipped(trainer, monkeypatch):
    train = FedAvg.train
    monkeypatch.setattr(FedAvg, "train", lambda self, *args: replace(train(self, *args), weight=0.5))
    with pytest.raises(InvalidUpdate, match=r"`weight` 0\.5"):
        trainer(FedAvg(), federation={"on_client_error": "skip"}).fit(mlp(), blobs())


@dataclass(frozen=True)
class Ragged(FedAvg):
    """Clients send tensors of different shapes under one name."""

    def train(self, message, client):
        return replace(super().train(message, client), extra={"a": {"b": torch.zeros(1 if client.id == 0 else 3)}})


@pytest.mark.parametrize("wire", ["encode", "count"])
def test_extra_tensors_of_different_shapes_are_not_broadcast(wire, trainer):
    words = (
        r"The update of client \d from `Ragged\.train` cannot be added: `extra\['a'\]\['b'\]` has the shape \(\d,\) "
    )
    with pytest.raises(InvalidUpdate, match=words):
        trainer(Ragged(), federation={"on_client_error": "skip", "wire": wire}).fit(mlp(), blobs())


@dataclass(frozen=True)
class Greedy(FedAvg):
    """Client 0 sends what an honest one never would."""

    how: str = ""

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, **GREEDY[self.how][0](update, client)) if client.id == 0 else update


def times(factor):
    return lambda update, client: {"weights": {name: value * factor for name, value in update.weights.items()}}


GREEDY = {
    "weight": (lambda update, client: {"weight": client.num_examples + 1}, "its update has the weight"),
    "values": (times(1e30), "its update of weights['net.fc1.weight'] holds values up to"),
    "metrics": (lambda update, client: {"metrics": {str(i): 0.0 for i in range(300)}}, "has 300 metrics"),
    "extra": (lambda update, client: {"extra": {"a": {"b": torch.zeros(10**6)}}}, "`extra` takes more than"),
    "shared": (lambda update, client: {"shared": {"a": torch.zeros(10**6)}}, "`shared` takes more than"),
}


@pytest.mark.parametrize("how", GREEDY)
def test_a_client_that_claims_too_much_is_left_out_or_ends_the_run_by_name(how, trainer):
    skips = trainer(Greedy(how=how), max_rounds=1, federation={"on_client_error": "skip"})
    skips.fit(mlp(), blobs())
    failures = {row["client"]: row["failure"] for row in table(skips) if row["failure"]}
    assert list(failures) == ["0"]
    assert GREEDY[how][1] in failures["0"]
    with pytest.raises(ClientFailed, match="Client 0 failed in round 0"):
        trainer(Greedy(how=how), max_rounds=1).fit(mlp(), blobs())


def test_memory_is_freed_before_the_next_client():
    module, held = mlp(), []

    def step():
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise MemoryError

    try:
        step()
    except MemoryError as error:
        kept = error
    module(torch.ones(1, 1, 1, 8)).sum().backward()
    assert held[0]() is not None
    faults.release_memory(kept, module)
    assert held[0]() is None
    assert all(parameter.grad is None for parameter in module.parameters())


class Broken(MLP):
    """Cannot train."""

    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError


def loader_methods():
    names = ("__init__", "__setattr__", "__delattr__")
    found = {(kind, name): value for kind in (DataLoader, BatchSampler) for name, value in vars(kind).items()}
    return {key: value for key, value in found.items() if key[1].removeprefix("__old") in names}


@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_a_run_leaves_the_classes_of_data_loaders_as_they_were(engine, trainer):
    """Lightning leaves a layer around them, and a process with hundreds of runs could make no loader any more."""
    before = loader_methods()
    options = {"federation": {"local_engine": engine}, "max_rounds": 1}
    trainer(FedAvg(), **options).fit(mlp(), blobs())
    assert loader_methods() == before
    with pytest.raises(ClientFailed):
        trainer(FedAvg(), **options).fit(Broken(num_classes=4, sample_shape=(1, 1, 8)), blobs())
    assert loader_methods() == before


def test_loaders_are_made_by_their_own_methods(trainer):
    """Fabric's wrappers note each loader's arguments, which takes ten times as long as making the loader."""
    own, found = DataLoader.__init__, []

    class Looking(FedAvg):
        def download(self, server, view):
            found.append(DataLoader.__init__ is own)
            return super().download(server, view)

    trainer(Looking(), max_rounds=1).fit(mlp(), blobs())
    assert found
    assert all(found)


def test_a_timeout_that_cannot_be(trainer):
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(InvalidOption, match=r"`federation\.client_timeout` is"):
            Federation(client_timeout=seconds)


class Fragile(MLP):
    """Fails in the third round's second client, while it is armed."""

    armed, fits = True, 0

    def on_fit_start(self):
        Fragile.fits += 1

    def training_step(self, batch, batch_idx):
        if Fragile.armed and Fragile.fits == 14:
            raise ZeroDivisionError("mine")
        return super().training_step(batch, batch_idx)


def fragile():
    torch.manual_seed(0)
    return Fragile(num_classes=4, sample_shape=(1, 1, 8))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("engine", ["fast", "trainer"])
def test_the_sentence_of_a_failure_runs_the_same_fit_again(engine, trainer, tmp_path, monkeypatch):
    """FedSpa keeps masks per client; the state before the round is committed, though it was not due.

    Growth is random here, since a gradient is one more fit for a Trainer, and fits are counted.
    """
    sent = []
    add = Accumulator.add
    monkeypatch.setattr(Accumulator, "add", lambda self, *args: (sent.append(args[0]), add(self, *args))[1])
    options = {"checkpoint_every_n_rounds": 3, "local_engine": engine}
    monkeypatch.setattr(Fragile, "fits", -100)
    trainer(FedSpa(growth="random"), folder="straight", federation=options).fit(fragile(), blobs())
    expected = sent[13]
    monkeypatch.setattr(Fragile, "fits", 0)
    run = trainer(FedSpa(growth="random"), federation=options)
    with pytest.raises(ClientFailed) as caught:
        run.fit(fragile(), blobs())
    assert (caught.value.round, caught.value.client) == (2, 1)
    _, _, call = str(caught.value).partition("\nTo run that local fit again: ")
    names = {"trainer": run, "module": fragile(), "datamodule": blobs()}
    before = files(tmp_path)
    monkeypatch.setattr(Fragile, "fits", 13)
    with pytest.raises(ClientFailed, match="mine"):
        eval(call, dict(names))
    monkeypatch.setattr(Fragile, "armed", False)
    names["module"] = fragile()
    again = eval(call, dict(names))
    assert files(tmp_path) == before
    for name, tensor in expected.weights.items():
        assert torch.equal(again.update.weights[name], tensor)
    for name, mask in expected.shared["masks"].items():
        assert torch.equal(again.update.shared["masks"][name], mask)
    assert dict(again.update.metrics) == dict(expected.metrics)
    assert dict(again.rows())["its weight in the merge"] == "1"


@pytest.mark.filterwarnings("ignore:.*was written with `data.client_names`")
def test_which_rounds_and_clients_can_be_run_again(trainer):
    few = {"clients_per_round": 2}
    run = trainer(FedAvg(), federation=few)
    first = run.replay(mlp(), blobs(), client=_drawn(run, 0), round=0)
    assert first.round == 0
    run.fit(mlp(), blobs())
    later = trainer(FedAvg(), federation=few, max_rounds=5)
    for options, said in (
        ({"client": 0, "round": 1}, "`round` is 1, but .*: 2 to 4; to replay others, keep checkpoints"),
        ({"client": 0, "round": 5}, "2 to 4"),
        ({"client": 77}, "`client` is 77, which does not train in round 3; expected one of"),
    ):
        with pytest.raises(InvalidOption, match=said):
            later.replay(mlp(), blobs(), "last", **options)
    named, other = blobs(), next(client for client in range(6) if client not in _cohort(later, 3))
    named.client_names = [f"ward {client}" for client in range(6)]
    expected = ", ".join(rf"{client} \(ward {client}\)" for client in _cohort(later, 3))
    with pytest.raises(InvalidOption, match=rf"is {other} \(ward {other}\), which .*; expected one of {expected}\.$"):
        later.replay(mlp(), named, "last", client=f"ward {other}")
    assert run.replay(mlp(), blobs(), "last", client=_drawn(run, 2)).round == 2
    (run.run_folder / "checkpoints" / "previous.ckpt").unlink()
    with pytest.raises(InvalidOption, match="none, since it has finished"):
        run.replay(mlp(), blobs(), "last", client=0)
    straight = later.replay(mlp(), blobs(), "last", client=_drawn(later, 4), round=4)
    from_the_start = later.replay(mlp(), blobs(), client=_drawn(later, 4), round=4)
    assert straight.norm == from_the_start.norm
    assert straight.norm > 0


def _cohort(run, round):
    return uniform_cohort(0, round, range(6), run.federation.clients_per_round)


def _drawn(run, round):
    return _cohort(run, round)[0]


class Dying(MLP):
    """The second rank dies, hangs or fails in its second round, if it should."""

    fate, fits = "", 0

    def on_train_start(self):
        Dying.fits += 1
        if os.environ.get("LOCAL_RANK") != "1" or Dying.fits < 4:
            return
        if Dying.fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if Dying.fate == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a step deep in another library would be ended
            time.sleep(600)
        if Dying.fate == "fails":
            raise ZeroDivisionError("mine")


def dying():
    torch.manual_seed(0)
    return Dying(num_classes=4, sample_shape=(1, 1, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "timeout", "said"),
    [
        ("dies", 120, "Rank 1 was ended by SIGKILL, so the run was stopped"),
        (
            "hangs",
            6,
            r"Rank 0 lost the connection to another rank \(.*\), which died or took longer than `trainer\.timeout`"
            r" = 6 seconds",
        ),
    ],
)
def test_a_rank_that_is_lost_ends_the_others_and_the_run_resumes(fate, timeout, said, trainer, monkeypatch):
    straight, resumed = dying(), dying()
    alone = {"local_engine": "fast"}  # which trains each client once, without a trial
    trainer(FedAvg(), folder="straight", federation=alone).fit(straight, blobs())
    monkeypatch.setattr(Dying, "fits", 0)
    monkeypatch.setattr(Dying, "fate", fate)
    with pytest.raises(RankFailed, match=said):
        trainer(FedAvg(), federation=alone, **FORK, timeout=timeout).fit(dying(), blobs())
    monkeypatch.setattr(Dying, "fate", "")
    summary = trainer(FedAvg(), federation=alone).fit(resumed, blobs(), "last")
    assert summary["rounds"] == 3
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in straight.state_dict().items())


def test_a_client_that_fails_on_another_rank_says_how_to_run_it_again_in_this_one(trainer, monkeypatch):
    monkeypatch.setattr(Dying, "fits", 0)
    monkeypatch.setattr(Dying, "fate", "fails")
    run = trainer(FedAvg(), federation={"local_engine": "fast"}, **FORK, timeout=120)
    with pytest.raises(ClientFailed, match="in round 1 on rank 1: ZeroDivisionError: mine") as caught:
        run.fit(dying(), blobs())
    call = str(caught.value).partition("\nTo run that local fit again: ")[2]
    again = eval(call, {"trainer": run, "module": dying(), "datamodule": blobs()})
    assert (again.round, again.outcome.client) == (caught.value.round, caught.value.client)
    assert str(copy.copy(caught.value)) == str(caught.value)


class LostFile(FederatedBlobs):
    """Cannot read the data of client 1 for a task, from a round on."""

    def __init__(self, task, since=0):
        super().__init__(num_clients=6, num_classes=4, dim=8, val_fraction=0.2, batch_size=16)
        self.task, self.since, self.read = task, since, 0

    def _loader(self, task, client):
        if task == self.task and client == 1:
            self.read += 1
            if self.read > self.since:
                raise OSError("lost file")
        return getattr(super(), f"client_{task}_dataloader")(client)

    def client_train_dataloader(self, client):
        return self._loader("train", client)

    def client_val_dataloader(self, client):
        return self._loader("val", client)


class LostPart(FederatedBlobs):
    """Cannot read the pooled validation data on one rank of several, from the second evaluation on."""

    def __init__(self):
        super().__init__(num_clients=6, num_classes=4, dim=8, val_fraction=0.2, batch_size=16)
        self.read = 0

    def val_dataloader(self):
        self.read += 1
        if self.read > 1 and (not dist.is_initialized() or dist.get_rank() == 1):
            raise OSError("lost file")
        return super().val_dataloader()


class Detector(MLP):
    """Has a loss in training mode only, as torchvision's detectors."""

    def training_step(self, batch, batch_idx):
        return ({"loss": super().training_step(batch, batch_idx)} if self.training else {})["loss"]


@pytest.mark.parametrize(
    ("method", "where"),
    [(SNIP(), "before round 0 on rank 0, when the method asked all clients"), (FedSpa(), "in round 0 on rank 0")],
    ids=repr,
)
def test_a_gradient_that_fails_names_the_client_and_the_mode(method, where, trainer):
    detector = Detector(num_classes=4, sample_shape=(1, 1, 8))
    words = rf"^Client \d failed {where}: RuntimeError: KeyError: 'loss'; the method calls `training_step` also in eval"
    with pytest.raises(ClientFailed, match=words) as failed:
        trainer(method).fit(detector, blobs())
    assert isinstance(failed.value.__cause__.__cause__, KeyError)


@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("engine", ["fast", "stacked"])
def test_a_client_that_cannot_be_scored_is_left_out_of_the_scores(engine, ranks, trainer, capfd):
    options = {"on_client_error": "skip", "local_engine": engine, "clients_per_round": 3}
    run = trainer(FedAvg(), federation=options, **ranks)
    summary = run.fit(mlp(), LostFile("val"))
    assert "OSError: lost file" in capfd.readouterr().err
    assert summary["personal/val_acc"] >= 0
    assert [row["client"] for row in table(run) if row["round"] == "2" and not row["personal/val_acc"]] == ["1"]


def test_a_client_that_fails_in_every_round_has_no_scores_of_finetuning_either(trainer):
    run = trainer(
        FedAvg(), federation={"on_client_error": "skip", "finetune_epochs": 1, "min_clients": 5}, max_rounds=2
    )
    assert run.fit(mlp(), LostFile("train"))["rounds"] == 2
    assert [row["client"] for row in table(run, "finetuned.csv") if not row["finetuned/val_acc"]] == ["1"]


@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
@pytest.mark.filterwarnings("ignore:.*was written with `data.")  # options of the user's data
def test_a_round_whose_scores_have_failed_is_kept(ranks, trainer, tmp_path):
    """As it is after a signal; the scores follow when the run goes on."""
    options = {"checkpoint_every_n_rounds": 10, "clients_per_round": 3}
    straight = trainer(FedAvg(), federation=options, folder="straight")
    straight.fit(mlp(), LostFile("val", since=99))
    run = trainer(FedAvg(), federation=options, **ranks)
    with pytest.raises(ClientFailed, match=r"^Client 1 has no scores in round 2 .*: OSError: lost file") as lost:
        run.fit(mlp(), LostFile("val", since=1))
    assert ranks or isinstance(lost.value.__cause__, OSError)
    assert lost.value.replay is None  # which would train
    assert last_epoch(tmp_path) == 2
    again = trainer(FedAvg(), federation=options)
    again.fit(mlp(), blobs(), "last")
    for name in ("metrics.csv", "clients.csv"):
        tables = [table(each, name) for each in (again, straight)]
        ours, theirs = ([{k: v for k, v in row.items() if "time/" not in k} for row in rows] for rows in tables)
        assert ours == theirs


@pytest.mark.parametrize("ranks", [{}, FORK], ids=["one rank", "two ranks"])
def test_a_round_whose_global_scores_have_failed_on_one_rank_is_kept(ranks, trainer, tmp_path):
    run = trainer(FedAvg(), federation={"checkpoint_every_n_rounds": 10}, **ranks)
    with pytest.raises(Exception, match="lost file"):  # of the launcher, if the rank that has failed is heard first
        run.fit(mlp(), LostPart())
    assert last_epoch(tmp_path) == 2


class StopAfterTwo(L.Callback):
    """Stops a run between two evaluations."""

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.filterwarnings("ignore:.*was written with `data.")  # options of the user's data
def test_the_last_round_of_a_stopped_run_is_kept_if_its_scores_have_failed(trainer, tmp_path):
    options = {"callbacks": [StopAfterTwo()], "check_val_every_n_round": 3, "max_rounds": 9}
    federation = {"checkpoint_every_n_rounds": 10}
    straight = trainer(FedAvg(), federation=federation, folder="straight", **options).fit(mlp(), blobs())
    with pytest.raises(ClientFailed, match="Client 1 has no scores in round 2"):
        trainer(FedAvg(), federation=federation, **options).fit(mlp(), LostFile("val"))
    assert last_epoch(tmp_path) == 2
    again = trainer(FedAvg(), federation=federation, **options).fit(mlp(), blobs(), "last")
    assert again["rounds"] == straight["rounds"] == 2
    assert again["personal/val_acc"] == straight["personal/val_acc"]
