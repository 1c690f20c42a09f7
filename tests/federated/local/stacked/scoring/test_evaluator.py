"""Evaluations are divided so that the weights and activations of a stack have room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_sparsefl.data.examples import Examples
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import EvaluationRequest, readable_in_order
from lightning_sparsefl.federated.local.stacked.scoring.evaluator import StackEvaluator
from lightning_sparsefl.federated.local.stacked.states.findings import Findings


def request(samples, batch_size=10):
    loader = Examples(torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.int64)).loader(batch_size)
    return EvaluationRequest(samples, (), {}, loader, "test")


@pytest.mark.parametrize(
    ("room", "parts"),
    [(1000, [[30, 10, 4, 2]]), (45, [[30, 10, 4], [2]]), (30, [[30, 10], [4, 2]]), (1, [[30], [10], [4], [2]])],
)
def test_a_stack_has_room_for_weights_and_first_batches(room, parts):
    """A client has 5 weights, and 1 number for each sample."""
    worker = SimpleNamespace(flat=SimpleNamespace(layout=SimpleNamespace(size=5)))
    evaluator = StackEvaluator(worker, activations=1.0, room=room, warns=True, findings=Findings())
    found = evaluator._parts([request(each) for each in (30, 10, 4, 2)])
    assert [[each.client for each in part] for part in found] == parts


def test_batches_end_with_the_samples():
    assert [request(23).size(number) for number in range(4)] == [10, 10, 3, 0]


def test_loaders_in_an_order_of_their_own_are_not_read_together():
    examples = Examples(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    assert readable_in_order(examples.loader(2))
    assert not readable_in_order(examples.loader(2, shuffle=True))
    assert not readable_in_order(None)


def test_samples_with_a_transform_that_may_draw_are_no_slices():
    inputs, labels = torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)
    loaders = [Examples(inputs, labels, transform).loader(2) for transform in (None, torch.relu)]
    requests = [EvaluationRequest(0, (), {}, loader, "test") for loader in loaders]
    assert [each.examples is not None for each in requests] == [True, False]
    assert requests[0].reading_key != requests[1].reading_key
