from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from helpers.conv1d import Conv1D
from lightning_sparsefl.callbacks import NMPruning
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import counts, kept, same
from lightning_sparsefl.sparse.nm import is_nm

GROUPS = {"n": 1, "m": 3}
"""Rows of 4, 9 and 6: the first cannot be cut into groups of 3."""
CUT = {"net.2.weight": 54, "net.4.weight": 18}


class Probe(Callback):
    """Kept weights after every step; weights and the optimizer's buffers are zero where they are dropped."""

    def __init__(self, callback):
        self.callback, self.kept, self.steps = callback, [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.steps:
            return
        self.steps = trainer.global_step
        self.kept.append(kept(self.callback.masks))
        for name, mask in self.callback.masks.items():
            weight = pl_module.get_parameter(name)
            assert torch.equal(weight != 0, mask)
            for buffer in trainer.optimizers[0].state[weight].values():
                if buffer is not None and buffer.shape == mask.shape:
                    assert not buffer[~mask].any()


def test_at_the_start_the_largest_of_each_group_stay(net, fit, by_hand, recipe, slow):
    module, callback = net(recipe), NMPruning(**GROUPS)
    score = {name: module.get_parameter(name).detach().abs().numpy() for name in CUT}
    fit(module, [callback, probe := Probe(callback)], recipe)
    masks = {name: torch.from_numpy(mask) for name, mask in slow.nm_masks(score, 1, 3).items()}
    assert same(callback.masks, masks)
    assert set(probe.kept) == {24}
    assert (module.net[0].weight != 0).all()

    def mask_gradients(parameters):
        for name, mask in masks.items():
            parameters[name].grad[~mask] = 0

    def mask_weights(parameters):
        for name, mask in masks.items():
            parameters[name][~mask] = 0

    expected = by_hand(net(recipe), recipe, edit_gradients=mask_gradients, edit_weights=mask_weights)
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("start", "dense"), [(0.2, 2), (0.5, 6), (0.99, 13)])
def test_it_prunes_once_at_its_share_of_the_training(start, dense, net, fit, recipes):
    recipe = recipes["momentum, decay"]
    callback = NMPruning(start=start, **GROUPS)
    probe = Probe(callback)
    fit(net(recipe), [callback, probe], recipe)  # 15 steps
    assert probe.kept == [72] * dense + [24] * (15 - dense)


def test_a_second_fit_keeps_the_mask(net, fit):
    module, callback = net(), NMPruning(start=0.5, **GROUPS)
    fit(module, [callback])
    held = dict(callback.masks)
    fit(module, [callback, probe := Probe(callback)])
    assert same(callback.masks, held)
    assert set(probe.kept) == {24}


@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_resumed_run_equals_a_straight_one(half, net, fit, recipes, tmp_path):
    recipe, options = recipes["momentum, decay"], {"start": 0.5, **GROUPS}
    straight, path = net(recipe), tmp_path / "half.ckpt"
    fit(straight, [NMPruning(**options)], recipe, epochs=4)
    callback = NMPruning(**options)

    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch + 1 == half:
                trainer.save_checkpoint(path)

    fit(net(recipe), [callback, Save()], recipe, epochs=4)
    resumed = net(recipe, seed=9)
    fit(resumed, [NMPruning(**options)], recipe, epochs=4, ckpt_path=path)
    torch.testing.assert_close(dict(resumed.named_parameters()), dict(straight.named_parameters()), rtol=0, atol=0)


def test_channels_of_a_convolution(net, fit):
    module = net()
    module.net[0] = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 9, 1), nn.Flatten())
    callback = NMPruning(dim=1, layers="type:Conv2d")
    fit(module, [callback], epochs=1)
    assert counts(callback.masks) == {"net.0.1.weight": 18}
    assert is_nm(callback.masks, dim=1)


@pytest.mark.parametrize("dim", [None, 1])
def test_groups_of_a_layer_with_its_inputs_first_lie_along_them(dim, net, fit):
    module = net()
    module.net[0] = Conv1D(9, 4)
    callback = NMPruning(n=1, m=2, dim=dim, layers="type:Conv1D")
    fit(module, [callback], epochs=1)
    assert (callback.masks["net.0.weight"].view(2, 2, 9).sum(1) == 1).all()


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_a_transposed_convolution_lie_along_its_inputs(groups, dim, net, fit):
    module = net()
    up = nn.ConvTranspose2d(4, 8, 3, groups=groups)
    module.net[0] = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), up, nn.Flatten(), nn.Linear(72, 9))
    callback = NMPruning(n=1, m=2, dim=dim, layers="type:ConvTranspose2d")
    fit(module, [callback], epochs=1)
    assert (callback.masks["net.0.1.weight"].view(2, 2, 8 // groups, 3, 3).sum(1) == 1).all()
    fit(module, [callback], epochs=1)
    with pytest.raises(InvalidOption, match=r"`NMPruning\(m=3\)`: the rows of `net.0.1.weight`"):
        fit(module, [NMPruning(m=3, layers="type:ConvTranspose2d")], epochs=1)


def test_groups_of_a_transposed_convolution_do_not_cross_those_of_the_layer():
    up = nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.ConvTranspose2d(8, 4, 3, groups=2))
    assert NMPruning(m=4).claims(up) == ("1.weight",)


def test_a_scored_checkpoint_of_a_transposed_convolution_is_known_to_be_pruned(net, fit, loader, tmp_path):
    def upsampled():
        module = net()
        module.net[0] = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.ConvTranspose2d(4, 9, 1), nn.Flatten())
        module.test_step = lambda batch: module.loss(batch)
        return module

    made, loaded = (NMPruning(n=1, m=2, layers="type:ConvTranspose2d") for _ in range(2))
    fit(upsampled(), [made], epochs=1).save_checkpoint(tmp_path / "pruned.ckpt")
    trainer = L.Trainer(accelerator="cpu", callbacks=[loaded], logger=False, enable_checkpointing=False, barebones=True)
    trainer.test(upsampled(), loader(), ckpt_path=tmp_path / "pruned.ckpt", verbose=False)
    assert loaded.shortfall() is None


def test_a_layer_that_cannot_be_cut_is_refused_if_it_is_chosen(net, fit):
    message = r"`NMPruning\(m=3\)`: the rows of `net.0.weight`, of shape \(9, 4\), .* groups of 3; add '!net.0.weight'"
    for layers in ("net*", ["net.0*", "net.2*"], "type:Linear"):
        with pytest.raises(InvalidOption, match=message):
            fit(net(), [NMPruning(layers=layers, **GROUPS)], epochs=1)
    for layers in (None, "!net.4*", ["net*", "!net.0.weight"]):
        callback = NMPruning(layers=layers, **GROUPS)
        fit(net(), [callback], epochs=1)
        assert list(callback.masks) == [name for name in CUT if layers != "!net.4*" or name != "net.4.weight"]


def test_no_layer_that_can_be_cut_is_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"`NMPruning\(m=7\)`: no layer has rows .* groups of 7; choose another"):
        fit(net(), [NMPruning(m=7)], epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, r"n=0\)`: expected a whole number from 1 to m = 4"),
        ({"n": 5}, "n=5"),
        ({"m": 0}, "m=0"),
        ({"start": 1.0}, "start=1.0"),
        ({"dim": -1}, "dim=-1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=f"`NMPruning.{message}"):
        NMPruning(**options)
