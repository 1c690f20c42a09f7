from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import DynamicMask, StaticMask, mask_owner
from lightning_sparsefl.callbacks.feedback import ErrorFeedback
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform
from lightning_sparsefl.sparse.masks import counts, same

WEIGHTS = ("net.0.weight", "net.2.weight", "net.4.weight")


class Probe(Callback):
    """After every batch, seen from behind the mask: the weights and the optimizer's buffers are zero where it is."""

    def __init__(self, mask):
        self.mask, self.batches, self.buffers = mask, 0, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        parameters = dict(pl_module.named_parameters())
        self.batches += 1
        for name, mask in self.mask.masks.items():
            assert torch.equal(parameters[name] != 0, mask)
            for buffer in trainer.optimizers[0].state[parameters[name]].values():
                if buffer is not None and buffer.shape == mask.shape:
                    assert not buffer[~mask].any()
                    self.buffers += 1


def shapes(module):
    return {name: parameter.shape for name, parameter in module.named_parameters() if name in WEIGHTS}


def test_the_mask_holds_after_every_step(net, fit, by_hand, recipe):
    module, callback = net(recipe), StaticMask(density=0.4, rescale=False)
    probe = Probe(callback)
    fit(module, [callback, probe], recipe)
    assert probe.batches == 15
    has_buffers = module.configure_optimizers().defaults.get("momentum") != 0  # Adam has no such option
    assert (probe.buffers > 0) == has_buffers
    assert tuple(callback.masks) == WEIGHTS
    assert counts(callback.masks) == kept_counts(shapes(module), erk(shapes(module), 0.4))

    def mask_gradients(parameters):
        for name, mask in callback.masks.items():
            parameters[name].grad *= mask

    def mask_weights(parameters):
        for name, mask in callback.masks.items():
            parameters[name] *= mask

    expected = by_hand(net(recipe), recipe, edit_gradients=mask_gradients, edit_weights=mask_weights)
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)


def test_layers_may_share_the_density_evenly(net, fit):
    module, callback = net(), StaticMask(density=0.3, layer_density="uniform")
    fit(module, [callback], epochs=1)
    assert counts(callback.masks) == kept_counts(shapes(module), uniform(shapes(module), 0.3))


def test_layers_may_have_densities_of_their_own(net, fit):
    patterns = {"net.0*": 0.75, "*4.weight": 1.0}
    module, callback = net(), StaticMask(density=0.5, layer_density=patterns)
    fit(module, [callback], epochs=1)
    assert counts(callback.masks) == {"net.0.weight": 27, "net.2.weight": 27, "net.4.weight": 18}


def test_the_draw_follows_from_the_seed(net, fit):
    drawn = []
    for seed in (0, 0, 1):
        drawn.append(StaticMask(density=0.5, seed=seed))
        fit(net(seed=7), [drawn[-1]], epochs=1, batches=1)
    first, again, other = (callback.masks for callback in drawn)
    assert same(first, again)
    assert not same(first, other)
    assert counts(first) == counts(other)


def test_a_second_fit_keeps_the_mask(net, fit):
    module, callback = net(), StaticMask(density=0.5)
    fit(module, [callback], epochs=1)
    before = dict(callback.masks)
    fit(module, [callback], epochs=1)
    assert same(before, callback.masks)


def test_given_masks_are_held(net, fit):
    keep = torch.zeros(9, dtype=torch.bool)
    keep[2] = True
    module = net()
    bias = module.net[4].bias.detach().clone()
    fit(module, [StaticMask(masks={"net.0.bias": keep})])
    assert torch.equal(module.net[0].bias != 0, keep)
    assert (module.net[0].weight != 0).all()
    assert not torch.equal(module.net[4].bias, bias)


def test_no_given_mask_means_dense(net, fit, by_hand, recipes):
    recipe = recipes["sgd"]
    module = net()
    fit(module, [StaticMask(masks={})], recipe)
    assert all((module.get_parameter(name) != 0).all() for name in WEIGHTS)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(), recipe), rtol=0, atol=1e-6)


def test_zeros_that_are_there_are_held(net, fit, recipe):
    module, callback = net(recipe), StaticMask(masks="nonzero", layers="!net.2*")
    with torch.no_grad():
        module.net[0].weight[:, 1:3], module.net[4].weight[0, :2], module.net[2].weight[:, 0] = 0, 0, 0
    zeros = {name: module.get_parameter(name) == 0 for name in WEIGHTS}
    before = {name: module.get_parameter(name).detach().clone() for name in WEIGHTS}
    probe = Probe(callback)
    fit(module, [callback, probe], recipe)
    assert probe.batches == 15
    assert list(callback.masks) == ["net.0.weight", "net.4.weight"]
    for name, mask in callback.masks.items():
        assert torch.equal(mask, ~zeros[name])
        assert (module.get_parameter(name) != before[name])[mask].any()
    assert module.net[2].weight[:, 0].any()
    left = dict(callback.masks)
    fit(module, [callback], recipe, epochs=1)
    assert same(left, callback.masks)


def test_first_weights_under_zeros_that_are_there_are_not_rescaled(net, fit):
    module = net()
    with torch.no_grad():
        module.net[0].weight[:, 1:3] = 0
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    before = module.net[0].weight.detach().clone()
    fit(module, [StaticMask(masks="nonzero", rescale=True)], epochs=1)
    assert torch.equal(module.net[0].weight, before)


def test_a_dense_module_and_an_empty_layer_have_no_zeros_to_hold(net, fit):
    module = net()
    with pytest.raises(
        InvalidOption, match=r"masks='nonzero'.*: all 108 weights differ from 0; expected a module that"
    ):
        fit(module, [StaticMask(masks="nonzero")])
    torch.nn.init.zeros_(module.net[2].weight)
    with pytest.raises(InvalidOption, match=r"`net.2.weight` is 0 everywhere; .* without it \('!net.2.weight'\)"):
        fit(module, [StaticMask(masks="nonzero")])
    with pytest.raises(InvalidOption, match=r"masks='zero'.*expected bool tensors by name, 'nonzero', or None"):
        StaticMask(masks="zero")


def test_density_1_is_dense_training(net, fit, by_hand, recipe):
    module = net(recipe)
    fit(module, [StaticMask(density=1.0)], recipe)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)


def test_state_dict_round_trip(net, fit):
    callback, other = StaticMask(density=0.3, seed=5), StaticMask(density=0.9)
    fit(net(), [callback], epochs=1)
    other.load_state_dict(callback.state_dict())
    assert list(other.masks) == list(callback.masks)
    assert all(torch.equal(mask, other.masks[name]) for name, mask in callback.masks.items())
    assert all(
        packed.numel() == -(-callback.masks[n].numel() // 8) for n, (packed, _) in other.state_dict()["masks"].items()
    )
    fit(net(seed=3), [other], epochs=1)
    assert same(other.masks, callback.masks)


def test_a_resumed_run_equals_a_straight_one(net, fit, recipes, tmp_path):
    recipe = recipes["adamw, clipped, accumulated"]
    straight, path = net(recipe), tmp_path / "half.ckpt"
    fit(straight, [StaticMask(density=0.4)], recipe, epochs=4)
    fit(net(recipe), [StaticMask(density=0.4)], recipe, epochs=2).save_checkpoint(path)
    resumed, callback = net(recipe, seed=9), StaticMask(density=0.4)  # same options, as a restarted script has them
    probe = Probe(callback)
    fit(resumed, [callback, probe], recipe, epochs=4, ckpt_path=path)
    assert probe.batches == 10
    torch.testing.assert_close(dict(resumed.named_parameters()), dict(straight.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [StaticMask, partial(DynamicMask, fraction=0.0, every_n_steps=2)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.9}, r"Mask\(density=0.9\)`: the fit goes on with the masks drawn with `density=0.4` that the"),
        ({"layer_density": "uniform"}, r"\(layer_density='uniform'\)`: .* drawn with `layer_density='erk'`"),
        ({"seed": 2}, r"\(seed=2\)`: .* drawn with `seed=1`"),
    ],
)
def test_a_resumed_fit_keeps_the_mask_and_warns_of_other_options(kind, options, message, net, fit, tmp_path):
    path, then, same_options = tmp_path / "half.ckpt", tmp_path / "then.ckpt", {"density": 0.4, "seed": 1}
    first, second, third = kind(**same_options), kind(**same_options | options), kind(**same_options)
    fit(net(), [first], epochs=1).save_checkpoint(path)
    with pytest.warns(UserWarning, match=message):
        fit(net(), [second], epochs=2, ckpt_path=path).save_checkpoint(then)
    assert same(first.masks, second.masks)
    mask_owner.warning_cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*the fit goes on with.*")
        fit(net(), [third], epochs=3, ckpt_path=then)  # the masks are still those that were drawn first
        fit(net(), [kind(**same_options | options)], epochs=1)


@pytest.mark.parametrize("kind", [StaticMask, ErrorFeedback])
def test_a_resumed_fit_warns_of_other_masks(kind, net, fit, tmp_path):
    path, masks = tmp_path / "half.ckpt", {"net.4.weight": torch.eye(3, 6, dtype=torch.bool)}
    fit(net(), [kind(masks=masks)], epochs=1).save_checkpoint(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*the fit goes on with.*")
        fit(net(), [kind(masks=masks)], epochs=2, ckpt_path=path)
    other = kind(masks={name: ~mask for name, mask in masks.items()})
    with pytest.warns(UserWarning, match=r"\(masks=...\)`: .* with the other masks that the checkpoint"):
        fit(net(), [other], epochs=2, ckpt_path=path)
    assert same(other.masks, masks)


@pytest.mark.parametrize("density", [0, -0.5, 1.5, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=r"density=.*expected a number in \(0, 1\]"):
        StaticMask(density=density)


def test_an_unknown_layer_density_is_refused():
    with pytest.raises(InvalidOption, match="layer_density"):
        StaticMask(layer_density="magic")


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"net.9.weight": torch.ones(3, 6, dtype=torch.bool)}, "`net.9.weight` is not among the weights"),
        ({"net.4.weight": torch.ones(6, 3, dtype=torch.bool)}, r"has shape \(6, 3\), expected \(3, 6\)"),
        ({"net.4.weight": torch.ones(3, 6)}, "expected torch.bool"),
    ],
)
def test_masks_that_do_not_fit_are_refused(net, fit, masks, message):
    with pytest.raises(IncompatibleMasks, match=message):
        fit(net(), [StaticMask(masks=masks)])
