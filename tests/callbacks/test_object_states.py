"""Snapshots of what objects hold: of anything a user keeps in an attribute, without an error."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from lightning_sparsefl.callbacks.object_states import ObjectStates
from lightning_sparsefl.callbacks.trial import trial


class Replay(deque):
    """A buffer whose constructor takes no items."""

    def __init__(self, capacity):
        super().__init__(maxlen=capacity)


class Recent(OrderedDict):
    """A cache with a `copy` of its own."""

    def copy(self):
        raise NotImplementedError


def chain(length):
    first = None
    for _ in range(length):
        first = SimpleNamespace(next=first, seen=[])
    return first


def nested(depth):
    value = [torch.zeros(1)]
    for _ in range(depth):
        value = [value]
    return value


KEPT = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "CSR": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested tensors": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "uninitialized": lambda: [nn.UninitializedParameter()],
    "NaN that cannot be written": lambda: torch.tensor([torch.nan]).expand(4),
    "array of objects": lambda: np.array([np.zeros(2), torch.ones(3), None], dtype=object),
    "array that cannot be written": lambda: np.broadcast_to(np.array(np.nan), (3,)),
    "buffer": lambda: Replay(4),
    "cache": Recent,
    "generator of the system": random.SystemRandom,
    "linked list": lambda: chain(1000),
    "nested lists": lambda: nested(1000),
    "lock": threading.Lock,
}


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse|sparse|quantize).*")
@pytest.mark.parametrize("case", KEPT)
def test_a_pass_leaves_any_attribute(case):
    module = L.LightningModule()
    module.held = value = KEPT[case]()
    for _ in range(2):
        with trial(module):
            module.held = None
    assert module.held is value


@pytest.mark.parametrize("kind", [Replay, Recent], ids=lambda kind: kind.__name__)
def test_a_container_of_a_class_of_its_own_keeps_its_content(kind):
    module = L.LightningModule()
    module.held = kind(4) if kind is Replay else kind(a=1)
    if kind is Replay:
        module.held.append(1)
    before = list(module.held)
    with trial(module):
        module.held.clear()
    assert list(module.held) == before
    assert kind is not Replay or module.held.maxlen == 4


def test_numbers_are_restored_and_only_if_they_have_changed():
    module = L.LightningModule()
    module.sums = sums = torch.tensor([1.0, torch.nan])
    module.mean, module.counts = torch.zeros(2), np.ones(2)
    version = sums._version
    with trial(module):
        module.mean.data.add_(1)
        module.counts += 1
        module.grown = module.counts.copy()
    assert sums._version == version  # so that a graph that it is saved in stays valid
    assert module.mean.tolist() == [0, 0]
    assert module.counts.tolist() == [1, 1]
    assert not hasattr(module, "grown")


def test_a_tensor_that_was_made_in_an_evaluation_is_restored():
    module = L.LightningModule()
    with torch.inference_mode():
        module.sums = torch.tensor([1.0, torch.nan])
    with trial(module), torch.inference_mode():
        module.sums += 1
    assert module.sums[0] == 1


class Average(dict):
    """A mean of weights with the number of its updates."""

    def __init__(self):
        super().__init__()
        self.updates, self.norms = 0, []


def test_the_attributes_of_a_container_are_restored_with_its_content():
    module = L.LightningModule()
    module.average = Average()
    with trial(module):
        module.average["weight"] = torch.ones(2)
        module.average.updates += 1
        module.average.norms.append(1.0)
        module.average.started = True
    assert module.average == {}
    assert vars(module.average) == {"updates": 0, "norms": []}


def test_weights_that_are_trained_are_restored():
    held = {"teacher": nn.Linear(2, 1), "sums": torch.zeros(1)}
    before = held["teacher"].weight.detach().clone()
    states = ObjectStates()
    states.visit(held, "held")
    with torch.no_grad():
        held["teacher"].weight.add_(1)
    held["sums"].add_(1)
    states.restore()
    assert torch.equal(held["teacher"].weight, before)
    assert held["sums"] == 0


def test_modules_that_are_no_submodules_are_restored():
    module = L.LightningModule()
    module.seen, module.scalers = {"loss": SumMetric()}, [nn.BatchNorm1d(2)]
    with trial(module):
        module.seen["loss"].update(1.0)
        module.scalers[0](torch.randn(3, 2))
        module.scalers[0].eval()
    assert module.seen["loss"].sum_value == 0
    assert module.scalers[0].training
    assert module.scalers[0].running_mean.tolist() == [0, 0]
    assert module.scalers[0].num_batches_tracked == 0


def test_a_tensor_of_another_shape_gets_its_own_again():
    module = L.LightningModule()
    module.bank = torch.ones(2)
    with trial(module):
        module.bank.data = torch.zeros(5)
    assert module.bank.tolist() == [1, 1]


@pytest.mark.parametrize(
    "data", [[torch.zeros(1) for _ in range(2000)], [([number], number) for number in range(2000)], torch.zeros(2**20)]
)
def test_what_is_taken_for_data_costs_little(data):
    """Only the outermost container is kept."""
    states = ObjectStates(2**20, most=10_000)
    states.visit(data, "data")
    assert len(states.kept) == 1
    assert states.kept[id(data)].before is None or len(states.kept[id(data)].before) == 2000
