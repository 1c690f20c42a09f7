from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import GradientSum, StaticMask

X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [2.0, 0.0]])


class Line(L.LightningModule):
    """A loss that is linear in the weights, so that a batch's gradient is the mean of its samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(2, 1), nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), 0.1)


def fit(folder, *callbacks, **options):
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    module = Line()
    trainer = L.Trainer(max_epochs=3, default_root_dir=folder, callbacks=list(callbacks), **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(X), batch_size=2))
    return module


def test_gradients_and_squares_are_summed_over_steps(tmp_path):
    callback = GradientSum(squares=True)
    fit(tmp_path, callback)
    means = torch.stack([X[:2].mean(0), X[2:].mean(0)])
    torch.testing.assert_close(callback.sums["layer.weight"], 3 * means.sum(0, keepdim=True))
    torch.testing.assert_close(callback.squares["layer.weight"], 3 * means.square().sum(0, keepdim=True))
    assert callback.sums["layer.bias"].tolist() == [6.0]
    assert callback.sums["unused.weight"].tolist() == [[0.0]]


def test_gradients_are_dense_and_not_clipped_before_a_mask(tmp_path):
    callback, mask = GradientSum(), StaticMask(masks={"layer.weight": torch.tensor([[True, False]])})
    module = fit(tmp_path, callback, mask, gradient_clip_val=1e-3, accumulate_grad_batches=2)
    torch.testing.assert_close(callback.sums["layer.weight"], 3 * X.mean(0, keepdim=True))
    assert module.layer.weight[0, 1] == 0
    assert callback.squares == {}


def test_a_new_fit_begins_at_zero(tmp_path):
    callback = GradientSum()
    fit(tmp_path, callback)
    fit(tmp_path, callback)
    assert callback.sums["layer.bias"].tolist() == [6.0]


def test_a_step_that_loss_scaling_skips_does_not_count():
    callback, module = GradientSum(squares=True), Line()
    optimizer = module.configure_optimizers()
    callback.on_fit_start(SimpleNamespace(precision_plugin=None), module)
    for value in (2.0, torch.inf, torch.nan):
        module.layer.weight.grad, module.layer.bias.grad = torch.tensor([[3.0, value]]), torch.ones(1)
        callback.on_before_optimizer_step(None, module, optimizer)
    assert callback.sums["layer.weight"].tolist() == [[3.0, 2.0]]
    assert callback.squares["layer.bias"].tolist() == [1.0]


class Ones(Line):
    """The gradient of each weight is 1 in each batch."""

    def training_step(self, batch):
        return sum(parameter.sum() for parameter in self.parameters())


def test_sums_grow_in_half_precision_too(tmp_path):
    callback, module = GradientSum(squares=True), Ones()
    trainer = L.Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        callbacks=[callback],
        precision="bf16-true",
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
    )
    trainer.fit(module, DataLoader(TensorDataset(X.repeat(75, 1))))
    assert callback.sums["layer.weight"].tolist() == callback.squares["layer.weight"].tolist() == [[300.0, 300.0]]
