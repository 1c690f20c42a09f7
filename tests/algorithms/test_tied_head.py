"""Methods that treat the head apart refuse one that shares its matrix with the embedding, or that is frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl import CS, FLASC, FedBABU, FedP3, FedPer, FedRep, LGFedAvg, PerFedMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.uses import uses_of
from lightning_sparsefl.types import ClientView

VIEW = ClientView(0, num_examples=7, capacity=1.0, round=0, max_rounds=3, seed=0)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.out = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.table.weight


class Model:
    """What an engine knows of a module."""

    norms, units, exits = frozenset(), (), {}

    def __init__(self, module):
        self.uses = uses_of(module)


@pytest.fixture
def module():
    return Language()


@pytest.fixture
def start(module):
    def run(method):
        fleet = Fleet([VIEW], frozenset(), torch.device("cpu"), Model(module))
        return method.init({name: value.detach() for name, value in module.named_parameters()}, fleet)

    return run


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        (FedPer(), ", or name `table` instead of 'head'"),
        (FedRep(), ", or name `table` instead of 'head'"),
        (FLASC(adapters=("hidden",)), ", or name `table` instead of 'head'"),
        (FedBABU(), ", or name `table` with `algorithm.head`"),
        (PerFedMask(), ", or name `table` with `algorithm.head`"),
        (LGFedAvg(), r"\.$"),
        (FedP3(), r"\.$"),
        (CS(), r"\. With `algorithm.prune_head: true`, the last layer is pruned too\.$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tied_head_is_refused_with_a_remedy(start, method, remedy):
    shared = "The model's head `out` shares `table.weight` with `table`, .*; give `out` a tensor of its own"
    with pytest.raises(InvalidOption, match=shared + remedy):
        start(method)


@pytest.mark.parametrize("method", [FedPer, FedRep])
def test_a_frozen_head_such_as_a_teachers_is_refused(start, module, method):
    module.table, module.teacher = nn.Embedding(5, 3), nn.Linear(3, 5).requires_grad_(False)
    message = r"The model's head `teacher`, its last linear layer, is frozen .* name the layer of the outputs instead"
    with pytest.raises(InvalidOption, match=message):
        start(method())
    assert list(start(method(own=("out",))).extra["own"]) == ["out.weight"]


def test_a_shared_matrix_that_is_named_concerns_both_layers(start):
    assert list(start(FedPer(own=("table",))).extra["own"]) == ["table.weight"]
    assert list(start(FedBABU(head="table")).extra["trainable"]) == ["table.weight"]
    assert set(start(CS(prune_head=True)).extra["kept"]) == {"table.weight", "hidden.weight"}
