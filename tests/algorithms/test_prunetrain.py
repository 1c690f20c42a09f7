from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.scripted import Scripted, scripted_client
from lightning_sparsefl import FedAvg, PruneTrain
from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.callbacks.first_loss import FirstLoss
from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import MLP
from lightning_sparsefl.sparse.masks import kept, same
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups, unit_masks
from lightning_sparsefl.types import Merged, Message

NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
GROUPS = find_groups(NET, torch.zeros(1, 3))
WEIGHTS = {name: torch.full_like(value, 0.5) for name, value in NET.state_dict().items()}
DEAD = {"0": torch.tensor([True, False, True, True])}


class Units:
    units = GROUPS


@pytest.fixture
def people(fleet):
    made = fleet()
    made._model = Units()
    return made


def merged(weights, losses=(), **options):
    return Merged(weights=weights, covered={}, reports={i: {"first_loss": loss} for i, loss in enumerate(losses)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "`algorithm.strength` is -1.0; expected a number >= 0, or null"),
        ({"ratio": 1.0}, r"`algorithm.ratio` is 1.0; expected a number in \[0, 1\)"),
        ({"threshold": -1.0}, "`algorithm.threshold` is -1.0; expected a number >= 0"),
        ({"reconfigure_every": 0}, "`algorithm.reconfigure_every` is 0; expected a whole number >= 1"),
        ({"density": 0}, r"`algorithm.density` is 0; expected a number in \(0, 1\]"),
        ({"initial_density": 0.05}, "`algorithm.initial_density` is 0.05; expected a number from `density` to 1"),
        ({"groups": "rows"}, "`algorithm.groups` is 'rows'; expected one of 'units', 'layers'"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        PruneTrain(**options)


def test_a_model_without_units_or_inner_layers_is_refused(fleet):
    with pytest.raises(InvalidOption, match="`PruneTrain` finds no units in the model; expected hidden channels"):
        PruneTrain().init(WEIGHTS, fleet())
    with pytest.raises(InvalidOption, match=r"leaves no layer between the first and the last to prune"):
        PruneTrain(groups="layers").init({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, fleet())


def test_units_below_the_threshold_die_for_good(people, view):
    method = PruneTrain(strength=0.1, reconfigure_every=2)
    state = method.init(WEIGHTS, people)
    assert (state.masks, method.download(state, view()).extra) == ({}, {})
    small = {name: value.clone() for name, value in WEIGHTS.items()}
    small["0.weight"][1], small["2.weight"][:, 1] = 9e-5, -9e-5
    small["2.weight"][2] = 9e-5  # its columns in the last layer are as they were
    first = method.aggregate(state, merged(small))
    assert first.masks == {}  # not in round 0
    second = method.aggregate(type(state)(1, first.weights, first.masks, first.extra), merged(small))
    assert same(second.masks, unit_masks(GROUPS, DEAD, WEIGHTS))
    assert not second.weights["0.weight"][1].any()
    assert second.weights["0.bias"].tolist() == [0.5, 0, 0.5, 0.5]
    third = method.aggregate(type(state)(3, second.weights, second.masks, second.extra), merged(second.weights))
    assert same(third.masks, second.masks)


def test_without_dead_units_there_are_no_masks(people):
    method = PruneTrain(strength=0.1)
    assert method.aggregate(method.init(WEIGHTS, people), merged(WEIGHTS)).masks == {}


def test_clients_train_the_live_units_with_the_penalty():
    masks = unit_masks(GROUPS, DEAD, WEIGHTS)
    weights = {name: value * masks.get(name, True) for name, value in WEIGHTS.items()}
    script = Scripted(weights, units=GROUPS)
    method = PruneTrain(strength=0.1)
    update = method.train(Message(weights=weights, masks=masks), scripted_client(script))
    ((received, held, units, (penalty, first)),) = script.fits
    assert received is weights
    assert held == {}
    assert units["0"].tolist() == DEAD["0"].tolist()
    assert units["2"].all()
    assert isinstance(penalty, GroupPenalty)
    assert (penalty.strength, penalty.stairs, penalty.groups) == (0.1, None, "units")
    assert [group.size for group in penalty.units(weights)] == [4, 5]
    assert [group.size for group in penalty.units(dict(cut(NET, GROUPS, units).named_parameters()))] == [3, 5]
    assert isinstance(first, FirstLoss)
    assert (update.kind, update.weight, update.votes) == ("weights", 7, None)
    assert same(method.may_vote(Message(weights=weights, masks=masks)), masks)


def test_the_whole_model_is_trained_as_it_is():
    script = Scripted(WEIGHTS, units=GROUPS)
    PruneTrain(strength=0.1).train(Message(weights=WEIGHTS), scripted_client(script))
    assert script.fits[0][2] is None


def test_the_penalty_is_on_layers_whose_names_look_like_patterns(client):
    name = "block[0].weight"
    message = Message(weights={name: torch.ones(2, 2)}, masks={name: torch.eye(2, dtype=torch.bool)})
    (penalty,) = PruneTrain(strength=0.1, groups="layers").callbacks(message, client()[0])
    module = nn.ModuleDict({"block[0]": nn.Linear(2, 2), "block0": nn.Linear(2, 2)})
    assert choose(module, penalty.layers, "GroupPenalty") == (name,)


def test_the_strength_follows_from_the_first_losses(people, view):
    # norms: 4 rows of 3 and 4 columns of 5 weights, 5 rows of 4 and 5 columns of 2 weights, each weight .5
    norms = 0.5 * (4 * 3**0.5 + 4 * 5**0.5 + 5 * 4**0.5 + 5 * 2**0.5)
    method = PruneTrain(ratio=0.2)
    state = method.aggregate(method.init(WEIGHTS, people), merged(WEIGHTS, losses=[2.0, 4.0]))
    strength = float(state.extra["penalty"]["strength"])
    assert strength == pytest.approx(0.25 * 3 / norms, rel=1e-6)
    assert strength * norms / (3 + strength * norms) == pytest.approx(0.2, rel=1e-6)
    later = method.aggregate(type(state)(1, state.weights, {}, state.extra), merged(WEIGHTS, losses=[9.0]))
    assert later.extra["penalty"] is state.extra["penalty"]
    message = method.download(later, view())
    (penalty,) = method.callbacks(message, scripted_client(Scripted({}, units=GROUPS)))
    assert penalty.strength == strength
    assert method.callbacks(Message(weights=WEIGHTS), scripted_client(Scripted({}, units=GROUPS))) == []


def test_layers_are_pruned_globally_between_the_first_and_the_last(fleet):
    method = PruneTrain(groups="layers", strength=0.1, density=0.25, initial_density=0.75)
    weights = {
        "a.weight": torch.ones(2, 2),
        "b.weight": torch.arange(1.0, 7).view(2, 3),
        "shortcut.weight": torch.ones(2, 2),
    }
    weights |= {"c.weight": torch.arange(4.0, 10).view(3, 2), "d.weight": torch.ones(2, 2), "d.bias": torch.ones(2)}
    state = method.init(weights, fleet())
    assert list(state.masks) == ["b.weight", "c.weight"]
    assert kept(state.masks) == 12
    script = Scripted(weights)
    update = method.train(Message(weights=weights, masks=state.masks), scripted_client(script))
    ((_, held, units, (penalty, _)),) = script.fits
    assert (held, units, penalty.layers, penalty.groups) == ({}, None, ["b.weight", "c.weight"], "layers")
    # round 0 keeps .75 of 12; the smallest are 1, 2 and 3
    assert update.weights["b.weight"].flatten().tolist() == [0, 0, 0, 4, 5, 6]
    assert torch.equal(update.weights["c.weight"], weights["c.weight"])
    assert method.may_vote(Message(weights=weights, masks=state.masks)) == {}
    last = method.aggregate(type(state)(4, weights, state.masks, state.extra), merged(weights))
    # .25 + .5 (1 / 5)^3 = .254: round(.746 * 12) = 9 are dropped
    assert kept(last.masks) == 3
    assert torch.equal(last.weights["a.weight"], weights["a.weight"])
    assert method.profile_state(state, 0).masks is state.masks
    assert [kept(method.profile_state(state, round).masks) for round in (1, 5)] == [9, 3]


def test_a_run_with_a_schedule_goes_on_with_the_same_number_of_rounds():
    """The server prunes by the number in its first state, and clients by that of the run."""
    assert PruneTrain(groups="layers").fixed_length
    assert not PruneTrain().fixed_length


def test_costs_of_live_units(mlp):
    method = PruneTrain(strength=0.1)
    server, (person,) = mlp.start(method, 1.0)
    mlp.check_costs(
        method, server, person, [{group.name: torch.ones(group.size, dtype=torch.bool) for group in mlp.units}]
    )
    live = {group.name: torch.arange(group.size) % 2 == 0 for group in mlp.units}
    masks = unit_masks(mlp.units, live, server.weights)
    pruned = type(server)(1, {n: w * masks.get(n, True) for n, w in server.weights.items()}, masks, server.extra)
    mlp.check_costs(method, pruned, person, [live])


def test_costs_of_a_schedule(facts):
    masks = {"b.weight": torch.ones(3, 2, dtype=torch.bool)}
    costs = PruneTrain(groups="layers", density=0.5, initial_density=0.5).costs(facts(masks))
    assert costs.flops_paper == costs.flops_analytic == 3 * 14 * 34
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * 9, 4 * (12 + 3))


def weights_of(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("options", [{"strength": 0.0}, {"ratio": 0.0}], ids=["strength", "ratio"])
def test_without_a_penalty_it_is_federated_averaging(options, federation):
    ours, theirs = (
        weights_of(federation(m, rounds=3, folder=type(m).__name__)) for m in (PruneTrain(**options), FedAvg())
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.slow
def test_a_cut_module_trains_as_a_masked_one(federation):
    ends = []
    for execution in ("mask", "cut"):
        torch.manual_seed(1)
        module = MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(16, 8), weight_decay=1e-3)
        method, options = PruneTrain(strength=0.01, threshold=0.3), {"precision": "64-true", "module": module}
        trainer = federation(method, rounds=4, folder=execution, federation={"execution": execution}, **options)
        ends.append(weights_of(trainer))
    dead = [name for name, value in ends[0].items() if value.dim() > 1 and bool((value == 0).all(1).any())]
    assert dead
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-5)


def test_layers_need_a_deeper_module_than_two(federation):
    with pytest.raises(InvalidOption, match="leaves no layer between the first and the last"):
        federation(PruneTrain(groups="layers"), rounds=1)
    module = MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8, 8))
    trainer = federation(PruneTrain(groups="layers", strength=1e-3), rounds=2, module=module)
    # the masks of round 1 of 2: .1 + .4 / 8 = .15, 64 - 54 = 10 of 64 weights
    assert int((weights_of(trainer)["net.fc2.weight"] != 0).sum()) == 10
