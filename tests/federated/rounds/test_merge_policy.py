"""Robust reducers, clipped updates and private sums, without a federation around them."""

import math
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from lightning_sparsefl import (
    DepthFL,
    DisPFL,
    FedAvg,
    FedDyn,
    FederatedAlgorithm,
    FederatedTrainer,
    Federation,
    FedP3,
    Hermes,
    Local,
    SparsyFed,
)
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated import REFL, CoordinateReducer, CoverageMedian, Privacy, ServerOptimizer, TrimmedMean
from lightning_sparsefl.federated.aggregation.clipping import clipped, require_norm
from lightning_sparsefl.federated.aggregation.privacy import NoisySum
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.aggregation.robust import trimmed_mean
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.exchange.flat import FlatModule
from lightning_sparsefl.federated.exchange.orders import ClientFacts, Order
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.rounds.merge_policy import MergePolicy
from lightning_sparsefl.federated.rounds.pending import pending_update
from lightning_sparsefl.federated.tracking.hyperparameters import hyperparameters
from lightning_sparsefl.models import MLP
from lightning_sparsefl.types import ClientView, Message, PendingUpdate, RunState, ServerState, Update

ROBUST = [CoverageMedian(), TrimmedMean(fraction=0.2)]


def flat_module():
    torch.manual_seed(0)
    return FlatModule(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))


def updates(server, count, seed=0):
    g = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        weights = {n: w + (torch.randn(w.shape, generator=g) * 2).round() for n, w in server.items()}
        votes = {n: torch.rand(server[n].shape, generator=g) < 0.4 for n in ("0.weight", "2.weight")}
        result.append(Update(weights=weights, votes=votes))
    return result


def ballots(reducer, flat, parts):
    """One for each rank, of its own clients."""
    server = flat.read()
    result = []
    for part in parts:
        ballot = reducer.start(flat.layout, server, 1000)
        for update in part:
            ballot.add(update, Message(weights=server), 1)
        result.append(ballot)
    return result


def collected(reducer, flat, parts):
    """What a process group does: every call shows each rank the values of all."""
    shown = []
    for ballot in ballots(reducer, flat, parts):
        mine = []
        ballot.collect(lambda own, mine=mine: mine.append(own) or [own])
        shown.append(mine)
    results = []
    for ballot in ballots(reducer, flat, parts):
        replay = iter(list(zip(*shown, strict=True)))
        ballot.collect(lambda own, replay=replay: list(next(replay)))
        results.append(ballot.result({}).weights.vector.numpy().tobytes())
    return results


@pytest.mark.parametrize("reducer", ROBUST, ids=repr)
def test_any_order_and_any_number_of_ranks_give_the_same_bytes(reducer):
    flat = flat_module()
    given = updates(flat.read(), 12)
    whole = collected(reducer, flat, [given])[0]
    rng = random.Random(0)
    for ranks in (2, 3, 12, 15):  # some have no client
        rng.shuffle(given)
        assert set(collected(reducer, flat, [given[i::ranks] for i in range(ranks)])) == {whole}


def test_of_zeros_with_and_without_a_sign_neither_is_first():
    flat = flat_module()
    signs = [Update(weights={"0.bias": torch.full((7,), zero)}) for zero in (0.0, -0.0, 0.0)]
    assert collected(CoverageMedian(), flat, [signs]) == collected(CoverageMedian(), flat, [signs[1:] + signs[:1]])


@pytest.mark.parametrize("reducer", [CoverageMedian(), TrimmedMean(fraction=0.4)], ids=repr)
@pytest.mark.parametrize("poison", [1e6, -1e30])
def test_the_result_lies_among_the_honest_votes(reducer, poison):
    flat, server = flat_module(), flat_module().read()
    honest = [Update(weights=u.weights) for u in updates(server, 3)]
    wrong = [Update(weights={n: w * poison for n, w in u.weights.items()}) for u in updates(server, 2, seed=1)]
    ballot = ballots(reducer, flat, [[wrong[0], *honest, wrong[1]]])[0]
    ballot.collect(lambda own: [own])
    for name, value in ballot.result({}).weights.items():
        votes = torch.stack([update.weights[name] for update in honest])
        assert (value >= votes.amin(0)).all()
        assert (value <= votes.amax(0)).all()


class Merges(CoordinateReducer):
    """Returns what a function makes of the votes."""

    def __init__(self, merge):
        self.merged = merge

    def merge(self, votes):
        return self.merged(votes)


def test_a_reducer_gets_the_votes_of_a_tensor_in_ascending_order():
    flat, shown = flat_module(), []
    given = updates(flat.read(), 5)
    least = Merges(lambda votes: shown.append(votes) or votes[0].double())
    ballot = ballots(least, flat, [given])[0]
    ballot.collect(lambda own: [own])
    assert [tuple(votes.shape) for votes in shown] == [(5, size) for size in flat.layout.sizes]
    for votes, name in zip(shown, flat.layout.names, strict=True):
        rows = torch.stack([u.weights[name].where(u.votes.get(name, torch.tensor(True)), torch.nan) for u in given])
        torch.testing.assert_close(votes, rows.flatten(1).sort(dim=0).values, equal_nan=True, rtol=0, atol=0)
        voted = ~votes[0].isnan().reshape(flat.layout.shapes[name])
        assert torch.equal(ballot.result({}).weights[name][voted], rows.nan_to_num(torch.inf).amin(0)[voted])
    assert any(votes[0].isnan().any() for votes in shown)  # nobody votes there


def test_without_votes_a_reducer_is_not_asked():
    flat = flat_module()
    ballot = ballots(Merges(lambda votes: pytest.fail("asked")), flat, [[]])[0]
    ballot.collect(lambda own: [own])


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        (lambda votes: None, "`Merges.merge` returned None; expected a `Tensor`, so add a `return`"),
        (
            lambda votes: votes,
            "`Merges.merge` returned for '0.weight' torch.float32 of shape (3, 35); expected floating-point numbers of "
            "shape (35,), one for each coordinate",
        ),
        (lambda votes: votes[0].isnan(), "returned for '0.weight' torch.bool of shape (35,)"),
        (lambda votes: votes[0] / 0, "returned for '0.weight' values that are not finite"),
    ],
    ids=["nothing", "shape", "type", "not finite"],
)
def test_what_a_reducer_returns_is_checked(merge, message):
    flat = flat_module()
    ballot = ballots(Merges(merge), flat, [updates(flat.read(), 3)])[0]
    with pytest.raises(InvalidOption, match=re.escape(message)):
        ballot.collect(lambda own: [own])


def test_votes_are_added_in_float64():
    votes = torch.tensor([[1e8], [1.0], [-1e8]])
    assert trimmed_mean(votes, lambda count: 0).tolist() == [1 / 3]


def test_a_received_norm_may_exceed_the_limit_by_rounding_only():
    """The norm of the parameters that the client may change; of the rest, and of buffers, any value fits."""
    flat, server = flat_module(), flat_module().read()
    message = Message(weights=server, trainable={"0.bias": torch.arange(7) < 2})

    def check(norm):
        change = {name: torch.zeros_like(weight) for name, weight in server.items()}
        change["0.bias"] = torch.tensor([0.6 * norm, 0.8 * norm, 5, 0, 0, 0, 0])
        change["1.running_mean"] = torch.full((7,), 5.0)
        require_norm(Update(weights=change, kind="difference"), message, 2.0, flat.layout)

    check(2.0 * (1 + 0.9e-4))
    with pytest.raises(InvalidUpdate, match=r"its norm is 2\.00022; expected at most `federation\.clip_update` = 2"):
        check(2.0 * (1 + 1.1e-4))


@pytest.mark.parametrize("limit", [1e-2, 1e-4])
def test_the_norm_in_float16_is_within_the_limit(limit):
    """Below 2**-14 its values have few digits, so that all may be rounded up."""
    flat = FlatModule(nn.Linear(1000, 1000).half())
    server = flat.read()
    change = {name: torch.full_like(weight, 1e-3) for name, weight in server.items()}
    update = clipped(Update(weights=change, kind="difference"), Message(weights=server), limit, flat.layout)
    norm = torch.cat([weight.double().flatten() for weight in update.weights.values()]).norm()
    assert 0.5 * limit < float(norm) <= limit
    require_norm(update, Message(weights=server), limit, flat.layout)


def test_an_update_in_float64_at_the_limit_is_scaled_in_the_end():
    """A factor of 1 up to rounding would be tried for ever."""
    flat = FlatModule(nn.Linear(100, 100).double())
    server, random = flat.read(), torch.Generator().manual_seed(0)
    change = {n: torch.randn(w.shape, generator=random, dtype=w.dtype) for n, w in server.items()}
    limit = math.hypot(*(float(weight.norm()) for weight in change.values()))
    for below in range(5):
        given, most = Update(weights=change, kind="difference"), limit * (1 - below * 2.0**-53)
        update = clipped(given, Message(weights=server), most, flat.layout)
        assert math.hypot(*(float(weight.norm()) for weight in update.weights.values())) <= most


def test_a_tensor_that_was_not_sent_has_no_change():
    flat, message = flat_module(), Message(weights={})
    update = Update(weights={"0.bias": torch.ones(7)})
    order = Order("run", 0, 0, "train", ClientFacts(num_examples=1, capacity=1.0, max_rounds=1), "key", message)
    for option, use in {
        "clip_update": lambda: clipped(update, message, 1.0, flat.layout),
        "reducer": lambda: PlainMean().start(flat.layout, flat.read(), 1).add(update, message, 1),
        "sampler": lambda: pending_update(order, update, arrival=1.0),
    }.items():
        with pytest.raises(InvalidUpdate, match=f"`federation.{option}` needs .* '0.bias' was not sent to the client"):
            use()


def test_late_changes_are_added_to_what_the_clients_received():
    """SparsyFed sends theta, of which the server's weights are powers."""
    flat, method = flat_module(), SparsyFed(exponent=2.0)
    view = ClientView(0, 1, 1.0, 0, 5, 0)
    server = method.init(flat.read(), Fleet([view], flat.layout.buffers, torch.device("cpu")))
    message = method.download(server, view)
    changes = {name: torch.full_like(weight, 0.1) for name, weight in message.weights.items()}
    moved = {name: weight + 0.1 for name, weight in message.weights.items()}
    policy, state = MergePolicy(method, Federation(), flat.layout, 4, StaleMean()), RunState(server)
    merge = policy.start(state, 1)
    merge.add(Update(weights=moved), message, 1)
    late = PendingUpdate(client=1, round=-1, arrival=0.0, weight=1, num_examples=1, changes=changes)
    merged = policy.result(merge, {0: {}}, state, [late])
    for name, weight in merged.weights.items():
        assert torch.allclose(weight, moved[name]), name


# ---- privacy


def private(flat, given, deviation, cohort=4, secret=bytes(32), context=(0, 0)):
    server = flat.read()
    noise = {"deviation": deviation, "cohort": cohort, "secret": secret, "context": context}
    accumulator = NoisySum(flat.layout, server, **noise)
    for update in given:
        accumulator.add(update, Message(weights=server), 100)
    return accumulator.result({0: {"loss": 1.0}})


def test_noise_has_the_deviation_that_was_asked_for():
    flat = FlatModule(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)))
    change = {n: torch.full_like(w, 0.01) for n, w in flat.read().items() if n not in flat.layout.buffers}
    given = [Update(weights=change, kind="difference", weight=w) for w in (1, 99)]  # samples do not count
    merged = private(flat, given, deviation=3.0)
    noise = (merged.weights["0.weight"] * 4 - 0.02).double()
    assert float(noise.std()) == pytest.approx(3.0, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.05)
    assert not merged.weights["1.running_mean"].any()
    assert merged.kind == "difference"
    assert merged.reports == {}
    again = private(flat, given, deviation=3.0)
    assert torch.equal(merged.weights["0.weight"], again.weights["0.weight"])


@pytest.mark.parametrize(
    "other",
    [{"context": (0, 1)}, {"context": (1, 0)}, {"secret": bytes(31) + b"\x01"}, {"shift": 1e-6}],
    ids=["round", "run", "secret", "sum"],
)
def test_no_two_sums_share_their_noise(other):
    flat = FlatModule(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)))

    def merged(shift=0.0, **options):
        change = {n: torch.full_like(w, 0.01 + shift) for n, w in flat.read().items() if n not in flat.layout.buffers}
        return private(flat, [Update(weights=change, kind="difference")], 3.0, **options).weights["0.weight"] * 4

    difference = (merged() - merged(**other)).double()
    assert float(difference.std()) == pytest.approx(3.0 * 2**0.5, rel=0.02)


def test_the_noisy_sum_lies_on_the_grid_of_the_sum():
    flat = flat_module()
    accumulator = NoisySum(flat.layout, flat.read(), deviation=0.3, cohort=4, secret=bytes(32), context=())
    accumulator.add(updates(flat.read(), 1)[0], Message(weights=flat.read()), 1)
    accumulator.result({})
    for constant, total in zip(accumulator._grid, accumulator._sum.split(flat.layout.sizes), strict=True):
        assert torch.equal(total, (total + constant) - constant)


def test_the_grid_tells_nothing_of_the_numbers_of_samples(tmp_path):
    """Else the released weights would: their smallest difference is that of the grid."""
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    privacy = Privacy(noise_multiplier=1.0, delta=0.01, key_file=str(key))
    flat = FlatModule(nn.Linear(5, 7))
    federation = Federation(clients_per_round=2, clip_update=1.0, privacy=privacy)
    policy = MergePolicy(FedAvg(), federation, flat.layout, clients=4)
    state = RunState(ServerState(round=0, weights=flat.read()), run="run")
    steps = [policy.start(state, samples)._grid for samples in (2, 2**15, 2**15 + 1)]
    assert steps[0] == steps[1] == steps[2]


def test_without_noise_it_is_the_sum_over_the_cohort():
    flat = flat_module()
    given = [Update(weights=u.weights, weight=k + 1) for k, u in enumerate(updates(flat.read(), 3))]
    merged = private(flat, given, deviation=0.0, cohort=5)  # two failed
    for name, old in flat.read().items():
        total = sum((update.weights[name] - old).double() for update in given)
        torch.testing.assert_close(merged.weights[name].double(), total / 5, rtol=1e-6, atol=1e-7)


def test_what_nobody_may_change_gets_no_noise():
    flat, server = flat_module(), flat_module().read()
    frozen = Message(weights=server, trainable={"2.weight": torch.zeros(3, 7, dtype=torch.bool)})
    accumulator = NoisySum(flat.layout, server, deviation=1.0, cohort=1, secret=bytes(32), context=())
    accumulator.add(Update(weights=server), frozen, 1)
    merged = accumulator.result({})
    assert not merged.weights["2.weight"].any()
    assert merged.weights["0.weight"].all()
    assert merged.voters == {}


def test_parameters_without_gradient_get_no_noise_and_may_not_change():
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    module[0].requires_grad_(False)
    flat = FlatModule(module)
    change = {name: torch.zeros_like(weight) for name, weight in flat.read().items()}
    merged = private(flat, [Update(weights=change, kind="difference")], deviation=1.0)
    assert not merged.weights["0.weight"].any()
    assert merged.weights["1.weight"].all()
    change["0.weight"][0, 0] = 1e-3
    with pytest.raises(InvalidUpdate, match=r"An update changes '0\.weight', which gets no noise"):
        private(flat, [Update(weights=change, kind="difference")], deviation=1.0)


def test_a_tensor_that_was_not_sent_is_refused_before_anything_is_added():
    flat = flat_module()
    accumulator = NoisySum(flat.layout, flat.read(), deviation=1.0, cohort=1, secret=bytes(32), context=())
    with pytest.raises(InvalidUpdate, match=r"needs the difference .* but '0\.weight' was not sent"):
        accumulator.check(Update(weights=flat.read()), Message(weights={}))
    accumulator.check(Update(weights=flat.read(), kind="difference"), Message(weights={}))


@pytest.mark.parametrize("carried", [{"shared": {"masks": {}}}, {"extra": {"control": {"c": torch.ones(1)}}}], ids=str)
def test_an_update_that_carries_more_is_refused(carried):
    flat = flat_module()
    with pytest.raises(InvalidUpdate, match=f"has `{next(iter(carried))}`"):
        private(flat, [Update(weights=flat.read(), **carried)], deviation=1.0)


# ---- options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip_update": 0.0}, "`federation.clip_update` is 0.0; expected a number above 0"),
        ({"clip_update": float("nan")}, "`federation.clip_update` is nan"),
        ({"privacy": Privacy(noise_multiplier=1, delta=1e-5)}, "`federation.clip_update` is not"),
        (
            {"privacy": Privacy(noise_multiplier=1, delta=1e-5), "clip_update": 1.0, "reducer": CoverageMedian()},
            r"`federation.reducer` is CoverageMedian\(\); expected null",
        ),
    ],
    ids=["zero", "nan", "privacy without a norm", "privacy with a median"],
)
def test_options_that_cannot_work(options, sentence):
    with pytest.raises(InvalidOption, match=sentence):
        Federation(**options)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedDyn(), {"clip_update": 1.0}),
        (FedDyn(), {"server_optimizer": ServerOptimizer(rule="adam")}),
        (FedDyn(), {"reducer": CoverageMedian()}),
        (FedDyn(), {"sampler": REFL()}),
        (DepthFL(), {"clip_update": 1.0}),
        (Hermes(), {"clip_update": 1.0}),
        (Hermes(), {"reducer": PlainMean()}),
        (Hermes(), {"sampler": REFL()}),
        (FedP3(), {"clip_update": 1.0}),
    ],
    ids=repr,
)
def test_options_that_change_what_a_method_computes_with_are_refused(method, options):
    federation, (name,) = Federation(**options), options
    late = None if federation.sampler is None else federation.sampler.late_merge()
    kind, layout = type(method).__name__, flat_module().layout
    reason = "corrects the mean" if method.needs_exact_mean else "has clients send more than they received, unless"
    with pytest.raises(InvalidOption, match=rf"`federation\.{name}` is .*, but {kind} {reason} .*; expected null"):
        MergePolicy(method, federation, layout, 4, late)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_update": 0.01},
        {"reducer": CoverageMedian()},
        {"server_optimizer": ServerOptimizer()},
        {"sampler": REFL()},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("method", [DisPFL(), Local()], ids=lambda method: type(method).__name__)
def test_options_of_a_merge_are_refused_where_nothing_is_merged(method, options):
    federation, (name,) = Federation(**options), options
    late = None if federation.sampler is None else federation.sampler.late_merge()
    said = (
        rf"`federation\.{name}` is .*, but {type(method).__name__} has no weights that the server merges; expected null"
    )
    with pytest.raises(InvalidOption, match=said):
        MergePolicy(method, federation, flat_module().layout, 4, late)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedDyn(), {"reducer": CoverageMean()}),
        (DepthFL(alpha=0.0), {"clip_update": 1.0, "server_optimizer": ServerOptimizer(rule="adam")}),
        (Hermes(own=False), {"clip_update": 1.0}),
        (Hermes(), {"reducer": CoverageMedian(), "server_optimizer": ServerOptimizer(rule="adam")}),
        (FedP3(head="shared"), {"clip_update": 1.0}),
    ],
    ids=repr,
)
def test_other_options_and_variants_are_accepted(method, options):
    MergePolicy(method, Federation(**options), flat_module().layout, 4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: TrimmedMean(fraction=0.5),
            r"`federation\.reducer\.fraction` is 0\.5; expected a number in \[0, 0\.5\)",
        ),
        (lambda: TrimmedMean(fraction=-0.1), "expected a number in"),
        *(
            (lambda z=z: Privacy(noise_multiplier=z, delta=1e-5), re.escape(f"noise_multiplier` is {z}; expected"))
            for z in (0, -1.0, float("nan"), float("inf"), 1e-320, 1e308)
        ),
        (lambda: Privacy(noise_multiplier=1, delta=1), "`federation.privacy.delta` is 1"),
        (lambda: Privacy(noise_multiplier=1, delta=0), "`federation.privacy.delta` is 0"),
    ],
    ids=["half", "negative", "zero", "below zero", "nan", "inf", "tiny", "huge", "delta", "no delta"],
)
def test_values_that_cannot_work(make, sentence):
    with pytest.raises(InvalidOption, match=sentence):
        make()


def test_they_are_hyper_parameters_of_the_run():
    options = {"reducer": TrimmedMean(fraction=0.2), "clip_update": 1.5}
    trainer = FederatedTrainer(algorithm=FedAvg(), federation=Federation(**options), accelerator="cpu", devices=1)
    found = hyperparameters(trainer.options, None, MLP(num_classes=4, sample_shape=(1, 1, 8)))
    assert found["federation/reducer"] == "TrimmedMean"
    assert found["federation/reducer/fraction"] == 0.2
    assert found["federation/clip_update"] == 1.5


class StartsNothing(Reducer):
    """Forgets to return the sum."""

    def start(self, layout, server, total_weight):
        """Do nothing."""


def test_a_reducer_that_starts_no_sum_is_named(federation):
    with pytest.raises(InvalidOption, match=r"`StartsNothing\.start` returned None; expected an `Accumulator`, so add"):
        federation(FedAvg(), rounds=1, federation={"reducer": StartsNothing()})


@dataclass(frozen=True, kw_only=True)
class InExtraAlone(FederatedAlgorithm):
    """Sends the model as a tree beside the weights."""

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, weights={}, extra={"model": update.weights})

    def aggregate(self, server, merged):
        return replace(server, weights={**server.weights, **merged.extra["model"]})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reducer": CoverageMedian()}, "`federation.reducer`"),
        (
            {"clip_update": 1.0, "server_optimizer": ServerOptimizer()},
            "`federation.clip_update` and `federation.server_op",
        ),
        ({}, None),
    ],
)
def test_options_that_have_nothing_to_act_on_are_named_once(options, named, tmp_path, recwarn):
    federation = Federation(clients_per_round=3, **options)
    trainer = FederatedTrainer(
        algorithm=InExtraAlone(), federation=federation, max_rounds=2, logger=False, default_root_dir=str(tmp_path)
    )
    data = FederatedBlobs(num_clients=4, num_classes=4, dim=8, eval_split="test")
    trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), data)
    said = [str(each.message) for each in recwarn if "had no effect" in str(each.message)]
    assert len(said) == (named is not None)
    assert named is None or said[0].startswith(named)
