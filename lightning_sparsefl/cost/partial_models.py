"""Costs of clients that train or hold a part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_sparsefl.sparse.masks import counts, intersect
from lightning_sparsefl.types import CostFacts, Costs, LayerFlops, Masks

BYTES_PER_WEIGHT = 4
"""The papers count float32 values and take masks as free."""


def with_trained_upload(costs: Costs, facts: CostFacts) -> Costs:
    """Replace the paper's costs: uploaded bytes by those of the trainable weights, and FLOPs by the analytic ones.

    Args:
        costs: Costs to change.
        facts: Facts of the client-round; its buffers are free, as in the papers.
    """
    message = facts.message
    changing = counts(intersect(message.trainable, message.masks))
    sent = sum(changing.get(n, weight.numel()) for n, weight in message.weights.items() if n not in facts.buffers)
    return replace(costs, flops_paper=costs.flops_analytic, bytes_up_paper=BYTES_PER_WEIGHT * sent)


def narrow_biases(layers: Sequence[LayerFlops], masks: Masks) -> list[LayerFlops]:
    """Return layers with the bias additions of the kept units only; masks scale the products elsewhere.

    Args:
        layers: Layers of the whole network.
        masks: Masks of the narrow network.
    """
    kept = counts(masks)
    biases = {layer.weight: _bias_of(layer.weight) for layer in layers}
    return [
        replace(layer, bias=layer.bias * kept[biases[layer.weight]] // masks[biases[layer.weight]].numel())
        if layer.bias and biases[layer.weight] in kept
        else layer
        for layer in layers
    ]


def narrow_facts(facts: CostFacts) -> CostFacts:
    """Return the facts of a client-round with the layers of its narrow network, that is :func:`narrow_biases`.

    Args:
        facts: Facts of the client-round, whose message has the masks of the narrow network.
    """
    return replace(facts, layers=narrow_biases(facts.layers, facts.message.masks))


def _bias_of(weight: str) -> str:
    """Return the name of the bias beside a weight: ``fc.bias``, or ``lstm.bias_ih_l0``."""
    module, dot, name = weight.rpartition(".")
    return f"{module}{dot}{name.replace('weight', 'bias', 1)}"
