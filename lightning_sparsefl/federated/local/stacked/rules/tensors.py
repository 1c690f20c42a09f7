"""Rules of functions of tensors: shapes, indices, reductions, and those that read a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules.mode import (
    LEAVES_TORCH,
    READS_NUMBER,
    REMOVES_GRADIENT,
    LayerRules,
    Rule,
    rule_for,
)


class _Flatten(torch.autograd.Function):
    """Flattening of images whose gradient lies in memory as they do.

    Without it, the backward pass of an activation before it reads two layouts at once, which takes ten times as long as
    a copy.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.shape = images.shape[2:]
        return images.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].reshape(*grads[0].shape[:2], *ctx.shape)
        return grad.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


@rule_for(Tensor.view, Tensor.reshape, torch.reshape)
def _view(rules: LayerRules, input: Any, *sizes: Any, **options: Any) -> Any:
    """Flatten images as `_flatten` does, whose layout ``view`` would refuse."""
    given = (*sizes, *options.values())  # `shape=`, `dtype=`
    sizes = given[0] if len(given) == 1 else given
    if not functorch.is_batched(input) or input.dim() != 4 or not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
        return NotImplemented
    samples, *image = input.shape
    whole = (samples, math.prod(image))
    wanted = [size in (-1, own) for size, own in zip(sizes, whole, strict=True)]
    if not all(wanted) or tuple(sizes) == (-1, -1):
        return NotImplemented
    return _flatten(rules, input, 1)


@rule_for(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(rules: LayerRules, input: Any) -> Any:
    """Return whether gradients flow to a tensor, which those of a level do not show."""
    if not functorch.is_batched(input):
        return NotImplemented
    return functorch.unwrap(input, rules.level)[0].requires_grad


@rule_for(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(rules: LayerRules, input: Any, value: Any) -> Any:
    """Refuse to freeze or to train a tensor of a level, which would not change its gradients."""
    if not functorch.is_batched(input):
        return NotImplemented
    if bool(value) != _requires_grad(rules, input):
        raise NotStackable("sets `requires_grad` of a tensor")
    return None


@rule_for(Tensor.index_fill, Tensor.index_fill_, torch.index_fill)
def _index_fill(rules: LayerRules, input: Any, dim: Any, index: Any, *value: Any, **options: Any) -> Any:
    """Refuse positions of each client; the rule of ``vmap`` (2.15) takes negative ones for those of another client."""
    if functorch.is_batched(index):
        raise NotStackable("uses `index_fill` with positions that differ between clients")
    return NotImplemented


@rule_for(F.one_hot)
def _one_hot(rules: LayerRules, tensor: Any, num_classes: int = -1) -> Any:
    """Mark the classes of all clients; ``vmap`` takes a negative class for none, which is an error alone."""
    classes = rules.open(tensor)
    if classes is None or num_classes < 0:
        return NotImplemented
    zeros = classes.new_zeros(*classes.shape, num_classes)
    return rules.close(zeros.scatter(-1, classes.unsqueeze(-1), 1))


@rule_for(Tensor.__setitem__)
def _set_marked(rules: LayerRules, input: Any, index: Any, value: Any) -> Any:
    """Write a number where a boolean tensor is true; before torch 2.15, ``vmap`` takes that for a choice of entries."""
    tensor, marked = rules.open(input), rules.open(index)
    if tensor is None or marked is None or marked.dtype is not torch.bool or not isinstance(value, (int, float)):
        return NotImplemented
    if marked.shape != tensor.shape:
        return NotImplemented
    tensor.masked_fill_(marked, value)
    return None


@rule_for(torch.bincount, Tensor.bincount)
def _bincount(rules: LayerRules, input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count the numbers of all clients; ``vmap`` does so client by client. One beyond `minlength` is an error here."""
    numbers = rules.open(input)
    if numbers is None or weights is not None or minlength <= 0:
        return NotImplemented
    zeros = torch.zeros(len(numbers), minlength, dtype=torch.long, device=numbers.device)
    return rules.close(zeros.scatter_add(1, numbers.long(), torch.ones_like(numbers, dtype=torch.long)))


@rule_for(torch.empty)
def _empty(rules: LayerRules, *size: Any, **options: Any) -> Any:
    """Give each client memory of its own, which it may fill in place, as distributions do with random numbers."""
    if not options.keys() <= {"dtype", "device"}:
        return NotImplemented
    shape = size[0] if size and isinstance(size[0], Sequence) else size
    return rules.close(torch.empty((rules.size, *shape), **options))


def _extreme(reduce: Callable[..., Tensor]) -> Rule:
    """Return a rule that divides the gradient evenly among equal extremes, as without clients."""

    def rule(rules: LayerRules, input: Any, *args: Any, **options: Any) -> Any:
        values = None if args or options else rules.open(input)
        return NotImplemented if values is None else rules.close(reduce(values.reshape(len(values), -1), 1))

    return rule


rule_for(torch.max, Tensor.max)(_extreme(torch.amax))
rule_for(torch.min, Tensor.min)(_extreme(torch.amin))


@rule_for(Tensor.grad.__get__)  # type: ignore[union-attr]
def _gradient(rules: LayerRules, input: Any) -> Any:
    """Return the gradient of a weight to a hook that sees it, and refuse to within a step, which computes it later."""
    if rules.gradients is not None and rules.gradients.knows(input):
        return rules.gradients.of(input)
    if functorch.is_batched(input):
        raise NotStackable("reads the gradient (`grad`) of a tensor")
    return NotImplemented


@rule_for(Tensor.grad.__set__)  # type: ignore[union-attr]
def _set_gradient(rules: LayerRules, input: Any, value: Any) -> Any:
    """Replace the gradient of a weight by one of the same shape and type."""
    if rules.gradients is None or not rules.gradients.knows(input):
        return NotImplemented
    before = rules.gradients.of(input)
    if (value is None) != (before is None):
        raise NotStackable(REMOVES_GRADIENT)
    if before is None:
        return None
    if (value.shape, value.dtype) != (before.shape, before.dtype):
        raise NotStackable("assigns a gradient of another shape or type")
    slopes = rules.every(value)
    assert slopes is not None
    rules.gradients.replace(input, value, slopes.detach() if functorch.is_batched(value) else slopes.detach().clone())
    return None


@rule_for(Tensor.grad.__delete__)  # type: ignore[union-attr]
def _delete_gradient(rules: LayerRules, input: Any) -> Any:
    """Remove the gradient of a weight, as an assignment of None does."""
    return _set_gradient(rules, input, None)


@rule_for(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(rules: LayerRules, input: Any) -> Any:
    """Return the numbers of a tensor without its history, which ``vmap`` refuses; writes are counted, unlike alone."""
    if not functorch.is_batched(input):  # such as a frozen weight that all clients share
        return NotImplemented if rules.gradients is None else input.detach()
    tensor, at = functorch.unwrap(input, rules.level)
    return NotImplemented if at is None else rules.close(tensor.detach(), at)


@rule_for(torch.tensor)
def _tensor(rules: LayerRules, data: Any, *args: Any, **options: Any) -> Any:
    """Make a vector of scalars, each of which ``vmap`` would read as a number."""
    if args or options or not isinstance(data, (list, tuple)) or not any(map(functorch.is_batched, data)):
        return NotImplemented
    if any(not isinstance(value, Tensor) or value.dim() for value in data) or len({value.dtype for value in data}) > 1:
        return NotImplemented
    scalars = [rules.every(value) for value in data]
    vector = torch.stack([scalar.detach() for scalar in scalars if scalar is not None], 1)
    return rules.close(vector.to(torch.get_default_device()))


@rule_for(torch._foreach_norm)
def _norms(rules: LayerRules, tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    """Return the norm of each tensor, as the functions of torch that clip gradients ask for them."""
    opened = [rules.every(tensor) for tensor in tensors]
    return [
        rules.close(torch.linalg.vector_norm(each.reshape(len(each), -1), ord, 1, dtype=dtype))
        for each in opened
        if each is not None
    ]


def _in_place(change: Callable[[Tensor, Any], Any]) -> Rule:
    """Return a rule that changes a list of tensors in place by a number, or by one of each client."""

    def rule(rules: LayerRules, tensors: Any, operand: Any) -> Any:
        opened, operands = [rules.open(tensor) for tensor in tensors], rules.open(operand)
        if any(each is None for each in opened) or (operands is not None and operands.dim() != 1):
            return NotImplemented
        for each in opened:
            assert each is not None
            change(each, operand if operands is None else operands.view(-1, *[1] * (each.dim() - 1)))
        return None

    return rule


rule_for(torch._foreach_mul_)(_in_place(Tensor.mul_))
rule_for(torch._foreach_clamp_min_)(_in_place(Tensor.clamp_min_))
rule_for(torch._foreach_clamp_max_)(_in_place(Tensor.clamp_max_))


def _refusal(clause: str) -> Rule:
    def refuse(rules: LayerRules, input: Any) -> Any:
        if functorch.is_batched(input):
            raise NotStackable(clause)
        return NotImplemented

    return refuse


rule_for(Tensor.is_leaf.__get__)(_refusal("asks whether a tensor is a leaf"))  # type: ignore[attr-defined]


_read = _refusal(READS_NUMBER)
rule_for(Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist)(_read)
rule_for(Tensor.numpy)(_refusal(LEAVES_TORCH))
BRANCHES = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.item)
"""Functions that let code branch on the value of a tensor."""


@rule_for(*BRANCHES[:3])
def _truth(rules: LayerRules, input: Any) -> Any:
    """Return the answer to a question about values if it is the same for all clients, who then take the same branch."""
    values = rules.open(input)
    if values is None or values.numel() != len(values):
        return NotImplemented
    answers = set(map(bool, values.flatten().tolist()))
    if len(answers) > 1:
        raise NotStackable("branches on the value of a tensor, which differs between clients")
    return answers.pop()


@rule_for(Tensor.item)
def _item(rules: LayerRules, input: Any) -> Any:
    """Return a truth value as a number of Python; see :func:`_truth`."""
    return _truth(rules, input) if input.dtype is torch.bool else _read(rules, input)


@rule_for(Tensor.flatten, torch.flatten)
def _flatten(rules: LayerRules, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten images of shape (B, C, H, W) to (B, C * H * W) by one copy to the layout of a linear layer."""
    if not functorch.is_batched(input) or input.dim() != 4 or (start_dim, end_dim) not in ((1, -1), (1, 3)):
        return NotImplemented
    images = rules.open(input)
    return NotImplemented if images is None else rules.close(_Flatten.apply(images))
