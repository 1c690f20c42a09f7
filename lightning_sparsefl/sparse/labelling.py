"""Effect of each operation on the labels of :mod:`~lightning_sparsefl.sparse.tracing`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.sparse.tracing import (
    Call,
    Rules,
    UnitTrace,
    changing_dims,
    line_along,
    spread,
    tensors,
    unit_dim,
)

# ---- layers with weights


def _convolve(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, weight, bias, *_, groups = call.bind("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    dim, groups = value.ndim - weight.ndim + 1, groups or 1
    if groups > 1 and weight.shape[1] == 1:  # depthwise: the units pass through
        units = trace.along(value, dim).repeat_interleave(len(weight) // groups)
        trace.axis(weight, 0, units, row=True)
    else:
        # Of every group the same positions go, or what is left would be no grouped convolution.
        tied = trace.read(value, dim, weight).view(groups, -1)
        trace.unify(tied, tied[:1])
        trace.axis(weight, 1, tied[0], "in")
        units = trace.produce(weight, 0, tiles=groups)
    trace.axis(bias, 0, units)
    trace.label(out, spread(units, dim, out.shape))


def _convolve_transposed(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, weight, bias, *_, groups = call.bind(
        "input", "weight", "bias", "stride", "padding", "output_padding", "groups"
    )
    if (groups or 1) > 1:
        trace.give_up(call, out)
        return
    dim = value.ndim - weight.ndim + 1
    trace.axis(weight, 0, trace.read(value, dim, weight), "in")
    units = trace.produce(weight, 1)
    trace.axis(bias, 0, units)
    trace.label(out, spread(units, dim, out.shape))


def _linear(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, weight, bias = call.bind("input", "weight", "bias")
    trace.axis(weight, 1, trace.read(value, value.ndim - 1, weight), "in")
    units = trace.produce(weight, 0)
    trace.axis(bias, 0, units)
    trace.label(out, spread(units, out.ndim - 1, out.shape))


def _multiply(trace: UnitTrace, call: Call, out: Tensor) -> None:
    """Label the product ``bias + value @ weight`` of a layer that is known to be a linear one."""
    added, value, weight = call.args[:3]
    if id(weight) not in trace.conv1d or not trace.followed(value) or call.kwargs:
        trace.give_up(call, out)
        return
    trace.axis(weight, 0, trace.read(value, value.ndim - 1, weight), "in")
    units = trace.produce(weight, 1)
    trace.axis(added, 0, units)
    trace.label(out, spread(units, out.ndim - 1, out.shape))


def _embed(trace: UnitTrace, call: Call, out: Tensor) -> None:
    _, weight = call.bind("input", "weight")
    if trace.embeddings:
        trace.label(out, spread(trace.produce(weight, 1), out.ndim - 1, out.shape))
    else:
        trace.label(out, torch.zeros((), dtype=torch.long).expand(out.shape))
        if id(weight) in trace.names:  # another layer may share the weight
            trace.axis(weight, 1, torch.zeros(weight.shape[1], dtype=torch.long), "in")


def _recur(trace: UnitTrace, call: Call, out: tuple[Tensor, ...]) -> None:
    """Label all layers and directions of an LSTM, a GRU or a plain recurrent network; padded or packed input."""
    packed = isinstance(call.args[3], (list, tuple))
    value, state, weights = (call.args[0], *call.args[2:4]) if packed else call.args[:3]
    biases, layers = call.args[4:6] if packed else call.args[3:5]
    both = call.args[8] if packed else call.args[7]
    made, trace.makes_state = trace.makes_state, False
    directions, per = 2 if both else 1, 4 if biases else 2
    hidden = list(tensors(state))
    if len(weights) != layers * directions * per:  # projections
        trace.give_up(call, out)
        return
    incoming = trace.read(value, value.ndim - 1, weights[0])
    states: list[Tensor] = []
    for layer in range(layers):
        first = layer * directions
        chunks = [weights[at * per : (at + 1) * per] for at in range(first, first + directions)]
        units = [_recurrent_layer(trace, incoming, *chunk) for chunk in chunks]
        states += units
        incoming = torch.cat(units)
    ids = torch.stack(states)
    zeros = [made or _take_state(trace, call, value, ids) for value in hidden]
    zero = all(zeros)
    trace.label(out[0], spread(incoming, out[0].ndim - 1, out[0].shape), zero)
    for value in out[1:]:
        trace.label(value, ids.unsqueeze(1).expand(value.shape), zero)


def _take_state(trace: UnitTrace, call: Call, value: Tensor, ids: Tensor) -> bool:
    """Give the units the labels of a first state that was passed in, and return whether dropped units start at 0."""
    if trace.followed(value):
        trace.unify(ids.unsqueeze(1), trace.labels(value).ids)
        return trace.labels(value).zero
    trace.pin(ids, f"`{call.name}` takes a first state of the full width")
    return False  # it may come from parameters


def _pack(trace: UnitTrace, call: Call, out: tuple[Tensor, ...]) -> None:
    """Label a packed sequence, or a padded one: the features stay where they are, in the last dimension."""
    value, zero = call.args[0], trace.labels(call.args[0]).zero
    filled = call.name == "pad_packed_sequence" and call.args[3] != 0
    ids = trace.along(value, value.ndim - 1)
    trace.label(out[0], spread(ids, out[0].ndim - 1, out[0].shape), zero and not filled)


def _recurrent_layer(trace: UnitTrace, incoming: Tensor, w_in: Tensor, w_hidden: Tensor, *biases: Tensor) -> Tensor:
    gates = w_hidden.shape[0] // w_hidden.shape[1]
    rows = trace.produce(w_in, 0, tiles=gates)
    units = rows[: w_hidden.shape[1]]
    trace.axis(w_in, 1, incoming, "in")
    trace.axis(w_hidden, 0, rows, row=True)
    trace.axis(w_hidden, 1, units, "in")
    for bias in biases:
        trace.axis(bias, 0, rows)
    return units


# ---- norms


def _batch_norm(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, *statistics = call.bind("input", "running_mean", "running_var", "weight", "bias")
    ids = trace.along(value, 1)
    for tensor in statistics:
        trace.axis(tensor, 0, ids)
    # Without an affine part, a running mean that is not zero shows in a channel that is.
    trace.label(out, spread(ids, 1, out.shape), zero=statistics[2] is not None or statistics[0] is None)


def _instance_norm(trace: UnitTrace, call: Call, out: Tensor) -> None:
    _batch_norm(trace, call, out)
    _require_affine(trace, call, out, call.bind(*["input", "running_mean", "running_var", "weight"])[3])


def _group_norm(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, _, weight, bias = call.bind("input", "num_groups", "weight", "bias")
    ids = trace.along(value, 1)
    _require_zeros(trace, call, value)
    trace.axis(weight, 0, ids)
    trace.axis(bias, 0, ids)
    trace.label(out, spread(ids, 1, out.shape), zero=weight is not None)
    _require_affine(trace, call, out, weight)


def _layer_norm(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, shape, weight, bias = call.bind("input", "normalized_shape", "weight", "bias")
    ids = trace.labels(value).ids
    dim = unit_dim(ids)
    if dim is None:
        trace.give_up(call, out)
        return
    inner = dim - (value.ndim - len(shape))
    if inner >= 0:
        _require_zeros(trace, call, value)
        _require_affine(trace, call, value, weight)
        for tensor in (weight, bias):
            trace.axis(tensor, inner, ids.select(0, 0) if ids.ndim == 1 else trace.along(value, dim))
    trace.label(out, ids, zero=inner >= 0 and weight is not None)


def _require_zeros(trace: UnitTrace, call: Call, value: Tensor) -> None:
    if not trace.labels(value).zero:
        reason = f"`{call.name}` would see the values of dropped units, which are constant there but not zero"
        trace.pin(trace.labels(value).ids, reason)


def _require_affine(trace: UnitTrace, call: Call, value: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        trace.pin(trace.labels(value).ids, f"`{call.name}` without an affine part does not store its width")


def _neighbours(trace: UnitTrace, call: Call, out: Tensor) -> None:
    ids = trace.labels(call.args[0]).ids
    trace.pin(ids, f"`{call.name}` reads neighbouring channels")
    trace.label(out, ids)


# ---- element by element


def _zero_stays(trace: UnitTrace, call: Call, out: Tensor) -> None:
    trace.label(out, *trace.labels(call.args[0]))


def _zero_moves(trace: UnitTrace, call: Call, out: Tensor) -> None:
    trace.label(out, trace.labels(call.args[0]).ids, zero=False)


def _prelu(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, weight = call.bind("input", "weight")
    if weight.numel() > 1:
        trace.axis(weight, 0, trace.along(value, 1))
    _zero_stays(trace, call, out)


def _combine(trace: UnitTrace, call: Call, out: Tensor) -> None:
    """Unify the labels of operands that meet in a sum, a product or the like."""
    operands = list(tensors((call.args, call.kwargs)))
    active = [value for value in operands if trace.followed(value)]
    if not active:  # arithmetic of parameters alone makes a tensor without a name
        return
    main = max(active, key=Tensor.numel)
    ids = trace.labels(main).ids.expand(out.shape)
    changing = [dim for dim in range(out.ndim) if bool((ids != ids.narrow(dim, 0, 1)).any())]
    for value in operands:
        if value is not main:
            _meet(trace, call, ids, value, changing)
    trace.label(out, ids, zero=_combined_zero(trace, call, [dim - ids.ndim for dim in changing]))


def _meet(trace: UnitTrace, call: Call, ids: Tensor, value: Tensor, changing: list[int]) -> None:
    shape = (1,) * (ids.ndim - value.ndim) + tuple(value.shape)
    wide = [dim for dim in changing if shape[dim] > 1]
    if trace.followed(value):
        own = trace.labels(value).ids
        if len(wide) == len(changing):
            trace.unify(ids, own)
        else:  # one value for all units, as in spatial attention
            trace.freeze(own)
    elif id(value) in trace.names and len(changing) == 1:
        if wide:
            line = line_along(ids, wide[0])
            assert line is not None  # it is the only dimension along which they change
            trace.axis(value, wide[0] - (ids.ndim - value.ndim), line)
    elif wide:
        trace.pin(ids, f"`{call.name}` takes a constant of the full width")


def _combined_zero(trace: UnitTrace, call: Call, along: list[int]) -> bool:
    """Return whether the operation yields zero for dropped units; see :func:`_is_zero`."""
    first, second = (call.args[0], call.args[1]) if len(call.args) > 1 else (call.args[0], 0.0)
    zeros = [_is_zero(trace, value, along) for value in (first, second)]
    if call.name in _PRODUCTS:
        return any(zeros)
    if call.name in _QUOTIENTS:
        return zeros[0]
    return all(zeros)


def _is_zero(trace: UnitTrace, value: Any, along: list[int]) -> bool:
    """Return whether the part of an operand that belongs to a dropped unit is zero.

    Args:
        trace: The trace.
        value: The operand.
        along: Dimensions of the units, counted from the last; a parameter is masked only along them.
    """
    if not isinstance(value, Tensor):
        return bool(value == 0)
    if trace.followed(value):
        return trace.labels(value).zero
    return id(value) in trace.names and any(-dim <= value.ndim and value.shape[dim] > 1 for dim in along)


# ---- shapes


def _move(trace: UnitTrace, call: Call, out: Any) -> None:
    """Move labels as the operation moves the elements."""
    filled = call.name in _JOINS
    active = [trace.labels(value) for value in tensors((call.args, call.kwargs)) if trace.followed(value)]
    if not active:  # a parameter that is reshaped is a tensor without a name
        return
    if any(isinstance(value, torch.dtype) for value in call.args):  # reads the bytes as another type
        trace.give_up(call, out)
        return

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return trace.labels(value).ids if filled or trace.followed(value) else value
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)(swap(item) for item in value)
        return value

    # Labels may lie in memory otherwise than what they label, where a view needs a copy.
    func = Tensor.reshape if call.name == "view" else call.func
    moved = func(*swap(call.args), **{name: swap(value) for name, value in call.kwargs.items()})
    zero = all(labels.zero for labels in active)
    for value, ids in zip(tensors(out), tensors(moved), strict=True):
        trace.label(value, ids, zero)
        if filled and len(changing_dims(ids)) > 1:
            for labels in active:
                trace.pin(labels.ids, f"`{call.name}` needs equal numbers of units that are chosen apart")
        if not filled and not _keeps_layout(active[0].ids, ids, call.name in _RESHAPES):
            trace.pin(active[0].ids, f"`{call.name}` takes its units apart or reorders them")


def _keeps_layout(before: Tensor, after: Tensor, merges: bool) -> bool:
    """Return whether the same call with fewer units along their dimension would yield the same, less those units."""
    dims = changing_dims(before)
    if len(dims) != 1:  # units of several layers, as of an LSTM's, may stand one behind another, but not in turns
        return not dims or not merges or bool((before.diff(dim=dims[-1]) <= 1).all())
    (dim,), new = dims, unit_dim(after)
    line, moved = line_along(before, dim), None if new is None else line_along(after, new)
    if line is None or moved is None:
        return False
    if merges:
        return torch.equal(torch.unique(line), torch.unique(moved))
    return torch.equal(line, moved)


def _reduce(trace: UnitTrace, call: Call, out: Any) -> None:
    value, dim, keepdim = call.bind("input", "dim", "keepdim")
    ids, zero = trace.labels(value)
    dims = tuple(range(ids.ndim)) if dim is None else dim
    low, high = (reduce(ids, dims, bool(keepdim)) for reduce in (torch.amin, torch.amax))
    if not torch.equal(low, high):
        trace.give_up(call, out)
        return
    for result in tensors(out):
        trace.label(result, low, zero and call.name != "logsumexp")  # which of zeros is log n


def _pool(trace: UnitTrace, call: Call, out: Any) -> None:
    value = call.bind("input")[0]
    spatial = next((int(digit) for digit in "123" if f"{digit}d" in call.name), value.ndim - 2)
    dim = value.ndim - spatial - 1
    ids = trace.along(value, dim)
    for result in tensors(out):
        trace.label(result, spread(ids, dim, result.shape), trace.labels(value).zero)


def _pad(trace: UnitTrace, call: Call, out: Tensor) -> None:
    value, amounts = call.bind("input", "pad")
    mode, fill = call.kwargs.get("mode", "constant"), call.kwargs.get("value")
    ids, zero = trace.labels(value)
    dim = unit_dim(ids)
    if dim is None:
        trace.freeze(ids)
        trace.label(out, torch.zeros((), dtype=torch.long).expand(out.shape))
        return
    line = trace.along(value, dim)
    if out.shape[dim] != value.shape[dim]:
        trace.pin(ids, "`pad` adds channels")
        at = 2 * (value.ndim - 1 - dim)
        line = torch.nn.functional.pad(line, tuple(amounts[at : at + 2]))
    trace.label(out, spread(line, dim, out.shape), zero and (mode != "constant" or not fill))


def _shape_only(trace: UnitTrace, call: Call, out: Tensor) -> None:
    """Leave a new constant unlabelled, since no unit is its source."""


_RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
_PRODUCTS = {"mul", "rmul", "imul", "multiply"}
_QUOTIENTS = {"div", "divide", "truediv", "itruediv", "true_divide"}
_SUMS = {"add", "radd", "iadd", "sub", "isub", "rsub", "subtract", "maximum", "minimum", "fmax", "fmin"}
_MOVES = """
    permute transpose t movedim moveaxis swapaxes swapdims squeeze unsqueeze expand repeat repeat_interleave chunk split
    tensor_split unbind getitem narrow select index_select roll flip get pixel_shuffle pixel_unshuffle channel_shuffle
"""
_ZERO_STAYS = """
    relu relu6 leaky_relu elu selu celu gelu silu mish tanh hardswish dropout dropout1d dropout2d dropout3d
    alpha_dropout feature_dropout feature_alpha_dropout abs neg square sqrt sin sign expm1 log1p softsign tanhshrink
    hardshrink softshrink contiguous clone detach to type type_as float double half bfloat16 cpu cuda requires_grad
"""
_ZERO_MOVES = "sigmoid hardsigmoid softplus logsigmoid log_sigmoid exp cos rsqrt pow clamp hardtanh threshold"
_REDUCTIONS = "mean sum amax amin max min std var norm logsumexp"
_POOLS = [f"{kind}_pool{n}d" for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)]
_CONSTANTS = "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_full new_empty"

RULES: Rules = {
    **{f"conv{n}d": _convolve for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolve_transposed for n in (1, 2, 3)},
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recur),
    **dict.fromkeys(("pack_padded_sequence", "pad_packed_sequence"), _pack),
    **dict.fromkeys(_ZERO_STAYS.split(), _zero_stays),
    **dict.fromkeys(_ZERO_MOVES.split(), _zero_moves),
    **dict.fromkeys(_PRODUCTS | _QUOTIENTS | _SUMS, _combine),
    **dict.fromkeys(_MOVES.split(), _move),
    **dict.fromkeys(_RESHAPES | _JOINS, _move),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys([*_POOLS, "interpolate", "upsample"], _pool),
    **dict.fromkeys(_CONSTANTS.split(), _shape_only),
    "linear": _linear,
    "addmm": _multiply,
    "embedding": _embed,
    "embedding_bag": _embed,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "local_response_norm": _neighbours,
    "prelu": _prelu,
    "pad": _pad,
}
"""Rules by the name of the function or method, without its underscores."""
