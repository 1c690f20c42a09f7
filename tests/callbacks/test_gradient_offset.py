from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import SGD

from lightning_sparsefl.callbacks import GradientOffset, StaticMask
from lightning_sparsefl.errors import IncompatibleMasks


def drawn(module, seed=3):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=rng) / 5 for name, value in module.named_parameters()}


def linear(offset):
    """sum <offset, w>, for autograd."""
    return lambda parameters: sum((parameters[name] * value).sum() for name, value in offset.items())


def test_a_linear_term_joins_the_loss(net, fit, by_hand, recipe):
    """Also where gradients are accumulated and clipped."""
    module = net(recipe)
    offset = drawn(module)
    fit(module, [GradientOffset(offset)], recipe)
    expected = by_hand(net(recipe), recipe, penalty=linear(offset))
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)
    plain = by_hand(net(recipe), recipe)
    assert not torch.allclose(module.net[0].weight, plain["net.0.weight"], atol=1e-3)


def test_a_missing_name_has_none_and_an_empty_tree_changes_nothing(net, fit, by_hand, recipes):
    recipe, module = recipes["sgd"], net()
    offset = {"net.2.weight": torch.ones(6, 9)}
    fit(module, [GradientOffset(offset)], recipe)
    expected = by_hand(net(), recipe, penalty=linear(offset))
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)
    plain = net()
    fit(plain, [GradientOffset({})], recipe)
    torch.testing.assert_close(dict(plain.named_parameters()), by_hand(net(), recipe), rtol=0, atol=1e-6)


def test_scaffold_brings_clients_to_the_same_gradient(net, fit):
    """One step of plain SGD with c - c_i, where c_i is the client's own gradient, is a step along -c."""
    module = net()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    common = drawn(module)
    own = {}

    class Spy(GradientOffset):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            own.update({name: value.grad.clone() for name, value in pl_module.named_parameters()})

    fit(net(), [Spy({})], epochs=1, batches=1)
    fit(module, [GradientOffset({name: common[name] - own[name] for name in common})], epochs=1, batches=1)
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.detach(), before[name] - 0.3 * common[name], rtol=0, atol=1e-6)


def test_what_has_no_gradient_is_left_alone(net, fit):
    module = net()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    fit(module, [GradientOffset(drawn(module))])
    assert torch.equal(module.net[0].weight, before)


def test_before_a_mask_the_offset_is_masked_too(net, fit, recipes):
    module, mask = net(recipes["momentum, decay"]), StaticMask(density=0.3)
    trainer = fit(module, [GradientOffset(drawn(module)), mask], recipes["momentum, decay"])
    for name, held in mask.masks.items():
        weight = module.get_parameter(name)
        assert not weight[~held].any()
        assert not trainer.optimizers[0].state[weight]["momentum_buffer"][~held].any()


def test_it_is_added_to_unscaled_gradients_and_in_the_parameters_type(net, fit):
    class Flat(type(net())):
        def loss(self, batch):
            return 0 * super().loss(batch)

    module = Flat(lambda parameters: SGD(parameters, 0.25))
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    offset = {name: torch.ones_like(value, dtype=torch.float64) for name, value in before.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fit(module, [GradientOffset(offset)], epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    for name, value in module.named_parameters():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.detach(), before[name] - 5 * 0.25, rtol=0, atol=1e-6)


def test_buffers_in_the_tree_do_nothing_and_the_tree_is_left_as_it_is(net, fit):
    module = net()
    module.register_buffer("mean", torch.zeros(2))
    offset = {"mean": torch.ones(2), "net.4.bias": torch.ones(3)}
    callback = GradientOffset(offset)
    fit(module, [callback])
    assert not module.mean.any()
    assert callback.offset["net.4.bias"].tolist() == [1, 1, 1]
    assert callback.state_dict() == {}
    assert callback._pairs == {}


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        ({"net.9.weight": torch.ones(1)}, "`GradientOffset`: `net.9.weight` in `offset` is not a tensor of the module"),
        ({"net.4.bias": torch.ones(4)}, r"`net.4.bias` in `offset` has shape \(4,\), expected \(3,\)"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(offset, message, net, fit):
    with pytest.raises(IncompatibleMasks, match=message):
        fit(net(), [GradientOffset(offset)])
