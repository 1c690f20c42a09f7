from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GlobalMagnitudePruning, ProximalTerm, SparsityMonitor, StaticMask
from lightning_sparsefl.errors import InvalidOption

LAYERS = ("net.0.weight", "net.2.weight", "net.4.weight")


class Logged(Callback):
    """What is logged at each epoch's end, and where zeros are then."""

    def __init__(self):
        self.rows, self.zeros = [], []

    def on_train_start(self, trainer, pl_module):
        self.note(pl_module)

    def note(self, pl_module):
        self.zeros.append(torch.cat([pl_module.get_parameter(name).detach().flatten() == 0 for name in LAYERS]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.note(pl_module)


def run(fit, module, callbacks, **options):
    logged = Logged()
    trainer = fit(module, [*callbacks, logged], **options)
    return logged, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_it_counts_zeros_whoever_made_them(net, fit):
    callback = GlobalMagnitudePruning(fraction=0.5, epochs=[0, 2])
    logged, last = run(fit, net(), [callback, SparsityMonitor()], epochs=3)
    dense = [float((~zeros).double().mean()) for zeros in logged.zeros]
    moved = [float((a ^ b).double().mean()) for a, b in zip(logged.zeros, logged.zeros[1:], strict=False)]
    assert last["sparsity/density"] == pytest.approx(dense[-1])
    assert last["mask/changed"] == pytest.approx(moved[-1])
    assert moved == pytest.approx([0.5, 0.0, 0.25])
    for name in LAYERS:
        kept = callback.masks[name]
        assert last[f"sparsity/layer/{name}"] == pytest.approx(float(kept.double().mean()))
    assert len(last) == 5


def test_without_a_mask_nothing_is_zero(net, fit):
    module = net()
    with torch.no_grad():
        module.net[4].weight[0] = 0  # and comes to life
    _, last = run(fit, module, [SparsityMonitor(per_layer=False), ProximalTerm()], epochs=1)
    assert last.keys() == {"sparsity/density", "mask/changed"}
    assert last["sparsity/density"] == 1.0
    assert last["mask/changed"] == pytest.approx(6 / 108)


def test_only_chosen_layers_and_only_some_epochs(net, fit):
    seen = []

    class Spy(SparsityMonitor):
        def on_train_epoch_end(self, trainer, pl_module):
            before, log = len(seen), pl_module.log_dict
            pl_module.log_dict = seen.append
            super().on_train_epoch_end(trainer, pl_module)
            pl_module.log_dict = log
            assert len(seen) - before == ((trainer.current_epoch + 1) % 2 == 0)

    fit(net(), [StaticMask(0.5, "uniform"), Spy(every_n_epochs=2, layers="net.0*")], epochs=5)
    expected = {"sparsity/density": 0.5, "sparsity/layer/net.0.weight": 0.5, "mask/changed": 0.0}
    assert seen == [expected] * 2


def test_it_changes_nothing(net, fit, recipe):
    plain, watched = net(recipe), net(recipe)
    fit(plain, [], recipe)
    fit(watched, [SparsityMonitor()], recipe)
    for name, weight in plain.named_parameters():
        assert torch.equal(watched.get_parameter(name), weight)


def test_drift_goes_on_over_a_resume(net, fit, tmp_path):
    def callbacks():
        return [GlobalMagnitudePruning(fraction=0.5, epochs=[0, 1]), SparsityMonitor(every_n_epochs=2)]

    _, straight = run(fit, net(), callbacks(), epochs=2)
    fit(net(), callbacks(), epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    _, resumed = run(fit, net(), callbacks(), epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert resumed == straight
    assert straight["mask/changed"] == pytest.approx(0.75)


def test_options_are_checked(net, fit):
    with pytest.raises(InvalidOption, match="every_n_epochs=0"):
        SparsityMonitor(every_n_epochs=0)
    with pytest.raises(InvalidOption, match=r"`SparsityMonitor`: the pattern 'conv\*' in `layers` matches no layer"):
        fit(net(), [SparsityMonitor(layers="conv*")], epochs=1)
