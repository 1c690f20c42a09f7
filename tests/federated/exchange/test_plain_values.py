import numpy as np
import pytest
import torch

from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.exchange.plain_values import encoded, pack_plain, unpack_plain
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.safe_load import load_plain


def test_masks_are_packed_to_a_bit_and_come_back():
    mask = torch.rand(1000) < 0.5
    packed = pack_plain({"m": mask})
    assert packed["m"]["packed_mask"].numel() == 125
    assert torch.equal(unpack_plain(packed, torch.device("cpu"))["m"], mask)


def test_a_view_is_stored_without_the_rest_of_its_storage():
    vector = torch.arange(100_000.0)
    packed = pack_plain({"head": vector[10:20], "row": vector.view(100, 1000)[3, :5]})
    assert torch.equal(packed["head"], vector[10:20])
    assert torch.equal(packed["row"], vector[3000:3005])
    assert len(encoded(packed)) < 5_000
    assert pack_plain(vector).data_ptr() == vector.data_ptr()


def test_what_a_checkpoint_cannot_hold_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`memory\['x'\]\[1\]` holds a `set`; expected numbers"):
        pack_plain({"x": [1, {1, 2}]}, "memory")


def test_numbers_of_numpy_become_plain(tmp_path):
    """They are floats and strings, too, and could not be read again."""
    packed = pack_plain({np.str_("a"): [np.float64(0.1), (1, True)]})
    write_atomically(tmp_path / "x.pt", packed)
    assert load_plain(tmp_path / "x.pt") == {"a": [0.1, [1, True]]}


def test_a_fingerprint_tells_contents_apart_and_not_how_they_are_held():
    wide = torch.arange(6.0).reshape(2, 3)
    same = [{"a": wide[:, :2], "b": [1, None]}, {"b": (1, None), "a": wide[:, :2].contiguous()}]
    assert fingerprint(same[0]) == fingerprint(same[1])
    others = [
        wide,
        wide.reshape(3, 2),
        wide.int(),
        wide[0],
        [1, 2],
        [[1], 2],
        ["12"],
        ["1", "2"],
        1,
        1.0,
        "1",
        True,
        {},
    ]
    assert len({fingerprint(other) for other in others}) == len(others)


def test_a_fingerprint_does_not_depend_on_strides():
    assert fingerprint(torch.tensor(2.0).expand(1)) == fingerprint(torch.tensor([2.0]))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"packed_mask": 1}}, r"`memory\['a'\]` holds the key 'packed_mask'"),
        ({("a", 1): 2}, r"`memory` holds the key \('a', 1\)"),
        ({"a": torch.eye(2).to_sparse()}, r"`memory\['a'\]` holds a tensor with the layout torch.sparse_coo"),
    ],
)
def test_what_would_not_be_read_again_is_refused(value, words):
    with pytest.raises(TypeError, match=words):
        pack_plain(value, "memory")
