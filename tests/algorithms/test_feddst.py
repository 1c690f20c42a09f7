from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import FedAvg, FedDST
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.plain_values import unpack_plain
from lightning_sparsefl.sparse.density import ceil_count, erk, kept_counts
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.types import Merged, Message, ServerState

LAYERS = {"a.weight": torch.ones(8, 6), "a.bias": torch.ones(8), "b.weight": torch.ones(3, 8), "mean": torch.ones(8)}
MASK = torch.tensor([[True, True, True, True, False, False]])
RECEIVED = {"w": torch.tensor([[0.2, -0.4, 0.3, 0.1, 0.0, 0.0]]), "bias": torch.tensor([1.0])}
TRAINED = {"w": torch.tensor([[0.1, -0.5, 0.3, -0.05, 0.0, 0.0]]), "bias": torch.tensor([1.5])}
SLOPES = {"w": torch.tensor([[9.0, 0.0, 0.0, 1.0, -2.0, 0.5]]), "bias": torch.tensor([99.0])}
KEEPS_4 = 4 / 6


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("density", 0, r"a number in \(0, 1\]"),
        ("exchange", 1, r"a number in \[0, 1\)"),
        ("search_until", 1.5, r"a number in \[0, 1\]"),
        ("search_every", 0, "a whole number >= 1"),
        ("epochs_after_search", -1, "a whole number >= 0"),
        ("min_votes", 0, "a whole number >= 1"),
        ("annealing", "linear", "one of 'constant', 'cosine'"),
        ("first", "erk", "one of 'random', 'magnitude'"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is {value!r}; expected {expected}"):
        FedDST(**{option: value})


def test_the_first_mask_is_erk(fleet):
    state = FedDST(density=0.5).init(LAYERS, fleet(buffers=["mean"]))
    shapes = {name: LAYERS[name].shape for name in ("a.weight", "b.weight")}
    assert {n: int(m.sum()) for n, m in state.masks.items()} == kept_counts(shapes, erk(shapes, 0.5))
    assert all(torch.equal(state.weights[name], mask.float()) for name, mask in state.masks.items())
    first, again, other = (FedDST().init(LAYERS, fleet(seed=seed)).masks for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_first_weights_may_be_rescaled_to_the_inputs_that_are_kept(fleet):
    plain, scaled = (
        FedDST(density=0.5, rescale=rescale).init(LAYERS, fleet(buffers=["mean"])) for rescale in (False, True)
    )
    assert same(plain.masks, scaled.masks)
    assert scaled.weights["mean"] is LAYERS["mean"]
    for name, mask in scaled.masks.items():
        for row, kept, values in zip(plain.weights[name], mask, scaled.weights[name], strict=True):
            assert torch.equal(values, row * (kept.numel() / max(1, int(kept.sum()))) ** 0.5)


def test_the_first_mask_of_the_code_keeps_the_largest_weights(fleet):
    weights = {name: torch.arange(float(w.numel())).reshape(w.shape) - 10 for name, w in LAYERS.items()}
    drawn, largest = (
        FedDST(density=0.5, first=first).init(weights, fleet(buffers=["mean"])) for first in ("random", "magnitude")
    )
    for name, mask in largest.masks.items():
        assert int(mask.sum()) == int(drawn.masks[name].sum())
        assert weights[name][mask].abs().min() >= weights[name][~mask].abs().max()
        assert torch.equal(largest.weights[name], weights[name] * mask)


def test_when_clients_search():
    method = FedDST(exchange=0.5, search_every=3)
    assert [t for t in range(20) if method.rate(t, 20)] == [1, 4, 7]  # ends before round 10
    assert [t for t in range(5) if FedDST(search_every=1).rate(t, 10)] == [1, 2, 3, 4]
    assert {method.rate(t, 20) for t in (1, 4, 7)} == {0.5}
    falling = FedDST(exchange=0.5, search_every=1, annealing="cosine")
    assert falling.rate(5, 20) == pytest.approx(0.25)  # half of the way to round 10
    assert not any(FedDST(search_until=0).rate(t, 20) for t in range(20))


def test_only_a_search_opens_the_votes(view):
    state = ServerState(round=1, weights=RECEIVED, masks={"w": MASK})
    method = FedDST(exchange=0.5)
    search, plain = (method.download(state, view(round=t, max_rounds=40)) for t in (1, 2))
    assert float(search.extra["search"]["rate"]) == 0.5
    assert method.may_vote(search) == {}
    # in single precision .3 is above .3, and a layer of 1,000 weights would exchange 301
    rate = FedDST(exchange=0.3).download(state, view(round=1, max_rounds=40)).extra["search"]["rate"]
    assert ceil_count(float(rate), 1000) == 300
    assert same(method.may_vote(plain), {"w": MASK})
    assert method.download_for(state, view(round=1, max_rounds=40), "score").extra == {}


def message(rate=0.0):
    extra = {"search": {"rate": torch.tensor([rate])}} if rate else {}
    return Message(weights=RECEIVED, masks={"w": MASK}, extra=extra)


def test_a_search_drops_the_smallest_and_grows_by_the_gradient(client):
    # a quarter of 4 goes: .05; of the two dead places, slope -2 comes, as a zero, and not slope 1 that was dropped
    someone, script = client(TRAINED, SLOPES)
    update = FedDST(density=KEEPS_4).train(message(0.25), someone)
    assert script.gradients == [TRAINED]
    assert update.votes["w"].tolist() == [[True, True, True, False, True, False]]
    torch.testing.assert_close(update.weights["w"], torch.tensor([[0.1, -0.5, 0.3, 0.0, 0.0, 0.0]]))
    assert (update.kind, update.weight, len(script.fits)) == ("weights", 7, 1)


def test_a_layer_exchanges_no_more_than_it_has_places_for(client):
    someone, _ = client(TRAINED, SLOPES)
    update = FedDST(density=5 / 6).train(message(0.9), someone)  # 5 of 6 to keep: one place, and 4 are held now
    assert update.votes["w"].tolist() == [[True, True, True, False, True, True]]


def test_clients_may_train_what_they_grew(client):
    someone, script = client(TRAINED, SLOPES)
    update = FedDST(density=KEEPS_4, epochs_after_search=2).train(message(0.5), someone)
    assert len(script.fits) == 2
    weights, masks, *_ = script.fits[1]
    assert same(masks, update.votes)
    assert weights["w"].tolist()[0][3:] == [0.0, 0.0, 0.0]
    assert update.weights is TRAINED


def test_without_a_search_the_mask_stays(client):
    someone, script = client(TRAINED, SLOPES)
    update = FedDST(density=KEEPS_4).train(message(), someone)
    assert same(update.votes, {"w": MASK})
    assert script.gradients == []


def merge(method, values, voters, clients=3):
    state = ServerState(round=1, weights=RECEIVED, masks={"w": MASK})
    voters = torch.tensor([voters], dtype=torch.int32)
    merged = Merged(
        weights={"w": torch.tensor([values]), "bias": torch.ones(1)},
        covered={"w": voters > 0, "bias": torch.ones(1, dtype=torch.bool)},
        voters={"w": voters},
        reports={client: {} for client in range(clients)},
    )
    return method.aggregate(state, merged)


def test_the_server_prunes_to_the_count_and_votes_break_ties():
    state = merge(FedDST(density=KEEPS_4), [0.5, -0.4, 0.3, 0.0, 0.0, 0.0], [3, 3, 2, 1, 0, 2])
    assert state.masks["w"].tolist() == [[True, True, True, False, False, True]]
    state = merge(FedDST(density=KEEPS_4), [0.1, -0.4, 0.3, 0.2, 0.5, 0.6], [3, 3, 3, 3, 1, 1])
    assert state.weights["w"].tolist() == [[0.0, pytest.approx(-0.4), pytest.approx(0.3), 0.0, 0.5, pytest.approx(0.6)]]


def test_weights_with_few_votes_die():
    state = merge(FedDST(density=KEEPS_4, min_votes=2), [0.1, -0.4, 0.3, 0.2, 0.5, 0.6], [3, 3, 2, 1, 1, 1])
    assert state.masks["w"].tolist() == [[True, True, True, False, False, False]]
    state = merge(FedDST(density=KEEPS_4, min_votes=9), [0.1, -0.4, 0.3, 0.2, 0.5, 0.6], [3, 3, 2, 1, 1, 1])
    assert state.masks["w"].tolist() == [[True, True, False, False, False, False]]  # all clients of the round


SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


def test_costs(facts):
    # layer a keeps 4 of 10: 22 FLOPs instead of 34, 12 of 18 numbers travel, and a mask of 10 positions at a change
    method = FedDST(search_every=3)
    search, after, plain = (method.costs(facts(SPARSE, round=t, max_rounds=40)) for t in (1, 2, 3))
    assert plain.flops_paper == plain.flops_analytic == search.flops_paper == 14 * 3 * 22
    assert search.flops_analytic == 14 * 3 * 22 + 4 * 3 * 34
    assert (plain.bytes_down_paper, plain.bytes_up_paper) == (48, 48)
    assert (search.bytes_down_paper, search.bytes_up_paper) == (48, 48 + 10 / 8)
    assert (after.bytes_down_paper, after.bytes_up_paper) == (48 + 10 / 8, 48)
    longer = FedDST(search_every=3, epochs_after_search=1).costs(facts(SPARSE, round=1, max_rounds=40))
    assert longer.flops_paper == 21 * 3 * 22


def test_a_density_of_1_is_fedavg(federation, last):
    dense, plain = (last(federation(m, folder=name)) for name, m in (("a", FedDST(density=1)), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]


def test_counts_are_exact_and_dead_weights_zero(federation):
    trainer = federation(FedDST(density=0.5, exchange=0.5, search_every=1, search_until=1), rounds=4)
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    shapes = {"net.0.weight": (16, 8), "net.4.weight": (4, 16)}
    counts = kept_counts(shapes, erk(shapes, 0.5))
    masks = unpack_plain(content["sparsefl"]["state"]["masks"], torch.device("cpu"))
    assert {name: int(mask.sum()) for name, mask in masks.items()} == counts
    assert not any(content["state_dict"][name][~mask].any() for name, mask in masks.items())
