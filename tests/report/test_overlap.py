import pytest
import torch

from lightning_sparsefl.report import overlap as module
from lightning_sparsefl.report.overlap import mask_overlap
from lightning_sparsefl.sparse.masks import overlap, pack


def random_masks(count, seed=0, shapes=None):
    g = torch.Generator().manual_seed(seed)
    shapes = shapes or {"a": (13, 7), "b": (5,), "c": (3, 3, 3)}
    return [
        {name: torch.rand(shape, generator=g) < 0.2 + 0.6 * k / count for name, shape in shapes.items()}
        for k in range(count)
    ]


def packed(masks):
    return [{name: pack(mask) for name, mask in tree.items()} for tree in masks]


def jaccard_table(masks):
    return torch.tensor([[overlap(a, b) for b in masks] for a in masks], dtype=torch.float64)


def test_overlap_is_the_pairwise_definition():
    masks = random_masks(6)
    assert torch.equal(mask_overlap(packed(masks)), jaccard_table(masks))


def test_overlap_counts_only_what_both_hold():
    masks = random_masks(5)
    del masks[0]["a"], masks[1]["b"], masks[2]["a"], masks[2]["b"], masks[2]["c"]
    masks[3] = {name: torch.zeros_like(mask) for name, mask in masks[3].items()}
    masks[4] = {name: torch.zeros_like(mask) for name, mask in masks[4].items()}
    table = mask_overlap(packed(masks))
    assert torch.equal(table, jaccard_table(masks))
    assert table[3, 4] == 1
    assert table[0, 3] == 0


def test_overlap_over_several_chunks_is_exact(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 16)
    masks = random_masks(4, shapes={"w": (1001,)})
    assert torch.equal(mask_overlap(packed(masks)), jaccard_table(masks))


@pytest.mark.parametrize(("value", "expected"), [(True, 1.0), (False, 1.0)])
def test_equal_masks_overlap_wholly(value, expected):
    assert mask_overlap(packed([{"w": torch.full((9,), value)}] * 2)).tolist() == [[expected] * 2] * 2
