"""Slow twins of `lightning_sparsefl.sparse.units` and `submodel`: by trial, one unit and one index at a time.

Nothing is imported from the package. What a unit touches is found by disturbing weights and looking at the output.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn


def output(module, inputs):
    with torch.no_grad():
        return module(inputs)


def loaded(module, weights):
    """A copy of the module with other weights."""
    other = copy.deepcopy(module)
    other.load_state_dict(weights)
    return other


def zeroed(weights, places):
    """Weights with zeros at the (name, dim, index) in `places`."""
    other = {name: value.clone() for name, value in weights.items()}
    for name, dim, index in places:
        other[name].select(dim, index).zero_()
    return other


def places(group, unit, *roles):
    """All (name, dim, index) of one unit."""
    return {
        (slot.name, slot.dim, int(index))
        for slot in group.slots
        if slot.role in roles
        for index in slot.positions[unit]
    }


def silent(module, weights, inputs, dims):
    """All (name, dim, index) of parameters that can be replaced by noise without changing the output."""
    module = loaded(module, weights)
    before = output(module, inputs)
    found = set()
    for name, value in module.named_parameters():
        for dim in range(min(value.ndim, dims)):
            for index in range(value.shape[dim]):
                place = value.data.select(dim, index)
                saved = place.clone()
                place.copy_(torch.randn(place.shape, generator=torch.Generator().manual_seed(0), dtype=place.dtype))
                if torch.allclose(before, output(module, inputs), rtol=0, atol=1e-12):
                    found.add((name, dim, index))
                place.copy_(saved)
    return found


def unit_masks(groups, kept, weights, incoming=True):
    masks = {}
    for group in groups:
        if group.name not in kept:
            continue
        for slot in group.slots:
            if slot.role == "buffer" or (slot.role == "in" and not incoming):
                continue
            mask = masks.setdefault(slot.name, torch.ones(weights[slot.name].shape, dtype=torch.bool))
            for unit, keep in enumerate(kept[group.name].tolist()):
                for index in slot.positions[unit].tolist():
                    if not keep:
                        mask.select(slot.dim, index).fill_(False)
    return masks


def unit_norms(groups, weights):
    norms = {}
    for group in groups:
        norms[group.name] = []
        for unit in range(group.size):
            total = 0.0
            for name, dim, index in places(group, unit, "out"):
                if weights[name].ndim > 1 and name.rpartition(".")[0] in group.layers:
                    total += sum(abs(value) for value in weights[name].select(dim, index).reshape(-1).tolist())
            norms[group.name].append(total)
    return norms


def keep_units(scores, density):
    kept = {}
    for name, values in scores.items():
        count = max(math.floor(density * len(values) + 0.5), 1)
        order = sorted(range(len(values)), key=lambda unit: (-float(values[unit]), unit))
        kept[name] = [unit in order[:count] for unit in range(len(values))]
    return kept


def narrow(weights, groups, kept):
    small = dict(weights)
    for name in weights:
        gone = {}
        for group in groups:
            for unit, keep in enumerate(kept.get(group.name, torch.ones(group.size)).tolist()):
                for place, dim, index in places(group, unit, "out", "in", "buffer"):
                    if place == name and not keep:
                        gone.setdefault(dim, set()).add(index)
        for dim, indices in gone.items():
            slices = [small[name].select(dim, i) for i in range(small[name].shape[dim]) if i not in indices]
            small[name] = torch.stack(slices, dim)
    return small


def group_norm(inputs, groups, weight, bias, eps):
    """One sample and one group at a time."""
    out = torch.empty_like(inputs)
    size = inputs.shape[1] // groups
    for sample in range(len(inputs)):
        for group in range(groups):
            part = slice(group * size, (group + 1) * size)
            values = inputs[sample, part]
            mean, var = values.mean(), values.var(correction=0)
            for channel in range(part.start, part.stop):
                scaled = (inputs[sample, channel] - mean) / math.sqrt(var + eps)
                out[sample, channel] = scaled * weight[channel] + bias[channel]
    return out


def has(module, *kinds):
    return any(isinstance(child, kinds) for child in module.modules())


def mixes(module):
    """Whether a unit's values reach others through a norm's statistics."""
    return has(module, nn.GroupNorm, nn.LayerNorm)
