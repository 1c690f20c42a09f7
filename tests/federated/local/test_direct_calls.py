"""The shortcuts of the fast engine do what the public methods do, bit for bit, or call them."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_sparsefl.data import CropFlip, Examples, Normalize
from lightning_sparsefl.federated.local.fast.batches import iterate_examples
from lightning_sparsefl.federated.local.fast.direct_calls import (
    _bare_step,
    run_backward,
    step_optimizer,
    zero_gradients,
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(kind, direct: bool) -> tuple[nn.Module, list[float]]:
    module, losses = net(), []
    used = kind(module.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        inputs, labels = torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)

        def closure(inputs=inputs, labels=labels):
            loss = nn.functional.cross_entropy(module(inputs), labels)
            zero_gradients(used) if direct else used.zero_grad()
            run_backward(loss) if direct else loss.backward()
            losses.append(loss.item())
            return loss

        step_optimizer(used, closure) if direct else used.step(closure)
    return module, losses


class Counting(SGD):
    """Optimizer of a user with a step of its own."""

    def step(self, closure=None):
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda p: Adam(p, lr=0.1),
        lambda p: Counting(p, lr=0.1),
    ],
    ids=["SGD", "Adam", "own class"],
)
def test_steps_have_the_bits_of_the_public_methods(kind):
    (ours, our_losses), (theirs, losses) = train(kind, direct=True), train(kind, direct=False)
    assert our_losses == losses
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_step_of_torch_loses_its_layer_and_a_users_step_does_not():
    used = SGD(net().parameters(), lr=0.1)
    assert _bare_step(type(used)) is SGD.step.__wrapped__
    assert _bare_step(type(Counting(net().parameters(), lr=0.1))) is None


def hook_of_optimizer(used, seen):
    used.register_step_post_hook(seen)


def hook_of_all(used, seen):
    return optimizer.register_optimizer_step_pre_hook(seen)


def replaced_step(used, seen):
    before = used.step
    used.step = lambda *args: (seen(), before(*args))[1]


@pytest.mark.parametrize("watch", [hook_of_optimizer, hook_of_all, replaced_step])
def test_whoever_watches_the_steps_sees_them(watch):
    used, seen = SGD(net().parameters(), lr=0.1), Mock(return_value=None)
    handle = watch(used, seen)
    try:
        step_optimizer(used, lambda: None)
    finally:
        if handle is not None:
            handle.remove()
    assert seen.call_count == 1


def test_a_scheduler_sees_the_steps():
    used = SGD(net().parameters(), lr=0.1)
    scheduler = StepLR(used, 1)
    step_optimizer(used, lambda: None)
    scheduler.step()  # warns if it has seen no step


def test_an_own_zero_grad_is_called():
    used = SGD(net().parameters(), lr=0.1)
    used.zero_grad = Mock()
    zero_gradients(used)
    used.zero_grad.assert_called_once_with()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_added_to_those_there(dtype):
    ours = net().to(dtype)
    theirs = copy.deepcopy(ours)
    inputs = torch.randn(4, 5).to(dtype)
    for _ in range(2):
        run_backward(ours(inputs).square().mean())
        theirs(inputs).square().mean().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("loss", [torch.zeros(()), torch.zeros(2, requires_grad=True) * 2])
def test_a_loss_that_cannot_be_differentiated_has_torchs_error(loss):
    with pytest.raises(RuntimeError) as ours:
        run_backward(loss)
    with pytest.raises(RuntimeError) as theirs:
        loss.backward()
    assert str(ours.value) == str(theirs.value)


# ---- batches

IMAGES = torch.randint(0, 256, (23, 1, 6, 6), dtype=torch.uint8)
LOADERS = {
    "shuffled": {"shuffle": True},
    "in order": {},
    "without the last": {"shuffle": True, "drop_last": True},
}


def ours(loader):
    return iterate_examples(loader, loader.dataset)


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("transform", [None, Normalize((0.5,), (0.5,)), CropFlip(2)], ids=["none", "normalize", "crop"])
def test_batches_and_random_numbers_are_those_of_a_dataloader(options, transform):
    loader = Examples(IMAGES, torch.arange(23), transform).loader(5, **options)
    assert Examples.are_read_by(loader)
    passes = []
    for start in (iter, ours):
        torch.manual_seed(3)
        epochs = [list(start(loader)) for _ in range(2)]
        passes.append((epochs, torch.rand(4)))
    (theirs, after), (found, found_after) = passes
    assert torch.equal(after, found_after)
    for their_epoch, our_epoch in zip(theirs, found, strict=True):
        for (inputs, labels), (our_inputs, our_labels) in zip(their_epoch, our_epoch, strict=True):
            assert torch.equal(inputs, our_inputs)
            assert torch.equal(labels, our_labels)


def test_indices_are_drawn_with_the_first_batch():
    loader = Examples(IMAGES, torch.arange(23)).loader(5, shuffle=True)
    orders = []
    for start in (iter, ours):
        torch.manual_seed(3)
        batches = start(loader)
        torch.rand(1)  # a hook that draws between the start of an epoch and its first batch
        orders.append(torch.cat([labels for _, labels in batches]))
    assert torch.equal(*orders)


def subclass(examples):
    class Own(Examples):
        """Examples of a user."""

    return Own(examples.inputs, examples.labels).loader(5)


@pytest.mark.parametrize(
    "make",
    [
        lambda examples: DataLoader(examples, batch_size=5),
        lambda examples: examples.loader(5, num_workers=1),
        lambda examples: examples.loader(5, sampler=WeightedRandomSampler([1.0] * 23, 23)),
        lambda examples: examples.loader(5, shuffle=True, generator=torch.Generator()),
        lambda examples: DataLoader(TensorDataset(examples.inputs), batch_size=5),
        subclass,
    ],
    ids=["own collate", "workers", "own sampler", "own generator", "other data", "subclass"],
)
def test_other_loaders_are_left_alone(make):
    assert not Examples.are_read_by(make(Examples(IMAGES, torch.arange(23))))
