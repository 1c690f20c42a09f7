"""An optimizer of a stack that steps ranges of clients moves each as an optimizer of its own would."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StackedOptimizer

SIZE = 3
OPTIMIZERS = {
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.1),
    "ASGD": lambda parameters: optim.ASGD(parameters, lr=0.1),
    "Adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1),
    "NAdam": lambda parameters: optim.NAdam(parameters, lr=0.1),
    "RMSprop": lambda parameters: optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda parameters: optim.Rprop(parameters, lr=0.1),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD with decay": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
}
HAS_GRADIENT = {
    "always": lambda tensor, step: True,
    "every second step": lambda tensor, step: step % 2 == 1,
    "one tensor later": lambda tensor, step: tensor == 0 or step >= 2,
}
RANGES = {
    "all": [(0, 3)] * 6,
    "two": [(0, 2), (2, 3)] * 4,
    "ragged": [(0, 3), (0, 3), (0, 2), (0, 1), (0, 1), (2, 3), (1, 3), (2, 3), (0, 1), (1, 2)],
}


def views_of(leaves, low, high):
    """Return the leaves of some clients by those of all."""
    if (low, high) == (0, SIZE):
        return {leaf: leaf for leaf in leaves}
    return {leaf: leaf.detach()[low:high].requires_grad_() for leaf in leaves}


def set_rate(optimizers, rate):
    """Set the learning rate, but for ASGD, which keeps that of a client's last step: in a stack the same for all."""
    for optimizer in optimizers:
        if not isinstance(optimizer, optim.ASGD):
            optimizer.param_groups[0]["lr"] = rate


@pytest.mark.parametrize("keeps", [False, True], ids=["new views", "kept views"])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("pattern", HAS_GRADIENT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_client_moves_as_alone(name, pattern, ranges, keeps):
    make, random = OPTIMIZERS[name], torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.empty(4)) for _ in range(2)]
    leaves = [torch.randn(SIZE, 4, generator=random).requires_grad_() for _ in own]
    alone = [[nn.Parameter(leaf.detach()[client].clone()) for leaf in leaves] for client in range(SIZE)]
    optimizers = [make(parameters) for parameters in alone]
    ours = StackedOptimizer(make(own), {id(p): leaf for p, leaf in zip(own, leaves, strict=True)}, SIZE)
    kept = {}
    for number, (low, high) in enumerate(RANGES[ranges]):
        views = views_of(leaves, low, high)
        views = kept.setdefault((low, high), views) if keeps else views
        for place, leaf in enumerate(leaves):
            if HAS_GRADIENT[pattern](place, ours.taken[low]):
                views[leaf].grad = torch.randn(high - low, 4, generator=random)
                for client in range(low, high):
                    alone[client][place].grad = views[leaf].grad[client - low].clone()
        set_rate([ours.optimizer, *optimizers], 0.1 / (1 + number // 3))
        ours.step(low, high, views, (low, high) if keeps and pattern == "always" else None)
        for client in range(low, high):
            optimizers[client].step()
            optimizers[client].zero_grad()
        for view in views.values():
            view.grad = None
    for client, parameters in enumerate(alone):
        for leaf, parameter in zip(leaves, parameters, strict=True):
            torch.testing.assert_close(leaf.detach()[client], parameter.detach())


def test_a_scheduler_sees_that_some_clients_have_stepped(recwarn):
    own = nn.Parameter(torch.empty(4))
    leaf = torch.ones(SIZE, 4, requires_grad=True)
    optimizer = optim.SGD([own], lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    part = leaf.detach()[:2].requires_grad_()
    part.grad = torch.ones(2, 4)
    StackedOptimizer(optimizer, {id(own): leaf}, SIZE).step(0, 2, {leaf: part})
    scheduler.step()
    assert not recwarn.list


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_clients_whose_equally_many_steps_had_other_gradients_do_not_mix(name):
    """A module that leaves a tensor out in some batches gives longer clients other counts of Adam than shorter ones."""
    random, parameter, leaf = torch.Generator().manual_seed(0), nn.Parameter(torch.empty(4)), torch.ones(2, 4)
    leaf.requires_grad_()
    alone = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizers = [OPTIMIZERS[name]([each]) for each in alone]
    ours = StackedOptimizer(OPTIMIZERS[name]([parameter]), {id(parameter): leaf}, 2)
    for client, has_gradient in [(0, True), (0, True), (1, False), (1, True), (0, True), (1, True)]:
        view = leaf.detach()[client : client + 1].requires_grad_()
        if has_gradient:
            view.grad = torch.randn(1, 4, generator=random)
            alone[client].grad = view.grad[0].clone()
        ours.step(client, client + 1, {leaf: view})
        optimizers[client].step()
        optimizers[client].zero_grad()
    torch.testing.assert_close(leaf.detach(), torch.stack([each.detach() for each in alone]))


def test_the_kernel_is_chosen_anew_where_options_or_layouts_of_gradients_have_changed():
    own, leaf = nn.Parameter(torch.empty(4, 5)), torch.randn(SIZE, 4, 5, requires_grad=True)
    ours = StackedOptimizer(optim.SGD([own], lr=0.1, momentum=0.9), {id(own): leaf}, SIZE)

    def is_fused(layouts, gradient=None):
        leaf.grad = torch.ones(SIZE, 4, 5) if gradient is None else gradient
        ours.step(0, SIZE, None, layouts)
        return bool(ours.optimizer.param_groups[0]["fused"])

    assert is_fused("rows")
    assert is_fused("rows")
    assert not is_fused("columns", torch.ones(SIZE, 5, 4).mT)
    assert is_fused("rows")
    ours.optimizer.param_groups[0]["momentum"] = 0
    assert not is_fused("rows")
