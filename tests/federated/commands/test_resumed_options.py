"""Options that a resumed run must share with its checkpoint, and those whose change is only reported."""

import copy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import FedAvg, FedDST, FederatedTrainer, Federation, FedProx, FedSpa
from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated import ExponentialRoundLR, Privacy, RoundLR, StepRoundLR
from lightning_sparsefl.federated.commands.run_facts import _option, _plain
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.models import MLP


class WarmUp(RoundLR):
    """A schedule of the user's, whose text has its address."""

    def factor(self, round, max_rounds):
        return min(1.0, (round + 1) / 3)


class Scaled(MLP):
    """A module with the weights of another one, and a loss of its own."""

    def training_step(self, batch, batch_idx):
        return 100 * super().training_step(batch, batch_idx)


def partly_frozen(**options):
    """A module of the same class, a part of which does not train."""
    module = MLP(**options)
    module.net.fc1.bias.requires_grad_(False)
    return module


class Others(FederatedBlobs):
    """Data with the options of another class."""


class Sites(FederatedBlobs):
    """Data whose clients have names."""

    client_names = ("north", "south", "west")


class OtherSites(FederatedBlobs):
    """Data with equally many samples of other clients."""

    client_names = ("north", "east", "west")


class Halving(Callback):
    """A callback of the user's."""

    def __init__(self, share=1.0):
        self.share = share


def fit(
    root,
    ckpt_path=None,
    rounds=1,
    drop_last=False,
    noise=0.5,
    lr=0.1,
    optimizer=None,
    algorithm=None,
    seed=0,
    local_engine="auto",
    client_timeout=None,
    select=None,
    min_clients=1,
    on_client_error="raise",
    model=MLP,
    blobs=FederatedBlobs,
    val_fraction=0.2,
    verb="fit",
    **options,
):
    engine = {"local_engine": local_engine, "client_timeout": client_timeout}
    engine |= {"min_clients": min_clients, "on_client_error": on_client_error}
    trainer = FederatedTrainer(
        algorithm=algorithm or FedAvg(),
        federation=Federation(clients_per_round=2, select=select, **engine),
        accelerator="cpu",
        devices=1,
        max_rounds=rounds,
        default_root_dir=str(root),
        logger=False,
        enable_progress_bar=False,
        **options,
    )
    sizes = {"num_train": 60, "num_clients": 3, "dim": 8, "batch_size": 8, "val_fraction": val_fraction}
    data = blobs(**sizes, drop_last=drop_last, noise=noise, seed=seed)
    torch.manual_seed(0)
    module = model(num_classes=data.num_classes, sample_shape=(1, 1, 8), lr=lr)
    if optimizer is not None:
        module.configure_optimizers = optimizer_of(module, optimizer)
    return getattr(trainer, verb)(module, data, ckpt_path)


def optimizer_of(module, options):
    """What the command line puts in the place of the module's method."""

    def configure_optimizers():
        return torch.optim.SGD(module.parameters(), **options)

    # an object of the user, whose text has its address
    configure_optimizers.configuration = {f"optimizer.{name}": value for name, value in options.items()}
    configure_optimizers.configuration["optimizer.schedule"] = object()
    return configure_optimizers


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    fit(root, optimizer={"lr": 0.1})
    return root


@pytest.fixture
def resume(first, tmp_path):
    """Resumes a copy of a run of one round, with other options."""
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)

    def resume(**options):
        return fit(tmp_path, "last", rounds=2, **{"optimizer": {"lr": 0.1}, **options})

    return resume


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gradient_clip_val", 0.5),
        ("gradient_clip_algorithm", "value"),
        ("accumulate_grad_batches", 2),
        ("limit_train_batches", 1),
        ("validate_locally", True),
        ("precision", "64-true"),
        ("drop_last", True),
    ],
)
def test_another_way_to_train_is_refused(option, value, resume):
    group = "data" if option == "drop_last" else "trainer"
    with pytest.raises(CheckpointMismatch, match=rf"`{group}.{option}` was .*, and is .*{value}"):
        resume(**{option: value})


@pytest.mark.filterwarnings("ignore:Clients train one after another, since each has a time limit")
def test_another_local_engine_is_refused_by_its_name(resume, tmp_path):
    words = "another `federation.local_engine`: clients train one after another, and in this run up to 3 clients train "
    with pytest.raises(CheckpointMismatch, match=f"{words}at once; set `federation.local_engine: fast`\\.$"):
        resume(local_engine="stacked")
    stacked = tmp_path / "stacked"
    fit(stacked, local_engine="stacked")
    remedy = "set `local_engine: stacked` and `stack_size: 3` of `federation`, and no `client_timeout`"
    for options in ({"local_engine": "fast"}, {"local_engine": "stacked", "client_timeout": 100.0}):
        with pytest.raises(CheckpointMismatch, match=rf"up to 3 clients train at once, and in this .*; {remedy}\.$"):
            fit(stacked, "last", rounds=2, **options)


@pytest.mark.filterwarnings("ignore:Clients train one after another, since each has a time limit")
def test_clients_with_a_time_limit_are_known_to_train_one_after_another(tmp_path):
    limited = {"local_engine": "stacked", "client_timeout": 100.0}
    fit(tmp_path, **limited)
    with pytest.raises(CheckpointMismatch, match="clients train one after another, and in this run up to 3 "):
        fit(tmp_path, "last", rounds=2, local_engine="stacked")
    fit(tmp_path, "last", rounds=2, **limited)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": 0.05}, r"`model.lr` = 0.1, and this run has 0.05"),
        ({"num_threads": 2}, r"`trainer.num_threads` = 1, and this run has 2"),
        ({"deterministic": "warn"}, r"`trainer.deterministic` = None, and this run has 'warn'"),
        ({"limit_val_batches": 1}, r"`trainer.limit_val_batches` = '1.0', and this run has '1'"),
        (
            {"client_callbacks": [ProximalTerm(strength=0.1)]},
            r"`trainer.client_callbacks` = None, and .* 'ProximalTerm\(strength=0.1\)'",
        ),
        ({"optimizer": {"lr": 0.2}}, r"`optimizer.lr` = 0.1, and this run has 0.2"),
        ({"seed": 1}, r"`data.seed` = 0, and this run has 1"),
        ({"select": "global/val_acc"}, r"`federation.select` = None, and this run has 'global/val_acc'"),
        ({"check_val_every_n_round": 2}, r"`trainer.check_val_every_n_round` = 1, and this run has 2"),
        ({"min_clients": 2}, r"`federation.min_clients` = 1, and this run has 2"),
        ({"on_client_error": "skip"}, r"`federation.on_client_error` = 'raise', and this run has 'skip'"),
        ({"noise": 0.1}, r"`data.noise` = None, and this run has 0.1"),
        ({"model": Scaled}, r"`model` = 'MLP', and this run has 'Scaled'"),
        ({"model": partly_frozen}, "`model.frozen_parameters` = None, and this run has 'net.fc1.bias'"),
        ({"blobs": Others}, r"`data` = 'FederatedBlobs', and this run has 'Others'"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_a_change_that_a_run_may_make_is_reported(options, name, resume):
    with pytest.warns(UserWarning, match=name):
        resume(**options)


@pytest.mark.parametrize("verb", ["validate", "test", "export"])
def test_clients_are_scored_on_their_own_samples(verb, resume):
    with pytest.raises(CheckpointMismatch, match=r"`client sizes` was \[.*\], and is \[.*\] now; choose the run's own"):
        resume(verb=verb, val_fraction=0.4)
    with pytest.warns(UserWarning, match=r"`data.seed` = 0, and this run has 1; clients may have other samples"):
        resume(verb=verb, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(verb=verb, lr=0.01, drop_last=True, blobs=Others)


def test_other_names_of_clients_are_reported(tmp_path):
    fit(tmp_path, blobs=Sites)
    fit(tmp_path, "last", blobs=Sites, verb="test")
    with pytest.warns(
        UserWarning, match=r"`data.client_names` = .*south.*, and this run has .*east.*; clients may have"
    ):
        fit(tmp_path, "last", blobs=OtherSites, verb="test")


def test_another_argument_of_a_callback_is_reported(tmp_path):
    fit(tmp_path, client_callbacks=[ProximalTerm(strength=0.1), Halving(0.5)])
    changed = [ProximalTerm(strength=0.1), Halving(0.25)]
    with pytest.warns(UserWarning, match=r"Halving\(share=0.5\)', and this run has '.*, Halving\(share=0.25\)'"):
        fit(tmp_path, "last", rounds=2, client_callbacks=changed)


def test_another_large_argument_of_a_callback_is_reported(tmp_path):
    """The text of a tensor leaves out what lies in the middle."""
    first = torch.ones(40, 40, dtype=torch.bool)
    fit(tmp_path, client_callbacks=[Halving({"share": first})])
    other = first.clone()
    other[20, 20] = False
    with pytest.warns(UserWarning, match=r"Tensor\(40, 40\) \w+.*, and this run has .*Tensor\(40, 40\) \w+"):
        fit(tmp_path, "last", rounds=2, client_callbacks=[Halving({"share": other})])


SPANNING = [{"algorithm": FedSpa()}, {"algorithm": FedDST()}, {"round_lr": StepRoundLR()}]
FIXED = [{"algorithm": FedSpa(search="static")}, {"algorithm": FedProx()}, {"round_lr": ExponentialRoundLR()}]


@pytest.mark.parametrize("options", [*SPANNING, *FIXED], ids=repr)
def test_more_rounds_are_reported_where_a_schedule_spans_them(options, tmp_path):
    fit(tmp_path, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path, "last", rounds=2, **options)
    told = any("`trainer.max_rounds` = 1, and this run has 2" in str(each.message) for each in said)
    assert told == (options in SPANNING)


def test_the_key_of_a_private_run_may_lie_elsewhere():
    options = {"noise_multiplier": 1.0, "delta": 0.01}
    one, other = (_option(Privacy(**options, key_file=path)) for path in ("/a/key", "/b/key"))
    assert one == other != _option(Privacy(noise_multiplier=1.0, delta=0.02))


def test_a_run_that_changes_nothing_resumes_without_a_warning(resume):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        resume()


def test_a_run_that_goes_on_with_a_model_checkpoint_warns_of_nothing(federation):
    """Lightning warns of a folder with files, which here are those of the run itself; warnings are errors in tests."""

    def saver():
        return ModelCheckpoint(monitor="global/val_acc", mode="max")

    first = federation(FedAvg(), rounds=1, callbacks=[saver()])
    again = federation(FedAvg(), rounds=2, callbacks=[saver()], ckpt_path=str(first.run_folder))
    assert again.run_folder == first.run_folder
    assert list(again.run_folder.rglob("*.ckpt"))


def test_a_schedule_of_the_users_own_class_resumes(tmp_path):
    fit(tmp_path, round_lr=WarmUp())
    assert fit(tmp_path, "last", rounds=2, round_lr=WarmUp())["rounds"] == 2


class Slow(RoundLR):
    """A schedule of the user's with an option, which is no dataclass."""

    def __init__(self, low=0.1):
        self.low = low

    def factor(self, round, max_rounds):
        return max(self.low, 1 - round / max_rounds)


def test_another_option_of_a_users_own_schedule_is_refused(tmp_path):
    fit(tmp_path, round_lr=Slow(0.2))
    with pytest.raises(CheckpointMismatch, match=r"`trainer.round_lr`.*Slow\(low=0.2\).*Slow\(low=0.9\)"):
        fit(tmp_path, "last", rounds=2, round_lr=Slow(0.9))
    assert fit(tmp_path, "last", rounds=2, round_lr=Slow(0.2))["rounds"] == 2
    hparams = (tmp_path / "FedAvg/version_0/hparams.yaml").read_text()
    assert "trainer/round_lr: Slow" in hparams
    assert "trainer/round_lr/low: 0.2" in hparams


def test_a_run_that_starts_from_another_runs_checkpoint_has_its_own_folder(first, tmp_path):
    theirs = next(first.glob("FedAvg/version_0"))
    before = sorted(path.name for path in theirs.rglob("*"))
    for given in (theirs, theirs / "checkpoints" / "last.ckpt"):
        mine = tmp_path / given.name
        assert fit(first, str(given), rounds=2, optimizer={"lr": 0.1}, run_dir=str(mine))["rounds"] == 2
        assert (mine / "summary.json").is_file()
    assert sorted(path.name for path in theirs.rglob("*")) == before
    with pytest.raises(InvalidOption, match=r"run_dir` is .*, where a run has begun, and `ckpt_path` is"):
        fit(first, str(theirs), rounds=2, run_dir=str(mine))


def test_a_folder_that_another_process_has_trained_in_meanwhile_is_left_as_it_is(tmp_path, monkeypatch):
    """The other run begins and ends between this one's search for a checkpoint and its first round."""
    init, calls, folder = FedAvg.init, [], str(tmp_path / "run")

    def slow(self, *args):
        calls.append(self)
        if len(calls) == 1:
            fit(tmp_path, rounds=3, run_dir=folder)
        return init(self, *args)

    monkeypatch.setattr(FedAvg, "init", slow)
    with pytest.raises(InvalidOption, match=r"Another process has trained in .*run while this one was set up; start"):
        fit(tmp_path, "auto", rounds=1, run_dir=folder)
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 4
    assert fit(tmp_path, "auto", rounds=4, run_dir=folder)["rounds"] == 4


def test_callbacks_that_would_share_a_state_are_refused(tmp_path):
    callbacks = [ModelCheckpoint(monitor="global/val_acc"), ModelCheckpoint(monitor="global/val_acc")]
    with pytest.raises(InvalidOption, match=r"`trainer\.callbacks` has 2 ModelCheckpoint with the state key"):
        fit(tmp_path, callbacks=callbacks)


class Own(LightningDataModule):
    """Data of one client, in batches of its own size."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        samples = TensorDataset(torch.zeros(12, 1, 1, 8), torch.zeros(12, dtype=torch.int64))
        return DataLoader(samples, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def test_batch_sizes_of_single_clients_must_agree(tmp_path):
    def fit_own(batch_size, rounds, ckpt_path=None):
        trainer = FederatedTrainer(
            algorithm=FedAvg(),
            federation=Federation(clients_per_round=2),
            accelerator="cpu",
            max_rounds=rounds,
            default_root_dir=str(tmp_path),
            logger=False,
            enable_progress_bar=False,
        )
        data = [Own(4), Own(batch_size), Own(4)]
        return trainer.fit(MLP(num_classes=2, sample_shape=(1, 1, 8)), data, ckpt_path)

    fit_own(6, rounds=1)
    words = r"`batch sizes of the clients\.1` was \[6, False\], and is \[3, False\] now"
    with pytest.raises(CheckpointMismatch, match=words):
        fit_own(3, rounds=2, ckpt_path="last")
    assert fit_own(6, rounds=2, ckpt_path="last")["rounds"] == 2


def half(value):
    return value / 2


class Scaled(FedAvg):
    """A method with an option, which is no dataclass."""

    def __init__(self, factor=1.0):
        super().__init__()
        object.__setattr__(self, "factor", factor)


def test_another_option_of_a_users_own_method_is_refused(tmp_path):
    fit(tmp_path, algorithm=Scaled())
    with pytest.raises(CheckpointMismatch, match=r"`algorithm\.factor` was 1\.0, and is 0\.5 now"):
        fit(tmp_path, "last", rounds=2, algorithm=Scaled(0.5))
    assert fit(tmp_path, "last", rounds=2, algorithm=Scaled())["rounds"] == 2


@dataclass(frozen=True, kw_only=True)
class Odd(FedAvg):
    """A method with options that have no lasting text of their own."""

    fn: Callable = half
    names: frozenset = frozenset()
    table: torch.Tensor = field(default_factory=lambda: torch.zeros(5000))


def test_options_of_a_method_are_compared_by_what_they_hold(tmp_path):
    """Neither the address of a function, nor the order of a set, nor what a tensor's text leaves out."""

    def odd(value=0.0, names="abc"):
        table = torch.zeros(5000)
        table[2500] = value
        return Odd(fn=FunctionType(half.__code__, {}), names=frozenset(names), table=table)

    fit(tmp_path, algorithm=odd())
    assert fit(tmp_path, "last", rounds=2, algorithm=odd(names="cab"))["rounds"] == 2
    with pytest.raises(CheckpointMismatch, match=r"`algorithm\.table` was Tensor\(5000,\) \w+, and is Tensor"):
        fit(tmp_path, "last", rounds=3, algorithm=odd(value=1.0))
    with pytest.raises(CheckpointMismatch, match=r"`algorithm\.names` was \{'a', 'b', 'c'\}, and is \{'a'\} now"):
        fit(tmp_path, "last", rounds=3, algorithm=odd(names="a"))


@dataclass(frozen=True)
class Named(Uniform):
    """A sampler with options that have no lasting text of their own."""

    names: frozenset = frozenset()
    fn: Callable = half


def test_options_of_other_objects_are_compared_by_what_they_hold():
    one, same, other = (Named(frozenset(names), FunctionType(half.__code__, {})) for names in ("abc", "cab", "ab"))
    assert _option(one) == _option(same) != _option(other)
    assert "names={'a', 'b', 'c'}" in _option(one)


@pytest.mark.parametrize("size", [1001, 5])
def test_the_text_of_an_option_tells_contents_apart(size):
    values = [np.arange(size), torch.arange(size), [torch.arange(size)], {"a": np.arange(size)}, WarmUp()]
    assert len({str(_plain(value)) for value in values}) == len(values)
    assert all(_plain(value) == _plain(copy.deepcopy(value)) for value in values)
