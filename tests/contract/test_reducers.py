"""What every exported reducer, clipped updates and private runs promise inside a federation."""

import copy
import csv
import dataclasses
import functools
import importlib.util
import inspect
import sys

import pytest
import torch

from lightning_sparsefl import FedAvg, FedBABU, FedDIP, FedLPS, FedOpt, FedProx, FedSpa, HeteroFL, algorithms, federated
from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated import CoverageMedian, PlainMean, Privacy, Reducer, TrimmedMean
from lightning_sparsefl.federated.commands import run
from lightning_sparsefl.federated.sampling.cohort_draw import CohortDraw
from lightning_sparsefl.federated.sampling.draws import uniform_cohort
from lightning_sparsefl.models import MLP
from lightning_sparsefl.testing import checks
from lightning_sparsefl.testing.contents import without_masks

EXPORTED = [getattr(federated, name) for name in federated.__all__]
REDUCERS = [
    kind for kind in EXPORTED if isinstance(kind, type) and issubclass(kind, Reducer) and not inspect.isabstract(kind)
]
SHORT = {"rounds": 2, "max_epochs": 1}
NOISE = Privacy(noise_multiplier=0.1, delta=1e-5)
DIGITS = "0123456789abcdef" * 4

every_reducer = pytest.mark.parametrize("reducer", [kind() for kind in REDUCERS], ids=repr)
needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cryptography", "dp_accounting")),
    reason="the extra `privacy` is not installed",
)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(DIGITS)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def private(key_file):
    """The options of a private run."""
    return {"clip_update": 0.5, "buffers": "local", "privacy": dataclasses.replace(NOISE, key_file=key_file)}


def weights(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def small():
    """Without buffers, and without dropout."""
    torch.manual_seed(0)
    return MLP(num_classes=4, sample_shape=(1, 1, 8))


def furthest(one, other):
    """Largest difference of a weight."""
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def distance(one, other):
    """Euclidean."""
    return sum(float((value.double() - other[name]).square().sum()) for name, value in one.items()) ** 0.5


def rounds_of(trainer):
    with (trainer.run_folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@every_reducer
def test_can_be_written_as_it_is_shown(reducer):
    assert eval(repr(reducer), vars(federated)) == reducer


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=f"{type(kind()).__name__}-{name}") for kind in REDUCERS for name, check in checks(kind())],
)
def test_keeps_the_promises_of_the_kit(check):
    check()


@every_reducer
def test_learns_and_two_ranks_give_the_bytes_of_one(reducer, federation, last):
    options = {"reducer": reducer, "clip_update": 5.0}
    one = federation(HeteroFL(rates=(1.0, 0.5)), federation={**options, "capacities": [0.5, 1.0]}, folder="one")
    assert one.summary["personal/val_acc"] > 0.45  # four classes
    two = federation(
        HeteroFL(rates=(1.0, 0.5)),
        devices=2,
        federation={**options, "capacities": [0.5, 1.0], "placement": "dynamic", "wire": "encode"},
        folder="two",
    )
    assert without_masks(last(two)) == without_masks(last(one))


@pytest.mark.parametrize("reducer", [CoverageMedian(), TrimmedMean(fraction=0.25)], ids=repr)
def test_a_poisoned_client_does_not_move_the_model(reducer, federation, monkeypatch):
    train = FedAvg.train

    def poisoned(self, message, client):
        update = train(self, message, client)
        factor = 1e6 if client.id == 1 else 1.0
        moved = {n: message.weights[n] + factor * (w - message.weights[n]) for n, w in update.weights.items()}
        return dataclasses.replace(update, weights=moved)

    honest = weights(federation(FedAvg(), **SHORT, federation={"reducer": reducer}, folder="honest"))
    monkeypatch.setattr(FedAvg, "train", poisoned)
    robust = weights(federation(FedAvg(), **SHORT, federation={"reducer": reducer}, folder="robust"))
    naive = weights(federation(FedAvg(), **SHORT, folder="naive"))
    assert furthest(robust, honest) < 3  # of few clients the middle moves by as much as they differ
    assert furthest(naive, honest) > 1e3


def test_a_clipped_update_moves_the_model_no_further(federation):
    module = small()
    before = copy.deepcopy(module.state_dict())
    options = {"clip_update": 0.01}
    trainer = federation(FedAvg(), **SHORT, module=module, federation=options)
    assert (
        0.01 < distance(before, module.state_dict()) <= 0.02 + 1e-6
    )  # two rounds, and no client stays within the norm
    assert all(float(row["local/update_norm"]) > 0.01 for row in rounds_of(trainer))


def test_a_norm_that_nobody_reaches_changes_nothing(federation):
    """But for rounding: what is clipped travels as a difference."""
    plain = federation(FedAvg(), **SHORT, folder="plain")
    clipped = federation(FedAvg(), **SHORT, federation={"clip_update": 1e6}, folder="clipped")
    assert furthest(weights(plain), weights(clipped)) < 1e-6


@pytest.mark.parametrize(
    ("algorithm", "reducer"), [(FedSpa(), CoverageMedian()), (FedLPS(), TrimmedMean())], ids=["FedSpa", "FedLPS"]
)
def test_a_method_that_names_its_reducer_keeps_it(algorithm, reducer, federation):
    with pytest.raises(InvalidOption, match=r"merges by PlainMean\(\), as its equations say"):
        federation(algorithm, federation={"reducer": reducer})


def test_a_method_takes_the_reducer_that_it_has(federation):
    own = federation(FedSpa(), **SHORT, folder="own")
    said = federation(FedSpa(), **SHORT, federation={"reducer": PlainMean()}, folder="said")
    assert furthest(weights(said), weights(own)) == 0


# ---- privacy

DENSE = [
    *(FedAvg(), FedOpt(), FedProx(), FedBABU(), FedDIP(), FedSpa(search="static")),
    *(algorithms.FedPer(), algorithms.FedRep(), algorithms.LGFedAvg(), algorithms.FedBN()),
    *(algorithms.Ditto(), algorithms.APFL(), algorithms.PFedMe(lam=5.0), algorithms.PerFedAvg()),
    algorithms.CS(),
]
CANNOT = [
    FedSpa(),
    FedSpa(search="static", mask_init="different"),
    algorithms.CS(upload="largest"),
    *(getattr(algorithms, n)() for n in algorithms.__all__ if n not in {type(method).__name__ for method in DENSE}),
]


@needs_extra
@pytest.mark.parametrize("algorithm", DENSE, ids=lambda a: type(a).__name__)
def test_a_private_run_logs_what_it_costs(algorithm, federation, private):
    trainer = federation(algorithm, **SHORT, federation=private)
    costs = [NOISE.epsilon(rounds, cohort=4, clients=6) for rounds in (1, 2)]
    assert [float(row["privacy/epsilon"]) for row in rounds_of(trainer)] == pytest.approx(costs)
    assert trainer.summary["privacy/epsilon"] == pytest.approx(costs[-1])
    assert trainer.summary["privacy/delta"] == 1e-5


@needs_extra
def test_layers_that_clients_keep_get_no_noise(federation, private):
    one, two = (
        weights(federation(algorithms.FedPer(), rounds=rounds, max_epochs=1, federation=private, folder=str(rounds)))
        for rounds in (1, 2)
    )
    assert torch.equal(one["net.4.weight"], two["net.4.weight"])
    assert not torch.equal(one["net.0.weight"], two["net.0.weight"])


@pytest.mark.slow
@needs_extra
def test_two_ranks_and_a_resumed_run_draw_the_same_noise(federation, last, private, monkeypatch):
    monkeypatch.setattr(run, "random_identifier", lambda: "0" * 32)
    straight = federation(FedBABU(), rounds=3, max_epochs=1, federation=private, folder="straight")
    two = federation(FedBABU(), devices=2, rounds=3, max_epochs=1, federation=private, folder="two")
    assert last(two) == last(straight)
    federation(FedBABU(), rounds=1, max_epochs=1, federation=private, folder="resumed")
    resumed = federation(FedBABU(), rounds=3, max_epochs=1, federation=private, folder="resumed", ckpt_path="last")
    assert last(resumed) == last(straight)
    assert resumed.summary == straight.summary


@needs_extra
@pytest.mark.parametrize("name", ["clip_update", "privacy", "reducer"])
def test_a_run_goes_on_with_the_merge_it_had(name, federation, private):
    noisier = dataclasses.replace(private["privacy"], noise_multiplier=0.2)
    other = {"clip_update": 0.4, "privacy": noisier, "reducer": CoverageMedian()}
    had = {"reducer": TrimmedMean()} if name == "reducer" else private
    federation(FedAvg(), rounds=1, max_epochs=1, federation=had)
    with pytest.raises(CheckpointMismatch, match=rf"`federation\.{name}` was"):
        federation(FedAvg(), **SHORT, federation={**had, name: other[name]}, ckpt_path="last")


@needs_extra
def test_a_client_that_fails_changes_neither_denominator_nor_epsilon(federation, monkeypatch, private):
    train = FedAvg.train

    def only_client_zero(self, message, client):
        if client.id:
            raise ValueError("no luck")
        return train(self, message, client)

    monkeypatch.setattr(FedAvg, "train", only_client_zero)
    module = small()
    before = copy.deepcopy(module.state_dict())
    quiet = {**private, "privacy": dataclasses.replace(private["privacy"], noise_multiplier=1e-9)}
    quiet["on_client_error"] = "skip"
    monkeypatch.setattr(CohortDraw, "draw", lambda self, run, state, candidates: [0, 2, 3, 5])
    trainer = federation(FedAvg(), rounds=1, max_epochs=2, module=module, federation=quiet)
    assert distance(before, module.state_dict()) == pytest.approx(
        0.5 / 4, rel=1e-4
    )  # one clipped update over the cohort of four
    assert float(rounds_of(trainer)[0]["clients/failed"]) == 3


@needs_extra
@pytest.mark.parametrize("algorithm", CANNOT, ids=repr)
def test_a_method_whose_updates_tell_more_is_refused(algorithm, federation, private):
    with pytest.raises(InvalidOption, match=r"`federation.privacy` cannot hold for"):
        federation(algorithm, federation=private)


@needs_extra
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"buffers": "average"}, "adds no noise to averaged buffers"),
        ({"privacy": Privacy(noise_multiplier=1.0, delta=0.2)}, "expected below 1 / 6"),
    ],
    ids=["buffers", "delta"],
)
def test_options_that_would_make_epsilon_a_lie_are_refused(options, sentence, federation, private):
    with pytest.raises(InvalidOption, match=sentence):
        federation(FedAvg(), federation={**private, **options})


def test_without_the_accountant_a_sentence_names_the_extra(federation, monkeypatch, private):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidOption, match=r"pip install 'lightning-sparsefl\[privacy\]'"):
        federation(FedAvg(), federation=private)


@needs_extra
def test_the_seed_is_not_the_key(federation, private, tmp_path):
    """Another key gives other noise; the key is nowhere in the run's folder."""
    one = federation(FedBABU(), rounds=1, max_epochs=1, federation=private, folder="one", logger=True)
    (tmp_path / "key").write_text(DIGITS[::-1])
    two = federation(FedBABU(), rounds=1, max_epochs=1, federation=private, folder="two")
    sigma = 0.1 * 0.5 / 4  # in the mean of four
    count = sum(value.numel() for name, value in weights(one).items() if "running" not in name)
    assert distance(weights(one), weights(two)) > sigma * count**0.5
    for path in (path for path in one.run_folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert DIGITS.encode() not in content
        assert bytes.fromhex(DIGITS) not in content


@needs_extra
def test_runs_with_one_key_and_seed_share_neither_noise_nor_cohorts(federation, private):
    """A run that is resumed repeats itself, since its checkpoint has the run's identifier."""
    nobody = {**private, "clip_update": 1e-9, "privacy": dataclasses.replace(private["privacy"], noise_multiplier=1e6)}
    one, two = (federation(FedBABU(), **SHORT, federation=nobody, folder=name) for name in ("one", "two"))
    changes = [change(trainer) for trainer in (one, two)]
    assert abs(float(torch.corrcoef(torch.stack(changes))[0, 1])) < 0.2
    copied = one.run_folder / "checkpoints" / "previous.ckpt"
    again = federation(FedBABU(), **SHORT, federation=nobody, folder="again", ckpt_path=str(copied))
    assert furthest(weights(again), weights(one)) == 0
    assert cohorts(again) == cohorts(one)[4:]


@needs_extra
def test_the_seed_of_a_private_run_does_not_tell_its_cohorts(federation, private):
    federation = functools.partial(federation, FedBABU(), rounds=6, max_epochs=1, limit_train_batches=1)
    public = [str(client) for number in range(6) for client in uniform_cohort(0, number, range(6), 4)]
    one, two = federation(federation=private, folder="one"), federation(federation=private, folder="two")
    assert len({tuple(public), tuple(cohorts(one)), tuple(cohorts(two))}) == 3


@needs_extra
def test_a_private_client_is_replayed_from_a_checkpoint(federation, private):
    trainer = federation(FedBABU(), **SHORT, federation=private)
    client = int(cohorts(trainer)[4])
    again = {"verb": "replay", "arguments": {"client": client, "round": 1}, "federation": private, **SHORT}
    with pytest.raises(InvalidOption, match="`ckpt_path` is not set"):
        federation(FedBABU(), **again)
    replayed = federation(
        FedBABU(), **again, ckpt_path=str(trainer.run_folder / "checkpoints" / "previous.ckpt")
    ).summary
    with (trainer.run_folder / "clients.csv").open(newline="") as file:
        logged = [row["local/train_loss"] for row in csv.DictReader(file) if row["client"] == str(client)]
    assert float(logged[-1]) == pytest.approx(replayed.outcome.metrics["train_loss"])


def change(trainer):
    """The change of the last round, which is noise where updates are clipped to almost nothing."""
    folder = trainer.run_folder / "checkpoints"
    states = [torch.load(folder / name, weights_only=True)["state_dict"] for name in ("last.ckpt", "previous.ckpt")]
    return torch.cat([(states[0][name] - states[1][name]).flatten().float() for name in states[0]])


def cohorts(trainer):
    """The clients of all rounds, as text."""
    with (trainer.run_folder / "clients.csv").open(newline="") as file:
        return [row["client"] for row in csv.DictReader(file) if row["local/train_loss"]]


@needs_extra
def test_without_a_key_a_private_run_is_refused(federation, private):
    with pytest.raises(InvalidOption, match=r"`federation.privacy.key_file` is not set"):
        federation(FedAvg(), federation={**private, "privacy": NOISE})
