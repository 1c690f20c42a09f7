"""Operations of several fits of one client-round."""

import pytest
import torch

from lightning_sparsefl.cost import forward_flops, phases, training_flops
from lightning_sparsefl.types import ClientView, CostFacts, LayerFlops, Message

LAYERS = [LayerFlops("a", 100, 3), LayerFlops("b", 50, 0), LayerFlops("head", 10, 2)]
HALF = {"a": torch.arange(8) < 4, "b": torch.arange(4) < 1}
HEAD_ONLY = {"a": torch.zeros(8, dtype=torch.bool), "b": torch.zeros(4, dtype=torch.bool)}
VIEW = ClientView(id=0, num_examples=7, capacity=1.0, round=0, max_rounds=1, seed=0)
FACTS = CostFacts(VIEW, Message({}), LAYERS, epochs=3, samples=7, batch_size=2)


def test_one_dense_phase_of_all_epochs_is_a_plain_fit():
    flops = phases(FACTS, [({}, {}, FACTS.epochs)])
    assert flops.flops_analytic == flops.flops_paper == training_flops(LAYERS, samples=21)


def test_phases_add_up_and_frozen_layers_only_save_operations_of_the_hardware():
    parts = [(HALF, {}, 2), (HALF, HEAD_ONLY, 5), ({}, {}, 1)]
    each = [phases(FACTS, [part]) for part in parts]
    whole = phases(FACTS, parts)
    assert whole.flops_paper == pytest.approx(sum(flops.flops_paper for flops in each), rel=1e-12)
    assert whole.flops_analytic == pytest.approx(sum(flops.flops_analytic for flops in each), rel=1e-12)
    assert each[1].flops_paper == 5 * 7 * 3 * forward_flops(LAYERS, HALF)
    assert each[1].flops_analytic == 5 * 7 * (forward_flops(LAYERS, HALF) + 2 * 22)
    assert phases(FACTS, []) == (0.0, 0.0)
