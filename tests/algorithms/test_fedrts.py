from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedAvg, FedRTS
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.adjust import beta_draws
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.types import Merged, Message, ServerState

LAYERS = {"a.weight": torch.arange(-24.0, 24).reshape(8, 6), "a.bias": torch.ones(8), "mean": torch.ones(8)}
MASK = torch.tensor([[True, True, True, True, False, False, False, False]])
WEIGHTS = {"w": torch.tensor([[0.4, -0.1, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0]]), "bias": torch.tensor([1.0])}
SLOPES = {"w": torch.tensor([[9.0, 9.0, 9.0, 9.0, 1.0, -3.0, 2.0, 0.0]]), "bias": torch.tensor([99.0])}
METHOD = FedRTS(exchange=0.6, adjust_every=2, adjust_until=8)
"""In round 2 it exchanges .6 / 2 (1 + cos(pi / 4)) = .51 of 4 weights: two."""


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("density", 0, r"a number in \(0, 1\]"),
        ("exchange", 1.1, r"a number in \[0, 1\]"),
        ("trust", -0.1, r"a number in \[0, 1\]"),
        ("evidence", 0, "a number above 0"),
        ("adjust_every", 0, "a whole number >= 1"),
        ("adjust_until", 0, "a whole number >= 1"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is {value}; expected {expected}"):
        FedRTS(**{option: value})


def test_the_first_mask_keeps_the_largest_weights(fleet):
    state = FedRTS(density=0.5).init(LAYERS, fleet(buffers=["mean"], seed=3))
    shapes = {"a.weight": LAYERS["a.weight"].shape}
    assert {n: int(m.sum()) for n, m in state.masks.items()} == kept_counts(shapes, erk(shapes, 0.5))
    assert state.masks["a.weight"][0].all()
    assert state.masks["a.weight"][-1].all()
    assert int(state.extra["plan"]["seed"]) == 3
    assert all(torch.equal(state.extra[key]["a.weight"], torch.ones(8, 6)) for key in ("alpha", "beta"))


def test_a_client_sends_bits(client):
    someone, _ = client(WEIGHTS, SLOPES, round=2)
    update = METHOD.train(Message(weights=WEIGHTS, masks={"w": MASK}), someone)
    assert update.extra["core"]["w"].tolist() == [[True, False, True, False, False, False, False, False]]
    assert update.extra["growth"]["w"].tolist() == [[False, False, False, False, False, True, True, False]]
    between, script = client(WEIGHTS, SLOPES, round=3)
    update = METHOD.train(Message(weights=WEIGHTS, masks={"w": MASK}), between)
    assert list(update.extra) == ["core"]
    assert script.gradients == []


def state(round=2):
    ones = {"w": torch.ones(1, 8)}
    extra = {"alpha": ones, "beta": ones, "plan": {"seed": torch.tensor(5)}}
    return ServerState(round, WEIGHTS, {"w": MASK}, extra)


def merged(core, growth=None):
    extra = {"core": {"w": torch.tensor([core])}}
    if growth is not None:
        extra["growth"] = {"w": torch.tensor([growth])}
    return Merged(weights=WEIGHTS, covered={}, extra=extra)


def test_a_unanimous_core_moves_its_distribution_by_the_evidence():
    new = METHOD.aggregate(state(2), merged([1.0, 0, 1.0, 0, 0, 0, 0, 0]))
    assert new.extra["alpha"]["w"].tolist() == [[11, 1, 11, 1, 1, 1, 1, 1]]
    assert new.extra["beta"]["w"].tolist() == [[1, 11, 1, 11, 1, 1, 1, 1]]
    assert same(new.masks, {"w": MASK})  # nothing is drawn
    # the server's own core counts half
    new = METHOD.aggregate(state(2), merged([0.0, 0.5, 1.0, 0.5, 0, 0, 0, 0]))
    assert new.extra["alpha"]["w"].tolist() == [[6, 3.5, 11, 3.5, 1, 1, 1, 1]]


def test_a_draw_follows_the_evidence():
    sure = state()
    alpha, beta = torch.ones(1, 8), torch.ones(1, 8)
    alpha[0, [0, 2, 5, 7]] = beta[0, [1, 3, 4, 6]] = 1e6
    sure = replace(sure, extra={**sure.extra, "alpha": {"w": alpha}, "beta": {"w": beta}})
    new = METHOD.aggregate(sure, merged([1.0, 0, 1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0.2, 1.0, 0, 0]))
    assert new.masks["w"].tolist() == [[True, False, True, False, False, True, False, True]]
    torch.testing.assert_close(new.weights["w"], torch.tensor([[0.4, 0, 0.3, 0, 0, 0, 0, 0]]))
    # of dead weights, half of the evidence is undecided: 10 (.25 + .5 * share)
    assert (new.extra["alpha"]["w"] - alpha)[0, 4:].tolist() == pytest.approx([3.5, 7.5, 2.5, 2.5])
    assert (new.extra["beta"]["w"] - beta)[0, 4:].tolist() == pytest.approx([6.5, 2.5, 7.5, 7.5])


def test_trust_is_the_weight_of_the_clients_votes():
    method = replace(METHOD, trust=0.25)
    new = method.aggregate(state(2), merged([0.0, 0.5, 1.0, 0.5, 0, 0, 0, 0]))
    assert new.extra["alpha"]["w"].tolist() == [[8.5, 2.25, 11, 2.25, 1, 1, 1, 1]]
    drawn = method.aggregate(state(2), merged([0.0, 0.5, 1.0, 0.5, 0, 0, 0, 0], [0, 0, 0, 0, 0.2, 1.0, 0, 0]))
    assert drawn.extra["alpha"]["w"][0, 4:].tolist() == pytest.approx([5.25, 7.25, 4.75, 4.75])


def test_draws_depend_on_the_seed_and_leave_the_generator_alone():
    ones = {"w": torch.full((100,), 2.0)}
    before = torch.get_rng_state()
    first, again, other = (beta_draws(ones, ones, seed)["w"] for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.mean()) == pytest.approx(0.5, abs=0.1)


def test_draws_leave_the_generators_of_other_devices_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    beta_draws({"w": torch.ones(2)}, {"w": torch.ones(2)}, 7)
    assert seeded == []


def test_no_weight_is_exchanged_after_the_end():
    masks = {"w": MASK}
    assert [METHOD.numbers(masks, t)["w"] for t in (0, 2, 8, 9, 20)] == [2, 2, 0, 0, 0]
    assert [t for t in range(12) if METHOD.adjusts(t)] == [2, 4, 6, 8]


SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


def test_costs(facts):
    # layer a keeps 4 of 10: 22 FLOPs instead of 34, 12 of 18 numbers travel, and bits of 4 or of 10 positions
    due, after, plain = (METHOD.costs(facts(SPARSE, round=t)) for t in (2, 3, 1))
    assert plain.flops_paper == plain.flops_analytic == due.flops_paper == 14 * 3 * 22
    assert due.flops_analytic == 14 * 3 * 22 + 4 * 3 * 34
    assert (plain.bytes_down_paper, plain.bytes_up_paper) == (48, 48 + 4 / 8)
    assert (due.bytes_down_paper, due.bytes_up_paper) == (48, 48 + 10 / 8)
    assert (after.bytes_down_paper, after.bytes_up_paper) == (48 + 10 / 8, 48 + 4 / 8)


def test_a_density_of_1_is_fedavg(federation, last):
    method = FedRTS(density=1, adjust_every=1)
    dense, plain = (last(federation(m, folder=name)) for name, m in (("a", method), ("b", FedAvg())))
    assert dense["state_dict"] == plain["state_dict"]
