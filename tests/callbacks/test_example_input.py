"""The inputs of a module's forward pass: in a batch, and in its example."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch

from lightning_sparsefl.callbacks.example_input import example_inputs, forward_inputs, one_sample


class One(L.LightningModule):
    def forward(self, tokens):
        return tokens


class Two(L.LightningModule):
    def forward(self, first, second, scale=1.0):
        return (first + second) * scale


class ByKeyword(L.LightningModule):
    def forward(self, *arguments, **batch):
        return batch


@dataclass
class Record:
    second: Any
    first: Any
    label: Any = None


Pair = namedtuple("Pair", ["second", "first"])
A, B, C = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        (One(), A, (A,)),
        (One(), [A, B], (A,)),
        (One(), ({"tokens": A, "mask": C}, B), (A,)),
        (One(), {"x": A}, ({"x": A},)),
        (ByKeyword(), {"x": A, "y": B}, ({"x": A, "y": B},)),
        (Two(), (A, B, C), (A, B)),
        (Two(), {"second": B, "first": A, "labels": C}, (A, B)),
        (Two(), {"second": B, "first": A, "scale": C}, (A, B, C)),
        (Two(), Record(B, A, C), (A, B)),
        (Two(), Pair(B, A), (A, B)),
        (One(), Pair(B, A), (B,)),
        (One(), (Record(A, B), C), (Record(A, B),)),
    ],
)
def test_the_inputs_in_a_batch(module, batch, expected):
    assert forward_inputs(module, batch) == expected


@pytest.mark.parametrize(
    ("example", "expected"),
    [(None, None), (A, (A,)), ((A, B), (A, B)), ([A, B], (A, B)), ({"second": B, "first": A}, (A, B))],
)
def test_an_example_is_read_as_lightning_reads_it(example, expected):
    module = Two()
    module.example_input_array = example
    assert example_inputs(module) == expected


def test_one_sample_of_each_tensor():
    batch = {"x": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0), "names": ["a"]}
    found = one_sample(batch)
    assert found["x"].tolist() == [[0, 1]]
    assert (found["scale"], found["names"]) == (2, ["a"])
