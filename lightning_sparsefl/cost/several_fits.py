"""Operations of clients that train in several phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sparsefl.cost.flops import forward_flops, training_flops
from lightning_sparsefl.types import CostFacts, Masks


class PhaseFlops(NamedTuple):
    """Sums over the phases of a client-round; the names are those of :class:`~lightning_sparsefl.types.Costs`."""

    flops_paper: float
    """Three forward passes of the held density for each sample, whatever is trainable."""
    flops_analytic: float
    """Operations that the hardware must execute, without those of frozen layers."""


def phases(facts: CostFacts, fits: Sequence[tuple[Masks, Masks, float]]) -> PhaseFlops:
    """Return the operations of a client-round that consists of several fits on all local samples.

    Args:
        facts: Facts of the client-round; its own number of epochs is not used.
        fits: Masks that are held, masks of what may change, and number of epochs of each fit.

    Example:
        >>> import torch
        >>> from lightning_sparsefl.types import ClientView, LayerFlops, Message
        >>> layers = [LayerFlops(weight="body", macs=10, bias=0), LayerFlops(weight="head", macs=5, bias=0)]
        >>> view = ClientView(id=0, num_examples=2, capacity=1.0, round=0, max_rounds=1, seed=0)
        >>> facts = CostFacts(view, Message({}), layers, epochs=9, samples=2, batch_size=1)
        >>> frozen = {"body": torch.tensor([False])}
        >>> phases(facts, [({}, {}, 1), ({}, frozen, 2)])
        PhaseFlops(flops_paper=540.0, flops_analytic=380.0)
    """
    paper = analytic = 0.0
    for masks, trainable, epochs in fits:
        samples = epochs * facts.samples
        paper += 3 * samples * forward_flops(facts.layers, masks)
        analytic += samples * training_flops(facts.layers, masks, trainable)
    return PhaseFlops(paper, analytic)
