from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import IncompatibleMasks
from lightning_sparsefl.sparse import masks as m
from lightning_sparsefl.sparse.prune import random_masks


def mask(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.bool)


def test_apply_zeroes_the_dropped_and_passes_the_dense_on_uncopied():
    weights = {"w": torch.tensor([1.0, -2.0]), "b": torch.ones(1)}
    out = m.apply(weights, {"w": mask(0, 1), "elsewhere": mask(1)})
    assert out["w"].tolist() == [0.0, -2.0]
    assert out["b"] is weights["b"]
    assert weights["w"].tolist() == [1.0, -2.0]


def test_masks_may_be_on_another_device_than_weights():
    weights = {"w": torch.zeros(2, device="meta")}
    assert m.apply(weights, {"w": mask(0, 1)})["w"].device.type == "meta"
    there = {"w": torch.ones(2, dtype=torch.bool, device="meta")}
    assert m.intersect(there, {"w": mask(0, 1)})["w"].device.type == "meta"
    assert random_masks(weights, {"w": 1})["w"].device.type == "meta"


def test_apply_makes_no_negative_zero():
    out = m.apply({"w": torch.tensor([-2.0, 1.0])}, {"w": mask(0, 1)})
    assert not out["w"].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_enforce_keeps_the_very_tensor_that_is_zero_already(dtype):
    clean, other = torch.tensor([3, 0], dtype=dtype), torch.tensor([3, 5], dtype=dtype)
    out = m.enforce({"clean": clean, "w": other, "dense": other}, {"clean": mask(1, 0), "w": mask(1, 0)})
    assert out["clean"] is clean
    assert m.enforce(tree := {"clean": clean, "dense": other}, {"clean": mask(1, 0)}) is tree
    assert out["dense"] is other
    assert (out["w"].tolist(), out["w"].dtype) == ([3, 0], dtype)
    assert other.tolist() == [3, 5]


@pytest.mark.parametrize("dropped", [-0.0, float("nan"), float("-inf")])
def test_enforce_leaves_a_positive_zero_whatever_was_there(dropped):
    out = m.enforce({"w": torch.tensor([[1.0, dropped]]).T}, {"w": mask(1, 0)[:, None]})["w"]
    assert out.flatten().tolist() == [1.0, 0.0]
    assert not out.signbit().any()


class Versioned(nn.Linear):
    """A layer that loads nothing without its version."""

    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        assert local_metadata.get("version") == 3
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


def test_apply_keeps_the_versions_of_a_state_dict():
    net = nn.Sequential(Versioned(2, 1))
    net.load_state_dict(m.apply(net.state_dict(), {"0.weight": mask(0, 1).view(1, 2)}))
    assert net[0].weight[0, 0] == 0
    assert type(m.apply(dict(net.state_dict()), {})) is dict


def test_apply_lets_gradients_through_the_kept_only():
    w = torch.ones(2, requires_grad=True)
    m.apply({"w": w}, {"w": mask(1, 0)})["w"].sum().backward()
    assert w.grad.tolist() == [1.0, 0.0]


def test_density_and_kept_are_over_the_masked_tensors():
    masks = {"a": mask(1, 0, 0), "b": mask(1)}
    assert m.kept(masks) == 2
    assert m.density(masks) == 0.5
    assert m.density({}) == 1.0
    assert m.counts({}) == {}


def test_a_missing_name_is_dense():
    a, b = {"x": mask(1, 0), "y": mask(0, 1)}, {"x": mask(0, 1)}
    assert {name: value.tolist() for name, value in m.intersect(a, b).items()} == {
        "x": [False, False],
        "y": [False, True],
    }
    assert {name: value.tolist() for name, value in m.union(a, b).items()} == {"x": [True, True]}
    assert list(m.intersect(b, a)) == ["x", "y"]


def test_overlap_is_the_jaccard_index_of_common_names():
    assert m.overlap({"x": mask(1, 1, 0, 0), "y": mask(0)}, {"x": mask(0, 1, 1, 0)}) == pytest.approx(1 / 3)
    assert m.overlap({"x": mask(1)}, {"y": mask(1)}) == 1.0
    assert m.overlap({"x": mask(0)}, {"x": mask(0)}) == 1.0


def test_changed_counts_positions_of_every_name():
    assert m.changed({"x": mask(1, 0), "y": mask(1, 1)}, {"x": mask(1, 1), "z": mask(0, 0, 1, 1)}) == 3 / 8
    assert m.changed({}, {}) == 0.0
    shared = {"x": mask(1, 0)}
    assert m.changed(shared, dict(shared)) == 0.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"x": mask(1, 1)}),
        ({"x": mask(1, 0)}, {"x": mask(1, 0)}),
        ({"x": mask(1, 0)}, {"x": mask(1, 1)}),
        ({"x": mask(1, 0)}, {}),
        ({"x": mask(1, 0)}, {"y": mask(1, 0)}),
        ({"x": mask(1, 0, 0)}, {"x": mask(1, 0)[None]}),
        ({"x": mask(1, 0), "y": mask(0)}, {"y": mask(0), "x": mask(1, 0)}),
    ],
)
def test_digests_agree_exactly_where_masks_do(a, b):
    comparable = all(a[name].shape == b[name].shape for name in a.keys() & b.keys())
    assert (m.digest(a) == m.digest(b)) == (comparable and m.same(a, b))


def test_subtract_undoes_add_and_passes_on_what_is_missing():
    a, b = {"w": torch.tensor([1.0]), "v": torch.tensor([5.0])}, {"w": torch.tensor([2.0])}
    added = m.add(a, b)
    assert added["w"].item() == 3.0
    assert added["v"] is a["v"]
    assert m.subtract(added, b)["w"].item() == 1.0


@pytest.mark.parametrize("combine", [m.add, m.subtract])
def test_a_tensor_that_is_not_in_the_weights_is_named(combine):
    with pytest.raises(IncompatibleMasks, match="`stray` is not among the weights"):
        combine({"w": torch.ones(1)}, {"stray": torch.ones(1)})


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"stray": mask(1)}, "`stray` is not among the weights, which have `w`"),
        ({"w": torch.ones(2)}, "mask of `w` is torch.float32, expected torch.bool"),
        ({"w": mask(1)}, r"mask of `w` has shape \(1,\), expected \(2,\)"),
    ],
)
def test_check_names_the_tensor(masks, words):
    with pytest.raises(IncompatibleMasks, match=words):
        m.check(masks, {"w": torch.ones(2)})


def test_dense_like_keeps_everything():
    assert m.same(m.dense_like({"w": torch.zeros(3, 2)}), {})
    assert m.dense_like({"w": torch.zeros(3, 2)})["w"].shape == (3, 2)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (9,), (3, 5), (0, 4), (2, 3, 11)])
def test_unpack_undoes_pack(shape):
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        drawn = torch.rand(shape, generator=generator) < 0.5
        packed = m.pack(drawn)
        assert packed.dtype == torch.uint8
        assert packed.numel() == -(-drawn.numel() // 8)
        assert torch.equal(m.unpack(packed, drawn.shape), drawn)


def test_all_bytes_pack_and_unpack():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(m.pack(m.unpack(every, (2048,))), every)


def test_pack_takes_strided_masks():
    base = torch.rand(6, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(m.unpack(m.pack(base.T), (10, 6)), base.T)
    assert torch.equal(m.unpack(m.pack(base[1:, 3:]), (5, 7)), base[1:, 3:])


def test_unpack_refuses_another_length():
    with pytest.raises(IncompatibleMasks, match="2 packed bytes, expected 1"):
        m.unpack(torch.zeros(2, dtype=torch.uint8), (8,))
