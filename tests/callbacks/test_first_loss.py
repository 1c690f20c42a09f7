from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks.first_loss import FirstLoss


class Losses(Callback):
    """The loss of each batch, at the weights that it is computed with."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            self.found.append(float(pl_module.loss(batch)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_loss_of_the_first_batch(accumulate, net, fit, recipes):
    recipe = next(each for each in recipes.values() if each.accumulate == accumulate)
    first, losses = FirstLoss(), Losses()
    fit(net(recipe), [first, losses], recipe)
    assert first.loss == pytest.approx(losses.found[0])
