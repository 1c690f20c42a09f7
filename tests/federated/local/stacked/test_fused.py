"""Fused kernels end where the other kernels end, and are chosen only where they can."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from lightning_sparsefl.federated.local.stacked.fused import choose_kernel, may_be_fused

RATES = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def leaf_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a leaf with a gradient; one of an image's kernels is stored channels last, as in a stack."""
    random = torch.Generator().manual_seed(seed)
    value, grad = torch.randn(2, *shape, generator=random, dtype=torch.float64)
    if len(shape) == 5:
        value, grad = (t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for t in (value, grad))
    leaf = value.requires_grad_()
    leaf.grad = grad
    return leaf


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, RATES),
        (optim.SGD, {**RATES, "nesterov": True}),
        (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
        (optim.Adam, {"weight_decay": 0.1}),
        (optim.Adam, {"amsgrad": True}),
        (optim.AdamW, {}),
    ],
)
@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 2, 3, 3)])
def test_the_kernel_ends_where_the_others_end(shape, kind, options):
    ours, theirs = leaf_of(shape), leaf_of(shape)
    fused, plain = kind([ours], **options), kind([theirs], **options, foreach=False)
    for step in range(4):
        ours.grad, theirs.grad = leaf_of(shape, step).grad, leaf_of(shape, step).grad
        choose_kernel(fused)
        assert fused.param_groups[0]["fused"]
        fused.step()
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def strided(leaf: torch.Tensor) -> None:
    leaf.grad = leaf.grad.t().contiguous().t()


def sparse(leaf: torch.Tensor) -> None:
    leaf.grad = leaf.grad.to_sparse()


@pytest.mark.parametrize("change", [strided, sparse])
def test_gradients_of_another_layout_are_left_to_the_other_kernels(change):
    leaf = leaf_of((3, 5))
    change(leaf)
    optimizer = optim.SGD([leaf], **RATES)
    choose_kernel(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def test_the_stride_of_a_dimension_of_length_1_is_free():
    """Kernels of grey images, whose gradients torch returns with another one."""
    ours, theirs = leaf_of((3, 4, 1, 3, 3)), leaf_of((3, 4, 1, 3, 3))
    fused, plain = optim.SGD([ours], **RATES), optim.SGD([theirs], **RATES, foreach=False)
    for _ in range(3):
        ours.grad = theirs.grad.clone().as_strided(ours.shape, (36, 9, 1, 3, 1))
        assert ours.grad.stride() != ours.stride()
        choose_kernel(fused)
        assert fused.param_groups[0]["fused"]
        fused.step()
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_leaves_with_gaps_are_left_to_the_other_kernels():
    leaf = torch.randn(3, 10)[:, ::2].requires_grad_()
    leaf.grad = torch.randn(3, 10)[:, ::2]
    optimizer = optim.SGD([leaf], **RATES)
    choose_kernel(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def test_a_state_of_another_layout_is_left_to_the_other_kernels():
    leaf = leaf_of((3, 5))
    optimizer = optim.SGD([leaf], **RATES)
    optimizer.state[leaf]["momentum_buffer"] = leaf.grad.to_sparse()
    choose_kernel(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def test_first_steps_beside_later_ones_are_left_to_the_other_kernels():
    first, second = leaf_of((3, 5)), leaf_of((3, 5), seed=1)
    optimizer = optim.SGD([first, second], **RATES)
    second.grad = None
    chosen = []
    for grad in (None, torch.ones(3, 5, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)):
        second.grad = grad
        choose_kernel(optimizer)
        chosen.append(bool(optimizer.param_groups[0]["fused"]))
        optimizer.step()
    assert chosen == [True, False, True]


@pytest.mark.parametrize("choice", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}])
def test_a_kernel_that_the_user_has_chosen_stays(choice):
    assert may_be_fused(optim.SGD([leaf_of((3, 5))], **RATES))
    assert not may_be_fused(optim.SGD([leaf_of((3, 5))], **RATES, **choice))


def test_other_optimizers_have_no_fused_kernel():
    assert not may_be_fused(optim.RMSprop([leaf_of((3, 5))]))


def test_plain_sgd_gains_nothing():
    optimizer = optim.SGD([leaf_of((3, 5))], lr=0.1)
    choose_kernel(optimizer)
    assert not optimizer.param_groups[0]["fused"]


def test_counts_of_steps_that_the_kernel_cannot_read_are_left_to_the_other_kernels():
    optimizer = optim.Adam([leaf_of((3, 5))])
    optimizer.step()
    (state,) = optimizer.state.values()
    state["step"] = state["step"].double()
    choose_kernel(optimizer)
    assert not optimizer.param_groups[0]["fused"]
