"""Rules of layers for several clients at once, faster than those of ``torch.vmap``.

``torch.vmap`` makes every function right for a batch of clients, but its rules for convolutions, pooling and norms copy
their inputs, and a call of an ``autograd.Function`` takes longer than a small layer. :class:`LayerRules` is active
within a level of ``vmap`` and takes these functions away from it: a rule looks through the wrapper, leaves the level,
computes with the plain tensors of all clients under ordinary autograd, and wraps the result. A function without a rule,
and a call that a rule does not know, is left to ``vmap``.

Images of S clients have the logical shape (B, S, C, H, W) with the clients in dimension 1, and lie in memory in the
order B, H, W, S, C. This is the layout ``channels_last`` of (B, S * C, H, W), so that a grouped convolution needs no
copy, and neither do pooling, norms and element-wise functions, which keep strides.

Weights that are the same for all clients are no batched tensors. A layer with such weights computes the samples of all
clients as those of one batch, and images before it keep the clients in dimension 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_sparsefl.federated.exchange.failures import in_brief, is_out_of_memory
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.group_norm import group_norm
from lightning_sparsefl.federated.local.stacked.logs import NotStackable

Rule = Callable[..., Any]
"""Function of :class:`LayerRules` and of the arguments of the function that it replaces; may return NotImplemented."""

_RULES: dict[Any, Rule] = {}


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for function in functions:
            _RULES[function] = rule
        return rule

    return register


def add_rule(function: Callable[..., Any], rule: Rule) -> None:
    """Add the rule of a function that calls :func:`torch.overrides.handle_torch_function`.

    Args:
        function: The function.
        rule: Rule of the function, which never returns NotImplemented.
    """
    _RULES[function] = rule


@contextmanager
def failing_alone(name: str) -> Iterator[None]:
    """Raise :class:`NotStackable` in the place of an error in the call of a function for one of the clients.

    The user's code may catch the error, and then go on for this client alone.

    Args:
        name: Name of the function.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotStackable(f"calls `{name}`, which fails for a client ({in_brief(error)})") from error


class LayerRules(TorchFunctionMode):
    """Mode that sends the functions of layers to their rules, within a level of ``vmap`` over clients.

    Args:
        size: Number of clients.
        level: Number of the level.
        own: Identities of the module's own tensors, which no client has.
    """

    def __init__(self, size: int, level: int, own: Set[int] = frozenset()) -> None:
        super().__init__()
        self.size, self.level, self._own = size, level, own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the rule of a function, or the function itself."""
        try:
            return self._call(func, args, kwargs or {})
        except Exception as error:
            if not isinstance(error, NotStackable):  # which notes itself
                NotStackable.note(error)
            raise

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        require_others(args, self._own)
        rule = _RULES.get(func)
        if rule is not None:
            with functorch.Outside():
                output = rule(self, *args, **kwargs)
            if output is not NotImplemented:
                return output
        return func(*args, **kwargs)

    def open(self, value: Any, dim: int = 0) -> Tensor | None:
        """Return the plain tensor of all clients; None if the value is the same for all.

        Args:
            value: Argument of a function.
            dim: Dimension in which the clients are to be.
        """
        if not functorch.is_batched(value):
            return None
        tensor, at = functorch.unwrap(value, self.level)
        return None if at is None else tensor if at == dim else tensor.movedim(at, dim)

    def open_all(self, *values: Any) -> list[Tensor | None] | None:
        """Return the plain tensors of arguments, None for those that are None; None if one is the same for all."""
        tensors = [None if value is None else self.open(value) for value in values]
        same = any(value is not None and tensor is None for value, tensor in zip(values, tensors, strict=True))
        return None if same else tensors

    def every(self, value: Any) -> Tensor | None:
        """Return the plain tensor of all clients, which repeats a value that is the same for all; None for None."""
        opened: Tensor | None = self.open(value)
        return value.expand(self.size, *value.shape) if opened is None and value is not None else opened

    def batch(self, value: Any, *weights: Any) -> Tensor | None:
        """Return the samples of all clients as one batch, if the weights are the same for all; else None."""
        tensor = None if any(map(functorch.is_batched, weights)) else self.open(value)
        return None if tensor is None else tensor.flatten(0, 1)

    def close_batch(self, tensor: Tensor) -> Tensor:
        """Return the samples of all clients, which were one batch, as those of each client."""
        return self.close(tensor.unflatten(0, (self.size, -1)))

    def close(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return a plain tensor as one of all clients.

        Args:
            tensor: Tensor with a dimension of the clients.
            dim: Dimension of the clients.
        """
        return functorch.wrap(tensor, dim, self.level)

    def image(self, value: Any, alone: bool = False) -> Tensor | None:
        """Return images of shape (B, C, H, W) as one tensor of shape (B, S * C, H, W); None if they are others.

        Args:
            value: The images.
            alone: Whether the value is one image of shape (C, H, W).
        """
        tensor = self.open(value, 0 if alone else 1)
        if alone and tensor is not None:
            tensor = tensor.unsqueeze(0)
        if tensor is None or tensor.dim() != 5:
            return None
        return _channels_last(tensor.flatten(1, 2))

    def close_image(self, tensor: Tensor) -> Tensor:
        """Return images of shape (B, S * C, H, W) as those of all clients."""
        return self.close(tensor.unflatten(1, (self.size, -1)), 1)


READS_NUMBER = "reads a number out of a tensor (`.item()`, `float()`, `int()`)"
"""Clause of a step that needs a number of Python, of which each client has its own."""
LEAVES_TORCH = "leaves torch (`.numpy()`)"
"""Clause of a step that goes on with the numbers in another library."""
KEPT_ELSEWHERE = "computes with parameters that it keeps elsewhere than in the module"
"""Clause of a step that reads the module's own tensors, which no client has."""


def require_others(args: Sequence[Any], own: Set[int], clause: str = KEPT_ELSEWHERE) -> None:
    """Check that a function is not one of a module's own tensors.

    Args:
        args: Arguments of the function.
        own: Identities of these tensors.
        clause: Clause of the error.

    Raises:
        NotStackable: If it is.
    """
    for arg in args:
        if id(arg) in own or (isinstance(arg, (list, tuple)) and any(id(item) in own for item in arg)):
            raise NotStackable(clause)


class OtherTensors(TorchFunctionMode):
    """Mode in which a module's own tensors cannot be read, outside of a level: of one client, or of schedulers.

    Args:
        own: Identities of the tensors.
        clause: Clause of the error.
    """

    def __init__(self, own: Set[int], clause: str = KEPT_ELSEWHERE) -> None:
        super().__init__()
        self._own, self._clause = own, clause

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it is one of these tensors."""
        require_others(args, self._own, self._clause)
        return func(*args, **(kwargs or {}))


class FlatViews(TorchFunctionMode):
    """Mode for one client, whose images have the layout of kernels in a stack, which ``view`` cannot flatten."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and ``reshape`` for a ``view`` of images."""
        if func is Tensor.view and args[0].dim() == 4 and not args[0].is_contiguous():
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))


def _channels_last(images: Tensor) -> Tensor:
    """Return images of shape (B, C, H, W) in the layout ``channels_last``, with the strides that this layout has.

    The stride of a dimension of size 1 is free, and torch's convolution on a CPU computes wrong gradients of the kernel
    where that of B is another one (2.15).
    """
    if len(images) == 1:
        return images.clone(memory_format=torch.channels_last)
    return images.contiguous(memory_format=torch.channels_last)


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


@_rule(F.linear, torch._C._nn.linear)
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


@_rule(F.embedding)
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


@_rule(F.conv2d, torch.conv2d)
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


for _function in (F.max_pool2d, torch.max_pool2d):
    _RULES[_function] = _pooling(F.max_pool2d)
_RULES[F.avg_pool2d] = _pooling(F.avg_pool2d)
_RULES[F.adaptive_avg_pool2d] = _pooling(F.adaptive_avg_pool2d)


@_rule(F.group_norm)
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


@_rule(F.batch_norm)
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
        flat = _channels_last(flat)
    if training and flat.numel() == flat.shape[1]:
        return NotImplemented  # one value for each channel: torch refuses it
    flatten = Tensor.view if writes else Tensor.reshape  # statistics are written in place
    mean, var, scale, shift = (None if tensor is None else flatten(tensor, -1) for tensor in opened)
    outputs = torch.batch_norm(flat, scale, shift, mean, var, training, momentum, eps, False)
    return rules.close(outputs.unflatten(1, (rules.size, -1)), 1)


@_rule(F.layer_norm)
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


@_rule(F.cross_entropy)
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


@_rule(F.relu, torch.relu, Tensor.relu)
def _relu(rules: LayerRules, input: Any, inplace: bool = False) -> Any:
    if inplace or not functorch.is_batched(input):
        return NotImplemented
    tensor, at = functorch.unwrap(input, rules.level)
    return NotImplemented if at is None else rules.close(torch.relu(tensor), at)


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


@_rule(Tensor.view, Tensor.reshape, torch.reshape)
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


@_rule(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _requires_grad(rules: LayerRules, input: Any) -> Any:
    """Return whether gradients flow to a tensor, which those of a level do not show."""
    if not functorch.is_batched(input):
        return NotImplemented
    return functorch.unwrap(input, rules.level)[0].requires_grad


@_rule(Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(rules: LayerRules, input: Any, value: Any) -> Any:
    """Refuse to freeze or to train a tensor of a level, which would not change its gradients."""
    if not functorch.is_batched(input):
        return NotImplemented
    if bool(value) != _requires_grad(rules, input):
        raise NotStackable("sets `requires_grad` of a tensor")
    return None


@_rule(Tensor.index_fill, Tensor.index_fill_, torch.index_fill)
def _index_fill(rules: LayerRules, input: Any, dim: Any, index: Any, *value: Any, **options: Any) -> Any:
    """Refuse positions of each client; the rule of ``vmap`` (2.15) takes negative ones for those of another client."""
    if functorch.is_batched(index):
        raise NotStackable("uses `index_fill` with positions that differ between clients")
    return NotImplemented


@_rule(F.one_hot)
def _one_hot(rules: LayerRules, tensor: Any, num_classes: int = -1) -> Any:
    """Mark the classes of all clients; ``vmap`` takes a negative class for none, which is an error alone."""
    classes = rules.open(tensor)
    if classes is None or num_classes < 0:
        return NotImplemented
    zeros = classes.new_zeros(*classes.shape, num_classes)
    return rules.close(zeros.scatter(-1, classes.unsqueeze(-1), 1))


@_rule(Tensor.__setitem__)
def _set_marked(rules: LayerRules, input: Any, index: Any, value: Any) -> Any:
    """Write a number where a boolean tensor is true; before torch 2.15, ``vmap`` takes that for a choice of entries."""
    tensor, marked = rules.open(input), rules.open(index)
    if tensor is None or marked is None or marked.dtype is not torch.bool or not isinstance(value, (int, float)):
        return NotImplemented
    if marked.shape != tensor.shape:
        return NotImplemented
    tensor.masked_fill_(marked, value)
    return None


@_rule(torch.bincount, Tensor.bincount)
def _bincount(rules: LayerRules, input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count the numbers of all clients; ``vmap`` does so client by client. One beyond `minlength` is an error here."""
    numbers = rules.open(input)
    if numbers is None or weights is not None or minlength <= 0:
        return NotImplemented
    zeros = torch.zeros(len(numbers), minlength, dtype=torch.long, device=numbers.device)
    return rules.close(zeros.scatter_add(1, numbers.long(), torch.ones_like(numbers, dtype=torch.long)))


def _extreme(reduce: Callable[..., Tensor]) -> Rule:
    """Return a rule that divides the gradient evenly among equal extremes, as without clients."""

    def rule(rules: LayerRules, input: Any, *args: Any, **options: Any) -> Any:
        values = None if args or options else rules.open(input)
        return NotImplemented if values is None else rules.close(reduce(values.reshape(len(values), -1), 1))

    return rule


_RULES[torch.max] = _RULES[Tensor.max] = _extreme(torch.amax)
_RULES[torch.min] = _RULES[Tensor.min] = _extreme(torch.amin)


def _refusal(clause: str) -> Rule:
    def refuse(rules: LayerRules, input: Any) -> Any:
        if functorch.is_batched(input):
            raise NotStackable(clause)
        return NotImplemented

    return refuse


_RULES[Tensor.grad.__get__] = _refusal("reads the gradient (`grad`) of a tensor")  # type: ignore[union-attr]
_RULES[Tensor.is_leaf.__get__] = _refusal("asks whether a tensor is a leaf")  # type: ignore[attr-defined]


_read = _refusal(READS_NUMBER)
for _reader in (Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist):
    _RULES[_reader] = _read
_RULES[Tensor.numpy] = _refusal(LEAVES_TORCH)
BRANCHES = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.item)
"""Functions that let code branch on the value of a tensor."""


@_rule(*BRANCHES[:3])
def _truth(rules: LayerRules, input: Any) -> Any:
    """Return the answer to a question about values if it is the same for all clients, who then take the same branch."""
    values = rules.open(input)
    if values is None or values.numel() != len(values):
        return NotImplemented
    answers = set(map(bool, values.flatten().tolist()))
    if len(answers) > 1:
        raise NotStackable("branches on the value of a tensor, which differs between clients")
    return answers.pop()


@_rule(Tensor.item)
def _item(rules: LayerRules, input: Any) -> Any:
    """Return a truth value as a number of Python; see :func:`_truth`."""
    return _truth(rules, input) if input.dtype is torch.bool else _read(rules, input)


@_rule(Tensor.flatten, torch.flatten)
def _flatten(rules: LayerRules, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten images of shape (B, C, H, W) to (B, C * H * W) by one copy to the layout of a linear layer."""
    if not functorch.is_batched(input) or input.dim() != 4 or (start_dim, end_dim) not in ((1, -1), (1, 3)):
        return NotImplemented
    images = rules.open(input)
    return NotImplemented if images is None else rules.close(_Flatten.apply(images))
