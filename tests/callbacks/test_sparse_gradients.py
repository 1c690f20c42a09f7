"""Embeddings whose gradients are sparse: trained as with dense ones, or refused by name."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl.callbacks import (
    DynamicMask,
    GradientOffset,
    GradualPruning,
    GroupPenalty,
    MoreauEnvelope,
    ProximalTerm,
)
from lightning_sparsefl.errors import InvalidOption


class Words(L.LightningModule):
    """A user's module, whose embedding sees a few of its words in a batch."""

    def __init__(self, sparse):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(12, 6, sparse=sparse), nn.Linear(6, 3)

    def training_step(self, batch):
        words = (3 * batch[0]).long().clamp(-5, 6) + 5
        return nn.functional.cross_entropy(self.head(self.words(words).mean(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicMask(density=0.5, every_n_steps=2),
        lambda: DynamicMask(density=0.5, every_n_steps=2, growth="random"),
        lambda: GradualPruning(density=0.5, every_n_steps=2),
    ],
    ids=["RigL", "SET", "GradualPruning"],
)
def test_masks_are_those_of_dense_gradients(make, fit):
    runs = []
    for sparse in (False, True):
        module, callback = Words(sparse), make()
        fit(module, [callback])
        runs.append((dict(module.state_dict()), callback.masks))
    (weights, masks), (others, other_masks) = runs
    assert not masks["words.weight"].all()
    assert all(torch.equal(mask, other_masks[name]) for name, mask in masks.items())
    torch.testing.assert_close(others, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "callback",
    [
        GroupPenalty(stairs=None),
        ProximalTerm(),
        GradientOffset({"words.weight": torch.ones(12, 6)}),
        MoreauEnvelope(strength=1.0, lr=0.1),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_terms_that_are_dense_are_refused_by_name(callback, fit):
    kind = type(callback).__name__
    with pytest.raises(InvalidOption, match=f"`{kind}` .* `words.weight`, which is sparse; expected an Embedding with"):
        fit(Words(True), [callback])
