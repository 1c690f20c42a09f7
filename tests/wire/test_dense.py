from __future__ import annotations

import struct

import pytest
import torch

from lightning_sparsefl.wire import dense


@pytest.mark.parametrize("dtype", dense.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_values_survive_bit_for_bit(dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    data = dense.encode(values)
    assert len(data) == dense.size(values.numel(), dtype)
    back = dense.decode(memoryview(data), dtype)
    assert back.dtype == dtype
    assert torch.equal(back.reshape(shape), values)


def test_little_endian():
    assert dense.encode(torch.tensor([1.5, -2.0], dtype=torch.float64)) == struct.pack("<2d", 1.5, -2.0)
    assert dense.encode(torch.tensor(258, dtype=torch.int32)) == b"\x02\x01\x00\x00"


def test_rows_of_a_strided_tensor_that_requires_a_gradient():
    values = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    assert dense.encode(values) == struct.pack("<6f", 0, 3, 1, 4, 2, 5)


@pytest.mark.parametrize(
    "values", [torch.tensor(2.0).expand(1), torch.ones(3, 2).t()[:1, :1], torch.ones(()).expand(3)]
)
def test_any_stride_is_taken(values):
    assert dense.encode(values) == struct.pack(f"<{values.numel()}f", *values.flatten().tolist())
    assert dense.flat(values).view(torch.int32).shape == (values.numel(),)


def test_special_values_survive():
    values = torch.tensor([float("nan"), float("inf"), -0.0])
    back = dense.decode(memoryview(dense.encode(values)), torch.float32)
    assert back.view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_foreign_bools_are_bools():
    assert dense.decode(memoryview(b"\x00\x02\xff"), torch.bool).view(torch.uint8).tolist() == [0, 1, 1]
