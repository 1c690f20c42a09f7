from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedSpa
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.types import Message, ServerState

LAYERS = {
    "a.weight": torch.ones(8, 6),
    "a.bias": torch.ones(8),
    "b.weight": torch.ones(3, 8),
    "norm.mean": torch.ones(8),
}
MASK = torch.tensor([True, True, True, True, False, False])
RECEIVED = torch.tensor([0.2, -0.4, 0.3, 0.1, 0.0, 0.0])
TRAINED = torch.tensor([0.1, -0.5, 0.3, -0.05, 0.0, 0.0])
SLOPES = torch.tensor([9.0, 0.0, 0.0, 1.0, -2.0, 0.5])
MESSAGE = Message(weights={"w": RECEIVED, "bias": torch.tensor([1.0])}, masks={"w": MASK})


def kept(state):
    return {name: int(mask.sum()) for name, mask in state.extra["first_masks"].items()}


@pytest.mark.parametrize("density", [0, -0.1, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=r"`algorithm.density` is .*; expected a number in \(0, 1\]"):
        FedSpa(density=density)


@pytest.mark.parametrize("exchange", [-0.1, 1.1, float("nan")])
def test_an_exchange_outside_its_range_is_refused(exchange):
    with pytest.raises(InvalidOption, match=r"`algorithm.exchange` is .*; expected a number in \[0, 1\]"):
        FedSpa(exchange=exchange)


@pytest.mark.parametrize("option", ["search", "mask_init", "layer_density", "growth", "merge", "mask_pool"])
def test_an_unknown_choice_is_refused(option):
    with pytest.raises(InvalidOption, match=option):
        FedSpa(**{option: "magic"})


def test_only_the_rate_of_a_search_follows_the_length_of_a_run():
    methods = FedSpa(), FedSpa(exchange=0.0), FedSpa(search="static")
    assert [method.follows_length for method in methods] == [True, False, False]


def test_the_budget_of_each_layer(fleet):
    # ERK, raw scores 14/48 and 11/24: eps = .5 * 72 / (14 + 11) = 1.44, densities .42 and .66
    people = fleet(buffers=["norm.mean"])
    assert kept(FedSpa(density=0.5).init(LAYERS, people)) == {"a.weight": 20, "b.weight": 15}
    assert kept(FedSpa(density=0.5, layer_density="uniform").init(LAYERS, people)) == {"a.weight": 24, "b.weight": 12}
    # with the bias (raw score 1) in the pool: .5 * 80 / (14 + 8 + 11) = 1.21, so the bias is dense;
    # then (.5 * 72 - .5 * 8) / 25 = 1.28, densities .3733 and .5867
    assert kept(FedSpa(density=0.5, mask_pool="all").init(LAYERS, people)) == {
        "a.weight": 17,
        "a.bias": 8,
        "b.weight": 14,
    }


def test_buffers_are_never_masked(fleet):
    weights = {**LAYERS, "positions": torch.ones(5, 4)}
    for pool in ("weights", "all"):
        state = FedSpa(mask_pool=pool).init(weights, fleet(buffers=["norm.mean", "positions"]))
        assert not {"norm.mean", "positions"} & set(state.extra["first_masks"])


def test_the_first_mask_follows_from_the_runs_seed(fleet):
    first, again, other = (FedSpa().init(LAYERS, fleet(seed=seed)).extra["first_masks"] for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_one_first_mask_for_all_or_one_for_each(fleet, view):
    state = FedSpa().init(LAYERS, fleet())
    everyone = [FedSpa().masks(state, view(client)) for client in range(3)]
    assert all(same(everyone[0], masks) for masks in everyone)

    method = FedSpa(mask_init="different")
    state = method.init(LAYERS, fleet())
    each = [method.masks(state, view(client)) for client in range(3)]
    assert not any(same(each[i], each[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert all({n: int(m.sum()) for n, m in masks.items()} == kept(state) for masks in each)
    assert same(each[1], method.masks(state, view(1, round=4)))  # asked again later, the same draw
    assert not same(each[1], method.masks(state, view(1, seed=9)))


def test_a_client_receives_and_is_scored_with_its_masked_weights(fleet, view, client):
    state = ServerState(round=1, weights={"w": torch.arange(1.0, 7)}, extra={"first_masks": {"w": ~MASK}})
    first = FedSpa().download(state, view())
    assert first.weights["w"].tolist() == [0, 0, 0, 0, 5, 6]
    assert same(first.masks, {"w": ~MASK})
    later = FedSpa().download(state, view(shared={"masks": {"w": MASK}}))
    assert later.weights["w"].tolist() == [1, 2, 3, 4, 0, 0]  # grown weights meet the server's values, not zeros
    assert same(later.masks, {"w": MASK})
    assert FedSpa().personalize(later, client()[0])["w"].tolist() == [1, 2, 3, 4, 0, 0]


def test_the_update_is_the_change_and_the_searched_mask(client):
    # round 0 exchanges half of 4: .05 and .1 go; of the four free places, slopes 9 (just dropped) and -2 come
    trained = {"w": TRAINED, "bias": torch.tensor([1.5])}
    someone, script = client(trained, {"w": SLOPES, "bias": torch.tensor([99.0])})
    update = FedSpa().train(MESSAGE, someone)
    assert script.fits == [(MESSAGE.weights, MESSAGE.masks, {}, [])]
    assert script.gradients == [trained]
    assert (update.kind, update.weight, update.votes, update.memory) == ("difference", 1, None, None)
    torch.testing.assert_close(update.weights["w"], TRAINED - RECEIVED)
    assert update.weights["bias"].tolist() == [0.5]
    assert {n: m.tolist() for n, m in update.shared["masks"].items()} == {"w": [True, True, True, False, True, False]}
    assert update.metrics == {"train_loss": 0.5}


@pytest.mark.parametrize(
    ("round", "rate"), [(0, 0.5), (1, 0.4268), (2, 0.25), (3, 0.0732)], ids=lambda value: str(value)
)
def test_how_many_weights_a_search_exchanges(client, round, rate):
    size = 400
    mask = torch.arange(size) < 200
    weights = torch.where(mask, torch.arange(1.0, size + 1), 0.0)
    slopes = torch.where(mask, 0.0, torch.arange(1.0, size + 1))
    someone, _ = client({"w": weights}, {"w": slopes}, round=round)
    masks = FedSpa().train(Message(weights={"w": weights}, masks={"w": mask}), someone).shared["masks"]
    moved = -int(-200 * rate // 1)  # rounded up
    expected = (torch.arange(size) < 200) & (torch.arange(size) >= moved) | (torch.arange(size) >= size - moved)
    assert torch.equal(masks["w"], expected)


@pytest.mark.parametrize("options", [{"round": 4}, {"max_rounds": 1}])
def test_the_last_round_searches_nothing(client, options):
    someone, script = client({"w": TRAINED, "bias": torch.ones(1)}, **options)
    update = FedSpa().train(MESSAGE, someone)
    assert script.gradients == []
    assert same(update.shared["masks"], {"w": MASK})


def test_random_growth_draws_from_the_clients_generator(client):
    masks = []
    for number in (0, 0, 1, 2, 3, 4):
        someone, script = client({"w": TRAINED, "bias": torch.ones(1)}, client=number)
        masks.append(FedSpa(growth="random").train(MESSAGE, someone).shared["masks"])
        assert script.gradients == []
        assert masks[-1]["w"][1]
        assert masks[-1]["w"][2]
        assert int(masks[-1]["w"].sum()) == 4
    assert same(masks[0], masks[1])
    assert not all(same(masks[0], other) for other in masks[2:])
    scores = torch.rand(6, generator=generator("key 0", 0, "train", "growth", 0))
    grown = sorted((0, 3, 4, 5), key=lambda place: -scores[place])[:2]
    assert sorted(masks[0]["w"].nonzero().flatten().tolist()) == sorted([1, 2, *grown])


def test_static_masks_never_change(client):
    someone, script = client({"w": TRAINED, "bias": torch.ones(1)})
    update = FedSpa(search="static").train(MESSAGE, someone)
    assert script.gradients == []
    assert update.shared is None


def test_who_divides_the_sum():
    assert isinstance(FedSpa().reducer(), PlainMean)
    assert isinstance(FedSpa(merge="count").reducer(), CoverageMean)


# Layer a keeps 4 of 10: forward 2 * 10 * .4 + 2 + 12 = 22, two epochs of 7 samples 14 * 3 * 22 = 924. The search is a
# dense pass, 3 * 34 a sample, over a batch of 4: 408. 4 + 2 + 6 weights of 4 bytes travel each way.
SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


@pytest.mark.parametrize(
    ("method", "searching"),
    [(FedSpa(), 408), (FedSpa(growth="random"), 0), (FedSpa(search="static"), 0)],
    ids=["dst", "random growth", "static"],
)
def test_costs(facts, method, searching):
    costs = method.costs(facts(SPARSE))
    assert costs.flops_paper == 924 + 408  # the paper charges the search always
    assert costs.flops_analytic == 924 + searching
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (48, 48)


def test_a_batch_has_no_more_samples_than_the_client(facts):
    costs = FedSpa().costs(facts(SPARSE, batch_size=128))
    assert costs.flops_paper == 924 + 128 * 3 * 34
    assert costs.flops_analytic == 924 + 7 * 3 * 34


def test_an_exchange_of_0_is_not_charged(facts):
    assert FedSpa(exchange=0).costs(facts(SPARSE)).flops_analytic == 924


def test_the_last_round_is_charged_without_a_search(facts):
    charged = [FedSpa().costs(facts(SPARSE, round=round, max_rounds=3)).flops_analytic for round in range(3)]
    assert charged == [924 + 408, 924 + 408, 924]
