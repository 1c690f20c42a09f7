from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.scripted import Scripted, scripted_client
from lightning_sparsefl import FedAvg, LotteryFL
from lightning_sparsefl.algorithms._personal_masks import participations
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.types import Message, ServerState

WEIGHTS = {"a.weight": torch.arange(1.0, 21).view(4, 5), "a.bias": torch.ones(4), "norm.mean": torch.ones(4)}
FULL = {"a.weight": torch.ones(4, 5, dtype=torch.bool), "a.bias": torch.ones(4, dtype=torch.bool)}
MESSAGE = Message(weights=WEIGHTS, masks=FULL)
TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}


def train(method, message=MESSAGE, score=0.9, memory=None, metric="val_acc"):
    script = Scripted(TRAINED, scores={metric: score})
    return method.train(message, scripted_client(script, memory)), script


def dropped(masks):
    return (~masks["a.weight"]).flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"`algorithm.density` is 0; expected a number in \(0, 1\]"),
        ({"density": 1.1}, r"`algorithm.density` is 1.1; expected a number in \(0, 1\]"),
        ({"step": 1}, r"`algorithm.step` is 1; expected a number in \[0, 1\)"),
        ({"gate": "test"}, "`algorithm.gate` is 'test'; expected one of 'val', 'train'"),
        ({"merge": "sum"}, "`algorithm.merge` is 'sum'; expected one of 'count', 'mean'"),
        ({"min_score": "high"}, "algorithm.min_score"),
        ({"metric": "val_loss"}, "`algorithm.metric` is 'val_loss'; expected a score that rises as a model improves"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        LotteryFL(**options)


def test_a_client_receives_and_is_scored_with_its_masked_weights(fleet, view):
    method = LotteryFL()
    state = method.init(WEIGHTS, fleet(buffers=["norm.mean"]))
    assert same(method.download(state, view()).masks, FULL)
    half = {"a.weight": torch.eye(4, 5, dtype=torch.bool)}
    message = method.download(state, view(shared={"masks": half}))
    assert message.weights["a.weight"].tolist() == (WEIGHTS["a.weight"] * half["a.weight"]).tolist()
    assert method.personalize(message, scripted_client(Scripted({}))) is message.weights


def test_an_open_gate_prunes_and_sets_parameters_back():
    update, script = train(LotteryFL())
    masks = update.shared["masks"]
    assert dropped(masks) == [0, 1]  # ceil(.1 * 19)
    ((weights, held, _, _),) = script.fits
    assert list(weights) == ["norm.mean"]  # the engine adds the run's initial values of the others
    assert held is masks
    assert update.votes is masks
    assert update.memory == {"density": 0.9}
    assert (update.kind, update.weight) == ("weights", 1)
    ((scored, split),) = script.evaluations
    assert scored is MESSAGE.weights
    assert split == "val"


def test_without_rewinding_the_received_weights_are_pruned():
    update, script = train(LotteryFL(rewind=False, gate="train"))
    ((weights, held, _, _),) = script.fits
    assert weights["a.weight"].flatten()[:4].tolist() == [0, 0, 3, 4]
    assert dropped(held) == dropped(update.shared["masks"]) == [0, 1]
    assert script.evaluations[0][1] == "train"


@pytest.mark.parametrize(
    ("options", "score", "memory"),
    [({}, 0.2, None), ({}, 0.9, {"density": 0.5}), ({"step": 0.0}, 0.9, None), ({"density": 1.0}, 0.9, None)],
    ids=["score", "target", "step", "density"],
)
def test_a_closed_gate_trains_what_was_received(options, score, memory):
    update, script = train(LotteryFL(**options), score=score, memory=memory)
    assert update.shared is None
    ((weights, held, _, _),) = script.fits
    assert weights is MESSAGE.weights
    assert held is update.votes is FULL


def test_an_open_gate_stops_after_seven_prunings_at_4783():
    method, memory, densities = LotteryFL(), None, []
    for _ in range(10):
        memory = train(method, memory=memory)[0].memory
        densities.append(memory["density"])
    assert densities[:7] == pytest.approx([0.9 ** (j + 1) for j in range(7)])
    assert densities[6:] == pytest.approx([0.4782969] * 4)
    assert method.prunings() == 7
    assert LotteryFL(step=0.2, density=0.1).prunings() == 11
    assert LotteryFL(step=0.0).prunings() == 0


def test_a_node_that_lost_its_memory_takes_the_density_of_its_mask():
    half = {**FULL, "a.weight": torch.arange(20).view(4, 5) >= 10}
    message = dataclasses.replace(MESSAGE, masks=half)
    update, _ = train(LotteryFL(density=0.5), message)
    assert (update.shared, update.memory) == (None, {"density": 0.5})
    assert train(LotteryFL(density=0.4), message)[0].memory == {"density": 0.45}


def test_the_mean_over_the_cohort_takes_differences():
    update, _ = train(LotteryFL(merge="mean", rewind=False))
    assert update.kind == "difference"
    assert update.weights["a.weight"].unique().tolist() == [1.0]
    assert dropped(update.votes) == [0, 1]
    assert isinstance(LotteryFL(merge="mean").reducer(), PlainMean)
    assert isinstance(LotteryFL().reducer(), CoverageMean)


def test_a_score_that_the_module_does_not_log_is_refused():
    with pytest.raises(InvalidOption, match=r"`algorithm.metric` is 'val_acc', which .* expected one of `val_f1`"):
        train(LotteryFL(), metric="val_f1")


def test_a_profile_has_the_masks_of_open_gates(fleet):
    method, people = LotteryFL(), fleet(clients=4)
    people.clients_per_round = 2
    state = method.init({"w": torch.arange(1.0, 101).view(10, 10)}, people)
    kept = [int(method.profile_state(state, round).masks["w"].sum()) for round in range(0, 20, 2)]
    # the percentile keeps 100, 90, 81, 73, 65, 58, 52 and 46, and then the nominal density .4783 is reached
    assert kept == [100, 90, 81, 73, 65, 58, 52, 46, 46, 46]


def test_a_profile_counts_the_whole_share_of_the_rounds(fleet):
    people = fleet(clients=10)
    people.clients_per_round = 7
    state = LotteryFL().init({"w": torch.ones(1)}, people)
    assert [participations(state, round) for round in (10, 100, 1000)] == [7, 70, 700]


def test_a_gate_on_training_data_is_charged(facts):
    assert LotteryFL().costs(facts()).flops_analytic == 14 * 3 * 34
    assert LotteryFL(gate="train").costs(facts()).flops_analytic == 14 * 3 * 34 + 7 * 34


@pytest.mark.parametrize(("left", "scored"), [(101, True), (81, True), (65, False)])
def test_a_gate_is_not_charged_after_the_last_pruning(facts, left, scored):
    """A pruning drops a fifth of what is left of 101 weights, rounded down."""
    masks = {"a.weight": torch.arange(101).view(1, 101) < left}
    before, after = (LotteryFL(density=0.7, step=0.2, gate=gate).costs(facts(masks)) for gate in ("val", "train"))
    assert (after.flops_analytic > before.flops_analytic) == scored


def test_a_gate_is_charged_by_the_nearest_number_of_prunings(facts):
    """Two prunings leave 8 of 10 weights, fewer than the nominal .81, and a third one is due above .75."""
    masks = {"a.weight": torch.arange(10).view(2, 5) < 8}
    before, after = (LotteryFL(density=0.75, step=0.1, gate=gate).costs(facts(masks)) for gate in ("val", "train"))
    assert after.flops_analytic > before.flops_analytic


class Uniform(FedAvg):
    """FedAvg in which each client counts once."""

    def train(self, message, client):
        return dataclasses.replace(super().train(message, client), weight=1)


def weights_of(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("method", [LotteryFL(min_score=1.0), LotteryFL(density=1.0)], ids=["gate", "density"])
def test_without_a_pruning_it_is_federated_averaging(method, federation):
    ours, theirs = (
        weights_of(federation(m, rounds=2, folder=type(m).__name__, federation={"local_engine": "fast"}))
        for m in (method, Uniform())
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


STARTS = []


class Noting(LotteryFL):
    """Notes what the engine starts a rewound fit from."""

    def train(self, message, client):
        fit = client.fit

        def noted(weights, masks, **options):
            if len(weights) < len(message.weights):
                STARTS.append((fit({}, masks, epochs=0).weights, masks))
            return fit(weights, masks, **options)

        client.fit = noted
        return super().train(message, client)


def test_a_rewound_fit_starts_from_the_initial_weights_of_the_run(federation):
    STARTS.clear()
    torch.manual_seed(3)
    module = federation.module()
    first = {name: value.detach().clone() for name, value in module.named_parameters()}
    federation(Noting(min_score=0.0), rounds=3, module=module)
    assert len(STARTS) > 4
    for weights, masks in STARTS:
        assert all(torch.equal(weights[name], value * masks[name]) for name, value in first.items())


def test_a_mask_in_the_servers_state_stands_for_all_clients_in_a_profile(view):
    mask = {"w": torch.tensor([True, False])}
    state = ServerState(round=3, weights={"w": torch.ones(2)}, masks=mask, extra={"first_masks": {}})
    assert same(LotteryFL().download(state, view(shared={"masks": {"w": torch.tensor([False, True])}})).masks, mask)


def test_a_client_without_validation_samples_is_named(federation, monkeypatch):
    evaluate = ClientWorker.evaluate
    monkeypatch.setattr(ClientWorker, "evaluate", lambda *args: {} if args[3] == "val" else evaluate(*args))
    with pytest.raises(
        InvalidOption, match=r"'val_acc', of which client \d has no value in the split 'val'; expected sam"
    ):
        federation(LotteryFL(), rounds=1, federation={"local_engine": "fast"})
