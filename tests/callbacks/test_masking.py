"""What every callback that masks weights does alike."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.swa_utils import AveragedModel

from helpers.conv1d import Conv1D
from helpers.masking import KINDS, PRUNERS, kept_of
from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradientOffset,
    GradualPruning,
    LayerFreezing,
    PowerPropagation,
    ProximalTerm,
    StaticMask,
)
from lightning_sparsefl.callbacks.magnitude_gate import MagnitudeGate
from lightning_sparsefl.callbacks.mask_owner import warning_cache
from lightning_sparsefl.callbacks.masking import forget
from lightning_sparsefl.callbacks.stacking.rows import RowOptimizer
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import same

pytestmark = pytest.mark.filterwarnings("ignore:.*never moves its mask.*")


@pytest.mark.parametrize("kind", KINDS)
def test_other_layers_are_left_dense(kind, net, fit):
    module, callback = net(), kind(layers=["!net.0*"])
    fit(module, [callback])
    assert list(callback.masks) == ["net.2.weight", "net.4.weight"]
    assert (module.net[0].weight != 0).all()
    assert (module.net[2].weight == 0).any()


def frozen(module):
    module.net[0].requires_grad_(False)
    return module


def with_a_teacher(module):
    module.ema, make = AveragedModel(module.net), module.optimizer
    own = set(module.net.parameters())
    module.optimizer = lambda parameters: make([parameter for parameter in parameters if parameter in own])
    return module


@pytest.mark.parametrize(
    ("change", "words", "without"),
    [
        (frozen, r"frozen weights, .*: 'net\.0\.weight'; leave them dense .*'!net\.0\.weight'", "!net.0*"),
        (
            with_a_teacher,
            r"weights that no optimizer steps, .*: 'ema\.module\.0\.weight' and 2 more; .*`layers=\['!ema\.\*'\]`",
            "!ema.*",
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_cannot_adapt_are_masked_with_a_warning_or_left_dense(kind, change, words, without, net, fit):
    warning_cache.clear()
    with pytest.warns(UserWarning, match=rf"`{kind.__name__}` masks {words}"):
        fit(change(net()), [kind()])
    warning_cache.clear()
    for layers in ([without], ["net.*"]):  # warnings are errors
        fit(change(net()), [kind(layers=layers)])


def test_zeros_of_frozen_layers_are_held_without_a_warning(net, fit):
    module = frozen(net())
    with torch.no_grad():
        module.net[0].weight[:, 0] = 0
    warning_cache.clear()
    fit(module, [StaticMask(masks="nonzero")])
    assert bool((module.net[0].weight[:, 1:] != 0).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
@pytest.mark.parametrize("kind", [DynamicMask, DynamicPruningWithFeedback])
def test_a_compiled_layer_trains_alike_and_resumes_uncompiled(kind, net, fit, tmp_path):
    plain, compiled, masks = net(), net(), []
    compiled.net[2] = torch.compile(compiled.net[2], backend="eager")
    for module, name in ((plain, "plain"), (compiled, "compiled")):
        callback = kind(density=0.4, every_n_steps=2, layers=["net.2.*", "net.4.*"])
        fit(module, [callback]).save_checkpoint(tmp_path / f"{name}.ckpt")
        masks.append(list(callback.masks.values()))
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(*masks, strict=True))
    content = torch.load(tmp_path / "compiled.ckpt", weights_only=True)
    content["state_dict"] = {name.replace("_orig_mod.", ""): value for name, value in content["state_dict"].items()}
    torch.save(content, tmp_path / "renamed.ckpt")
    callback = kind(density=0.4, every_n_steps=2, layers=["net.2.*", "net.4.*"])
    fit(net(seed=3), [callback], ckpt_path=tmp_path / "renamed.ckpt")
    assert list(callback.masks) == ["net.2.weight", "net.4.weight"]
    assert all(torch.equal(one, other) for one, other in zip(callback.masks.values(), masks[0], strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
def test_a_module_compiled_in_place_trains_alike(net, fit):
    plain, compiled = net(), net()
    compiled.net.compile(backend="eager")
    for module in (plain, compiled):
        fit(module, [DynamicMask(density=0.4, every_n_steps=2)])
    for name, weight in plain.named_parameters():
        assert torch.equal(compiled.get_parameter(name), weight)


def test_a_callback_lets_go_of_the_module(net, fit):
    for callback in (kind() for kind in KINDS):
        fit(net(), [callback], epochs=1)
        assert not callback._weights
        assert not callback._stencils


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (StaticMask, {"masks": {}, "layers": "net*"}, r"layers='net\*'\)`: expected None beside `masks`"),
        (DynamicMask, {"density": 0}, r"`DynamicMask\(density=0\)`: expected a number in \(0, 1\]"),
        (DynamicMask, {"layer_density": "magic"}, "expected 'erk' or 'uniform'"),
        (DynamicMask, {"growth": "magic"}, "expected 'gradient' or 'random'"),
        (DynamicMask, {"fraction": 1.5}, "fraction=1.5"),
        (DynamicMask, {"every_n_steps": 0}, "every_n_steps=0"),
        (DynamicMask, {"stop": 0}, "stop=0"),
        (GradualPruning, {"density": float("nan")}, "density=nan"),
        (GradualPruning, {"start": 1.0}, "start=1.0"),
        (GradualPruning, {"start": 0.5, "end": 0.5}, r"end=0.5\)`: expected a share of the training in \(start, 1\]"),
        (GradualPruning, {"every_n_steps": 0}, "every_n_steps=0"),
        (GradualPruning, {"scope": "magic"}, "expected 'layer' or 'global'"),
        (GlobalMagnitudePruning, {"fraction": 1.0}, "fraction=1.0"),
        (GlobalMagnitudePruning, {"epochs": []}, r"epochs=\[\]"),
        (GlobalMagnitudePruning, {"epochs": [2, -1]}, "numbers of epochs, from 0"),
        (DynamicPruningWithFeedback, {"density": 1.1}, "density=1.1"),
        (DynamicPruningWithFeedback, {"start": -0.1}, "start=-0.1"),
        (DynamicPruningWithFeedback, {"end": 1.1}, "end=1.1"),
        (DynamicPruningWithFeedback, {"every_n_steps": 0}, "every_n_steps=0"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, message):
    with pytest.raises(InvalidOption, match=message):
        kind(**options)


STILL = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    "Adam": {"weight_decay": 1e-2, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 0.5},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
}


class Counted(StaticMask):
    """Notes how often the weights are masked."""

    passes = 0

    def mask_weights(self, names=None):
        self.passes += 1
        super().mask_weights(names)


class Always(Counted):
    """Never trusts an optimizer."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._still = False


def optimized(net, name, options):
    module = net()
    module.configure_optimizers = lambda: getattr(torch.optim, name)(module.parameters(), **options)
    return module


@pytest.mark.parametrize("name", STILL)
def test_weights_that_an_optimizer_leaves_at_zero_need_no_masking(name, net, fit):
    modules = [optimized(net, name, STILL[name]) for _ in range(2)]
    quick, slow = Counted(0.3), Always(0.3)
    for module, callback in zip(modules, (quick, slow), strict=True):
        fit(module, [callback])
    assert quick.passes < 6 < slow.passes
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one, other)
        assert not torch.signbit(one[one == 0]).any()


@pytest.mark.parametrize(("name", "trusted"), [("SGD", True), ("Adamax", False), ("Adagrad", False)])
def test_in_half_precision_an_eps_that_is_zero_is_not_trusted(name, trusted, net, fit):
    module, callback = optimized(net, name, {"lr": 0.01}), Counted(0.3)
    fit(module, [callback], precision="16-true")
    assert (callback.passes < 6) == trusted
    parameters = dict(module.named_parameters())
    assert all((parameters[name][~mask] == 0).all() for name, mask in callback.masks.items())


@pytest.mark.parametrize(
    ("name", "options", "key", "first"),
    [("Rprop", {"lr": 0.02}, "step_size", 0.02), ("Adagrad", {"initial_accumulator_value": 0.1}, "sum", 0.1)],
)
def test_what_is_forgotten_is_what_it_was_at_first(name, options, key, first, net, fit):
    """A step size of 0 would stay so, and the weight with it once it is held again."""
    module, callback = optimized(net, name, options), GradualPruning(0.3)
    optimizer = fit(module, [callback]).optimizers[0]
    for name, mask in callback.masks.items():
        memory = optimizer.state[module.get_parameter(name)]
        torch.testing.assert_close(memory[key][~mask], torch.full_like(memory[key][~mask], first))
        assert not torch.allclose(memory[key][mask], torch.tensor(first))
        assert not any(memory[other][~mask].any() for other in ("prev",) if other in memory)


@pytest.mark.parametrize(
    ("make", "key", "first"),
    [
        (lambda leaves: torch.optim.Rprop(leaves, lr=0.02), "step_size", 0.02),
        (lambda leaves: torch.optim.Adagrad(leaves, initial_accumulator_value=0.1), "sum", 0.1),
    ],
    ids=["Rprop", "Adagrad"],
)
def test_a_client_of_a_stack_forgets_as_one_that_trains_alone(make, key, first):
    leaf = nn.Parameter(torch.ones(2, 3))
    optimizer = make([leaf])
    for slope in (1.0, 2.0):
        leaf.grad = torch.full_like(leaf, slope)
        optimizer.step()
    weight = nn.Parameter(torch.ones(3))
    row = RowOptimizer({"weight": weight}, 1)
    row.follow(optimizer, {id(leaf): "weight"})
    forget(row, weight, torch.tensor([True, False, True]))
    stacked = optimizer.state[leaf][key]
    assert float(stacked[1, 1]) == pytest.approx(first)
    assert not torch.isclose(stacked[[0, 0, 0, 1, 1], [0, 1, 2, 0, 2]], torch.tensor(first)).any()


def test_rprop_goes_on_with_the_step_sizes_of_dropped_weights(net, fit, tmp_path):
    """Its step size of a weight that has been dropped is the learning rate of that step, which a scheduler changes."""

    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    def fitted(*more, path=None):
        module = net()
        optimizer = torch.optim.Rprop(module.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        module.configure_optimizers = lambda: ([optimizer], [scheduler])
        fit(module, [DynamicMask(0.4, growth="random", every_n_steps=2), *more], epochs=5, ckpt_path=path)
        return module.state_dict()

    whole, resumed = fitted(Save()), fitted(path=tmp_path / "two.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


class Writer(Callback):
    """Writes all weights in one of the hooks."""

    def __init__(self, hook):
        def write(trainer, pl_module, *_, **__):
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.add_(0.01)

        setattr(self, hook, write)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step"])
def test_weights_that_others_write_are_masked(hook, net, fit):
    seen, callback = [], Counted(0.3)

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            parameters = dict(pl_module.named_parameters())
            seen.append(all((parameters[name][~mask] == 0).all() for name, mask in callback.masks.items()))

    fit(net(), [Writer(hook), callback, Watch()])
    assert len(seen) > 6
    assert all(seen)


@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {"eps": 0.0}), ("LBFGS", {"lr": 0.01}), ("SGD", {"lr": 0.1, "momentum": 0.9})]
)
def test_other_optimizers_are_not_trusted(name, options, net, fit):
    module, callback = optimized(net, name, options), Counted(0.3)
    if name == "SGD":
        kind = type("Drifting", (torch.optim.SGD,), {})
        module.configure_optimizers = lambda: kind(module.parameters(), **options)
    fit(module, [callback])
    assert callback.passes > 6
    parameters = dict(module.named_parameters())
    assert all((parameters[name][~mask] == 0).all() for name, mask in callback.masks.items())


@pytest.mark.parametrize("name", ["momentum, decay", "nesterov, decay, clipped", "adam, decay, accumulated"])
@pytest.mark.parametrize("kind", PRUNERS)
def test_masks_of_a_subclass_that_only_holds_them_are_held(kind, name, net, fit, recipes):
    seen, callback, recipe = [], kind(), recipes[name]

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            for name, mask in callback.masks.items():
                weight = pl_module.get_parameter(name)
                memory = [v for v in trainer.optimizers[0].state[weight].values() if v.shape == weight.shape]
                seen.append((bool(mask.all()), not any(tensor[~mask].any() for tensor in (weight, *memory))))

    fit(net(recipe), [callback, Watch()], recipe)
    assert {dense for dense, _ in seen} == {True, False}
    assert all(held for _, held in seen)


class Shaken(Callback):
    """Stands behind, and writes into gradients that are masked."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.add_(0.1)


def noisy(module):
    class Noisy(type(module)):
        def on_before_optimizer_step(self, optimizer):
            for parameter in self.parameters():
                parameter.grad.add_(0.1)

    module.__class__ = Noisy
    return module


def clipped(module):
    class Clipped(type(module)):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            for parameter in self.parameters():
                parameter.grad.add_(0.1)

    module.__class__ = Clipped
    return module


@pytest.mark.parametrize("change", [noisy, clipped, Shaken])
@pytest.mark.parametrize("kind", [StaticMask, DynamicMask])
def test_gradients_that_change_after_they_are_masked_move_no_weight(kind, change, net, fit):
    seen, callback, module = [], kind(0.3), net()

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            parameters = dict(pl_module.named_parameters())
            seen.append(all((parameters[name][~mask] == 0).all() for name, mask in callback.masks.items()))

    behind = [Shaken()] if change is Shaken else []
    fit(module if behind else change(module), [callback, *behind, Watch()])
    assert len(seen) > 6
    assert all(seen)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("kind", KINDS)
def test_complex_weights(kind, dtype, net, fit):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.randn(6, 3, dtype=dtype)), nn.Linear(6, 3)

        def forward(self, x):
            return self.out((torch.fft.rfft(x).to(dtype) @ self.weight.T).abs().float())

    module, callback = net(), kind()
    module.net = Spectral()
    fit(module, [callback])
    mask = callback.masks["net.weight"]
    assert module.net.weight[mask].all()
    assert not module.net.weight[~mask].any()
    assert module.net.weight.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_loaded_in_the_middle_of_a_fit(kind, net, fit):
    callback = kind()

    class Loads(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                self.masks = kept_of(callback)
                callback.load_state_dict(callback.state_dict())
                assert same(callback.masks, self.masks)

    module = net()
    fit(module, [callback, Loads()])
    assert all(not module.get_parameter(name)[~mask].any() for name, mask in callback.masks.items())


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("kind", [StaticMask, DynamicMask])
def test_first_weights_have_the_scale_of_the_fan_in_that_is_kept(kind, rescale, net, fit):
    module, first = net(), net()
    callback = kind(density=0.3, layer_density="uniform", rescale=rescale)

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            for name, mask in callback.masks.items():
                kept = mask.sum(1, keepdim=True)
                scale = (mask.shape[1] / kept.clamp(min=1)).sqrt() if rescale else torch.ones(len(mask), 1)
                torch.testing.assert_close(
                    pl_module.get_parameter(name).detach(), first.get_parameter(name).detach() * mask * scale
                )

    fit(module, [callback, Look()], epochs=1)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    fit(module, [callback], epochs=0)  # a second fit trains on, and rescales nothing
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", [StaticMask, DynamicMask])
@pytest.mark.parametrize(
    "reader",
    [ProximalTerm(100.0), PowerPropagation(1.0), LayerFreezing({"net.2.weight": torch.eye(9, dtype=torch.bool)[:6]})],
    ids=lambda each: type(each).__name__,
)
def test_a_callback_before_a_mask_reads_the_weights_that_training_starts_with(reader, kind, net, fit):
    """The term pulls to them, the powers are of them, and frozen entries keep them."""
    module, callback = net(), kind(density=0.3, rescale=True)
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, 1e-3)
    started = {}

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            started.update({name: value.detach().clone() for name, value in pl_module.named_parameters()})

    fit(module, [copy.deepcopy(reader), callback, Look()], epochs=1)
    for name, mask in callback.masks.items():
        torch.testing.assert_close(module.get_parameter(name).detach(), started[name], atol=5e-3, rtol=0)
        assert not torch.allclose(started[name][mask], net().get_parameter(name)[mask], atol=0.1)


@pytest.mark.parametrize("layer", [nn.ConvTranspose1d(4, 5, 1), nn.Sequential(nn.Flatten(), Conv1D(5, 4))])
def test_rescaling_knows_layers_whose_inputs_come_first_and_leaves_embeddings(layer, net, fit):
    module = net()
    module.net = nn.Sequential(nn.Embedding(6, 4), nn.Unflatten(1, (4, 1)), copy.deepcopy(layer))
    module.loss = lambda batch: module.net(batch[1]).square().mean()
    module.net[1] = nn.Unflatten(1, (4, 1))
    first = {name: value.detach().clone() for name, value in module.named_parameters()}
    callback = StaticMask(0.5, "uniform")

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            for name, mask in callback.masks.items():
                ratio = (pl_module.get_parameter(name) / first[name])[mask]
                kept = mask.sum([dim for dim in range(mask.dim()) if dim != 1], keepdim=True)
                expected = torch.ones_like(ratio) if "net.0" in name else (4 / kept).sqrt().expand_as(mask)[mask]
                torch.testing.assert_close(ratio.detach(), expected)

    fit(module, [callback, Look()], epochs=1)


class TwoLosses(L.LightningModule):
    """Passes both losses before the first of two steps, as networks that compete do."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))

    def training_step(self, batch):
        hidden = self.net[0](batch[0])
        losses = hidden.square().mean(), nn.functional.cross_entropy(self.net[1:](hidden.detach()), batch[1])
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.net[0], self.net[1:])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_the_weights_that_another_loss_was_computed_with(kind, fit):
    module, callback = TwoLosses(), kind(**({"every_n_steps": 1} if kind is DynamicMask else {}))
    fit(module, [callback])
    for name, mask in callback.masks.items():
        assert not module.get_parameter(name)[~mask].any()


def test_a_mask_behind_a_gate_leaves_them_too(fit):
    """The gate writes the weights of one optimizer before its step."""
    module, mask = TwoLosses(), StaticMask(density=0.5)
    fit(module, [MagnitudeGate(0.01), mask])
    for name, kept in mask.masks.items():
        assert not module.get_parameter(name)[~kept].any()


BEHIND = {
    "gradients": lambda: [StaticMask(density=0.5), GradientOffset({"net.0.weight": torch.ones(9, 4)})],
    "powers": lambda: [GradualPruning(density=0.3, every_n_steps=2), PowerPropagation()],
}


@pytest.mark.parametrize("name", BEHIND)
def test_optimizers_know_nothing_of_masked_weights_whatever_acts_behind_the_mask(name, net, fit, recipes):
    """So that a weight that grows later starts without a memory."""
    recipe, callbacks = recipes["momentum, decay"], BEHIND[name]()
    (optimizer,) = fit(module := net(recipe), callbacks, recipe).optimizers
    for name, kept in callbacks[0].masks.items():
        assert not optimizer.state[module.get_parameter(name)]["momentum_buffer"][~kept].any()
