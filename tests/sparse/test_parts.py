"""Parts of a model by the names of its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import ResNet18
from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.parts import embeddings_of, layers_with_buffers, norms_of, only, part, without

NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 3))
WEIGHTS = {**dict(NET.named_parameters()), "1.running_mean": torch.zeros(2), "1.running_var": torch.ones(2)}
BUFFERS = frozenset({"1.running_mean", "1.running_var"})
NORMS = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class PreNorm(nn.Module):
    """A block, whose name ends as that of a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], []),
        (["head"], ["5.weight", "5.bias"]),
        (["4", "head"], ["4.weight", "4.bias", "5.weight", "5.bias"]),
        (["*.bias"], ["0.bias", "1.bias", "4.bias", "5.bias"]),
        (["1"], ["1.weight", "1.bias", "1.running_mean", "1.running_var"]),
        (["norm"], ["1.weight", "1.bias", "1.running_mean", "1.running_var"]),
        (["*"], list(WEIGHTS)),
    ],
)
def test_a_part_has_the_names_of_its_patterns_in_the_models_order(patterns, names):
    assert list(part(WEIGHTS, patterns, buffers=BUFFERS, norms=norms_of(NET))) == names


def test_a_buffer_is_no_head():
    table = {**WEIGHTS, "positions": torch.zeros(3, 3)}
    assert part(table, ["head"], buffers={*BUFFERS, "positions"}) == ("5.weight", "5.bias")


class Late(nn.Module):
    """A network whose embedding was created after its head, and may be tied to it."""

    def __init__(self, tied=False):
        super().__init__()
        self.head, self.vectors, self.bag = nn.Linear(3, 5), nn.Embedding(5, 3), nn.EmbeddingBag(5, 3)
        if tied:
            self.vectors.weight = self.head.weight


def test_an_embedding_is_no_head():
    net = Late()
    assert embeddings_of(net) == {"vectors.weight", "bag.weight"}
    parameters = dict(net.named_parameters())
    assert part(parameters, ["head"], embeddings=embeddings_of(net)) == ("head.weight", "head.bias")
    assert head_of(parameters, "vectors", embeddings_of(net)) == ("vectors.weight",)


def test_weights_that_an_embedding_shares_may_be_the_head():
    net = Late(tied=True)
    assert embeddings_of(net) == {"bag.weight"}
    assert head_of(dict(net.named_parameters()), embeddings=embeddings_of(net)) == ("head.weight", "head.bias")


def test_a_pattern_must_match_but_there_may_be_no_norm():
    expected = r"The pattern '9' of a part matches no tensor; expected .* some of `0.weight`, `0.bias`, .* and 4 more"
    with pytest.raises(InvalidOption, match=expected):
        part(WEIGHTS, ["9"])
    assert part(WEIGHTS, ["norm"], norms=norms_of(nn.Linear(2, 2))) == ()


def test_norms_are_found_by_type():
    assert norms_of(NET) == {*NORMS, "1.num_batches_tracked"}
    assert norms_of(nn.Sequential(RMSNorm(), PreNorm())) == {"0.gain", "1.norm.weight", "1.norm.bias"}
    assert norms_of(nn.GroupNorm(1, 4)) == {"weight", "bias"}
    assert norms_of(nn.InstanceNorm2d(3)) == set()


def test_the_norms_of_a_network_are_its_vectors_but_the_biases_of_linear_layers():
    module = ResNet18(num_classes=10, norm="batch")
    vectors = {name for name, value in module.state_dict().items() if value.dim() < 2}
    assert norms_of(module) == vectors - {name for name in vectors if name.endswith("fc.bias")}


def test_only_and_without_divide_a_tree():
    kept, rest = only(WEIGHTS, ["5.bias", "nothing"]), without(WEIGHTS, ["5.bias", "nothing"])
    assert list(kept) == ["5.bias"]
    assert list({**rest, **kept}) == [*(name for name in WEIGHTS if name != "5.bias"), "5.bias"]
    assert all(value is WEIGHTS[name] for name, value in {**rest, **kept}.items())


def test_a_layer_has_the_buffers_of_its_norm():
    layers = layers_with_buffers(WEIGHTS, BUFFERS)
    assert list(layers) == ["0", "4", "5"]
    assert set(layers["0"]) == {"0.weight", "0.bias", *NORMS}
    assert sorted(name for names in layers.values() for name in names) == sorted(WEIGHTS)
