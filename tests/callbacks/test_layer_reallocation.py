"""When a mask moves between layers in a fit, how much of it, and that its weights are held."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks.layer_reallocation import LayerReallocation
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.adjust import reallocated
from lightning_sparsefl.sparse.masks import counts, same
from lightning_sparsefl.sparse.scores import random

LAYERS = ("net.0.weight", "net.2.weight", "net.4.weight")


def half(module):
    rng = torch.Generator().manual_seed(2)
    return {name: torch.rand(module.get_parameter(name).shape, generator=rng) < 0.5 for name in LAYERS}


class Probe(Callback):
    """After every batch, behind the mask: the masks, the weights, and what the optimizer remembers."""

    def __init__(self, mask):
        self.mask, self.seen, self.weights = mask, [dict(mask.masks)], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(dict(self.mask.masks))
        self.weights.append({name: pl_module.get_parameter(name).detach().clone() for name in LAYERS})
        for name, mask in self.mask.masks.items():
            weight = pl_module.get_parameter(name)
            assert not weight[~mask].any()
            for value in trainer.optimizers[0].state[weight].values():
                assert value is None or value.shape != mask.shape or not value[~mask].any()

    @property
    def moves(self):
        """After which steps the masks moved."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return [step for step, (before, after) in enumerate(pairs, start=1) if not same(before, after)]


@pytest.mark.parametrize(("epochs", "steps"), [(1, [3]), (2, [6]), (3, [6, 11])])
def test_masks_move_between_epochs_or_in_the_middle_of_one(net, fit, recipe, epochs, steps):
    module = net(recipe)
    callback = LayerReallocation(half(module), exchange=0.5, key=(7,))
    probe = Probe(callback)
    fit(module, [callback, probe], recipe, epochs=epochs)
    per_epoch = -(-5 // recipe.accumulate)
    expected = steps
    if recipe.accumulate > 1:
        ends = [min(recipe.accumulate * (step + 1), 5) for step in range(per_epoch)]
        expected = [ends[per_epoch // 2]] if epochs == 1 else [5 * epoch + 1 for epoch in range(1, epochs)]
    assert probe.moves == expected
    assert all(sum(counts(seen).values()) == sum(counts(probe.seen[0]).values()) for seen in probe.seen)
    assert counts(probe.seen[-1]) != counts(probe.seen[0])


def test_a_move_exchanges_what_is_left_of_the_rate(net, fit):
    module = net()
    first = half(module)
    callback = LayerReallocation(first, exchange=0.5, key=(7, "doc"))
    probe = Probe(callback)
    fit(module, [callback, probe], epochs=2)
    draws = random(first, generator(7, "doc", 1))
    dense = {}

    class Before(Callback):
        """The weights at the move, from another fit of the same steps under the first mask."""

        def on_train_epoch_end(self, trainer, pl_module):
            dense.update({name: pl_module.get_parameter(name).detach().clone() for name in LAYERS})

    fit(net(), [LayerReallocation(first, exchange=0.0, key=(7,)), Before()], epochs=1)
    assert same(callback.masks, reallocated(dense, first, 0.25, draws))
