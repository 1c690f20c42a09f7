"""Parts of a model by the names of its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import ResNet18
from lightning_sparsefl.sparse.layer_groups import head_layer, head_of
from lightning_sparsefl.sparse.parts import layers_with_buffers, norms_of, only, part, without
from lightning_sparsefl.sparse.uses import TensorUses, uses_of

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


class Language(nn.Module):
    """A network whose last layer is tied to its embedding, with a bias of its own."""

    def __init__(self, tied=True):
        super().__init__()
        self.table, self.hidden, self.out = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        if tied:
            self.out.weight = self.table.weight


def facts(net):
    return dict(net.named_parameters()), uses_of(net)


def test_an_embedding_is_no_head():
    parameters, uses = facts(Late())
    assert uses.embeddings == {"vectors.weight", "bag.weight"}
    assert part(parameters, ["head"], uses=uses) == ("head.weight", "head.bias")
    assert head_of(parameters, "vectors", uses) == ("vectors.weight",)


def test_a_head_that_shares_its_matrix_is_refused():
    parameters, uses = facts(Language())
    expected = (
        r"head `out` shares `table.weight` with `table`, so that neither can be treated without the other; "
        r"give `out` a tensor of its own, or name `table` %s, which then concerns both\."
    )
    with pytest.raises(InvalidOption, match=expected % "with `head`"):
        head_of(parameters, uses=uses)
    with pytest.raises(InvalidOption, match=expected % "instead of 'head'"):
        part(parameters, ["head"], uses=uses)
    with pytest.raises(InvalidOption, match=r"`out` a tensor of its own\.$"):
        head_of(parameters, uses=uses, named=None)
    parameters, uses = facts(Late(tied=True))
    with pytest.raises(InvalidOption, match=r"head `head` shares `head.weight` with `vectors`"):
        head_of(parameters, uses=uses)
    parameters, uses = facts(Language(tied=False))
    assert head_of(parameters, uses=uses) == ("out.weight", "out.bias")


def test_a_layer_is_named_with_those_that_share_its_tensors():
    parameters, uses = facts(Language())
    for refuses in (lambda: part(parameters, ["out"], uses=uses), lambda: head_of(parameters, "out", uses)):
        with pytest.raises(InvalidOption, match=r"`out` shares `table.weight` with `table`.*; name `table`, or give"):
            refuses()
    assert part(parameters, ["table"], uses=uses) == head_of(parameters, "table", uses) == ("table.weight",)
    assert part(parameters, ["table", "out"], uses=uses) == ("table.weight", "out.bias")


def test_the_layer_of_the_logits_may_share_its_matrix():
    parameters, uses = facts(Language())
    assert head_layer(parameters, uses=uses) == head_layer(parameters, "out", uses) == "out"


def test_a_layer_after_a_tied_one_is_the_head():
    net = Language()
    net.classifier = nn.Linear(3, 2)
    parameters, uses = facts(net)
    assert head_of(parameters, uses=uses) == ("classifier.weight", "classifier.bias")


def test_a_layer_that_is_registered_twice_is_not_tied():
    net = Late()
    net.net = nn.Sequential(net.vectors, net.head)
    parameters, uses = facts(net)
    assert head_of(parameters, uses=uses) == ("head.weight", "head.bias")
    assert TensorUses().among(["fc.weight"]) == {"fc.weight": "fc.weight"}


def test_a_pattern_must_match_but_there_may_be_no_norm():
    expected = r"`patterns` has the pattern '9', which matches no tensor; expected .* some of `0.weight`, .* and 4 more"
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


def test_one_tensor_under_two_names_of_a_layer_has_two_uses():
    layer = nn.Linear(2, 2)
    layer.again = layer.weight
    assert uses_of(nn.Sequential(layer)).stored == {
        "0.weight": "0.weight",
        "0.bias": "0.bias",
        "0.again": "0.weight",
    }
