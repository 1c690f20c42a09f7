"""Callbacks that train numbers of which the module's weights are a function."""

from __future__ import annotations

import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.func import functional_call
from torch.optim import LBFGS, SGD, Adam
from torch.utils.data import DataLoader

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    LearnedImportance,
    LotteryRewind,
    PowerPropagation,
    StaticMask,
)
from lightning_sparsefl.callbacks.magnitude_gate import MagnitudeGate
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.callbacks.stacking.kinds import stacked
from lightning_sparsefl.callbacks.stochastic_mask import StochasticMask
from lightning_sparsefl.callbacks.unit_thresholds import UnitThresholds
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions

pytestmark = pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*")

LAYERS = ("net.0.weight", "net.2.weight", "net.4.weight")
KINDS = {
    "power": lambda: PowerPropagation(1.5),
    "thresholds": lambda: UnitThresholds(strength=0.05),
    "stochastic": lambda: StochasticMask(seed=3),
    "gate": lambda: MagnitudeGate(0.15),
    "gate by layer": lambda: MagnitudeGate({"net.0.weight": 0.2, "net.2.weight": 0.0, "net.4.weight": 0.1}),
}


def weights_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def alike(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_the_gradients_are_those_of_autograd(net, fit, loader, recipe):
    """The optimizer of theta: power propagation written into the forward pass."""
    module, callback = net(recipe), PowerPropagation(1.5)
    plain = copy.deepcopy(module)
    fit(module, [callback], recipe)

    theta = {n: p.detach().clone() for n, p in plain.named_parameters()}
    for name in LAYERS:
        theta[name] = theta[name].sign() * theta[name].abs() ** (1 / 1.5)
    for value in theta.values():
        value.requires_grad_(True)

    def shown():
        return {n: v.sign() * v.abs() ** 1.5 if n in LAYERS else v for n, v in theta.items()}

    optimizer = recipe.optimizer(theta.values())
    for _ in range(3):
        batches = list(loader())
        for index, (x, y) in enumerate(batches):
            logits = functional_call(plain.net, {n.removeprefix("net."): w for n, w in shown().items()}, (x,))
            (nn.functional.cross_entropy(logits, y) / recipe.accumulate).backward()
            if (index + 1) % recipe.accumulate and index + 1 < len(batches):
                continue
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(theta.values(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights_of(module), {n: v.detach() for n, v in shown().items()}, rtol=0, atol=2e-5)
    torch.testing.assert_close(dict(callback.theta), {n: theta[n].detach() for n in LAYERS}, rtol=0, atol=2e-5)


@pytest.mark.parametrize("same", [lambda: PowerPropagation(1.0), lambda: MagnitudeGate(0.0)])
def test_without_effect_training_is_the_modules_own_to_the_bit(same, net, fit, recipe):
    module, plain = net(recipe), net(recipe)
    fit(module, [same()], recipe)
    fit(plain, [], recipe)
    assert alike(weights_of(module), weights_of(plain))


@pytest.mark.parametrize("optimizer", ["momentum, decay", "adam, decay, accumulated", "nesterov, decay, clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_trains_as_a_trainer_does(kind, optimizer, net, fit, loader, recipes):
    recipe, runs = recipes[optimizer], []
    for engine in ("trainer", "client"):
        module, callback = net(recipe), KINDS[kind]()
        if engine == "trainer":
            fit(module, [callback], recipe)
        else:
            options = LocalOptions(
                max_epochs=3, gradient_clip_val=recipe.clip, accumulate_grad_batches=recipe.accumulate
            )
            FastEngine(Fabric(accelerator="cpu", devices=1), options).fit(module, loader(), None, callbacks=[callback])
        runs.append((weights_of(module), callback))
    assert alike(runs[0][0], runs[1][0])
    assert alike(runs[0][1].state_dict(), runs[1][1].state_dict())
    assert not alike(runs[0][0], weights_of(net(recipe)))


class Shows(Callback):
    """Before and after every batch the module holds f(theta), and theta is something else."""

    def __init__(self, callback):
        self.callback, self.batches, self.differs = callback, 0, False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for name, theta in self.callback.theta.items():
            weight = pl_module.get_parameter(name)
            assert torch.equal(weight, self.callback.shown(name, theta))
            self.differs |= not torch.equal(weight, theta)
        self.batches += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_shows_the_function_wherever_it_is_looked_at(kind, net, fit, recipes):
    module, callback = net(recipes["momentum, decay"]), KINDS[kind]()
    probe = Shows(callback)
    fit(module, [probe, callback], recipes["momentum, decay"], num_sanity_val_steps=0)
    assert probe.batches == 2 * 15
    assert probe.differs
    pickle.loads(pickle.dumps(callback))
    assert copy.deepcopy(callback)._weights == {}


class Feed:
    """A loader that says where it stands, and goes on from there."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Kill(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 9:
            raise RuntimeError("killed")


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_within_an_epoch_and_resumed_is_as_if_nothing_had_happened(kind, optimizer, net, loader, tmp_path):
    def run(folder, seed=0, also=(), ckpt_path=None):
        module, callback = net(seed=seed), KINDS[kind]()
        more = {"momentum": 0.9, "weight_decay": 0.1} if optimizer is SGD else {}
        module.optimizer = lambda parameters: optimizer(parameters, lr=0.05, **more)
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            callbacks=[callback, *also, saver],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, Feed(list(loader())), ckpt_path=ckpt_path)
        return module, callback

    straight, callback = run("straight")
    with pytest.raises(RuntimeError, match="killed"):
        run("killed", also=[Kill()])
    resumed, other = run("killed", seed=9, ckpt_path=tmp_path / "killed" / "step=7.ckpt")
    assert alike(weights_of(straight), weights_of(resumed))
    assert alike(callback.state_dict(), other.state_dict())


def test_a_second_fit_goes_on_with_theta(net, fit):
    module, callback = net(), MagnitudeGate(0.2)
    fit(module, [callback])
    first = {name: value.clone() for name, value in callback.theta.items()}
    fallen = {name: value.abs() < 0.2 for name, value in first.items()}
    fit(module, [callback])
    assert all(torch.equal(callback.theta[n][below], first[n][below]) for n, below in fallen.items())
    assert any(below.any() for below in fallen.values())
    assert not alike(dict(callback.theta), first)


def test_what_falls_below_the_threshold_is_out_of_the_model_and_keeps_its_value(net, fit, recipes):
    recipe = recipes["nesterov, decay, clipped"]
    module, callback = net(recipe), MagnitudeGate(0.2)
    start = weights_of(module)
    fit(module, [callback], recipe)
    for name in LAYERS:
        below = start[name].abs() < 0.2
        assert torch.equal(callback.theta[name][below], start[name][below])
        assert not module.get_parameter(name)[callback.theta[name].abs() < 0.2].any()
        assert below.any()


def test_a_mask_after_it_holds(net, fit, recipes):
    recipe = recipes["momentum, decay"]
    module, power, mask = net(recipe), PowerPropagation(1.25), StaticMask(density=0.4, rescale=False)
    fit(module, [power, mask], recipe)
    for name, kept in mask.masks.items():
        assert not module.get_parameter(name)[~kept].any()


class Watched(Callback):
    """A callback that may change gradients behind a mask."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        """Changes nothing."""


def test_theta_under_a_mask_is_masked_where_others_may_change_gradients(net, fit, recipes):
    module, mask = net(recipes["momentum, decay"]), StaticMask(density=0.3)
    trainer = fit(module, [PowerPropagation(1.5), mask, Watched()], recipes["momentum, decay"])
    for name, kept in mask.masks.items():
        memory = trainer.optimizers[0].state[module.get_parameter(name)]["momentum_buffer"]
        assert (memory[~kept] == 0).all()


def test_weights_behind_a_stochastic_mask_never_change_and_draws_follow_the_scores(net, fit):
    module, callback = net(), StochasticMask(seed=3)
    start = weights_of(module)
    fit(module, [callback])
    for name in LAYERS:
        assert torch.equal(callback.frozen[name], start[name])
        weight, drawn = module.get_parameter(name), callback.shown(name, callback.scores[name])
        assert torch.equal(weight, drawn)
        assert torch.equal(drawn[drawn != 0], start[name][drawn != 0])
    one, zero = ({n: torch.full_like(start[n], value) for n in LAYERS} for value in (50.0, -50.0))
    for scores, count in ((one, 36 + 54 + 18), (zero, 0)):
        fit(module := net(), [StochasticMask(scores=scores)], epochs=1)
        assert sum(int(module.get_parameter(name).count_nonzero()) for name in LAYERS) == count


def test_thresholds_grow_until_units_are_off_and_leave_the_optimizer(net, fit, recipes, tmp_path):
    recipe = recipes["momentum, decay"]
    module, callback = net(recipe), UnitThresholds(strength=0.05)
    trainer = fit(module, [callback], recipe)
    assert all((values > 0).any() for values in callback.thresholds.values())
    off = {name: ~module.get_parameter(name).any(1) for name in LAYERS}
    assert any(rows.any() for rows in off.values())
    assert all(not rows.all() for rows in off.values())
    assert all(callback.theta[name][rows].any(1).all() for name, rows in off.items())
    (group,) = trainer.optimizers[0].param_groups
    assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in module.parameters()}
    trainer.save_checkpoint(tmp_path / "after.ckpt")


def test_a_layer_with_hardly_a_unit_left_starts_again(net, fit):
    first = {name: torch.full((size,), 4.0) for name, size in zip(LAYERS, (9, 6, 3), strict=True)}
    callback = UnitThresholds(strength=0.0, thresholds=first)
    module = net()
    module.optimizer = lambda parameters: SGD(parameters, lr=0.0)
    fit(module, [callback])
    assert all(not values.any() for values in callback.thresholds.values())
    assert all(module.get_parameter(name).all() for name in LAYERS)


@pytest.mark.parametrize(("on", "threshold"), [(1, 0.0), (2, 1.0)])
def test_a_layer_with_one_percent_of_its_units_starts_again(on, threshold):
    weight = torch.zeros(100, 2)
    weight[:on] = 3.0
    callback = UnitThresholds(thresholds={"layer.weight": torch.ones(100)})
    callback.begin({"layer.weight": weight})
    assert callback.thresholds["layer.weight"].unique().tolist() == [threshold]


def test_thresholds_stay_between_minus_5_and_5():
    callback = UnitThresholds(thresholds={"layer.weight": torch.tensor([-9.0, 1.0, 9.0])})
    callback.begin({"layer.weight": torch.full((3, 2), 7.0)})
    assert callback.thresholds["layer.weight"].tolist() == [-5.0, 1.0, 5.0]


@pytest.mark.parametrize("thresholds", [None, {"net.weight": torch.zeros(4)}])
def test_thresholds_of_a_transposed_convolution_are_refused(thresholds, net, fit):
    class Transposed(type(net())):
        def __init__(self):
            super().__init__(lambda parameters: SGD(parameters, lr=0.1))
            self.net = nn.ConvTranspose1d(4, 3, 1)

    message = "`net.weight` of a ConvTranspose1d has a row for each input instead of each unit; expected `layers` that"
    with pytest.raises(InvalidOption, match=message):
        fit(Transposed(), [UnitThresholds(thresholds=thresholds)])
    if thresholds:
        with pytest.raises(InvalidOption, match=message):
            stacked([UnitThresholds(thresholds=thresholds)] * 2, Transposed(), [1, 1])


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


@pytest.mark.parametrize("order", [1, -1])
def test_thresholds_beside_finetuning_are_refused(order, net, fit):
    message = "`UnitThresholds`, which SpaFL trains with, does not support `Unfreezing`, a `BaseFinetuning`: it stores"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [UnitThresholds(), Unfreezing()][::order])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", [LotteryRewind, DynamicPruningWithFeedback, LearnedImportance])
def test_what_returns_values_of_weights_that_theta_would_not_follow_is_refused(kind, order, net, fit):
    message = f"`{kind.__name__}` returns earlier values to `net.0.weight`, which `PowerPropagation` trains as a"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [PowerPropagation(), kind(density=0.5)][::order])
    fit(net(), [PowerPropagation(layers="net.4*"), kind(density=0.5, layers=["net.0*", "net.2*"])][::order])


@pytest.mark.parametrize("order", [1, -1])
def test_a_mask_that_grows_weights_from_0_is_refused_beside_powers_that_stay_there(order, net, fit):
    message = "`DynamicMask` grows weights that would stay 0 in `net.0.weight`, which `PowerPropagation` trains as a"
    with pytest.raises(InvalidOption, match=message):
        fit(net(), [PowerPropagation(), DynamicMask(every_n_steps=2)][::order])
    fit(net(), [PowerPropagation(exponent=1), DynamicMask(every_n_steps=2)][::order])
    fit(net(), [PowerPropagation(layers="net.4*"), DynamicMask(layers="net.0*", every_n_steps=2)][::order])


class TwoSteps(Callback):
    """A step of the bare optimizer, which Lightning does not know of."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.optimizers[0].zero_grad()
        with torch.enable_grad():
            pl_module.loss(batch).backward()
        trainer.optimizers[0].step()


def test_steps_of_the_bare_optimizer_step_theta_too(net, fit, loader):
    """Two steps on each batch are those of a loader that has each batch twice."""
    module, callback = net(), PowerPropagation(1.5)
    fit(module, [callback, TwoSteps()])
    other, again = net(), PowerPropagation(1.5)
    twice = DataLoader(loader().dataset, batch_sampler=[range(i, i + 4) for i in range(0, 20, 4) for _ in range(2)])
    FastEngine(Fabric(accelerator="cpu", devices=1), LocalOptions(max_epochs=3)).fit(
        other, twice, None, callbacks=[again]
    )
    assert alike(weights_of(module), weights_of(other))


@pytest.mark.parametrize("kind", ["power", "thresholds"])
def test_a_mask_acts_on_theta_in_steps_of_the_bare_optimizer(kind, net, fit):
    """So that neither decay nor momentum moves what is pruned, as with steps that Lightning knows of."""

    class Manual(type(net())):
        automatic_optimization, known = False, True

        def training_step(self, batch):
            optimizer = self.optimizers(use_pl_optimizer=self.known)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    ends = []
    for known in (True, False):
        module = Manual(lambda parameters: SGD(parameters, 0.2, momentum=0.9, weight_decay=0.1))
        callback, mask = KINDS[kind](), StaticMask(density=0.5, rescale=False)
        module.known = known
        (optimizer,) = fit(module, [callback, mask]).optimizers
        for name, kept in mask.masks.items():
            assert not callback.theta[name][~kept].any()
            assert not optimizer.state[module.get_parameter(name)]["momentum_buffer"][~kept].any()
        ends.append(weights_of(module))
    assert alike(*ends)


def test_what_does_not_fit_is_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"`PowerPropagation\(exponent=0.5\)`: expected a number >= 1"):
        PowerPropagation(0.5)
    with pytest.raises(InvalidOption, match=r"`MagnitudeGate\(thresholds=-1\)`: expected numbers >= 0"):
        MagnitudeGate(-1)
    with pytest.raises(InvalidOption, match=r"`MagnitudeGate` and `PowerPropagation` both train `net.0.weight` as"):
        fit(net(), [PowerPropagation(), MagnitudeGate(0.1)])
    with pytest.raises(IncompatibleMasks, match=r"theta of `net.0.weight` has shape \(2,\), expected \(9, 4\)"):
        fit(net(), [PowerPropagation(theta={"net.0.weight": torch.ones(2)})])
    with pytest.raises(IncompatibleMasks, match="`other` in theta is not a parameter of the module"):
        fit(net(), [PowerPropagation(theta={"other": torch.ones(2)})])
    module = net()
    module.optimizer = lambda parameters: LBFGS(parameters)
    with pytest.raises(InvalidOption, match="`PowerPropagation` does not support LBFGS"):
        fit(module, [PowerPropagation()])


def test_weights_whose_zeros_are_others_are_refused(net, fit):
    message = r"`MagnitudeGate` cannot train `net\.0\.weight`, which the parametrization `_WeightNorm` computes from"
    first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 9))
    for callback, remedy in (
        (MagnitudeGate(0.1), r"; take the layer away with '!net\.0\.\*' in `layers`, or remove"),
        (MagnitudeGate(0.1, theta={"net.0.parametrizations.weight.original1": torch.ones(9, 4)}), "; remove"),
    ):
        module = net()
        module.net[0] = first
        with pytest.raises(InvalidOption, match=f".*{message} `net.0.parametrizations.weight.original.`{remedy}"):
            fit(module, [callback])


def test_the_base_class_asks_for_its_function():
    for hook in ("shown", "slope"):
        with pytest.raises(NotImplementedError):
            getattr(Reparameterized(), hook)("w", *[torch.ones(1)] * (1 + (hook == "slope")))


def test_complex_weights_are_refused(net, fit):
    module = net()
    module.spectrum = nn.Linear(2, 2, dtype=torch.complex64)
    message = r"`PowerPropagation` cannot train `spectrum\.weight`, which is complex; .* with '!spectrum\*' in `layers`"
    with pytest.raises(InvalidOption, match=message):
        fit(module, [PowerPropagation(1.5)], epochs=1)
    fit(module, [PowerPropagation(1.5, layers="!spectrum*")], epochs=1)
