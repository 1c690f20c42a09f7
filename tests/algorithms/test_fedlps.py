"""FedLPS in cases that can be worked out by hand; the equations as a whole are compared with a NumPy twin."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_sparsefl import FedLPS
from lightning_sparsefl.algorithms import _pucbv as pucbv
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.types import Message, ServerState

NET = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
WEIGHTS = {name: torch.ones_like(value) for name, value in NET.state_dict().items()}
UNITS = find_groups(NET, torch.zeros(1, 5))
XI = {"bandit": {"xi": torch.tensor([10.0])}}
CONFIGS = Path(__file__).parents[2] / "configs" / "paper" / "fedlps"


@pytest.fixture
def asked(client):
    """A client whose model has the units, and whose training adds 1 to all."""

    def make(**facts):
        made, script = client(trained={name: value + 1 for name, value in WEIGHTS.items()}, **facts)
        script.units = UNITS
        return made, script

    return make


def message(density=0.5, weights=WEIGHTS):
    return Message(weights=weights, extra={"units": {"density": torch.tensor(density)}})


def server(round=0):
    return ServerState(round=round, weights=WEIGHTS, extra=XI)


def test_the_upload_is_the_change_of_the_kept_units(asked):
    made, script = asked(memory={})
    update = FedLPS(ratio="fixed", pattern="ordered").train(message(), made)
    assert script.fits[0][1] == {}
    rows = torch.tensor([True, True, False, False])
    assert torch.equal(update.votes["0.weight"], rows[:, None].expand(4, 5))
    assert torch.equal(update.votes["2.weight"], rows[None, :].expand(3, 4))
    for name, mask in update.votes.items():
        assert torch.equal(update.weights[name], mask.float())
    assert (update.kind, update.weight, update.shared) == ("difference", 7, None)
    assert {name: value.shape for name, value in update.memory["weights"].items()} == {
        "0.weight": (2, 5),
        "0.bias": (2,),
        "2.weight": (3, 2),
        "2.bias": (3,),
    }


def test_a_client_is_scored_with_what_it_trained_and_others_with_their_first_mask(asked, view):
    method = FedLPS(ratio="capacity", pattern="ordered")
    made, _ = asked()
    update = method.train(message(0.25), made)
    trained, _ = asked(memory=update.memory)
    sent = method.download_for(server(), view(), "score")  # of capacity 1
    own = method.personalize(sent, trained)
    assert own["0.bias"].tolist() == [2, 0, 0, 0]
    assert method.trained(message(), update)["0.bias"].tolist() == [2, 0, 0, 0]
    assert method.personalize(sent, asked()[0])["0.bias"].tolist() == [1, 1, 1, 1]


def test_rules_for_the_density(view):
    weak = replace(view(), capacity=0.125)
    assert float(
        FedLPS(ratio="fixed", density=0.3).download(server(), weak).extra["units"]["density"]
    ) == pytest.approx(0.3)
    assert float(FedLPS(ratio="capacity").download(server(), weak).extra["units"]["density"]) == 0.125
    for round in range(20):
        bandit = FedLPS().download(server(round), replace(weak, round=round)).extra["units"]["density"]
        assert 0 < float(bandit) <= 0.125
    assert densities(FedLPS(ratio="capacity", dynamic=True), weak, 40) == {1, 0.5, 0.25, 0.125, 0.0625}


def densities(method, client, rounds):
    views = (replace(client, round=r) for r in range(rounds))
    return {float(method.download(server(), view).extra["units"]["density"]) for view in views}


def test_a_density_above_the_capability_is_reset_to_it(view):
    """The paper's section III-B. Drawing below the capability instead would halve a weak client's density."""
    weak = [replace(view(), capacity=0.0625, round=r) for r in range(200)]
    used = [float(FedLPS().download(server(), one).extra["units"]["density"]) for one in weak]
    assert sum(density == 0.0625 for density in used) > 0.88 * 200  # 15/16 expected
    assert statistics.fmean(used) > 0.058  # .0605 expected
    state = FedLPS().observe(server(), weak[0], {"train_acc": 0.6, "train_acc_first": 0.1, "seconds": 2.0})["bandit"]
    assert used[0] == 0.0625
    assert [arm["high"] for arm in state["arms"] if arm["pulls"]] == [0.0625, 0.2]  # the reset density is rewarded


@pytest.mark.parametrize("levels", [(1.0, 0.5), (1.0, 0.5, 0.25)])
def test_the_levels_of_the_capacities_can_be_chosen(levels, view):
    """Figures 7 and 8."""
    assert densities(FedLPS(ratio="capacity", dynamic=True, levels=levels), view(), 40) == set(levels)
    with pytest.raises(InvalidOption, match=r"`Devices\.levels` is .*capacities in \(0, 1\]"):
        FedLPS(levels=(1.0, 0.0))


def test_the_published_program_draws_from_a_half_and_weak_devices_train_at_their_capacity(view):
    method = FedLPS.as_published_code(dynamic=False)
    assert densities(method, replace(view(), capacity=0.25), 20) == {0.25}
    assert all(density > 0.5 for density in densities(method, replace(view(), capacity=1.0), 20))


def test_the_file_of_the_published_program_says_what_the_class_says():
    written = yaml.safe_load((CONFIGS / "as_published_code.yaml").read_text())
    method, default = FedLPS.as_published_code(), FedLPS()
    changed = {f.name for f in fields(FedLPS) if getattr(method, f.name) != getattr(default, f.name)}
    options = written["algorithm"]["init_args"]
    assert FedLPS(**options) == method
    assert changed <= set(options)
    assert FedLPS.as_published_code(mu=1.0, rho=0.1) == FedLPS(**{**options, "mu": 1.0, "rho": 0.1})


def test_only_models_above_a_density_are_personal_models(asked):
    method = FedLPS(ratio="capacity", pattern="ordered", score_above=0.25)
    stranger, _ = asked()
    assert method.personalize(message(), stranger) is WEIGHTS  # the dense global model
    small = method.train(message(0.25), asked(memory={})[0]).memory
    assert "kept" not in small
    large = method.train(message(0.5), asked(memory=small)[0]).memory
    again = method.train(message(0.25), asked(memory=large)[0]).memory
    assert again["kept"]["0"].tolist() == [True, True, False, False]
    assert method.personalize(message(), asked(memory=again)[0])["0.bias"].tolist() == [2, 2, 0, 0]


def test_rewards_are_per_unit_of_time(view):
    report = {"train_acc": 0.6, "train_acc_first": 0.1, "seconds": 2.0}
    means = [
        max(arm["mean"] for arm in FedLPS(time_unit=unit).observe(server(), view(), report)["bandit"]["arms"])
        for unit in (1.0, 4.0)
    ]
    assert means[1] == pytest.approx(4 * means[0])


def test_the_mean_pulls_at_each_layer_alike_and_the_proximal_term_fades(asked):
    made, _ = asked(memory={})
    size = sum(value.numel() for value in WEIGHTS.values())
    assert FedLPS()._proximal_term(WEIGHTS, made).strength == pytest.approx(2 / size)
    running, _ = asked(memory={}, buffers=["running"])
    assert FedLPS()._proximal_term({**WEIGHTS, "running": torch.ones(7)}, running).strength == pytest.approx(2 / size)
    assert FedLPS(reduction="sum")._proximal_term(WEIGHTS, made).strength == 2


def test_the_bandit_learns_from_accuracy_and_time(view):
    method = FedLPS()
    report = {"train_acc": 0.6, "train_acc_first": 0.1, "seconds": 2.0}
    state = method.observe(server(), view(), report)["bandit"]
    density = float(method.download(server(), view()).extra["units"]["density"])
    rewarded = [arm for arm in state["arms"] if arm["pulls"]]
    assert rewarded[0]["high"] == pytest.approx(density)
    assert rewarded[0]["mean"] == pytest.approx((pucbv.utility(0.6) - pucbv.utility(0.1)) / 2)
    later = view(shared={"bandit": state}, round=3)
    assert method.observe(server(3), later, {"train_acc": 0.7, "seconds": 1.0})["bandit"]["accuracy"] == 0.7
    assert FedLPS(ratio="fixed").observe(server(), view(), report) is None
    with pytest.raises(InvalidOption, match=r"federation\.monitor"):
        method.observe(server(), view(), {"train_loss": 0.1, "seconds": 1.0})


def test_a_metric_that_is_missing_in_training_is_refused_after_the_first_client(asked):
    def first_client():
        made, script = asked(memory={})
        script.evaluate = lambda client, weights, split: {"val_acc": 0.1}
        return made

    with pytest.raises(InvalidOption, match=r"must log `train_acc` in training.* reported \['train_loss'\]"):
        FedLPS(pattern="ordered").train(message(), first_client())
    FedLPS(pattern="ordered", ratio="fixed").train(message(), first_client())


def test_seconds_are_those_of_the_client_s_device(view):
    method = FedLPS(flops_per_second=100.0, bytes_per_second=10.0, alpha=2.0)
    assert method.simulated_seconds(replace(view(), capacity=0.5), 300.0, 40) == 300 / 50 + 2 * 40 / 10


def test_costs_by_hand(facts):
    """Two epochs of 7 samples in batches of 4; a forward pass is 34 FLOPs, 2 * 5 + 2 + 2 * 3 of one unit of `a`."""
    net = nn.Module()
    net.a, net.b = nn.Linear(5, 2), nn.Linear(2, 3, bias=False)
    net.forward = lambda x: net.b(net.a(x))

    class Model:
        units = find_groups(net, torch.zeros(1, 5))

    made = facts(message=message(0.5, {name: value.detach() for name, value in net.state_dict().items()}))
    costs = FedLPS(ratio="fixed").costs(replace(made, model=Model()))
    assert costs.flops_paper == 3 * 2 * 8 * (10 + 2 + 12)  # rows only: `b` is whole
    assert costs.flops_analytic == 3 * 2 * 7 * (10 + 2 + 6) + 3 * 4 * 34  # and the probe
    assert costs.bytes_down_paper == 4 * (10 + 2 + 6)
    assert costs.bytes_up_paper == 4 * (5 + 2 + 6)
    first = FedLPS(probe=False).costs(replace(made, model=Model()))
    assert first.flops_analytic == 3 * 2 * 7 * (10 + 2 + 6) + 7 * 34  # and the first accuracy
    again = FedLPS(probe=False).costs(replace(made, model=Model(), again=True))
    assert again.flops_analytic == 3 * 2 * 7 * (10 + 2 + 6)


def test_a_metric_that_falls_is_refused(view):
    fleet = Fleet([replace(view(), monitor="train_loss")], frozenset(), torch.device("cpu"))
    with pytest.raises(InvalidOption, match=r"is 'train_loss', which falls.*such as 'train_acc'"):
        FedLPS().init(WEIGHTS, fleet)
    assert FedLPS(ratio="capacity").init(WEIGHTS, fleet).round == 0  # which rewards nothing


@pytest.mark.parametrize("pattern", ["learned", "magnitude", "ordered"])
@pytest.mark.parametrize("refresh", ["step", "round"])
def test_units_that_change_in_training_cannot_be_cut_out(pattern, refresh, view):
    method = FedLPS(pattern=pattern, refresh=refresh)
    whole = Fleet([view()], frozenset(), torch.device("cpu"))
    narrow = Fleet([view()], frozenset(), torch.device("cpu"), execution="cut")
    assert method.init(WEIGHTS, whole).round == 0
    if refresh == "round" or pattern == "ordered":
        assert method.init(WEIGHTS, narrow).round == 0
    else:
        with pytest.raises(InvalidOption, match=r"federation\.execution: cut.*algorithm\.refresh: round"):
            method.init(WEIGHTS, narrow)


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0},
        {"ratio": "best"},
        {"pattern": "best"},
        {"mu": -1},
        {"arms": 0},
        {"bytes_per_second": 0},
        {"drop": -1},
        {"levels": ()},
        {"time_unit": 0},
        {"arms_from": 1},
        {"score_above": -0.5},
        {"explore": "never"},
        {"compare_with": "mean"},
        {"reduction": "max"},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(InvalidOption, match=next(iter(options))):
        FedLPS(**options)
