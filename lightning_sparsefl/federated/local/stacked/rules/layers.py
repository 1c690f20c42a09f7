"""Rules of layers and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules.group_norm import group_norm
from lightning_sparsefl.federated.local.stacked.rules.mode import (
    LayerRules,
    Rule,
    channels_last,
    rule_for,
)


class _Linear(torch.autograd.Function):
    """Linear layer whose weight gradient has the strides of the weight.

    Autograd differentiates ``bmm(x, w.mT)`` to a transposed gradient, which is then copied into the leaf's layout; on a
    perceptron this copy takes half of the step.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        if bias is None:
            return torch.bmm(inputs, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,), (inputs, weight), needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if needed[0] else None,
            torch.bmm(grad.mT, inputs) if needed[1] else None,
            grad.sum(1) if needed[2] else None,
        )


@rule_for(F.linear, torch._C._nn.linear)
def _linear(rules: LayerRules, input: Any, weight: Any, bias: Any = None) -> Any:
    batch = rules.batch(input, weight, bias) if input.dim() > 1 else None
    if batch is not None:
        return rules.close_batch(F.linear(batch, weight, bias))
    opened = rules.open_all(input, weight, bias)
    if opened is None:
        return NotImplemented
    inputs, weights, biases = opened
    assert inputs is not None
    middle = inputs.shape[1:-1]
    outputs = _Linear.apply(inputs.reshape(rules.size, -1, inputs.shape[-1]), weights, biases)
    return rules.close(outputs.reshape(rules.size, *middle, outputs.shape[-1]))


@rule_for(F.embedding)
def _embedding(
    rules: LayerRules,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look all clients' tokens up in one table; the rule of ``vmap`` (2.15) forgets `padding_idx` in gradients."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        if functorch.is_batched(input) or functorch.is_batched(weight):
            raise NotStackable("uses an embedding with `max_norm`, `scale_grad_by_freq` or `sparse`")
        return NotImplemented
    tokens, tables = rules.open(input), rules.open(weight)
    if tokens is not None and tables is None:
        return rules.close(F.embedding(tokens, weight, padding_idx))
    if tokens is None:
        return NotImplemented
    assert tokens is not None
    assert tables is not None
    size = tables.shape[1]
    first = torch.arange(rules.size, device=tokens.device).view(-1, *[1] * (tokens.dim() - 1)) * size
    known = (tokens >= 0) & (tokens < size)  # others would be the tokens of the next client, and are refused so
    outputs = F.embedding(torch.where(known, tokens + first, -1), tables.flatten(0, 1))
    if padding_idx is not None:
        outputs = torch.where((tokens == padding_idx % size).unsqueeze(-1), outputs.detach(), outputs)
    return rules.close(outputs)


@rule_for(F.conv2d, torch.conv2d)
def _conv2d(
    rules: LayerRules,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if functorch.is_batched(input) and functorch.unwrap(input, rules.level)[1] is None:
        raise NotStackable("calls a convolution within a `torch.vmap` of its own")
    batch = rules.batch(input, weight, bias) if input.dim() == 4 else None
    if batch is not None:
        return rules.close_batch(F.conv2d(batch, weight, bias, stride, padding, dilation, groups))
    alone = input.dim() == 3  # one image without a dimension for the batch
    images, opened = rules.image(input, alone), rules.open_all(weight, bias)
    if images is None or opened is None:
        return NotImplemented
    weights, biases = opened
    assert weights is not None
    flat = None if biases is None else biases.reshape(-1)
    outputs = F.conv2d(images, weights.flatten(0, 1), flat, stride, padding, dilation, groups * rules.size)
    return rules.close(outputs[0].unflatten(0, (rules.size, -1))) if alone else rules.close_image(outputs)


def _pooling(function: Callable[..., Any]) -> Rule:
    def pool(rules: LayerRules, input: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("return_indices") or input.dim() != 4 or not functorch.is_batched(input):
            return NotImplemented
        if functorch.unwrap(input, rules.level)[1] == 0:
            return rules.close_batch(function(rules.batch(input), *args, **kwargs))
        images = rules.image(input)
        return NotImplemented if images is None else rules.close_image(function(images, *args, **kwargs))

    return pool


rule_for(F.max_pool2d, torch.max_pool2d)(_pooling(F.max_pool2d))
rule_for(F.avg_pool2d)(_pooling(F.avg_pool2d))
rule_for(F.adaptive_avg_pool2d)(_pooling(F.adaptive_avg_pool2d))


@rule_for(F.group_norm)
def _group_norm(
    rules: LayerRules, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    batch = rules.batch(input, weight, bias)
    if batch is not None:
        return rules.close_batch(F.group_norm(batch, num_groups, weight, bias, eps))
    images, opened = rules.image(input), rules.open_all(weight, bias)
    if images is None or opened is None:
        return NotImplemented
    scale, shift = (None if tensor is None else tensor.reshape(-1) for tensor in opened)
    groups = num_groups * rules.size
    if images.device.type == "cpu" and images.shape[1] < 8 * groups:
        return rules.close_image(group_norm(images, scale, shift, groups, eps))
    return rules.close_image(F.group_norm(images, groups, scale, shift, eps))


@rule_for(F.batch_norm)
def _batch_norm(
    rules: LayerRules,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    batch = None if training else rules.batch(input, running_mean, running_var, weight, bias)
    if batch is not None:
        return rules.close_batch(F.batch_norm(batch, running_mean, running_var, weight, bias, eps=eps))
    tensors, inputs = (running_mean, running_var, weight, bias), rules.open(input, 1)
    writes = training and running_mean is not None
    opened = rules.open_all(*tensors) if writes else [rules.every(tensor) for tensor in tensors]
    if opened is None or inputs is None or inputs.dim() not in (3, 5):
        return NotImplemented
    flat = inputs.flatten(1, 2)
    if flat.dim() == 4:
        flat = channels_last(flat)
    if training and flat.numel() == flat.shape[1]:
        return NotImplemented  # one value for each channel: torch refuses it
    flatten = Tensor.view if writes else Tensor.reshape  # statistics are written in place
    mean, var, scale, shift = (None if tensor is None else flatten(tensor, -1) for tensor in opened)
    outputs = torch.batch_norm(flat, scale, shift, mean, var, training, momentum, eps, False)
    return rules.close(outputs.unflatten(1, (rules.size, -1)), 1)


@rule_for(F.layer_norm)
def _layer_norm(
    rules: LayerRules, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    batch = rules.batch(input, weight, bias) if input.dim() > len(normalized_shape) else None
    if batch is not None:
        return rules.close_batch(F.layer_norm(batch, normalized_shape, weight, bias, eps))
    opened = rules.open_all(input, weight, bias)
    if opened is None:
        return NotImplemented
    inputs, scale, shift = opened
    assert inputs is not None
    outputs = F.layer_norm(inputs, normalized_shape, None, None, eps)
    ones = [1] * (outputs.dim() - 1 - len(normalized_shape))
    if scale is not None:
        outputs = outputs * scale.view(rules.size, *ones, *normalized_shape)
    if shift is not None:
        outputs = outputs + shift.view(rules.size, *ones, *normalized_shape)
    return rules.close(outputs)


@rule_for(F.cross_entropy)
def _cross_entropy(
    rules: LayerRules,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss of logits of shape (B, classes) and of classes as targets."""
    opened = rules.open_all(input, target)
    if opened is None or size_average is not None or reduce is not None or functorch.is_batched(weight):
        return NotImplemented
    logits, targets = opened
    assert logits is not None
    assert targets is not None
    if logits.dim() != 3 or targets.dim() != 2 or targets.is_floating_point() or reduction not in _REDUCTIONS:
        return NotImplemented
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    ).view(rules.size, -1)
    if reduction == "none":
        return rules.close(losses)
    total = losses.sum(1)
    if reduction == "sum":
        return rules.close(total)
    counted = targets != ignore_index
    classes = torch.where(counted, targets, 0)
    return rules.close(total / (counted if weight is None else weight[classes] * counted).sum(1))


_REDUCTIONS = ("mean", "sum", "none")


@rule_for(F.relu, torch.relu, Tensor.relu)
def _relu(rules: LayerRules, input: Any, inplace: bool = False) -> Any:
    if inplace or not functorch.is_batched(input):
        return NotImplemented
    tensor, at = functorch.unwrap(input, rules.level)
    return NotImplemented if at is None else rules.close(torch.relu(tensor), at)
