from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GlobalMagnitudePruning
from lightning_sparsefl.sparse.masks import counts, kept, same

TOTAL = 36 + 54 + 18
WEIGHTS = ("net.0.weight", "net.2.weight", "net.4.weight")


class Probe(Callback):
    """Kept weights after every epoch; weights and the optimizer's buffers are zero where they are dropped."""

    def __init__(self, callback):
        self.callback, self.kept = callback, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, mask in self.callback.masks.items():
            weight = pl_module.get_parameter(name)
            assert torch.equal(weight != 0, mask)
            for buffer in trainer.optimizers[0].state[weight].values():
                if buffer is not None and buffer.shape == mask.shape:
                    assert not buffer[~mask].any()

    def on_train_epoch_end(self, trainer, pl_module):
        self.kept.append(kept(self.callback.masks))


def after(fraction, times, start=TOTAL):
    for _ in range(times):
        start -= math.ceil(fraction * start)
    return start


def test_a_trainer_that_goes_on_has_missed_no_epoch(net, fit, loader):
    module, callback = net(), GlobalMagnitudePruning(fraction=0.5, epochs=[0])
    trainer = fit(module, [callback], epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert callback.shortfall() is None
    assert kept(callback.masks) == after(0.5, 1)
    late, trainer.fit_loop.max_epochs = GlobalMagnitudePruning(fraction=0.5, epochs=[0]), 3
    trainer.callbacks.remove(callback)
    trainer.callbacks.append(late)
    with pytest.warns(UserWarning, match=r"epochs \[0\]") as said:
        trainer.fit(module, loader())
    for words in ("does not prune at epochs [0], since the fit begins with epoch 2", "before epochs [0] pruned"):
        assert any(words in str(each.message) for each in said)


def test_epochs_before_the_first_one_of_a_fit_are_named_also_where_later_ones_prune(net, fit, loader):
    module = net()
    trainer = fit(module, [], epochs=1)
    callback, trainer.fit_loop.max_epochs = GlobalMagnitudePruning(fraction=0.5, epochs=[0, 1]), 2
    trainer.callbacks.append(callback)
    with pytest.warns(UserWarning, match=r"epochs \[0\]") as said:
        trainer.fit(module, loader())
    assert any("(epochs=[0, 1])` does not prune at epochs [0]" in str(each.message) for each in said)
    assert kept(callback.masks) == after(0.5, 1)
    assert callback.shortfall() == "at density 0.5, before epochs [0] pruned"
    again = GlobalMagnitudePruning(fraction=0.5, epochs=[0, 1])
    again.load_state_dict(callback.state_dict())
    assert again.shortfall() == callback.shortfall()


def test_one_shot_leaves_the_largest(net, fit, by_hand, recipe):
    module, callback = net(recipe), GlobalMagnitudePruning(fraction=0.7)
    before = torch.cat([module.get_parameter(name).detach().abs().flatten() for name in WEIGHTS])
    probe = Probe(callback)
    fit(module, [callback, probe], recipe)
    assert probe.kept == [after(0.7, 1)] * 3
    held = torch.cat([callback.masks[name].flatten() for name in WEIGHTS])
    assert before[held].min() > before[~held].max()

    def mask_gradients(parameters):
        for name, mask in callback.masks.items():
            parameters[name].grad[~mask] = 0

    def mask_weights(parameters):
        for name, mask in callback.masks.items():
            parameters[name][~mask] = 0

    expected = by_hand(net(recipe), recipe, edit_gradients=mask_gradients, edit_weights=mask_weights)
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)


def test_it_prunes_at_its_epochs(net, fit, recipe):
    callback = GlobalMagnitudePruning(fraction=0.3, epochs=[1, 3])
    probe = Probe(callback)
    fit(net(recipe), [callback, probe], recipe, epochs=5)
    assert probe.kept == [TOTAL, *[after(0.3, 1)] * 2, *[after(0.3, 2)] * 2]


def test_three_fits_compound(net, fit):
    """Unlike Lightning's `ModelPruning`, which begins anew."""
    module, callback, left = net(), GlobalMagnitudePruning(fraction=0.5), []
    for _ in range(3):
        fit(module, [callback], epochs=1)
        left.append(sum(int((module.get_parameter(name) != 0).sum()) for name in WEIGHTS))
    assert left == [after(0.5, times) for times in (1, 2, 3)] == [54, 27, 13]


@pytest.mark.filterwarnings("ignore:.*before epochs .2. pruned")
def test_one_trainer_that_fits_twice_goes_on_with_its_epochs(net, fit):
    callback, module = GlobalMagnitudePruning(fraction=0.5, epochs=[0, 2]), net()
    trainer = fit(module, [callback], epochs=2)
    assert kept(callback.masks) == 54
    trainer.fit_loop.max_epochs = 3
    x = torch.randn(20, 4)
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), 4))
    assert kept(callback.masks) == 27


@pytest.mark.filterwarnings("ignore:.*before epochs .1. pruned")
def test_a_resumed_fit_does_not_prune_an_epoch_twice(net, fit, tmp_path):
    options = {"fraction": 0.5, "epochs": [0, 1]}
    fit(net(), [GlobalMagnitudePruning(**options)], epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    callback = GlobalMagnitudePruning(**options)
    probe = Probe(callback)
    fit(net(seed=3), [callback, probe], epochs=3, ckpt_path=tmp_path / "one.ckpt")
    assert probe.kept == [27, 27]


def test_a_fit_that_is_resumed_after_the_last_batch_of_an_epoch_prunes_in_the_next(net, fit, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.is_last_batch:
                trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    callbacks = [GlobalMagnitudePruning(fraction=0.5, epochs=[0, 2]) for _ in range(3)]
    fit(net(), [callbacks[0], Save()], epochs=3)
    for last, callback in enumerate(callbacks[1:]):
        fit(net(seed=3), [callback], epochs=3, ckpt_path=tmp_path / f"{last}.ckpt")
        assert same(callback.masks, callbacks[0].masks)


@pytest.mark.parametrize("epochs", [None, [0, 1]])
def test_fraction_0_is_dense_training(epochs, net, fit, by_hand, recipes):
    recipe, module = recipes["momentum, decay"], net(recipes["momentum, decay"])
    callback = GlobalMagnitudePruning(fraction=0, epochs=epochs)
    fit(module, [callback], recipe)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)
    assert sum(counts(callback.masks).values()) == TOTAL


def test_state_dict_round_trip(net, fit):
    callback, other = GlobalMagnitudePruning(fraction=0.6), GlobalMagnitudePruning(fraction=0.1)
    fit(net(), [callback], epochs=1)
    other.load_state_dict(callback.state_dict())
    assert same(callback.masks, other.masks)
