from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_sparsefl.callbacks import DynamicPruningWithFeedback, GroupPenalty, ProximalTerm, StaticMask
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.units import find_groups

LAYERS = ("net.0.weight", "net.2.weight", "net.4.weight")
STEPS = 15
"""Of three epochs of five batches."""


def copied(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def norms(module, layers=LAYERS):
    return sum(float(module.get_parameter(name).detach().norm()) for name in layers)


def climbing(peak, stairs, total, layers=LAYERS):
    """The paper's eqs. 8 and 9 for autograd: in part i of Q, from 1, lambda = peak (i - 1) / Q."""
    step = -1

    def term(parameters):
        nonlocal step
        step += 1
        part = 1
        while part < stairs and step >= part * total / stairs:
            part += 1
        return peak * (part - 1) / stairs * sum(parameters[name].square().sum().sqrt() for name in layers)

    return term


def test_the_term_joins_the_loss(net, fit, by_hand, recipe):
    module, total = net(recipe), STEPS if recipe.accumulate == 1 else 9
    fit(module, [GroupPenalty(strength=0.5, stairs=4)], recipe)
    expected = by_hand(net(recipe), recipe, penalty=climbing(0.5, 4, total))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)
    plain = by_hand(net(recipe), recipe)
    assert max(float((expected[name] - plain[name]).abs().max()) for name in LAYERS) > 1e-3


def test_a_level_strength(net, fit, by_hand, recipe):
    module = net(recipe)
    fit(module, [GroupPenalty(strength=0.2, stairs=None, layers="net.2*")], recipe)

    def term(parameters):
        return 0.2 * parameters["net.2.weight"].square().sum().sqrt()

    torch.testing.assert_close(copied(module), by_hand(net(recipe), recipe, penalty=term), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"strength": 0}, {"stairs": 1}])
def test_strength_0_and_the_first_stair_change_nothing(net, fit, recipes, options):
    recipe = recipes["momentum, decay"]
    plain, penalised = net(recipe), net(recipe)
    fit(plain, [], recipe)
    fit(penalised, [GroupPenalty(**options)], recipe)
    torch.testing.assert_close(copied(penalised), copied(plain), rtol=0, atol=0)


def test_the_stronger_the_smaller(net, fit):
    sizes = []
    for strength in (0.0, 0.1, 0.4):
        module = net()
        fit(module, [GroupPenalty(strength=strength, stairs=None)])
        sizes.append(norms(module))
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_layer_of_zeros_stays_where_it_is_and_finite(net, fit, recipes):
    module = net(recipes["sgd"])
    with torch.no_grad():
        module.net[2].weight.zero_()
        module.net[4].weight.zero_()  # so that no gradient reaches the layer below it either
    fit(module, [GroupPenalty(strength=0.5, stairs=None)], recipes["sgd"], batches=1, epochs=1)
    assert not module.net[2].weight.any()
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_what_has_no_gradient_is_left_alone(net, fit):
    module = net()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    fit(module, [GroupPenalty(strength=0.5, stairs=None)])
    assert torch.equal(module.net[0].weight, before)


def test_the_norm_is_that_of_the_pruned_weights(net, fit, recipes):
    """One step of error feedback by hand: the gradient is taken at w * m, and moves the dense w."""
    recipe, module = recipes["sgd"], net(recipes["sgd"])
    masks = {"net.2.weight": torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.4}
    start = copied(module)
    feedback = ErrorFeedback(masks=masks)
    fit(module, [GroupPenalty(strength=0.7, stairs=None, layers="net.2*"), feedback], recipe, epochs=1, batches=1)

    again = net(recipe)
    again.load_state_dict(apply(start, masks))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    loss = again.loss((x[:4], x[:4, :3].argmax(1))) + 0.7 * again.net[2].weight.square().sum().sqrt()
    loss.backward()
    for name, parameter in again.named_parameters():
        pruned = feedback.pruned.get(name, torch.zeros(()))
        dense = module.get_parameter(name).detach().cpu() + pruned.cpu()
        expected = parameter.detach() - 0.3 * parameter.grad
        torch.testing.assert_close(dense, expected, rtol=0, atol=1e-6)
    assert feedback.pruned["net.2.weight"].any()


def test_after_a_callback_that_joins_the_weights_it_is_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"comes after `DynamicPruningWithFeedback`, .* expected it before"):
        fit(net(), [DynamicPruningWithFeedback(), GroupPenalty()])
    fit(net(), [GroupPenalty(), ProximalTerm(), DynamicPruningWithFeedback()], epochs=1)
    fit(net(), [StaticMask(), GroupPenalty()], epochs=1)


class Strengths(Callback):
    def __init__(self, penalty):
        self.penalty, self.seen = penalty, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(self.penalty.now)


def test_every_fit_climbs_its_own_stairs(net, fit):
    penalty = GroupPenalty(strength=1.0, stairs=3)
    for _ in range(2):
        strengths = Strengths(penalty)
        fit(net(), [penalty, strengths])
        assert strengths.seen == pytest.approx([0.0] * 5 + [1 / 3] * 5 + [2 / 3] * 5)


@pytest.mark.parametrize("strength", [-0.1, float("nan")])
def test_a_strength_below_0_is_refused(strength):
    with pytest.raises(InvalidOption, match=r"`GroupPenalty\(strength=.*expected a number >= 0"):
        GroupPenalty(strength=strength)


def test_no_stairs_are_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"`GroupPenalty\(stairs=0\)`: expected a whole number >= 1, or None"):
        GroupPenalty(stairs=0)
    with pytest.raises(InvalidOption, match="pattern 'fc' in `layers` matches no layer"):
        fit(net(), [GroupPenalty(layers="fc")])


def groups_of(net):
    holder = nn.Sequential(OrderedDict(net=net().net))
    return find_groups(holder, torch.zeros(1, 4))


def lasso(strength):
    """The penalty of PruneTrain for autograd: rows of the hidden units, and the columns that read them."""

    def term(parameters):
        first, second, third = (parameters[name] for name in LAYERS)
        parts = [first.square().sum(1), second.square().sum(0), second.square().sum(1), third.square().sum(0)]
        return strength * sum((part + 1e-8).sqrt().sum() for part in parts)

    return term


@pytest.mark.parametrize("given", ["groups", "function", "example input"])
def test_the_penalty_of_units_joins_the_loss(net, fit, by_hand, recipe, given):
    module = net(recipe)
    units = groups_of(net)
    if given == "example input":
        module.example_input_array, module.forward = torch.zeros(1, 4), module.net.forward
    options = {"groups": units, "function": lambda parameters: units, "example input": None}
    fit(module, [GroupPenalty(strength=0.05, stairs=None, groups="units", units=options[given])], recipe)
    expected = by_hand(net(recipe), recipe, penalty=lasso(0.05))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)


def with_norm(module):
    module.net.insert(1, nn.BatchNorm1d(9))
    with torch.no_grad():
        module.net[1].weight.copy_(torch.linspace(-0.5, 1.0, 9))
        module.net[1].weight[3] = 0.0
    return module


def test_the_penalty_of_scales_joins_the_loss(net, fit, by_hand, recipe):
    module = with_norm(net(recipe))
    fit(module, [GroupPenalty(strength=0.05, stairs=None, groups="scales")], recipe)
    expected = by_hand(with_norm(net(recipe)), recipe, penalty=lambda p: 0.05 * p["net.1.weight"].abs().sum())
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)
    plain = by_hand(with_norm(net(recipe)), recipe)
    assert float((expected["net.1.weight"] - plain["net.1.weight"]).abs().max()) > 1e-3


def test_a_module_without_scales_is_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"finds no norm with weights in `Net`; expected one, or other `groups`"):
        fit(net(), [GroupPenalty(groups="scales")])


@pytest.mark.parametrize("strength", [math.inf, -math.inf, math.nan])
def test_a_strength_that_is_not_finite_is_refused(strength):
    with pytest.raises(InvalidOption, match="expected a"):
        GroupPenalty(strength=strength)


def test_a_module_without_units_is_refused(net, fit):
    module = net()
    module.example_input_array = torch.zeros(1, 4)
    module.forward = module.net.forward
    torch.nn.utils.parametrizations.weight_norm(module.net[2])
    torch.nn.utils.parametrizations.weight_norm(module.net[0])
    with pytest.raises(InvalidOption, match=r"groups='units'\)` finds no units in `.*without parametrizations"):
        fit(module, [GroupPenalty(groups="units")], epochs=1)


def test_groups_of_one_module_have_different_state_keys(net):
    penalties = [GroupPenalty(), GroupPenalty(layers="net.2*"), *(GroupPenalty(groups=g) for g in ("units", "scales"))]
    assert len({penalty.state_key for penalty in penalties}) == 4


def test_options_of_units_are_checked(net, fit):
    with pytest.raises(InvalidOption, match=r"`GroupPenalty\(groups='rows'\)`: expected 'layers', 'units' or 'scales'"):
        GroupPenalty(groups="rows")
    with pytest.raises(InvalidOption, match=r"`GroupPenalty\(layers='net.2\*'\)`: expected None beside"):
        GroupPenalty(groups="units", layers="net.2*")
    with pytest.raises(InvalidOption, match=r"`example_input_array`, which `Net` does not set; set it,"):
        fit(net(), [GroupPenalty(groups="units")])
