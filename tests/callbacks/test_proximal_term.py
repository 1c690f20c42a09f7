from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GradientOffset, ProximalTerm, StaticMask
from lightning_sparsefl.callbacks.stacking.kinds import stacked
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption


def penalty(strength, anchor):
    """strength / 2 ||w - anchor||^2, for autograd."""

    def term(parameters):
        return strength / 2 * sum(((parameters[name] - value) ** 2).sum() for name, value in anchor.items())

    return term


def copied(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def distance(module, anchor):
    return sum(float(((value - anchor[name]) ** 2).sum()) for name, value in copied(module).items())


def test_the_term_joins_the_loss(net, fit, by_hand, recipe):
    module = net(recipe)
    start = copied(module)
    fit(module, [ProximalTerm(strength=0.7)], recipe)
    expected = by_hand(net(recipe), recipe, penalty=penalty(0.7, start))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)
    assert distance(module, by_hand(net(recipe), recipe)) > 1e-4


def test_strength_0_changes_nothing(net, fit, recipes):
    recipe = recipes["momentum, decay"]
    plain, held = net(recipe), net(recipe)
    fit(plain, [], recipe)
    fit(held, [ProximalTerm(strength=0)], recipe)
    torch.testing.assert_close(copied(held), copied(plain), rtol=0, atol=0)


def test_the_stronger_the_nearer(net, fit):
    distances = []
    for strength in (0.0, 0.5, 2.0):
        module = net()
        start = copied(module)
        fit(module, [ProximalTerm(strength=strength)])
        distances.append(distance(module, start))
    assert distances[0] > distances[1] > distances[2] > 0


def test_a_given_anchor(net, fit, by_hand, recipe):
    anchor = {"net.2.weight": torch.full((6, 9), 0.5), "net.4.bias": torch.tensor([1.0, 2.0, 3.0])}
    module = net(recipe)
    fit(module, [ProximalTerm(strength=0.3, anchor=anchor)], recipe)
    expected = by_hand(net(recipe), recipe, penalty=penalty(0.3, anchor))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)


def test_an_anchor_without_names_has_no_term(net, fit):
    plain, free = net(), net()
    fit(plain, [])
    fit(free, [ProximalTerm(strength=1.0, anchor={})])
    torch.testing.assert_close(copied(free), copied(plain), rtol=0, atol=0)


def test_an_anchor_of_the_modules_own_tensors_does_not_move(net, fit, by_hand, recipes):
    recipe, module = recipes["sgd"], net()
    start = copied(module)
    live = {name: parameter.detach() for name, parameter in module.named_parameters()}
    fit(module, [ProximalTerm(strength=0.7, anchor=live)], recipe)
    expected = by_hand(net(), recipe, penalty=penalty(0.7, start))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)


def test_every_fit_has_its_own_anchor(net, fit, by_hand, recipes):
    recipe, module, callback = recipes["sgd"], net(), ProximalTerm(strength=0.7)
    fit(module, [callback], recipe)
    half = copied(module)
    fit(module, [callback], recipe)
    again = net()
    again.load_state_dict(half)
    expected = by_hand(again, recipe, penalty=penalty(0.7, half))
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)


def test_what_has_no_gradient_is_left_alone(net, fit):
    module = net()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    anchor = {name: parameter + 1 for name, parameter in copied(module).items()}
    fit(module, [ProximalTerm(strength=0.5, anchor=anchor)])
    assert torch.equal(module.net[0].weight, before)


class DeadWeights(Callback):
    """The anchor pulls at no weight that the mask drops, nor at its momentum."""

    def __init__(self, mask):
        self.mask, self.batches = mask, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        for name, mask in self.mask.masks.items():
            parameter = pl_module.get_parameter(name)
            assert not parameter[~mask].any()
            assert not trainer.optimizers[0].state[parameter]["momentum_buffer"][~mask].any()


def test_before_a_mask_the_pull_is_masked_too(net, fit, recipes):
    module, mask = net(recipes["momentum, decay"]), StaticMask(density=0.3)
    probe = DeadWeights(mask)
    fit(module, [ProximalTerm(strength=0.5, anchor=copied(module)), mask, probe], recipes["momentum, decay"])
    assert probe.batches == 15


def test_a_resumed_run_equals_a_straight_one(net, fit, recipes, tmp_path):
    recipe = recipes["momentum, decay"]
    straight, path = net(recipe), tmp_path / "half.ckpt"
    fit(straight, [ProximalTerm(strength=0.7)], recipe, epochs=4)
    fit(net(recipe), [ProximalTerm(strength=0.7)], recipe, epochs=2).save_checkpoint(path)
    resumed = net(recipe, seed=9)
    fit(resumed, [ProximalTerm(strength=0.7)], recipe, epochs=4, ckpt_path=path)
    torch.testing.assert_close(copied(resumed), copied(straight), rtol=0, atol=0)


@pytest.mark.parametrize("strength", [-0.1, float("nan")])
def test_a_strength_below_0_is_refused(strength):
    with pytest.raises(InvalidOption, match=r"`ProximalTerm\(strength=.*expected a number >= 0"):
        ProximalTerm(strength=strength)


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        (
            {"model.net.4.bias": torch.ones(3)},
            "`ProximalTerm`: `model.net.4.bias` in `anchor` is not a tensor",
        ),
        ({"net.4.bias": torch.ones(1)}, r"`net.4.bias` in `anchor` has shape \(1,\), expected \(3,\)"),
    ],
)
def test_an_anchor_that_does_not_fit_is_refused(anchor, message, net, fit):
    with pytest.raises(IncompatibleMasks, match=message):
        fit(net(), [ProximalTerm(anchor=anchor)])
    with pytest.raises(IncompatibleMasks, match=message):
        stacked([ProximalTerm(anchor=anchor)] * 2, net(), [1, 1])


@pytest.mark.parametrize("term", [lambda tree: ProximalTerm(0.7, anchor=tree), GradientOffset])
def test_names_are_those_of_a_compiled_part(term, net, fit):
    plain, compiled = net(), net()
    compiled.net = torch.compile(compiled.net, backend="eager")
    tree = {name: parameter + 1 for name, parameter in copied(plain).items()}
    for module in (plain, compiled):
        fit(module, [term(tree)])
    torch.testing.assert_close(list(copied(compiled).values()), list(copied(plain).values()), rtol=0, atol=1e-6)
