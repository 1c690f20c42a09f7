"""Headers of sums without a grid, as another side states them."""

import pytest
import torch
from lightning_sparsefl.federated.aggregation.exact_sum import SumHeader

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused
from lightning_sparsefl_flower.secure_sum.headers import plain_headers, read_headers


def test_headers_arrive_as_they_were_sent():
    headers = {"extra/a": {"b": SumHeader(torch.Size([2, 3]), 1), "c": SumHeader(torch.Size([0]), None)}}
    assert read_headers(plain_headers(headers), most=7) == headers


@pytest.mark.parametrize(
    "shape",
    [[2**70], [2**40, 2**40], [0, 2**70], [2**62, 0, 2**62], [101], [-1], [1.0], [True], [1] * 65, "2", 2, None],
    ids=str,
)
def test_a_shape_that_is_not_one_or_too_large_is_refused(shape):
    with pytest.raises(SecureSumRefused, match="no shapes of at most 100 elements"):
        read_headers({"extra/a": {"b": [shape, 0]}}, most=100)


def test_shapes_that_are_too_large_together_are_refused():
    with pytest.raises(SecureSumRefused, match="have 120 elements; expected at most 100"):
        read_headers({"extra/a": {name: [[60], 0] for name in "bc"}}, most=100)


@pytest.mark.parametrize("headers", [{"extra/\ud800": {"b": [[1], 0]}}, {"extra/a": {"\udfff": [[1], 0]}}], ids=ascii)
def test_a_name_that_cannot_be_printed_is_refused(headers):
    with pytest.raises(SecureSumRefused, match="names that are no text"):
        read_headers(headers, most=100)
