"""Operations of a model: fvcore's multiply-accumulates of every layer, scaled by the density of its weights.

One multiply-accumulate is two operations; a bias is one operation per element and output position. Normalisation,
activation and pooling are not counted. fvcore ignores masks and counts recurrent layers, embeddings and fused
attention as 0, so these are counted here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_sparsefl.sparse.forward import split_arguments
from lightning_sparsefl.sparse.masks import counts, intersect
from lightning_sparsefl.sparse.modes import modes_restored, random_restored
from lightning_sparsefl.types import LayerFlops, Masks

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by keyword."""
_PRODUCTS = (
    *("conv", "_convolution_mode", "linear", "addmm", "matmul", "bmm", "baddbmm", "addbmm", "mm", "mv", "addmv"),
    *("dot", "inner", "tensordot", "einsum", "bilinear", "scaled_dot_product_attention", "embedding"),
    "linalg_multi_dot",
)
"""Operators that are counted; fvcore's other counts are those of normalisation and pooling."""


def count_layers(module: nn.Module, sample: Tensor | tuple[Any, ...]) -> tuple[LayerFlops, ...]:
    """Count the operations of every layer on one sample, in the order in which the modules finish.

    This is the order of the forward pass, unless a module uses a weight of its own before it calls a submodule.

    The module runs twice, in evaluation mode and without gradients; its modes and the random state are
    restored. A layer that is called several times is counted each time, under the first name of its weight.
    Operations of a module without a weight matrix (a `matmul`, or a lookup of tied weights) have the empty name, to
    which no mask applies, and so have the products of queries, keys and values in ``nn.MultiheadAttention``; those of a
    module with several matrices are divided in proportion to their sizes. Of a module that passes the weights of layers
    that it does not call to functions, such as ``torch.nn.functional.linear``, these weights have their own operations,
    and the others have the empty name. Recurrent layers are counted for every time step. An embedding is counted as a
    product with a one-hot vector without its zeros, ``nn.Bilinear`` as one multiply-accumulate for each weight.

    Args:
        module: Module, which may be a ``LightningModule``, whose ``forward`` takes the sample.
        sample: Batch of one sample, on the module's device; a tuple is passed as several arguments.

    Returns:
        Multiply-accumulates and bias additions of each layer.

    Example:
        >>> count_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), torch.zeros(1, 1, 5, 5))
        (LayerFlops(weight='0.weight', macs=162, bias=18),)
    """
    arguments = split_arguments(module, sample if isinstance(sample, tuple) else (sample,))
    with _undisturbed(module), torch.no_grad():
        calls, borrowed = _observe(module, arguments)
        products = _count_products(module, arguments)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    modules = dict(module.named_modules())
    layers: dict[str, LayerFlops] = {}
    for name, amounts in calls.items():
        for tensor, macs, bias in _work(modules[name], amounts, products.get(name, 0), borrowed.get(name, ())):
            weight = "" if tensor is None else names[id(tensor)]
            key = weight or f"{name}()"
            before = layers.get(key, LayerFlops(weight=weight, macs=0, bias=0))
            layers[key] = LayerFlops(weight=weight, macs=before.macs + macs, bias=before.bias + bias)
    return tuple(layers.values())


def forward_flops(layers: Sequence[LayerFlops], masks: Masks | None = None) -> float:
    """Return the operations of a forward pass of one sample: ``sum of 2 * macs * density(weight) + bias``.

    Args:
        layers: Layers from :func:`count_layers`.
        masks: Masks of the weights; a missing name is dense. Biases are counted in full.

    Example:
        >>> layers = [LayerFlops(weight="w", macs=10, bias=2)]
        >>> forward_flops(layers), forward_flops(layers, {"w": torch.tensor([True, False])})
        (22.0, 12.0)
    """
    return sum(_passes(layers, _fractions(layers, masks or {})))


def training_flops(
    layers: Sequence[LayerFlops],
    masks: Masks | None = None,
    trainable: Masks | None = None,
    samples: int = 1,
) -> float:
    """Return the operations of a forward and backward pass over `samples` samples, without those of frozen layers.

    The backward pass of a layer costs as much as its forward pass for the gradient of the input, from the earliest
    trainable layer on, and as much again for the gradient of the weights, times the fraction of its kept weights
    that is trainable. The input gradient of the earliest layer is counted although it is not needed, so that a
    fully trainable model costs exactly three forward passes, as in the papers. Products without a weight have the
    gradients of both factors.

    Args:
        layers: Layers from :func:`count_layers`.
        masks: Masks of the weights that the model holds; a missing name is dense.
        trainable: Masks of the weights that may change; a missing name is trainable.
        samples: Number of samples.

    Example:
        >>> layers = [LayerFlops(weight="a", macs=10, bias=0), LayerFlops(weight="b", macs=5, bias=0)]
        >>> training_flops(layers), training_flops(layers, trainable={"a": torch.tensor([False])})
        (90.0, 50.0)
    """
    masks, trainable = masks or {}, trainable or {}
    kept = _fractions(layers, masks)
    changing = _fractions(layers, intersect(masks, trainable)) if trainable else kept
    forward = _passes(layers, kept)
    shares = [t / k if k else 0.0 for k, t in zip(kept, changing, strict=True)]
    weighted = [place for place, layer in enumerate(layers) if layer.weight]
    first = next((place for place in weighted if shares[place]), len(layers) if weighted else 0)
    first = 0 if first in weighted[:1] else first
    weight_gradients = sum(cost * share for cost, share in zip(forward[first:], shares[first:], strict=True))
    return samples * (sum(forward) + sum(forward[first:]) + weight_gradients)


def _passes(layers: Sequence[LayerFlops], fractions: Sequence[float]) -> list[float]:
    return [2.0 * layer.macs * share + layer.bias for layer, share in zip(layers, fractions, strict=True)]


def _fractions(layers: Sequence[LayerFlops], masks: Masks) -> list[float]:
    """Return the density of each layer's weight."""
    held = {layer.weight: masks[layer.weight] for layer in layers if layer.weight in masks}
    densities = {name: kept / max(1, held[name].numel()) for name, kept in counts(held).items()}
    return [densities.get(layer.weight, 1.0) for layer in layers]


def _work(
    module: nn.Module, amounts: Sequence[int], products: int, borrowed: Sequence[_Product]
) -> Iterator[tuple[Tensor | None, int, int]]:
    """Yield weight tensor, multiply-accumulates and bias additions of one module, without those of called children.

    `amounts` are the sums of :func:`_amounts` over the module's calls, and `borrowed` its products with weights of
    others.
    """
    matrices, amount = _matrices(module), amounts[0]
    if _is_attention(module):
        yield from _attention_work(module, amounts, products)
    elif borrowed:
        for product in borrowed:
            yield product.weight, product.macs, product.bias
        yield None, max(0, products - sum(product.macs for product in borrowed)), 0
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        for name, weight in matrices.items():
            bias = getattr(module, name.replace("weight", "bias"), None)
            yield weight, weight.numel() * amount, 0 if bias is None else bias.numel() * amount
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield module.weight, module.embedding_dim * amount, 0
    elif not matrices:
        if products:
            yield None, products, 0
    else:
        total, left = sum(weight.numel() for weight in matrices.values()), products
        biases = amount if isinstance(getattr(module, "bias", None), Tensor) else 0
        for place, weight in enumerate(matrices.values(), start=1):
            share = left if place == len(matrices) else products * weight.numel() // max(1, total)
            left -= share
            yield weight, share, biases
            biases = 0


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is called with queries, keys and values; a subclass may take other arguments."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def _attention_work(module: Any, tokens: Sequence[int], products: int) -> Iterator[tuple[Tensor | None, int, int]]:
    """Yield the work of the projections of queries, keys and values, of their products, and of the last projection."""
    inner = [weight for name, weight in _matrices(module).items() if "weight" in name]  # without `bias_k` and `bias_v`
    (outer,), queries = _matrices(module.out_proj).values(), tokens[0]
    # one matrix of three equal blocks, or three matrices where keys or values have a size of their own
    if len(inner) == 1:
        macs = [inner[0].numel() * sum(tokens) // 3]
    else:
        macs = [weight.numel() * count for weight, count in zip(inner, tokens, strict=True)]
    biased = module.in_proj_bias is not None
    for weight, each in zip(inner, macs, strict=True):
        yield weight, each, each // weight.shape[-1] if biased else 0
    last = outer.numel() * queries
    yield None, products - sum(macs) - last, 0
    yield outer, last, 0 if module.out_proj.bias is None else module.embed_dim * queries


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's own weight matrices, also parametrized ones and those in lists and dicts of parameters."""
    lists = [name for name, child in module.named_children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))]
    own = tuple(f"{name}." for name in ["parametrizations", *lists])
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2 and ("." not in name or name.startswith(own))
    }


class _Product(NamedTuple):
    """A product with a weight."""

    weight: Tensor
    macs: int
    bias: int


class _Products(TorchFunctionMode):
    """Notes the products with parameters that are passed to functions as they are."""

    _NOTED = (F.linear, F.conv1d, F.conv2d, F.conv3d)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[_Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note its product."""
        result = func(*args, **(kwargs or {}))
        if func in self._NOTED:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            weight, count = given["weight"], result.numel()
            if isinstance(weight, nn.Parameter):
                self.found.append(
                    _Product(weight, count * weight[0].numel(), count if given.get("bias") is not None else 0)
                )
        return result


def _observe(module: nn.Module, arguments: _Arguments) -> tuple[dict[str, list[int]], dict[str, list[_Product]]]:
    """Run the module and sum :func:`_amounts` for each submodule, in the order in which they finish.

    The second result are the products that a module computes with weights of layers in it that are not called.
    """
    calls: dict[str, list[int]] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            amounts = _amounts(layer, args, kwargs, output)
            before = calls.get(name, [0] * len(amounts))
            calls[name] = [known + amount for known, amount in zip(before, amounts, strict=True)]

        return hook

    hooks = [layer.register_forward_hook(note(name), with_kwargs=True) for name, layer in module.named_modules()]
    try:
        with _Products() as products:
            module(*arguments[0], **arguments[1])
    finally:
        for handle in hooks:
            handle.remove()
    return calls, _borrowed(module, calls, products.found)


def _borrowed(module: nn.Module, calls: Mapping[str, Any], found: Sequence[_Product]) -> dict[str, list[_Product]]:
    """Return the products with weights of layers that were not called, by the called module around each layer."""
    paths: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    own = {name: [id(weight) for weight in _matrices(module.get_submodule(name)).values()] for name in calls}
    borrowed: dict[str, list[_Product]] = {}
    for product in found:
        users = paths.get(id(product.weight), [""])
        path = users[0]
        if not path or any(user in calls for user in users):
            continue
        while path and path not in calls:
            path = path.rpartition(".")[0]
        if id(product.weight) not in own[path]:  # as in a list of parameters
            borrowed.setdefault(path, []).append(product)
    return borrowed


def _amounts(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> list[int]:
    """Return what the work of a call depends on.

    These are the numbers of queries, keys and values of attention, or one number: the time steps of a recurrent layer,
    the tokens of an embedding, or else the elements of the first output tensor.
    """
    if _is_attention(module):
        names = ("query", "key", "value")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return [given[name].numel() // given[name].shape[-1] for name in names]
    inputs = tree_leaves((args, dict(kwargs)))
    values = next((x for x in inputs if isinstance(x, (Tensor, PackedSequence))), torch.empty(0))
    if isinstance(values, PackedSequence):
        return [values.data.shape[0]]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return [values.numel() // module.input_size]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [values.numel()]
    return [next((leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), 0)]


class _TensorsOnly(nn.Module):
    """Module with only the tensors of another module's inputs, output and state, so that it can be traced.

    Args:
        module: Module to trace.
        arguments: Arguments by position and by keyword.
    """

    def __init__(self, module: nn.Module, arguments: _Arguments) -> None:
        super().__init__()
        self.module = module
        self._leaves, self._structure = tree_flatten(arguments)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Arguments of `forward`."""
        return tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        arguments, named = tree_unflatten(leaves, self._structure)
        return [leaf for leaf in tree_leaves(self.module(*arguments, **named)) if isinstance(leaf, Tensor)]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state without what `get_extra_state` adds to it; a parent has passed its own to be filled."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name in [name for name, value in state.items() if not isinstance(value, Tensor)]:
            del state[name]
        return state


def _count_products(module: nn.Module, arguments: _Arguments) -> dict[str, int]:
    """Return fvcore's multiply-accumulates of every submodule, without its children's."""
    from fvcore.nn import FlopCountAnalysis  # imported here, where the warnings of its import are suppressed

    traced = _TensorsOnly(module, arguments).eval()
    analysis = FlopCountAnalysis(traced, traced.inputs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    for operator, count in _COUNTS.items():
        analysis.set_op_handle(f"aten::{operator}", count)
    operators = analysis.by_module_and_operator()
    totals = {name: sum(int(found[kind]) for kind in _PRODUCTS) for name, found in operators.items()}
    own = dict(totals)
    for name, total in totals.items():
        if name:
            own[name.rpartition(".")[0]] -= total
    return {name.partition(".")[2]: macs for name, macs in own.items() if name}


def _count_attention(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count attention scores and their product with the values: ``queries * keys`` positions times both widths."""
    query, key, value = (node.type().sizes() for node in inputs[:3])
    rows = torch.Size(query[:-1]).numel()
    return int(rows * key[-2] * (query[-1] + value[-1]))


def _count_added_product(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count matrix products that are added to another tensor, as that of attention to its mask."""
    left, right = (node.type().sizes() for node in inputs[1:3])
    return int(torch.Size(left).numel() * (right[-1] if len(right) > 1 else 1))


def _count_product(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count a product over the last dimension of the first factor, of vectors too, for which fvcore's handler fails."""
    left, out = (nodes[0].type().sizes() for nodes in (inputs, outputs))
    return int(torch.Size(out).numel() * (left[-1] if left else 1))


def _count_contraction(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count a product over any dimensions, which the sizes of the factors and of the result determine."""
    left, right, out = (torch.Size(node.type().sizes()).numel() for node in (*inputs[:2], outputs[0]))
    return math.isqrt(left * right * out)


def _count_chain(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count a product of several matrices in the order that takes the fewest operations, as torch computes it."""
    shapes = [node.type().sizes() for node in inputs[0].node().inputs()]
    rows = shapes[0][0] if len(shapes[0]) > 1 else 1
    sides = [rows, shapes[0][-1], *(shape[1] if len(shape) > 1 else 1 for shape in shapes[1:])]
    least = {(first, first): 0 for first in range(len(shapes))}
    for length in range(1, len(shapes)):
        for first in range(len(shapes) - length):
            last = first + length
            least[first, last] = min(
                least[first, cut] + least[cut + 1, last] + sides[first] * sides[cut + 1] * sides[last + 1]
                for cut in range(first, last)
            )
    return int(least[0, len(shapes) - 1])


def _count_convolution(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count a convolution whose padding is a word, such as ``"same"``, which fvcore has no handler for."""
    weight, out = inputs[1].type().sizes(), outputs[0].type().sizes()
    return int(torch.Size(out).numel() * torch.Size(weight[1:]).numel())


def _count_bilinear_form(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count a bilinear form for each row: one multiply-accumulate for each weight."""
    first, _, weight = (node.type().sizes() for node in inputs[:3])
    return int(torch.Size(first[:-1]).numel() * torch.Size(weight).numel())


def _count_lookup(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Count the vectors that `torch.nn.functional.embedding` takes out of a matrix, as an embedding layer's are."""
    return int(torch.Size(outputs[0].type().sizes()).numel())


_COUNTS = {
    "scaled_dot_product_attention": _count_attention,
    "embedding": _count_lookup,
    "bilinear": _count_bilinear_form,
    "_convolution_mode": _count_convolution,
    "tensordot": _count_contraction,
    "linalg_multi_dot": _count_chain,
    **dict.fromkeys(("matmul", "mv", "dot", "inner"), _count_product),
    **dict.fromkeys(("baddbmm", "addbmm", "addmv"), _count_added_product),
}
"""Functions that count the operators that fvcore does not know, or not in all shapes."""


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Enter evaluation mode without warnings; restore all modes, hooks and random states on exit."""
    layers = list(module.modules())
    hooks = [(own, set(own)) for layer in layers for own in (layer._forward_pre_hooks, layer._forward_hooks)]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with modes_restored(module), random_restored(module.parameters()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.eval()
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for own, before in hooks:  # fvcore leaves its own where it cannot trace, as in a compiled module
            for key in own.keys() - before:
                del own[key]
