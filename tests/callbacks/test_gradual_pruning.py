from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import GradualPruning
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import counts, density, kept, same

SIZES = {"net.0.weight": 36, "net.2.weight": 54, "net.4.weight": 18}


class Probe(Callback):
    """Masks after every batch; weights and the optimizer's buffers are zero where they are."""

    def __init__(self, callback):
        self.callback, self.masks = callback, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.masks.append({name: mask.clone() for name, mask in self.callback.masks.items()})
        for name, mask in self.callback.masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            for buffer in trainer.optimizers[0].state[weight].values():
                if buffer is not None and buffer.shape == mask.shape:
                    assert not buffer[~mask].any()


def pruned(slow, score, masks, target, scope):
    if scope == "global":
        return slow.shrink_globally(score, masks, int(target * sum(SIZES.values()) + 1e-9))
    wanted = slow.kept_counts({name: mask.shape for name, mask in masks.items()}, dict.fromkeys(masks, target))
    return slow.shrink(score, masks, wanted)


def forget(optimizer, weight, mask):
    for value in optimizer.state[weight].values():
        if value is not None and value.shape == mask.shape:
            value[~mask] = 0


def by_paper(slow, masks, window, every, final, scope):
    """Zhu and Gupta for `by_hand`: prunes after the step, in place, one weight at a time."""
    state = {}

    def before_step(parameters, optimizer):
        state["optimizer"], state["step"] = optimizer, state.get("step", 0) + 1

    def mask_gradients(parameters):
        for name, mask in masks.items():
            parameters[name].grad[~mask] = 0

    def after_step(parameters):
        if state and slow.recurs(state["step"], *window, every):
            target = slow.gradual(1, final, state["step"], *window)
            score = {name: parameters[name].abs().numpy() for name in masks}
            new = pruned(slow, score, {name: mask.numpy() for name, mask in masks.items()}, target, scope)
            for name, mask in masks.items():
                mask.copy_(torch.from_numpy(new[name]))
                forget(state["optimizer"], parameters[name], mask)
        for name, mask in masks.items():
            parameters[name][~mask] = 0

    return {"before_step": before_step, "edit_gradients": mask_gradients, "edit_weights": after_step}


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_it_trains_as_on_paper(scope, net, fit, by_hand, recipe, slow):
    module = net(recipe)
    callback = GradualPruning(density=0.3, start=0.1, end=0.7, every_n_steps=3, scope=scope)
    probe = Probe(callback)
    fit(module, [callback, probe], recipe, epochs=4)
    total = 4 * (3 if recipe.accumulate == 2 else 5)
    window = (total // 10, -(-total * 7 // 10))
    masks = {name: torch.ones_like(mask) for name, mask in callback.masks.items()}
    expected = by_hand(net(recipe), recipe, epochs=4, **by_paper(slow, masks, window, 3, 0.3, scope))
    assert same(callback.masks, masks)
    torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=1e-6)
    assert len({kept(masks) for masks in probe.masks}) > 3


@pytest.mark.parametrize("every", [1, 4, 100])
def test_every_layer_has_its_density_at_every_step(every, net, fit, slow):
    module, callback = net(), GradualPruning(density=0.5, start=0.2, end=0.8, every_n_steps=every)
    probe = Probe(callback)
    fit(module, [callback, probe], epochs=4)  # 20 steps: the window is 4 to 16
    moves = [step for step in range(21) if slow.recurs(step, 4, 16, every)]
    for step, masks in enumerate(probe.masks, 1):
        last = max((move for move in moves if move <= step), default=0)
        share = slow.gradual(1, 0.5, last, 4, 16)
        assert counts(masks) == {name: int(share * size + 1e-9) for name, size in SIZES.items()}
    assert density(callback.masks) == 0.5


def test_what_was_dropped_stays_so(net, fit):
    callback = GradualPruning(density=0.1, every_n_steps=1, scope="global", end=1.0)
    probe = Probe(callback)
    fit(net(), [callback, probe])
    for before, after in zip(probe.masks, probe.masks[1:], strict=False):
        assert not any((after[name] & ~before[name]).any() for name in SIZES)
    assert kept(callback.masks) == int(0.1 * sum(SIZES.values()))


def test_global_leaves_the_largest_of_all_layers(net, fit, recipes):
    still = recipes["sgd"]._replace(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0))
    module, callback = net(still), GradualPruning(density=0.4, scope="global", end=1.0, every_n_steps=100)
    with torch.no_grad():
        module.net[0].weight.mul_(100)
    fit(module, [callback], still)  # prunes once, after the last step
    assert counts(callback.masks)["net.0.weight"] == 36
    assert kept(callback.masks) == int(0.4 * 108)


def test_fits_compound_from_the_density_that_was_reached(net, fit):
    module, callback = net(), GradualPruning(density=0.5, every_n_steps=2, end=1.0)
    fit(module, [callback])
    held = dict(callback.masks)
    assert density(held) == 0.5
    fit(module, [callback])
    assert same(callback.masks, held)
    callback.density = 0.2
    probe = Probe(callback)
    fit(module, [callback, probe])
    densities = [density(masks) for masks in probe.masks]
    assert densities[0] == 0.5
    assert densities == sorted(densities, reverse=True)
    assert counts(callback.masks) == {name: int(0.2 * size) for name, size in SIZES.items()}


@pytest.mark.parametrize(
    ("scope", "message"),
    [("layer", "`net.0.weight` has 18 weights left, fewer"), ("global", "`all layers` has 54 weights left, fewer")],
)
def test_a_density_above_the_one_that_was_reached_is_refused(scope, message, net, fit):
    module, callback = net(), GradualPruning(density=0.5, every_n_steps=2, end=1.0, scope=scope)
    fit(module, [callback])
    callback.density = 0.9
    with pytest.raises(InvalidOption, match=message + ".* what was dropped stays so; expected a lower density"):
        fit(module, [callback])


@pytest.mark.parametrize("spread", ["erk", {"net.0*": 0.75, "net.[2]*": 1.0}])
def test_every_layer_may_end_at_a_density_of_its_own(spread, net, fit, slow):
    module, callback = net(), GradualPruning(density=0.5, every_n_steps=3, end=0.8, layer_density=spread)
    probe = Probe(callback)
    fit(module, [callback, probe], epochs=4)
    shapes = {name: tuple(mask.shape) for name, mask in callback.masks.items()}
    final = slow.erk(shapes, 0.5) if spread == "erk" else dict(zip(SIZES, (0.75, 1.0, 0.5), strict=True))
    moves = [step for step in range(21) if slow.recurs(step, 0, 16, 3)]
    for step, masks in enumerate(probe.masks, 1):
        last = max(move for move in moves if move <= step)
        assert counts(masks) == {
            name: int(float(slow.gradual(1, final[name], last, 0, 16)) * size + 1e-9) for name, size in SIZES.items()
        }
    assert len(set(final.values())) > 1


def test_density_1_is_dense_training(net, fit, by_hand, recipe):
    module = net(recipe)
    fit(module, [GradualPruning(density=1.0, every_n_steps=1)], recipe)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)
