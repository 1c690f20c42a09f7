from __future__ import annotations

import copy
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import BudgetAwareExtrusion, GlobalMagnitudePruning, StaticMask
from lightning_sparsefl.callbacks.budget_aware_extrusion import decay
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption

START = torch.tensor([[0.1, -0.2, 3.0, -4.0, 0.0, 0.0]])


class Still(L.LightningModule):
    """A module whose loss has no gradient, so that only the penalty moves it."""

    def __init__(self, lr=0.1, gamma=1.0):
        super().__init__()
        self.layer, self.lr, self.gamma, self.rates = nn.Linear(6, 1, bias=False), lr, gamma, []
        with torch.no_grad():
            self.layer.weight.copy_(START)

    def training_step(self, batch):
        return 0 * self.layer(batch[0]).sum()

    def configure_optimizers(self):
        module = self

        class Noting(torch.optim.SGD):
            def step(self, closure=None):
                result = super().step(closure)
                module.rates.append(self.param_groups[0]["lr"])
                return result

        optimizer = Noting(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(folder, module, *callbacks, steps=2):
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=steps, default_root_dir=folder, callbacks=list(callbacks), **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(1, 6))))
    return module.layer.weight.detach()


@pytest.mark.parametrize(
    ("option", "value"), [("strength", -1.0), ("share", 1.5), ("psi", -1.0), ("max_lr", 0.0)], ids=lambda v: str(v)
)
def test_an_option_outside_its_range_is_refused(option, value):
    with pytest.raises(InvalidOption, match=rf"`BudgetAwareExtrusion\({option}={value}\)`: expected a number"):
        BudgetAwareExtrusion(**{option: value})


def test_the_smallest_kept_weights_shrink_by_a_step_of_fixed_length(tmp_path):
    weight = fit(tmp_path, Still(lr=0.01), BudgetAwareExtrusion(strength=0.5, psi=0.0), steps=1)
    low = START[0, :2]  # two of the four that are not zero
    torch.testing.assert_close(weight[0, :2], low - 0.01 * 0.5 * low / low.norm())
    assert torch.equal(weight[0, 2:], START[0, 2:])


def test_masks_say_what_is_kept(tmp_path):
    mask = {"layer.weight": torch.tensor([[False, False, True, True, True, True]])}
    callback = BudgetAwareExtrusion(strength=0.5, share=0.75, psi=0.0, masks=mask)
    weight = fit(tmp_path, Still(lr=0.01), callback, StaticMask(masks=mask), steps=1)
    assert weight[0, 2] == pytest.approx(3 - 0.005)  # the smallest three are 0, 0 and 3
    assert weight[0].tolist()[3:] == [-4, 0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
def test_masks_that_do_not_fit_are_refused_and_those_of_a_compiled_layer_are_found(net, fit):
    for masks in ({"net.9.weight": torch.ones(3, 6) > 0}, {"net.4.weight": torch.ones(6, 3) > 0}):
        with pytest.raises(IncompatibleMasks, match=rf"`{next(iter(masks))}`"):
            fit(net(), [BudgetAwareExtrusion(masks=masks)])
    callback, module = BudgetAwareExtrusion(masks={"net.4.weight": torch.ones(3, 6) > 0}), net()
    module.net[4] = torch.compile(module.net[4], backend="eager")
    fit(module, [callback])
    assert list(callback.state_dict()["low"]) == ["net.4._orig_mod.weight"]


def test_without_a_penalty_and_with_zeros_only_nothing_moves(tmp_path):
    assert torch.equal(fit(tmp_path, Still(), BudgetAwareExtrusion(strength=0.0)), START)
    mask = {"layer.weight": START == 0}
    weight = fit(tmp_path, Still(), BudgetAwareExtrusion(strength=1.0, share=1.0, masks=mask))
    assert torch.equal(weight, START)  # the norm of zeros has no slope


def test_the_learning_rate_follows_the_formula_and_the_schedule_is_its_own(tmp_path):
    module = Still(lr=0.1, gamma=0.5)
    fit(tmp_path, module, BudgetAwareExtrusion(strength=0.0, psi=20.0, max_lr=0.28), steps=4)
    raised = 20 * (2 / (1 + math.exp(-0.3)) - 1) * 0.1  # of ||w_low||_1 = .3, constant without a penalty
    formula = [raised * (8 - 2 * b) / (8 - b) for b in range(4)]
    assert module.rates == pytest.approx([min(0.28, max(0.1 * 0.5**b, rate)) for b, rate in enumerate(formula)])
    assert module.rates[0] == 0.28
    plain = Still(lr=0.1, gamma=0.5)
    fit(tmp_path, plain, BudgetAwareExtrusion(strength=0.0, psi=0.0), steps=4)
    assert plain.rates == pytest.approx([0.1 * 0.5**b for b in range(4)])


class Thaw(BaseFinetuning):
    """Adds the first layer to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.2)


@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*")
def test_a_group_of_parameters_that_is_added_later_starts_at_its_own_rate(net, fit):
    module, callback = net(), BudgetAwareExtrusion(psi=0.0)
    module.optimizer = lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], 0.1)
    fit(module, [Thaw(), callback], epochs=2)
    assert callback.state_dict()["first"] == [[0.1, 0.2]]


def test_the_rate_falls_from_1_to_0():
    assert [decay(b, 10) for b in (0, 5, 10)] == pytest.approx([1, 10 / 15, 0])


@pytest.mark.parametrize(
    "masking", [StaticMask(0.5, rescale=False), GlobalMagnitudePruning(0.5)], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("first", [True, False])
def test_a_share_of_the_weights_that_a_mask_beside_it_keeps_is_penalized(first, masking, tmp_path):
    module, penalty, masking = Still(), BudgetAwareExtrusion(share=0.5), copy.deepcopy(masking)
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[0.1, -0.2, 3.0, -4.0, 0.5, 6.0]]))
    fit(tmp_path, module, *([penalty, masking] if first else [masking, penalty]))
    kept, low = masking.masks["layer.weight"], penalty._low["layer.weight"]
    assert (int(kept.sum()), int((low & kept).sum())) == (3, 1)
    assert not (low & ~kept).any()
