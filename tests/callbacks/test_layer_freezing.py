from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GradualPruning,
    LayerFreezing,
    PowerPropagation,
)
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption

BODY = ("net.0.weight", "net.0.bias")


def frozen(module, *names):
    return {name: torch.zeros_like(module.get_parameter(name), dtype=torch.bool) for name in names}


def partly(module):
    """Some entries of a weight and of a bias may change, all of another weight."""
    rng = torch.Generator().manual_seed(1)
    return {
        "net.2.weight": torch.rand(module.net[2].weight.shape, generator=rng) < 0.5,
        "net.2.bias": torch.arange(6) < 2,
        "net.4.weight": torch.ones(3, 6, dtype=torch.bool),
    }


def copied(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Probe(Callback):
    """After every batch: frozen entries have their first value, to the bit."""

    def __init__(self, trainable, start):
        self.trainable, self.start, self.batches = trainable, start, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        for name, mask in self.trainable.items():
            assert torch.equal(pl_module.get_parameter(name)[~mask], self.start[name][~mask])


class Backward(Callback):
    """Which parameters and activations the backward pass reaches."""

    def __init__(self):
        self.graded, self.reached = set(), set()

    def on_fit_start(self, trainer, pl_module):
        for place in (0, 2, 4):
            pl_module.net[place].register_forward_hook(
                lambda layer, inputs, output, place=place: self.reached.add(place) if output.requires_grad else None
            )

    def on_after_backward(self, trainer, pl_module):
        self.graded |= {name for name, parameter in pl_module.named_parameters() if parameter.grad is not None}


def test_a_frozen_layer_gets_no_gradient(net, fit, by_hand, recipe):
    module = net(recipe)
    start, trainable = copied(module), frozen(module, *BODY)
    probe, backward = Probe(trainable, start), Backward()
    fit(module, [LayerFreezing(trainable), probe, backward], recipe)
    assert probe.batches == 15
    assert backward.graded == set(start) - set(BODY)
    assert backward.reached == {2, 4}  # the backward pass stops below the earliest trainable layer
    assert all(parameter.requires_grad for parameter in module.parameters())

    alone = net(recipe)
    for name in BODY:
        alone.get_parameter(name).requires_grad_(False)
    torch.testing.assert_close(copied(module), by_hand(alone, recipe), rtol=0, atol=1e-6)


def test_frozen_entries_keep_their_values(net, fit, by_hand, recipe):
    module = net(recipe)
    start, trainable = copied(module), partly(module)
    probe = Probe(trainable, start)
    fit(module, [LayerFreezing(trainable), probe], recipe)
    assert probe.batches == 15
    for name, mask in trainable.items():
        assert (module.get_parameter(name) != start[name])[mask].any()

    def mask_gradients(parameters):
        for name, mask in trainable.items():
            parameters[name].grad *= mask

    def restore(parameters):
        for name, mask in trainable.items():
            parameters[name][~mask] = start[name][~mask]

    expected = by_hand(net(recipe), recipe, edit_gradients=mask_gradients, edit_weights=restore)
    torch.testing.assert_close(copied(module), expected, rtol=0, atol=1e-6)


def test_an_average_in_front_of_it_keeps_frozen_entries(net, fit, recipes):
    module = net(recipes["momentum, decay"])
    start, trainable = copied(module), partly(module)
    fit(module, [EMAWeightAveraging(decay=0.5), LayerFreezing(trainable)], recipes["momentum, decay"])
    for name, mask in trainable.items():
        assert torch.equal(module.get_parameter(name)[~mask], start[name][~mask])


@pytest.mark.parametrize("order", [1, -1])
def test_a_frozen_entry_that_is_pruned_stays_zero(net, fit, recipes, order):
    module = net(recipes["momentum, decay"])
    pruning = GradualPruning(density=0.3, every_n_steps=2)

    class Held(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, mask in pruning.masks.items():
                assert (pl_module.get_parameter(name)[~mask] == 0).all()

    fit(module, [*[LayerFreezing(partly(module)), pruning][::order], Held()], recipes["momentum, decay"])


def test_nothing_frozen_is_plain_training(net, fit, by_hand, recipe):
    module = net(recipe)
    everything = {name: torch.ones_like(p, dtype=torch.bool) for name, p in module.named_parameters()}
    fit(module, [LayerFreezing(everything)], recipe)
    torch.testing.assert_close(copied(module), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)


def test_one_object_serves_several_fits(net, fit):
    callback = LayerFreezing(frozen(net(), *BODY) | partly(net()))
    for seed in (1, 2):
        module = net(seed=seed)
        probe = Probe(callback.trainable, copied(module))
        fit(module, [callback, probe])
        assert probe.batches == 15


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_that_are_made_or_compiled_later_are_frozen(net, fit, hook):
    module = net()
    body, trainable = module.net[0], frozen(module, *BODY) | partly(module)
    start = [value.clone() for value in copied(module).values()]

    def make(**_):
        module.net[0] = torch.compile(body, backend="eager")

    del module.net[0]
    module.net.insert(0, torch.nn.Identity())
    setattr(module, hook, make)
    fit(module, [LayerFreezing(trainable)])
    for value, first, mask in zip(module.parameters(), start, masks_of(module, trainable), strict=True):
        assert torch.equal(value[~mask], first[~mask])
        assert not mask.any() or not torch.equal(value, first)


def masks_of(module, trainable):
    """Masks of all parameters, in their order."""
    plain = {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}
    return [trainable.get(name, torch.ones_like(p, dtype=torch.bool)) for name, p in plain.items()]


def test_a_layer_without_a_shape_is_refused(net, fit):
    module = net()
    trainable = frozen(module, *BODY)
    module.net[0] = torch.nn.LazyLinear(9)
    with pytest.raises(InvalidOption, match=r"`LayerFreezing`: `net.0.weight` has no shape yet"):
        fit(module, [LayerFreezing(trainable)])


def test_a_module_with_nothing_left_to_train_is_refused(net, fit):
    module = net()
    everything = frozen(module, *dict(module.named_parameters()))
    with pytest.raises(InvalidOption, match="no parameter of the module is left to train; expected one that may"):
        fit(module, [LayerFreezing(everything)])
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_what_the_user_froze_stays_frozen(net, fit):
    module = net()
    module.net[2].requires_grad_(False)
    fit(module, [LayerFreezing(frozen(module, *BODY, "net.2.weight"))])
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, False, True, True]


def test_a_resumed_run_equals_a_straight_one(net, fit, recipes, tmp_path):
    recipe = recipes["adamw, clipped, accumulated"]
    straight, path = net(recipe), tmp_path / "half.ckpt"
    trainable = frozen(straight, *BODY) | partly(straight)
    fit(straight, [LayerFreezing(trainable)], recipe, epochs=4)
    fit(net(recipe), [LayerFreezing(trainable)], recipe, epochs=2).save_checkpoint(path)
    resumed = net(recipe, seed=9)
    fit(resumed, [LayerFreezing(trainable)], recipe, epochs=4, ckpt_path=path)
    torch.testing.assert_close(copied(resumed), copied(straight), rtol=0, atol=0)


MOVING = {
    "RigL": lambda: DynamicMask(density=0.5, every_n_steps=2, fraction=0.5, stop=1.0),
    "feedback": lambda: DynamicPruningWithFeedback(density=0.5, every_n_steps=2),
    "powers": PowerPropagation,
}


@pytest.mark.parametrize(("kind", "order"), [(kind, order) for kind in MOVING for order in (1, -1)][:-1])
def test_a_resumed_run_equals_a_straight_one_beside_what_moves_frozen_values(kind, order, net, fit, recipes, tmp_path):
    recipe = recipes["momentum, decay"]

    def callbacks():
        return [MOVING[kind](), LayerFreezing(partly(net()))][::order]

    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 10:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    straight, resumed = net(recipe), net(recipe, seed=9)
    fit(straight, [*callbacks(), Saves()], recipe, epochs=4)
    fit(resumed, callbacks(), recipe, epochs=4, ckpt_path=tmp_path / "mid.ckpt")
    torch.testing.assert_close(copied(resumed), copied(straight), rtol=0, atol=0)


def test_a_resumed_run_may_freeze_other_entries(net, fit, tmp_path):
    trainable = partly(net())
    other = {"net.2.weight": ~trainable["net.2.weight"]}
    fit(first := net(), [LayerFreezing(trainable)], epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    before = first.get_parameter("net.2.weight")[~other["net.2.weight"]].clone()
    fit(second := net(seed=9), [LayerFreezing(other)], epochs=3, ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(second.get_parameter("net.2.weight")[~other["net.2.weight"]], before)


def test_entries_that_are_frozen_as_powers_keep_their_values(net, fit, recipes):
    module = net(recipes["momentum, decay"])
    trainable, start = partly(module), copied(module)
    callbacks = [PowerPropagation(), LayerFreezing(trainable)]
    for _ in range(2):  # the second fit starts with the theta of the first
        fit(module, callbacks, recipes["momentum, decay"])
        for name, mask in trainable.items():
            torch.testing.assert_close(module.get_parameter(name)[~mask], start[name][~mask])
    message = "`LayerFreezing` comes before `PowerPropagation`, which trains `net.2.weight` as a function of other"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [LayerFreezing(trainable), PowerPropagation()])
    fit(net(), [LayerFreezing(trainable), PowerPropagation(layers="net.0.weight")])


class Fails(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        raise RuntimeError("half way")


def test_a_run_that_fails_leaves_nothing_frozen(net, fit):
    module = net()
    with pytest.raises(RuntimeError, match="half way"):
        fit(module, [LayerFreezing(frozen(module, *BODY)), Fails()])
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ({"net.9.weight": torch.ones(3, 6, dtype=torch.bool)}, "`net.9.weight` is not among the weights"),
        ({"net.4.weight": torch.ones(6, 3, dtype=torch.bool)}, r"has shape \(6, 3\), expected \(3, 6\)"),
        ({"net.4.weight": torch.ones(3, 6)}, "expected torch.bool"),
    ],
)
def test_masks_that_do_not_fit_are_refused(net, fit, trainable, message):
    with pytest.raises(IncompatibleMasks, match=message):
        fit(net(), [LayerFreezing(trainable)])
