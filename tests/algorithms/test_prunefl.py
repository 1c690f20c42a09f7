from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, PruneFL
from lightning_sparsefl.callbacks import GradientSum
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import kept, same
from lightning_sparsefl.types import FitResult, LayerFlops, Merged, Message, ServerState

LAYERS = {"a.weight": torch.ones(8, 6), "a.bias": torch.ones(8), "b.weight": torch.ones(3, 8), "mean": torch.ones(8)}
MASK = torch.tensor([[True, True, True, True, False, False]])
WEIGHTS = {"w": torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0]]), "bias": torch.tensor([1.0])}
SECONDS = {"w": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("density", 0, r"a number in \(0, 1\]"),
        ("initial_density", 1.1, r"a number in \(0, 1\]"),
        ("reconfigure_every", 0, "a whole number >= 1"),
        ("first_epochs", 0, "a whole number >= 1"),
        ("half_life", 0, "a number above 0"),
        ("flops_per_second", -1, "a number above 0"),
        ("bytes_per_second", 0, "a number above 0"),
        ("prunable", 2, r"a number in \[0, 1\]"),
        ("constant", -1, "a number >= 0"),
        ("criterion", "magic", "one of 'time', 'cubic', 'halving'"),
        ("seconds_per_weight", {"*": 0}, "numbers above 0 by pattern"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is .*; expected {expected}"):
        PruneFL(**{option: value})


def test_the_time_of_a_weight_follows_from_its_operations(fleet):
    layers = (LayerFlops("a.weight", macs=480, bias=0), LayerFlops("b.weight", macs=24, bias=0))
    people = fleet(buffers=["mean"], layers=layers)  # 7 samples each
    method = PruneFL(first="dense", flops_per_second=1000.0, bytes_per_second=100.0)
    times = {name: float(time) for name, time in method.init(LAYERS, people).extra["seconds"].items()}
    assert times == pytest.approx({"a.weight": 6 * 10 * 7 / 1000 + 8 / 100, "b.weight": 6 * 7 / 1000 + 8 / 100})
    longer = fleet(buffers=["mean"], layers=layers, samples=lambda view: 5 * view.num_examples)  # five local epochs
    times = {name: float(time) for name, time in method.init(LAYERS, longer).extra["seconds"].items()}
    assert times == pytest.approx({"a.weight": 6 * 10 * 35 / 1000 + 8 / 100, "b.weight": 6 * 35 / 1000 + 8 / 100})
    given = PruneFL(first="dense", seconds_per_weight={"b*": 3.0}).init(LAYERS, people)
    assert float(given.extra["seconds"]["b.weight"]) == 3.0


def test_a_pattern_without_a_layer_is_refused(fleet):
    method = PruneFL(first="dense", seconds_per_weight={"a*": 1.0, "c*": 3.0})
    with pytest.raises(InvalidOption, match=r"seconds_per_weight.* 'c\*' matches no layer, expected .* `a.weight`"):
        method.init(LAYERS, fleet(buffers=["mean"]))


def test_first_masks_by_erk_dense_and_snip(fleet):
    people = fleet(buffers=["mean"])
    shapes = {name: LAYERS[name].shape for name in ("a.weight", "b.weight")}
    drawn = PruneFL(first="erk").init(LAYERS, people)
    assert {n: int(m.sum()) for n, m in drawn.masks.items()} == kept_counts(shapes, erk(shapes, 0.5))
    dense = PruneFL(first="dense", dense_layers=("b.*",)).init(LAYERS, people)
    assert list(dense.masks) == ["a.weight"]
    assert kept(dense.masks) == 48
    slopes = {name: torch.arange(float(LAYERS[name].numel())).reshape(LAYERS[name].shape) for name in shapes}
    asked = fleet(buffers=["mean"], survey=lambda message: Merged(weights=slopes, covered={}))
    sensitive = PruneFL(first="snip").init(LAYERS, asked)
    assert kept(sensitive.masks) == 36
    assert not sensitive.masks["a.weight"].flatten()[:18].any()


def test_the_client_with_the_largest_capacity_prunes_first(fleet, client):
    asked = []

    def survey(message):
        asked.append(message)
        share = {"a.weight": torch.eye(8, 6) / 3, "b.weight": torch.ones(3, 8) / 3}
        covered = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in LAYERS.items()}
        covered["a.weight"] = torch.ones(8, 6, dtype=torch.bool)
        found = {name: 7 * w for name, w in LAYERS.items()}
        return Merged(weights=found, covered=covered, extra={"masks": share})

    state = PruneFL().init(LAYERS, fleet(buffers=["mean"], survey=survey))
    assert int(asked[0].extra["asked"]["client"]) == 0
    assert torch.equal(state.masks["a.weight"], torch.eye(8, 6, dtype=torch.bool))
    assert torch.equal(state.weights["a.weight"], 7 * torch.eye(8, 6))
    assert torch.equal(state.weights["b.weight"], LAYERS["b.weight"])  # nobody sent it
    assert PruneFL().survey(asked[0], client(client=1)[0]).weights == {}


class Alone:
    """A client's engine: every fit reports an accuracy, and gives weight 0 a growing share of the gradient."""

    def __init__(self, accuracies, squares):
        self.accuracies, self.squares, self.fits = list(accuracies), squares, []

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        self.fits.append((weights, masks, epochs))
        callbacks[0].squares = {name: value.clone() for name, value in self.squares.items()}
        return FitResult(weights=WEIGHTS, metrics={"train_acc": self.accuracies.pop(0)}, steps=1)


def test_a_client_prunes_alone_until_the_density_is_stable(client):
    someone, _ = client()
    squares = {"w": torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), "bias": torch.tensor([0.5])}
    someone._worker = engine = Alone([0.1, 0.14, *([0.5] * 30)], squares)
    message = Message(weights={}, extra={"asked": {"client": torch.tensor(0.0)}, "seconds": SECONDS})
    update = PruneFL(prunable=0.5, first_epochs=3).survey(message, someone)
    # two fits below the accuracy; then 6, 3, 2, 1 weights of which half may go, and five times no change
    assert [kept(masks) if masks else 6 for _, masks, _ in engine.fits] == [6, 6, 6, 3, 2, 1, 1, 1, 1, 1]
    assert {epochs for *_, epochs in engine.fits} == {3}
    assert update.extra["masks"]["w"].tolist() == [[True, False, False, False, False, False]]
    assert update.weights["w"].tolist() == [[4.0, 0, 0, 0, 0, 0]]
    assert update.weight == 7


@pytest.mark.parametrize(("accuracy", "fits"), [(0.0, 1), (0.15, 3), (0.9, 20)])
def test_by_the_cubic_a_client_prunes_to_the_first_density_until_it_is_accurate(client, accuracy, fits):
    someone, _ = client()
    squares = {"w": torch.tensor([[1.0, 0.0, 4.0, 2.0, 3.0, 0.0]]), "bias": torch.tensor([9.0])}
    someone._worker = engine = Alone([0.1, 0.14, *([0.5] * 30)], squares)
    message = Message(weights={}, extra={"asked": {"client": torch.tensor(0.0)}, "seconds": SECONDS})
    method = PruneFL(criterion="cubic", initial_density=0.5, first_epochs=3, first_accuracy=accuracy)
    update = method.survey(message, someone)
    assert [kept(masks) if masks else 6 for _, masks, _ in engine.fits] == [6, *[3] * (fits - 1)]
    assert {epochs for *_, epochs in engine.fits} == {3}
    assert update.extra["masks"]["w"].tolist() == [[False, False, True, True, True, False]]
    assert update.weights["w"].tolist() == [[0, 0, 2.0, 1.0, 0, 0]]


def test_a_client_that_drops_all_of_its_weights_is_stable(client):
    someone, _ = client()
    someone._worker = engine = Alone([0.5] * 30, {"w": torch.zeros(1, 6), "bias": torch.tensor([0.5])})
    message = Message(weights={}, extra={"asked": {"client": torch.tensor(0.0)}, "seconds": SECONDS})
    update = PruneFL(prunable=1.0, constant=1.0).survey(message, someone)
    assert [kept(masks) if masks else 6 for _, masks, _ in engine.fits] == [6, 0, 0, 0, 0, 0]
    assert not update.extra["masks"]["w"].any()


def test_a_first_client_whose_accuracy_is_not_known_is_refused(client):
    someone, _ = client()
    message = Message(weights={}, extra={"asked": {"client": torch.tensor(0.0)}, "seconds": SECONDS})
    squares = {"w": torch.ones(1, 6), "bias": torch.tensor([0.5])}
    someone.monitor = "train_f1"
    someone._worker = Alone([0.5] * 30, squares)
    with pytest.raises(InvalidOption, match=r"`federation.monitor` is 'train_f1', .* expected `train_acc`, or set"):
        PruneFL().survey(message, someone)
    someone._worker = Alone([0.5] * 30, squares)
    assert PruneFL(first_accuracy=0.0).survey(message, someone).extra["masks"]


def test_squared_sums_wait_in_the_memory_until_a_reconfiguration(client):
    class Fits:
        def fit(self, client, weights, masks, trainable, callbacks, **options):
            assert isinstance(callbacks[0], GradientSum)
            callbacks[0].sums = {"w": torch.full((1, 6), 2.0), "bias": torch.tensor([-3.0])}
            return FitResult(weights=WEIGHTS, metrics={}, steps=1)

    message, method = Message(weights=WEIGHTS, masks={"w": MASK}), PruneFL(reconfigure_every=3)
    someone, _ = client(round=1)
    someone._worker = Fits()
    first = method.train(message, someone)
    assert first.extra == {}
    assert first.memory["squares"]["w"].tolist() == [[4.0] * 6]
    again, _ = client(round=2, memory=first.memory)
    again._worker = Fits()
    due = method.train(message, again)
    assert due.memory == {}
    assert due.extra["squares"]["bias"].tolist() == [18.0]


def reconfigured(method, squares, round=0, rounds=10):
    plan = {"rounds": torch.tensor(float(rounds))}
    state = ServerState(round, WEIGHTS, {"w": MASK}, {"plan": plan, "seconds": SECONDS})
    extra = {"squares": {"w": torch.tensor([squares]), "bias": torch.tensor([4.0])}}
    return method.aggregate(state, Merged(weights=WEIGHTS, covered={}, extra=extra))


def test_a_reconfiguration_keeps_large_weights_and_what_is_worth_its_time():
    # the two largest stay; the bias is worth 4, so 4 / 2 is to be exceeded: by 9, and then 13 / 3 by 5, by nothing else
    state = reconfigured(PruneFL(prunable=0.5), [0.0, 0.0, 1.0, 5.0, 0.0, 9.0])
    assert state.masks["w"].tolist() == [[True, True, False, True, False, True]]
    assert state.weights["w"].tolist() == [[4.0, 3.0, 0.0, 1.0, 0.0, 0.0]]
    # after a half-life only one of four may go
    state = reconfigured(PruneFL(prunable=0.5, half_life=4), [0.0] * 6, round=4)
    assert state.masks["w"].tolist() == [[True, True, True, False, False, False]]
    # time that passes anyway makes weights cheap
    state = reconfigured(PruneFL(prunable=0.5, constant=100.0), [0.0, 0.0, 1.0, 5.0, 0.0, 9.0])
    assert state.masks["w"].tolist() == [[True, True, True, True, False, True]]


def test_schedules_keep_the_largest_squares():
    squares = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    method = PruneFL(criterion="cubic", density=0.5, initial_density=1.0, first="dense")
    assert method.fixed_length
    assert not PruneFL().fixed_length
    assert reconfigured(method, squares, round=9).masks["w"].tolist() == [[False, False, False, True, True, True]]
    assert kept(reconfigured(method, squares, round=0).masks) == 6
    halving = PruneFL(criterion="halving", prunable=0.5, half_life=1)
    assert kept(reconfigured(halving, squares, round=0).masks) == 3
    assert kept(reconfigured(halving, squares, round=1).masks) == 4  # .75 of 6, rounded down
    assert halving.share(6, 10) > 0.99


def test_without_squares_the_mask_stays():
    state = ServerState(0, WEIGHTS, {"w": MASK}, {"seconds": SECONDS})
    assert same(PruneFL().aggregate(state, Merged(weights=WEIGHTS, covered={})).masks, {"w": MASK})


def test_profile_foresees_the_densities_of_a_schedule(fleet):
    method = PruneFL(criterion="cubic", density=0.2, initial_density=0.8, reconfigure_every=2, first="erk")
    first = method.init(LAYERS, fleet(buffers=["mean"]))  # 72 weights, 5 rounds
    shares = [0.2 + 0.6 * (1 - t / 5) ** 3 for t in (1, 3)]
    found = [kept(method.profile_state(first, round).masks) for round in range(6)]
    assert found == [kept(first.masks)] * 2 + [int(72 * shares[0])] * 2 + [int(72 * shares[1])] * 2
    assert kept(PruneFL(first="dense", reconfigure_every=1).profile_state(first, 4).masks) == kept(first.masks)
    by_client = PruneFL(criterion="cubic", density=0.2, initial_density=0.8, reconfigure_every=2, first="client")
    assert [kept(by_client.profile_state(first, round).masks) for round in (0, 1, 2)] == [57, 57, found[2]]


def test_only_a_first_client_that_trains_up_to_an_accuracy_needs_metrics():
    methods = PruneFL(first="client", first_accuracy=0.5), PruneFL(first="client", first_accuracy=0.0)
    assert [method.needs_metrics for method in (*methods, PruneFL(first="dense"))] == [True, False, False]


SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


def test_costs(facts):
    # layer a keeps 4 of 10: 22 FLOPs instead of 34; 12 of 18 numbers travel; all 18 before a reconfiguration
    method = PruneFL(reconfigure_every=3)
    first, plain, due, after = (method.costs(facts(SPARSE, round=t, max_rounds=9)) for t in range(4))
    assert (first.bytes_down_paper, first.bytes_up_paper) == (48, 48)
    assert plain.flops_paper == 14 * 3 * 22
    assert plain.flops_analytic == 14 * (22 + 22 + 34)
    assert (plain.bytes_down_paper, plain.bytes_up_paper) == (48, 48)
    assert (due.bytes_down_paper, due.bytes_up_paper) == (48, 48 + 72)
    assert (after.bytes_down_paper, after.bytes_up_paper) == (48 + 10 / 8, 48)


def test_a_dense_mask_of_which_nothing_may_go_is_fedavg(federation, last):
    method = PruneFL(first="dense", prunable=0.0, reconfigure_every=1)
    dense, plain = (last(federation(m, folder=name)) for name, m in (("a", method), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]
