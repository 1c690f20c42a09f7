from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import counts, density
from lightning_sparsefl.sparse.nm import divides, is_nm, nm_masks


def test_ties_go_to_the_lower_index_and_nan_is_the_smallest():
    inf, nan = float("inf"), float("nan")
    score = torch.tensor([[1.0, 1, 1, 1, nan, -inf, nan, 0, inf, inf, nan, inf]])
    assert nm_masks({"w": score})["w"].int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_any_type_of_score(dtype):
    assert nm_masks({"w": torch.tensor([[1, 3, 2, 0]], dtype=dtype)})["w"].tolist() == [[False, True, True, False]]


def test_groups_lie_along_rows_or_along_channels():
    score = torch.arange(2 * 4 * 3 * 3).reshape(2, 4, 3, 3)
    rows, channels = nm_masks({"w": score})["w"], nm_masks({"w": score}, dim=1)["w"]
    assert rows.flatten()[:8].tolist() == [False, False, True, True] * 2
    assert channels[0, :, 0, 0].tolist() == [False, False, True, True]
    assert rows.is_contiguous()
    assert channels.is_contiguous()
    assert density({"w": rows}) == density({"w": channels}) == 0.5
    drawn = torch.rand(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    assert [is_nm(nm_masks({"w": drawn}, dim=dim)) for dim in (None, 1)] == [True, False]
    linear = score.reshape(6, 12)
    assert torch.equal(nm_masks({"w": linear})["w"], nm_masks({"w": linear}, dim=1)["w"])


def test_groups_of_a_matrix_lie_along_its_columns():
    masks = nm_masks({"w": torch.tensor([[1, 8], [2, 7], [3, 6], [4, 5]])}, 1, 2, dim=0)
    assert masks["w"].int().tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert [is_nm(masks, 1, 2, dim=dim) for dim in (0, 1)] == [True, True]
    assert not is_nm({"w": torch.tensor([[1, 0], [1, 0]]) > 0}, 1, 2, dim=0)


def test_less_than_n_is_n_of_m_too_and_what_has_no_groups_is_not():
    assert is_nm({"w": torch.zeros(3, 8, dtype=torch.bool)})
    assert not is_nm({"w": torch.zeros(3, 6, dtype=torch.bool)})
    assert is_nm({})
    assert counts(nm_masks({"w": torch.ones(5, 12)}, 3, 4)) == {"w": 45}
    assert nm_masks({"w": torch.ones(2, 4)}, 4, 4)["w"].all()


def test_what_divides():
    assert [divides(shape) for shape in [(8,), (3, 8), (3, 6), (8, 2, 2, 1), (3, 0), ()]] == [0, 1, 0, 1, 1, 0]
    assert [divides(shape, dim=1) for shape in [(8,), (3, 8), (8, 2, 2, 1)]] == [0, 1, 0]


@pytest.mark.parametrize(
    ("shape", "dim", "length"), [((3, 6), None, 6), ((4, 3, 5, 5), None, 75), ((4, 3, 4, 4), 1, 3)]
)
def test_a_remainder_is_refused_by_name(shape, dim, length):
    with pytest.raises(
        InvalidOption, match=rf"`odd` of shape .* has {length} weights in a row .* groups of `m=4`; leave"
    ):
        nm_masks({"even": torch.ones(2, 4, 4, 4), "odd": torch.ones(shape)}, dim=dim)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (5, 4), (1, 0)])
def test_a_pattern_that_is_none_is_refused(n, m):
    for function in (nm_masks, is_nm):
        with pytest.raises(InvalidOption, match=f"`n={n}`, `m={m}`: expected 1 <= n <= m"):
            function({}, n, m)


def test_the_mask_is_what_pytorchs_kernels_take():
    """A linear layer's weight under a 2:4 mask, compressed and back."""
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
        sparse_semi_structured_to_dense_cutlass,
    )

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32).half()
    weight *= nm_masks({"w": weight.abs()})["w"]
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    assert packed.shape == (32, 32)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(packed, meta), weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_multiplies_it_alike():
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).half().cuda()
    weight *= nm_masks({"w": weight.abs()})["w"]
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).half().cuda()
    compressed = torch.sparse.to_sparse_semi_structured(weight)
    torch.testing.assert_close(torch.nn.functional.linear(x, compressed), x @ weight.T, rtol=1e-2, atol=1e-1)
