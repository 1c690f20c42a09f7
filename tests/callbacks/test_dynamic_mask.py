from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import DynamicMask
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import erk, kept_counts, uniform
from lightning_sparsefl.sparse.masks import changed, counts, same

WEIGHTS = ("net.0.weight", "net.2.weight", "net.4.weight")


class Probe(Callback):
    """After every batch, seen from behind: what the mask drops is zero, for the optimizer too; masks by step."""

    def __init__(self, callback):
        self.callback, self.masks, self.buffers = callback, [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.masks.append({name: mask.clone() for name, mask in self.callback.masks.items()})
        for name, mask in self.callback.masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            for buffer in trainer.optimizers[0].state[weight].values():
                if buffer is not None and buffer.shape == mask.shape:
                    assert not buffer[~mask].any()
                    self.buffers += 1


def by_paper(slow, masks, options, total):
    """Algorithm 1 of RigL for `by_hand`: moves the masks in place, one weight at a time."""
    state = {"step": 0, "draws": 0}
    last = math.ceil(options["stop"] * total)

    def before_step(parameters, optimizer):
        step, state["step"] = state["step"], state["step"] + 1
        if step == 0 or step % options["every_n_steps"] or step >= last:
            return
        share = options["fraction"] / 2 * (1 + math.cos(math.pi * step / last))
        state["draws"] += 1
        draws = generator(options["seed"], "grow", state["draws"])
        for name, mask in masks.items():
            weight = parameters[name]
            old = {name: mask.numpy().copy()}
            left = slow.prune({name: weight.abs().numpy()}, old, share)
            grow = torch.rand(mask.shape, generator=draws) if options["growth"] == "random" else weight.grad.abs()
            new = slow.regrow({name: grow.numpy()}, left, {name: int(old[name].sum())})[name]
            mask.copy_(torch.from_numpy(new))
            gone = torch.from_numpy(new != old[name])
            weight[gone] = 0
            for value in optimizer.state[weight].values():
                if value is not None and value.shape == mask.shape:
                    value[gone] = 0

    def mask_gradients(parameters):
        for name, mask in masks.items():
            parameters[name].grad[~mask] = 0

    def mask_weights(parameters):
        for name, mask in masks.items():
            parameters[name][~mask] = 0

    return {"before_step": before_step, "edit_gradients": mask_gradients, "edit_weights": mask_weights}


@pytest.mark.parametrize("growth", ["gradient", "random"])
def test_it_trains_as_on_paper(growth, net, fit, by_hand, recipe, slow):
    options = {"growth": growth, "fraction": 0.5, "every_n_steps": 2, "stop": 0.8, "seed": 3}
    module, callback = net(recipe), DynamicMask(density=0.4, rescale=False, **options)
    probe = Probe(callback)
    fit(module, [callback, probe], recipe, epochs=4)
    first = {name: mask.clone() for name, mask in probe.masks[0].items()}
    total = 4 * (3 if recipe.accumulate == 2 else 5)
    expected = by_hand(net(recipe), recipe, epochs=4, **by_paper(slow, first, options, total))
    assert same(callback.masks, first)  # by now moved by hand
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)
    assert changed(probe.masks[0], probe.masks[-1]) > 0.1
    has_buffers = module.configure_optimizers().defaults.get("momentum") != 0
    assert (probe.buffers > 0) == has_buffers


@pytest.mark.parametrize(("layer_density", "spread"), [("erk", erk), ("uniform", uniform)])
def test_density_never_changes(layer_density, spread, net, fit):
    module, callback = net(), DynamicMask(density=0.3, layer_density=layer_density, every_n_steps=1, stop=1.0)
    probe = Probe(callback)
    fit(module, [callback, probe])
    shapes = {name: module.get_parameter(name).shape for name in WEIGHTS}
    wanted = kept_counts(shapes, spread(shapes, 0.3))
    assert [counts(masks) for masks in probe.masks] == [wanted] * 15


def test_the_mask_moves_when_it_is_time_and_less_and_less(net, fit):
    callback = DynamicMask(density=0.5, growth="random", fraction=0.8, every_n_steps=4, stop=0.75)
    probe = Probe(callback)
    fit(net(), [callback, probe], epochs=4)
    moved = [changed(a, b) for a, b in zip(probe.masks, probe.masks[1:], strict=False)]
    assert [step for step, share in enumerate(moved, 1) if share] == [4, 8, 12]
    assert moved[3] > moved[7] > moved[11]


def test_gradients_grow_where_they_are_largest(net, fit):
    """A layer's grown weights have larger dense gradients than every weight that stayed dropped."""

    class Gradients(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.last = {name: pl_module.get_parameter(name).grad.abs().clone() for name in WEIGHTS}
            self.before = {name: mask.clone() for name, mask in callback.masks.items()}

    class Grown(Callback):
        found = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, mask in callback.masks.items():
                grown, out = mask & ~seen.before[name], ~mask & ~seen.before[name]
                if grown.any() and out.any():
                    self.found += 1
                    assert seen.last[name][grown].min() >= seen.last[name][out].max()

    callback, seen, grown = DynamicMask(density=0.3, every_n_steps=2), Gradients(), Grown()
    fit(net(), [seen, callback, grown])
    assert grown.found > 5


def test_bf16_mixed_grows_too(net, fit, recipes):
    callback = DynamicMask(density=0.3, every_n_steps=2)
    probe, module = Probe(callback), net(recipes["momentum, decay"])
    fit(module, [callback, probe], recipes["momentum, decay"], precision="bf16-mixed")
    assert module.net[0].weight.dtype == torch.float32
    assert changed(probe.masks[0], probe.masks[-1]) > 0.1


class Overflows(Callback):
    """One step has gradients that are not finite."""

    def __init__(self, at):
        self.at = at

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.at:
            pl_module.net[2].weight.grad[0, 0] = float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            pl_module.net[2].weight.nan_to_num_(nan=0.5, posinf=0.5, neginf=0.5)


def test_a_move_waits_for_finite_gradients(net, fit):
    callback = DynamicMask(density=0.3, every_n_steps=4, growth="random")
    probe = Probe(callback)
    fit(net(), [Overflows(4), callback, probe], epochs=2)
    moves = {
        name: [step for step in range(1, 10) if not torch.equal(probe.masks[step][name], probe.masks[step - 1][name])]
        for name in WEIGHTS[:2]
    }
    assert moves == {"net.0.weight": [4], "net.2.weight": [5]}


def test_a_layer_that_does_not_train_keeps_its_mask(net, fit):
    options = {"density": 0.4, "every_n_steps": 1, "growth": "random", "stop": 1.0, "layers": ["net.*"]}
    module, callback = net(), DynamicMask(**options)
    module.net[0].requires_grad_(False)
    probe = Probe(callback)
    fit(module, [callback, probe])
    assert torch.equal(probe.masks[0][WEIGHTS[0]], probe.masks[-1][WEIGHTS[0]])
    assert not torch.equal(probe.masks[0][WEIGHTS[1]], probe.masks[-1][WEIGHTS[1]])


def test_a_dense_layer_has_nowhere_to_move(net, fit):
    plain, module = net(), net()
    fit(plain, [])
    fit(module, [DynamicMask(density=1.0, every_n_steps=1)])
    for name, weight in plain.named_parameters():
        assert torch.equal(module.get_parameter(name), weight)


def test_a_second_fit_goes_on_with_the_masks(net, fit):
    module, callback = net(), DynamicMask(density=0.4, every_n_steps=2, growth="random")
    fit(module, [callback])
    before = {name: mask.clone() for name, mask in callback.masks.items()}
    probe = Probe(callback)
    fit(module, [callback, probe])
    assert same(probe.masks[0], before)
    assert not same(probe.masks[-1], before)
    assert counts(callback.masks) == counts(before)


def test_a_mask_that_never_moves_is_told(net, fit):
    with pytest.warns(UserWarning, match=r"every_n_steps=77\)` never moves its mask, since moves end at step 12 of 15"):
        fit(net(), [DynamicMask(every_n_steps=77)])


def test_random_growth_follows_from_the_seed(net, fit):
    ends = []
    for seed in (0, 0, 1):
        callback = DynamicMask(density=0.5, growth="random", every_n_steps=2, seed=seed)
        fit(net(), [callback])
        ends.append(np.concatenate([mask.numpy().ravel() for mask in callback.masks.values()]))
    assert (ends[0] == ends[1]).all()
    assert (ends[0] != ends[2]).any()
