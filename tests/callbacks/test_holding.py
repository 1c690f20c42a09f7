"""Modules that replace parameters or layers during a fit, which a callback has looked up."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn.utils import parametrizations, prune

from helpers.masking import KINDS
from lightning_sparsefl.callbacks import (
    BudgetAwareExtrusion,
    GradientOffset,
    GradientSum,
    GradualPruning,
    GroupPenalty,
    LayerFreezing,
    LearnedImportance,
    OrderedDropout,
    PowerPropagation,
    ProximalTerm,
    StaticMask,
)
from lightning_sparsefl.callbacks.stochastic_mask import StochasticMask
from lightning_sparsefl.errors import InvalidOption

pytestmark = pytest.mark.filterwarnings("ignore:.*never moves its mask.*", "ignore:.*the fit ended at density")


def frozen(rows):
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:rows] = False
    return LayerFreezing({"net.2.weight": mask})


OTHERS = {
    "LearnedImportance": lambda: LearnedImportance(0.5),
    "PowerPropagation": PowerPropagation,
    "StochasticMask": StochasticMask,
    "GroupPenalty": GroupPenalty,
    "OrderedDropout": OrderedDropout,
    "LayerFreezing in part": lambda: frozen(2),
    "LayerFreezing": lambda: frozen(6),
    "ProximalTerm": ProximalTerm,
    "GradientSum": GradientSum,
    "GradientOffset": lambda: GradientOffset({"net.2.weight": torch.ones(6, 9)}),
    "BudgetAwareExtrusion": BudgetAwareExtrusion,
}
CALLBACKS = {kind.__name__: kind for kind in KINDS} | OTHERS


def swapped(module):
    module.net[2] = nn.Linear(9, 6)


def assigned(module):
    values = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(values, assign=True)


def kept_aside(module):
    module.former = module.net[2]
    swapped(module)


def replacing(module, hook, change, epoch=0):
    """Let a hook of the module replace parameters, and hand the new ones to new optimizers."""

    def act(*_):
        if module.current_epoch == epoch:
            change(module)
            module.trainer.strategy.setup_optimizers(module.trainer)

    setattr(module, hook, act)
    return module


@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_a_layer_that_is_replaced_in_a_later_epoch_is_refused(make, net, fit):
    module = replacing(net(), "on_train_epoch_start", swapped, epoch=1)
    with pytest.raises(InvalidOption, match=r"`net\.2(\.weight|\.bias)?` has been replaced since the fit started, so"):
        fit(module, [make()])
    assert module.global_step == 5


@pytest.mark.filterwarnings("ignore:.*masks weights that no optimizer steps")
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("change", [swapped, assigned, kept_aside])
def test_the_first_batch_is_refused_after_a_hook_that_replaces_parameters(hook, change, net, fit):
    module = replacing(net(), hook, change)
    with pytest.raises(InvalidOption, match=r"^`StaticMask`: `net\.[02]\.weight` .* `setup` or `configure_model`"):
        fit(module, [StaticMask(0.3)])
    assert module.global_step == 0


def test_a_layer_that_is_replaced_within_an_epoch_is_refused_at_its_end(net, fit):
    module = replacing(net(), "on_train_batch_start", swapped)
    with pytest.raises(InvalidOption, match=r"^`GradualPruning`: `net\.2\.weight` has been replaced"):
        fit(module, [GradualPruning(0.3, every_n_steps=2)])
    assert module.current_epoch == 0


def test_parameters_that_are_replaced_before_the_fit_starts_are_masked(net, fit):
    module = net()
    module.setup = lambda stage: assigned(module)
    callback = StaticMask(0.3)
    fit(module, [callback])
    for name, mask in callback.masks.items():
        assert not module.get_parameter(name)[~mask].any()


class Renaming(Callback):
    def __init__(self, change):
        self.change = change

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.change(pl_module.net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
@pytest.mark.parametrize(
    "change",
    [
        lambda net: prune.l1_unstructured(net[2], "weight", 0.1),
        lambda net: parametrizations.orthogonal(net[4]),
        lambda net: net.add_module("2", torch.compile(net[2], backend="eager")),
    ],
    ids=["prune", "parametrization", "compile"],
)
def test_a_parameter_that_only_changes_its_name_is_held(change, net, fit):
    module, callback = net(), StaticMask(0.3, layers="net.2*")
    weight = module.net[2].weight
    fit(module, [callback, Renaming(change)])
    assert not weight[~callback.masks["net.2.weight"]].any()
