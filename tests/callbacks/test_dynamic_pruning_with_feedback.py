from __future__ import annotations

import copy
import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.func import functional_call

from lightning_sparsefl.callbacks import DynamicPruningWithFeedback
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.masks import dense_like, density, kept, same

TOTAL = 36 + 54 + 18


def batches():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return [(x[at : at + 4], y[at : at + 4]) for at in range(0, 20, 4)]


class Probe(Callback):
    """After every batch: the module is sparse, and held and pruned weights add up to the dense ones."""

    def __init__(self, callback):
        self.callback, self.masks, self.dense = callback, [], {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.masks.append({name: mask.clone() for name, mask in self.callback.masks.items()})
        pruned = self.callback.state_dict()["pruned"]
        for name, mask in self.callback.masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            assert not pruned[name][mask].any()
            self.dense[name] = weight.detach() + pruned[name]


def by_paper(module, recipe, slow, window, every, final, epochs):
    """Algorithm 1 of DPF in plain torch: gradients with respect to w * m, steps of the dense w."""
    module = copy.deepcopy(module)
    dense = dict(module.named_parameters())
    optimizer = recipe.optimizer(list(dense.values()))
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in dense.items() if w.dim() > 1}
    step = 0
    for _ in range(epochs):
        summed = {}
        for index, (x, y) in enumerate(batches()):
            with torch.no_grad():
                pruned = {n: torch.where(masks[n], w, 0.0) if n in masks else w.clone() for n, w in dense.items()}
            pruned = {name: w.requires_grad_() for name, w in pruned.items()}
            names = {name.removeprefix("net."): w for name, w in pruned.items()}
            loss = nn.functional.cross_entropy(functional_call(module.net, names, (x,)), y) / recipe.accumulate
            for name, grad in zip(pruned, torch.autograd.grad(loss, list(pruned.values())), strict=True):
                summed[name] = summed[name] + grad if name in summed else grad
            if (index + 1) % recipe.accumulate and index + 1 < 5:
                continue
            for name, weight in dense.items():
                weight.grad = summed[name]
            summed, step = {}, step + 1
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(dense.values(), recipe.clip)
            optimizer.step()
            if step == window[1] or (step >= window[0] and (step - window[0]) % every == 0):
                share = slow.gradual(1, final, step, *window)
                score = {name: dense[name].detach().abs().numpy() for name in masks}
                full = {name: mask.numpy() | True for name, mask in masks.items()}
                new = slow.shrink_globally(score, full, int(share * TOTAL + 1e-9))
                masks = {name: torch.from_numpy(mask) for name, mask in new.items()}
    return {name: weight.detach() for name, weight in dense.items()}, masks


def test_it_trains_as_on_paper(net, fit, recipe, slow):
    module = net(recipe)
    callback = DynamicPruningWithFeedback(density=0.3, start=0.1, end=0.6, every_n_steps=2)
    probe = Probe(callback)
    fit(module, [callback, probe], recipe, epochs=4)
    total = 4 * (3 if recipe.accumulate == 2 else 5)
    dense, masks = by_paper(net(recipe), recipe, slow, (total // 10, -(-total * 6 // 10)), 2, 0.3, epochs=4)
    assert same(callback.masks, masks)
    torch.testing.assert_close(probe.dense, {name: dense[name] for name in probe.dense}, rtol=0, atol=1e-6)
    held = {name: dense[name] * masks[name] if name in masks else dense[name] for name in dense}
    torch.testing.assert_close(dict(module.named_parameters()), held, rtol=0, atol=1e-6)


def test_pruned_weights_go_on_training_and_return(net, fit, recipes):
    recipe = recipes["momentum, decay"]
    callback = DynamicPruningWithFeedback(density=0.3, end=0.3, every_n_steps=1)
    probe = Probe(callback)
    fit(net(recipe), [callback, probe], recipe, epochs=6)
    late = probe.masks[10:]
    assert {kept(masks) for masks in late} == {int(0.3 * TOTAL)}
    returned = [a for a, b in itertools.pairwise(late) if any((b[name] & ~a[name]).any() for name in a)]
    assert len(returned) > 3


def test_density_1_is_dense_training(net, fit, by_hand, recipe):
    module = net(recipe)
    fit(module, [DynamicPruningWithFeedback(density=1.0, every_n_steps=1)], recipe)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)


class Looks(Callback):
    """The module is sparse whoever looks, and dense only inside the optimizer's step."""

    def __init__(self, callback):
        self.callback, self.seen = callback, set()

    def look(self, name, pl_module):
        masks = self.callback.masks
        sparse = not any(pl_module.get_parameter(n)[~mask].any() for n, mask in masks.items())
        if not same(masks, dense_like(masks)):
            self.seen.add((name, sparse))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.look("batch", pl_module)

    def on_after_backward(self, trainer, pl_module):
        self.look("backward", pl_module)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.look("step", pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look("end", pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self.look("epoch", pl_module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_only_the_optimizer_sees_dense_weights(precision, net, fit, recipes):
    recipe, module = recipes["adamw, clipped, accumulated"], net(recipes["adamw, clipped, accumulated"])
    callback = DynamicPruningWithFeedback(density=0.3, every_n_steps=1)
    looks = Looks(callback)
    fit(module, [callback, looks], recipe, precision=precision)
    looks.look("fit", module)
    assert looks.seen == {(name, name != "step") for name in ("batch", "backward", "step", "end", "epoch", "fit")}


def test_a_run_that_fails_leaves_the_module_sparse(net, fit):
    class Fails(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 8:
                raise RuntimeError("half way")

    module, callback = net(), DynamicPruningWithFeedback(density=0.2, end=0.2, every_n_steps=1)
    with pytest.raises(RuntimeError, match="half way"):
        fit(module, [callback, Fails()])
    assert density(callback.masks) < 0.25
    assert not any(module.get_parameter(name)[~mask].any() for name, mask in callback.masks.items())
    assert "step" not in vars(module.trainer.optimizers[0])


class Manual(L.LightningModule):
    """Two optimizers in a batch; looks at its weights between their steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.zeros = []

    def training_step(self, batch):
        for optimizer in self.optimizers():
            self.zeros.append(int((self.a.weight == 0).sum() + (self.b.weight == 0).sum()))
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.b(self.a(batch[0])), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9) for layer in (self.a, self.b)]


def test_a_module_that_optimizes_by_itself_sees_sparse_weights_between_its_steps(fit):
    module, callback = Manual(), DynamicPruningWithFeedback(density=0.25, end=0.2, every_n_steps=1)
    fit(module, [callback])
    assert module.zeros[-2:] == [56 - 14] * 2


def test_a_second_fit_goes_on_with_the_dense_weights(net, fit, recipes):
    recipe = recipes["sgd"]  # which remembers nothing between steps, so two fits can equal one
    module, callback = net(recipe), DynamicPruningWithFeedback(density=0.3, end=0.2, every_n_steps=1)
    fit(module, [callback], recipe)
    fit(module, [callback], recipe)
    whole = net(recipe)
    # 3 epochs of a plan that ends at 20 % of them, and 3 more: the same as one that ends at 10 % of 6
    fit(whole, [DynamicPruningWithFeedback(density=0.3, end=0.1, every_n_steps=1)], recipe, epochs=6)
    for name, weight in whole.named_parameters():
        assert torch.equal(module.get_parameter(name), weight)


class Save(Callback):
    """Saves a checkpoint after the first epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(trainer.default_root_dir + "/first.ckpt")


def test_the_density_goes_on_falling_after_a_resume(net, fit, tmp_path):
    """From the density with which the second fit of a callback began."""
    first = DynamicPruningWithFeedback(density=0.5, end=1.0, every_n_steps=2)
    fit(net(), [first])
    first.density = 0.1
    before, after = Probe(first), None
    fit(net(), [first, Save(), before])
    resumed = DynamicPruningWithFeedback(density=0.1, end=1.0, every_n_steps=2)
    after = Probe(resumed)
    fit(net(seed=1), [resumed, after], ckpt_path=tmp_path / "first.ckpt")
    assert [kept(masks) for masks in after.masks] == [kept(masks) for masks in before.masks[5:]]
    assert same(resumed.masks, first.masks)


def test_lbfgs_is_refused(net, fit, recipes):
    module = net()
    module.optimizer = lambda parameters: torch.optim.LBFGS(parameters, lr=0.1)
    with pytest.raises(InvalidOption, match="does not support LBFGS"):
        fit(module, [DynamicPruningWithFeedback()])


def test_pruned_weights_of_another_module_are_refused(net, fit):
    callback, other = DynamicPruningWithFeedback(), net()
    fit(net(), [callback], epochs=1)
    callback.masks = {"net.0.weight": torch.ones(9, 4, dtype=torch.bool)}
    callback._pruned = {"net.0.weight": torch.zeros(4, 9)}
    with pytest.raises(IncompatibleMasks, match=r"`net.0.weight` has shape \(4, 9\), expected \(9, 4\)"):
        fit(other, [callback], epochs=1)
