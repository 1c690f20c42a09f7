from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.sparse import apply
from lightning_sparsefl.sparse.apply import InPlaceMask

STRANGE = [torch.nan, torch.inf, -torch.inf, -1.5, -0.0, 0.0, 1e-40]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def drawn(shape, dtype):
    rng = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=rng).to(dtype) * (1 + 2j if dtype.is_complex else 1)
    tensor.view(-1)[: len(STRANGE)] = torch.tensor(STRANGE).to(dtype)
    tensor.view(-1)[-len(STRANGE) :] = torch.tensor(STRANGE).to(dtype)
    return tensor, torch.rand(shape, generator=rng) < 0.4


def slow(tensor, mask):
    """Kept values and the others, one by one."""
    kept, rest = torch.zeros_like(tensor), torch.zeros_like(tensor)
    for place in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(-1, tensor.dim()):
        (kept if mask[tuple(place)] else rest)[tuple(place)] = tensor[tuple(place)]
    return kept, rest


def bits(tensor):
    return tensor.reshape(-1).clone().view(torch.uint8).tolist()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(apply, "_CHUNK", 16)
    apply._scratch.cache_clear()
    yield
    apply._scratch.cache_clear()


@pytest.mark.parametrize("layout", ["plain", "channels last", "transposed mask"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 2, 1, 1), (4, 4, 1, 1), (5, 3, 2, 3)])
def test_it_keeps_every_bit_of_what_is_kept_and_zeroes_the_rest(shape, dtype, layout):
    tensor, mask = drawn(shape, dtype)
    kept, rest = slow(tensor, mask)
    if layout == "channels last":
        tensor = tensor.to(memory_format=torch.channels_last)
    if layout == "transposed mask":
        mask = mask.transpose(0, 1).contiguous().transpose(0, 1)
    zeroed, split, other = tensor.clone(), tensor.clone(), torch.full_like(tensor, 7.0)
    InPlaceMask(mask, dtype).zero_(zeroed)
    InPlaceMask(mask, dtype).split_(split, other)
    assert bits(zeroed) == bits(split) == bits(kept)
    assert bits(other) == bits(rest)
    split[~mask] = 3.0
    InPlaceMask(mask, dtype).join_(split, other)
    assert bits(split) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_mask_are_the_mask_of_these_rows(dtype):
    tensor, mask = drawn((6, 2, 7), dtype)
    expected, rows = slow(tensor, mask)[0][1:4], tensor[1:4].clone()
    InPlaceMask(mask, dtype)[1:4].zero_(rows)
    assert bits(rows) == bits(expected)


def test_a_parameter_is_changed_in_place():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    before = weight._version
    InPlaceMask(torch.zeros(3, 4, dtype=torch.bool), weight.dtype).zero_(weight)
    assert not weight.any()
    assert weight._version > before


def test_the_gradient_of_an_embedding_may_be_sparse():
    layer = torch.nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1, 3, 3])).sum().backward()
    mask = torch.tensor([[True, False]]).expand(5, 2)
    InPlaceMask(mask, torch.float32).zero_(layer.weight.grad)
    assert layer.weight.grad.to_dense().tolist() == [[0, 0], [1, 0], [0, 0], [2, 0], [0, 0]]
