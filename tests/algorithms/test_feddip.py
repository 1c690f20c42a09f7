from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_sparsefl import FedDIP
from lightning_sparsefl.callbacks import GroupPenalty, ProximalTerm
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.density import erk, kept_counts
from lightning_sparsefl.sparse.masks import apply, kept, same
from lightning_sparsefl.types import Merged, Message, ServerState

LAYERS = {
    "a.weight": torch.arange(1.0, 41).reshape(8, 5),
    "a.bias": torch.ones(8),
    "shortcut.weight": torch.ones(6, 8, 1, 1),
    "b.weight": -torch.arange(1.0, 25).reshape(3, 8),
    "norm.mean": torch.ones(8),
}
MASK = torch.tensor([True, True, False, False])
RECEIVED = {"w": torch.tensor([0.2, -0.4, 0.0, 0.0]), "bias": torch.tensor([1.0])}
MESSAGE = Message(weights=RECEIVED, masks={"w": MASK})


def merged(weights):
    return Merged(weights=weights, covered={})


def after(method, state, weights):
    """The state after a round whose merged dense weights are these; the engine counts the round."""
    return method.aggregate(state, merged(weights))


def state_of(values, masks, round=0, rounds=10):
    weights = {"w": torch.tensor(values)}
    return ServerState(round, apply(weights, masks), masks, {"plan": {"rounds": torch.tensor(float(rounds))}})


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("density", 0, r"a number in \(0, 1\]"),
        ("density", float("nan"), r"a number in \(0, 1\]"),
        ("initial_density", 0.05, "a number from `density` to 1"),
        ("initial_density", 1.5, "a number from `density` to 1"),
        ("reconfigure_every", 0, "a whole number >= 1"),
        ("penalty", -1e-3, "a number >= 0"),
        ("stairs", 0, "a whole number >= 1"),
        ("mu", -1, "a number >= 0"),
    ],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm\.{option}` is {value}; expected {expected}"):
        FedDIP(**{option: value})


def test_the_first_mask_is_erk_over_the_weights(fleet):
    state = FedDIP(initial_density=0.6).init(LAYERS, fleet(buffers=["norm.mean"]))
    shapes = {name: LAYERS[name].shape for name in ("a.weight", "shortcut.weight", "b.weight")}
    assert {n: int(m.sum()) for n, m in state.masks.items()} == kept_counts(shapes, erk(shapes, 0.6))
    for name, value in LAYERS.items():  # what is pruned is gone at once
        assert torch.equal(state.weights[name], value * state.masks[name] if name in state.masks else value)
    again, other = (FedDIP().init(LAYERS, fleet(seed=seed)).masks for seed in (0, 1))
    assert same(again, FedDIP().init(LAYERS, fleet()).masks)
    assert not same(again, other)


def test_an_initial_density_of_1_starts_dense(fleet):
    state = FedDIP(initial_density=1.0).init(LAYERS, fleet(buffers=["norm.mean"]))
    assert all(mask.all() for mask in state.masks.values())


def test_a_model_without_a_layer_to_prune_is_refused(fleet):
    with pytest.raises(InvalidOption, match=r"`algorithm\.fixed_layers` is \('\*',\), which leaves no layer"):
        FedDIP(fixed_layers=("*",)).init(LAYERS, fleet())


def test_a_pruned_weight_returns_where_it_has_grown():
    state = state_of([4.0, 3.0, 0.0, 0.0], {"w": MASK})
    dense = {"w": torch.tensor([4.0, 0.5, -2.0, 0.1])}
    method = FedDIP(density=0.5, reconfigure_every=1)
    new = after(method, state, dense)
    assert new.masks["w"].tolist() == [True, False, True, False]
    assert new.weights["w"].tolist() == [4.0, 0.0, -2.0, 0.0]
    never = after(FedDIP(density=0.5, reconfigure_every=1, recover=False), state, dense)
    assert same(never.masks, {"w": MASK})
    assert never.weights["w"].tolist() == [4.0, 0.5, 0.0, 0.0]


def test_between_two_masks_the_merged_weights_are_pruned_by_the_old_one():
    state = state_of([4.0, 3.0, 0.0, 0.0], {"w": MASK}, round=1)
    new = after(FedDIP(density=0.5, reconfigure_every=3), state, {"w": torch.tensor([4.0, 0.5, -2.0, 0.1])})
    assert same(new.masks, {"w": MASK})
    assert new.weights["w"].tolist() == [4.0, 0.5, 0.0, 0.0]


def test_without_recovery_masks_are_nested(fleet):
    method = FedDIP(density=0.2, initial_density=0.8, reconfigure_every=1, recover=False)
    state = method.init(LAYERS, fleet(buffers=["norm.mean"]))
    masks = [state.masks]
    for round in range(5):
        rng = torch.Generator().manual_seed(round)
        noise = {name: torch.randn(value.shape, generator=rng) for name, value in LAYERS.items()}
        state = after(method, ServerState(round, state.weights, state.masks, state.extra), noise)
        masks.append(state.masks)
    assert all(not (new[n] & ~old[n]).any() for old, new in itertools.pairwise(masks) for n in new)
    assert kept(masks[-1]) < kept(masks[0])


def test_the_density_falls_by_the_cubic_over_the_layers_that_move(fleet):
    method = FedDIP(density=0.2, initial_density=1.0, reconfigure_every=2)
    state = method.init(LAYERS, fleet(buffers=["norm.mean"]))
    counts = []
    for round in range(5):
        state = after(method, ServerState(round, state.weights, state.masks, state.extra), LAYERS)
        counts.append(kept({name: mask for name, mask in state.masks.items() if name != "shortcut.weight"}))
        assert state.masks["shortcut.weight"].all()
    # 64 weights: .2 + .8 * .6 ** 3 = .3728 after round 2, .2 + .8 * .2 ** 3 = .2064 after round 4, none after 5
    assert counts == [64, 24, 24, 13, 13]
    assert method.density_after(5, 5) == pytest.approx(0.2064)


def test_profile_foresees_the_densities_of_the_run(fleet):
    method = FedDIP(density=0.2, initial_density=0.6, reconfigure_every=2)
    first = method.init(LAYERS, fleet(buffers=["norm.mean"]))
    state = first
    for round in range(6):
        foreseen = method.profile_state(first, round)
        assert foreseen.round == round
        assert kept(foreseen.masks) == kept(state.masks)
        assert not any(foreseen.weights[name][~mask].any() for name, mask in foreseen.masks.items())
        state = after(method, ServerState(round, state.weights, state.masks, state.extra), LAYERS)


def test_what_a_client_sends_is_dense_and_counts_everywhere(client):
    someone, script = client({"w": torch.tensor([0.1, -0.5, 0.0, 0.0]), "bias": torch.tensor([1.5])})
    method = FedDIP()

    def fit(client, weights, masks, trainable, callbacks, **options):
        callbacks[-1]._pruned = {"w": torch.tensor([0.0, 0.0, 0.3, -0.2])}
        script.fits.append((weights, masks))
        return type(script).fit(script, client, weights, masks, trainable, callbacks)

    someone._worker = type("Bench", (), {"fit": staticmethod(fit)})
    update = method.train(MESSAGE, someone)
    assert script.fits[0] == (RECEIVED, {})  # masks would hold the weights
    torch.testing.assert_close(update.weights["w"], torch.tensor([0.1, -0.5, 0.3, -0.2]))
    assert (update.kind, update.weight, update.votes) == ("weights", 7, {})
    assert method.may_vote(MESSAGE) == {}
    assert method.trained(MESSAGE, update)["w"].tolist() == pytest.approx([0.1, -0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("round", "strength"), [(0, 0.0), (8, 0.0), (9, 0.1), (19, 0.2), (98, 0.9), (99, 0.9)], ids=lambda value: str(value)
)
def test_the_stairs_of_the_penalty(client, round, strength):
    someone, _ = client(round=round, max_rounds=100)
    callbacks = FedDIP(penalty=1.0).callbacks(MESSAGE, someone)
    assert sum(c.now for c in callbacks if isinstance(c, GroupPenalty)) == pytest.approx(strength)


def test_the_terms_of_the_loss_stand_before_the_feedback(client):
    someone, _ = client(round=4, max_rounds=5)
    message = Message(weights=LAYERS, masks={"a.weight": LAYERS["a.weight"] > 3, "shortcut.weight": MASK})
    penalty, pull, feedback = FedDIP(mu=0.3).callbacks(message, someone)
    assert isinstance(penalty, GroupPenalty)
    assert penalty.layers == ["a.weight"]
    assert isinstance(pull, ProximalTerm)
    assert (pull.strength, pull.anchor) == (0.3, LAYERS)
    assert isinstance(feedback, ErrorFeedback)
    assert [type(c) for c in FedDIP(penalty=0).callbacks(message, someone)] == [ErrorFeedback]


def test_the_penalty_is_on_layers_whose_names_look_like_patterns(client):
    name = "block[0].weight"
    message = Message(weights={name: torch.ones(2, 2)}, masks={name: torch.eye(2, dtype=torch.bool)})
    penalty, *_ = FedDIP(penalty=1.0).callbacks(message, client(round=9, max_rounds=10)[0])
    module = nn.ModuleDict({"block[0]": nn.Linear(2, 2), "block0": nn.Linear(2, 2)})
    assert choose(module, penalty.layers, "GroupPenalty") == (name,)


# Layer a keeps 4 of 10: a pruned forward pass is 2 * 10 * .4 + 2 + 12 = 22, a dense one 34; two epochs of 7 samples.
SPARSE = {"a.weight": torch.tensor([[True, True, False, False, False]] * 2)}


def test_costs(facts):
    costs = FedDIP(density=0.1, initial_density=0.5).costs(facts(SPARSE, round=5, max_rounds=10))
    assert costs.flops_analytic == 14 * (22 + 22 + 34)
    assert costs.flops_paper == 14 * 3 * 22
    assert costs.bytes_up_paper == 4 * 18
    assert costs.bytes_down_paper == pytest.approx((0.1 + 0.4 * 0.5**3) * 4 * 18)  # the cubic, whatever the mask is
    assert FedDIP().costs(replace(facts(SPARSE), buffers=frozenset({"a.bias"}))).bytes_up_paper == 4 * 16
