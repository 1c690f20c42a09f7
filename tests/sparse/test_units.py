from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.conv1d import Conv1D
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.models import MLP, VGG11, LeNet5, ResNet18, SmallCNN
from lightning_sparsefl.sparse.conv1d import inputs_come_first
from lightning_sparsefl.sparse.importance import add_row_gradients, gate_gradients, relative, tie
from lightning_sparsefl.sparse.unit_lasso import unit_lasso_gradients
from lightning_sparsefl.sparse.units import find_groups, keep_units, unit_counts, unit_masks, unit_norms

_spec = importlib.util.spec_from_file_location(
    "units_reference", Path(__file__).parents[1] / "reference" / "units_reference.py"
)
slow = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slow)


def sizes(module: nn.Module, *inputs: Tensor, **options) -> dict[str, int]:
    return {group.name: group.size for group in find_groups(module, *inputs, **options)}


def units(groups):
    """The first and the last of each group; all of them take ten times as long."""
    return [(group, unit) for group in groups for unit in (0, group.size - 1)]


def test_a_unit_without_rows_is_read_where_the_groups_say(net):
    """Its incoming slices, and no others, can then be anything."""
    module, inputs = net
    if slow.has(module, nn.Sigmoid) or hasattr(module, "up"):
        pytest.skip("a dropped unit is not zero behind a sigmoid")
    weights = module.state_dict()
    nothing = slow.silent(module, weights, inputs, dims=2)
    for group, unit in units(find_groups(module, inputs)):
        rowless = slow.zeroed(weights, slow.places(group, unit, "out", "buffer"))
        found = slow.silent(module, rowless, inputs, dims=2) - nothing
        readers = slow.places(group, unit, "in")
        # Of a grouped convolution's input only the same position of all groups can go.
        assert readers <= found | nothing, (group.name, unit)
        beyond = {(name, dim, index) for name, dim, index in found - readers if dim == reading_dim(module, name)}
        assert beyond - slow.places(group, unit, "out") == set(), (group.name, unit)


def reading_dim(module: nn.Module, name: str) -> int:
    """The dimension of a weight along which the layer reads."""
    return 0 if inputs_come_first(module.get_submodule(name.rpartition(".")[0])) else 1


def test_a_unit_that_nobody_reads_is_made_where_the_groups_say(net):
    """Its rows, biases and norms, and no others, can then be anything."""
    module, inputs = net
    if slow.mixes(module):
        pytest.skip("a norm over channels reads all of them")
    weights = module.state_dict()
    nothing = slow.silent(module, weights, inputs, dims=1)
    for group, unit in units(find_groups(module, inputs)):
        unread = slow.zeroed(weights, slow.places(group, unit, "in"))
        found = slow.silent(module, unread, inputs, dims=1) - nothing
        made = {place for place in slow.places(group, unit, "out") if place[1] == 0}
        assert made <= found | nothing, (group.name, unit)
        if not any(map(inputs_come_first, module.modules())):  # their rows, dimension 0, are what they read
            assert found <= made, (group.name, unit)


def test_masks_and_norms_are_those_of_plain_loops(net):
    module, inputs = net
    groups, weights = find_groups(module, inputs), module.state_dict()
    assert groups
    for seed, incoming in ((0, True), (1, False), (2, True)):
        scores = {g.name: torch.rand(g.size, generator=torch.Generator().manual_seed(seed)) for g in groups}
        kept = keep_units(scores, unit_counts(groups, 0.5))
        assert {name: mask.tolist() for name, mask in kept.items()} == slow.keep_units(scores, 0.5)
        fast, plain = (make(groups, kept, weights, incoming) for make in (unit_masks, slow.unit_masks))
        assert fast.keys() == plain.keys()
        assert all(torch.equal(fast[name], plain[name]) for name in fast)
        assert fast.keys() <= {name for name, _ in module.named_parameters()}
    for name, norm in unit_norms(groups, weights).items():
        torch.testing.assert_close(norm.tolist(), slow.unit_norms(groups, weights)[name])


def test_weights_of_several_clients_at_once_give_the_bits_of_one_after_another(net):
    groups, rng = find_groups(*net), torch.Generator().manual_seed(0)
    named = list(net[0].named_parameters())
    weights, slopes = ({name: torch.randn(3, *w.shape, generator=rng) for name, w in named} for _ in range(2))
    own = [
        [{n: tensor[place].clone() for n, tensor in tree.items()} for tree in (weights, slopes)] for place in range(3)
    ]

    def agree(together, alone):
        assert together.keys() == alone[0].keys()
        for name, tensor in together.items():
            assert torch.equal(tensor, torch.stack([tree[name] for tree in alone])), name

    agree(unit_norms(groups, weights, leading=1), [unit_norms(groups, tree) for tree, _ in own])
    agree(gate_gradients(groups, weights, slopes, leading=1), [gate_gradients(groups, *trees) for trees in own])
    agree(unit_lasso_gradients(groups, weights, leading=1), [unit_lasso_gradients(groups, tree) for tree, _ in own])
    norms = [unit_norms(groups, tree) for tree, _ in own]
    together = {name: torch.stack([tree[name] for tree in norms]) for name in norms[0]}
    for reduction in ("sum", "mean"):
        scores = relative(together)
        agree(scores, [relative(tree) for tree in norms])
        halves = {name: score / 2 for name, score in scores.items()}
        found = tie(halves, together, reduction)
        each = [
            tie({name: half[place] for name, half in halves.items()}, tree, reduction)
            for place, tree in enumerate(norms)
        ]
        for tree, trees in zip(found, zip(*each, strict=True), strict=True):
            agree(tree, trees)
    for norm, trees in zip(norms, own, strict=True):
        add_row_gradients(groups, norm, *trees)
    add_row_gradients(groups, together, weights, slopes)
    agree(slopes, [tree for _, tree in own])


def test_nothing_is_changed_by_looking(net):
    module, inputs = net
    module.train()
    next(module.children()).eval()
    modes = [child.training for child in module.modules()]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    find_groups(module, inputs)
    assert [child.training for child in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in module.parameters())


ZOO = {
    LeNet5: ({}, (1, 28, 28), {"net.conv1": 20, "net.conv2": 50, "net.fc1": 500}),
    SmallCNN: ({}, (1, 8, 8), {"net.conv1": 16, "net.conv2": 32}),
    MLP: ({"hidden": (8, 4)}, (1, 28, 28), {"net.fc1": 8, "net.fc2": 4}),
    VGG11: ({}, (3, 32, 32), {f"net.conv{n}": size for n, size in enumerate((64, 128, *(256,) * 2, *(512,) * 4), 1)}),
    ResNet18: (
        {},
        (3, 32, 32),
        {
            "net.conv1": 64,
            "net.stage1.0.conv1": 64,
            "net.stage1.1.conv1": 64,
            **{f"net.stage{n}.{b}.conv1": 64 * 2 ** (n - 1) for n in (2, 3, 4) for b in (0, 1)},
            **{f"net.stage{n}.0.conv2": 64 * 2 ** (n - 1) for n in (2, 3, 4)},
        },
    ),
}


@pytest.mark.parametrize("model", ZOO)
def test_the_zoo(model):
    options, shape, expected = ZOO[model]
    assert sizes(model(**options), torch.zeros(1, *shape)) == expected


def test_logistic_regression_has_no_units():
    assert find_groups(MLP(hidden=()), torch.zeros(1, 1, 28, 28)) == ()


def test_a_residual_stream_is_one_group_with_several_layers():
    groups = {group.name: group for group in find_groups(ResNet18(), torch.zeros(1, 3, 32, 32))}
    assert groups["net.conv1"].layers == ("net.conv1", "net.stage1.0.conv2", "net.stage1.1.conv2")
    readers = [consumer.name for consumer in groups["net.conv1"].consumers]
    assert readers == ["net.stage1.0.conv1", "net.stage1.1.conv1", "net.stage2.0.conv1", "net.stage2.0.shortcut.conv"]
    assert groups["net.stage4.0.conv2"].consumers[-1].dim == -1


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("name", "count", "total"),
    [("resnet18", 12, 2880), ("mobilenet_v2", 25, 9128), ("alexnet", 7, 9344), ("densenet121", 120, 10240)],
)
def test_torchvision(name, count, total):
    torchvision = pytest.importorskip("torchvision")
    found = sizes(getattr(torchvision.models, name)(), torch.zeros(1, 3, 64, 64))
    assert (len(found), sum(found.values())) == (count, total)


@pytest.mark.parametrize("net", ["lstm", "gru", "bidirectional"], indirect=True)
def test_columns_of_embeddings_are_units_if_asked(net):
    module, inputs = net
    assert "emb" not in sizes(module, inputs)
    group = find_groups(module, inputs, embeddings=True)[0]
    assert (group.name, group.size) == ("emb", 4)
    assert [(slot.name, slot.dim) for slot in group.slots if slot.role == "out"] == [("emb.weight", 1)]


def test_a_hidden_unit_has_a_row_in_every_gate():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(2, 3), nn.Linear(3, 1)

        def forward(self, inputs):
            return self.fc(self.rnn(inputs)[0])

    (group,) = find_groups(Net(), torch.zeros(4, 1, 2))
    assert group.name == "rnn.l0"
    assert group.layers == ("rnn",)
    rows = {slot.name: slot.positions.tolist() for slot in group.slots if slot.role == "out"}
    assert set(map(str, rows.values())) == {"[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]"}
    assert set(rows) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0"}
    assert {slot.name for slot in group.slots if slot.role == "in"} == {"rnn.weight_hh_l0", "fc.weight"}


def test_tied_weights_have_a_slot_for_each_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.mid, self.out = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
            self.out.weight = self.emb.weight

        def forward(self, tokens):
            return self.out(torch.tanh(self.mid(self.emb(tokens))))

    assert sizes(Tied(), torch.zeros(1, 2, dtype=torch.long)) == {}
    (group,) = find_groups(Tied(), torch.zeros(1, 2, dtype=torch.long), embeddings=True)[:1]
    assert {slot.name for slot in group.slots} >= {"emb.weight", "out.weight"}


class Wrapped(nn.Module):
    """A convolution, some operation, a linear layer."""

    def __init__(self, operation, width=4):
        super().__init__()
        self.conv, self.fc, self.operation = nn.Conv2d(1, 4, 1), nn.Linear(width, 2), operation

    def forward(self, inputs):
        return self.fc(self.operation(self.conv(inputs)).mean((2, 3)))


PIXELS = torch.zeros(2, 1, 2, 2)


class Multiplied(nn.Module):
    """A layer whose weight is multiplied from the right."""

    def __init__(self, product):
        super().__init__()
        self.first, self.last, self.product = nn.Linear(4, 5), nn.Linear(6, 2), product
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.product(torch.relu(self.first(inputs)), self.weight, self.bias)))


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, bias: x @ weight + bias,
        lambda x, weight, bias: torch.addmm(bias, x, weight),
        lambda x, weight, bias: (weight.T @ x.T).T + bias,
    ],
)
def test_products_of_a_matrix_that_is_in_no_known_layer_keep_their_units_whole(product):
    """It may be a buffer, and the module that has it has no narrow form."""
    assert not find_groups(Multiplied(product), torch.randn(3, 4))


def test_products_of_another_form_keep_the_units_of_a_conv1d_whole():
    class Scaled(Conv1D):
        def forward(self, inputs):
            return torch.addmm(self.bias, inputs, self.weight, beta=0.5)

    assert not find_groups(nn.Sequential(Scaled(4, 3), nn.Linear(4, 2)), torch.randn(2, 3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.softmax(1),
        lambda x: x.cumsum(1),
        lambda x: x - x.mean(1, keepdim=True) + x.flip(1) * 0,
        lambda x: x @ x,
        lambda x: x.sort(1).values,
        lambda x: F.normalize(x),
        lambda x: x + float(x.abs()[0, 0].tolist()[0][0]) * x,
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.max(x, x.flip(1)),
        lambda x: torch.einsum("ncij,cd->ndij", x, torch.eye(4)),
    ],
)
def test_what_is_not_understood_keeps_its_units_whole(operation):
    assert not any(group.masks_only == "" for group in find_groups(Wrapped(operation), PIXELS))


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), "`chunk` takes its units apart"),
        (lambda x: x.view(2, 2, 2, 2, 2).transpose(1, 2).reshape(2, 4, 2, 2), "`view` takes its units apart"),
        (lambda x: F.local_response_norm(x, 2), "neighbouring"),
        (lambda x: x + torch.ones(4, 1, 1), "constant of the full width"),
        (lambda x: F.group_norm(x, 2), "without an affine part"),
    ],
)
def test_what_needs_the_full_width_is_masked_only(operation, reason):
    (group, *_) = find_groups(Wrapped(operation), PIXELS)
    assert reason in group.masks_only


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.dropout(F.silu(x)) * 0.5 + 1,
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.pad(x, (1, 1, 1, 1)),
        lambda x: x.permute(0, 2, 3, 1).contiguous().movedim(-1, 1).clone(),
        lambda x: x[:, :, 1:, :].flatten(2).unflatten(2, (1, 2)),
        lambda x: torch.stack([x, x]).sum(0),
        lambda x: x.relu_().add_(x),
    ],
)
def test_what_keeps_channels_apart_keeps_the_units(operation):
    (group,) = find_groups(Wrapped(operation), PIXELS)
    assert (group.size, group.masks_only) == (4, "")


class Normed(nn.Module):
    """A convolution, some operation with a parameter that all channels share, a norm over them, a linear layer."""

    def __init__(self, operation):
        super().__init__()
        self.conv, self.place = nn.Conv2d(1, 4, 1), nn.Parameter(torch.ones(1, 1, 2, 2))
        self.norm, self.fc, self.operation = nn.GroupNorm(1, 4), nn.Linear(4, 2), operation

    def forward(self, inputs):
        return self.fc(self.norm(self.operation(self.conv(inputs), self.place)).mean((2, 3)))


@pytest.mark.parametrize(
    ("operation", "fits"),
    [
        (lambda x, place: x, True),
        (lambda x, place: x * place, True),
        (lambda x, place: x + place, False),
        (lambda x, place: x.sigmoid() * place, False),
        (lambda x, place: x.mean((2, 3), keepdim=True), True),
        (lambda x, place: x.logsumexp((2, 3), keepdim=True), False),
    ],
)
def test_a_norm_over_units_that_are_not_0_when_dropped_is_masked_only(operation, fits):
    (group, *_) = find_groups(Normed(operation), PIXELS)
    assert (group.masks_only == "") == fits


def test_a_function_of_its_own_gradient_is_followed():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    (group,) = find_groups(Wrapped(Double.apply), PIXELS)
    assert (group.size, len(group.consumers)) == (4, 1)


def test_spatial_attention_is_not_a_unit_of_every_channel():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.look, self.last = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 1, 1), nn.Conv2d(4, 2, 1)

        def forward(self, inputs):
            hidden = self.conv(inputs)
            return self.last(hidden * torch.sigmoid(self.look(hidden)))

    assert sizes(Attention(), PIXELS) == {"conv": 4}


def test_a_sum_with_the_input_keeps_its_units_whole():
    class Plus(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 2, 1)

        def forward(self, inputs):
            return self.last(self.conv(inputs) + inputs)

    assert sizes(Plus(), PIXELS) == {}


def test_control_flow_is_followed():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, inputs):
            hidden = self.one(inputs)
            return self.two(hidden if inputs.sum() > 0 else -hidden)

    assert sizes(Branch(), torch.ones(1, 2)) == {"one": 3}


def test_ignored_layers_stay_whole():
    net = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), nn.Linear(5, 1))
    assert sizes(net, torch.zeros(1, 2)) == {"0": 3, "1.0": 4, "1.1": 5}
    assert sizes(net, torch.zeros(1, 2), ignore=["1"]) == {"0": 3}
    with pytest.raises(InvalidOption, match="`nothing` is not a module"):
        find_groups(net, torch.zeros(1, 2), ignore=["nothing"])


def test_a_forward_that_fails_is_told():
    with pytest.raises(InvalidOption, match=r"`Linear` fails on example inputs of shape \(1, 3\).*change the inputs"):
        find_groups(nn.Linear(2, 1), torch.zeros(1, 3))


def test_inputs_that_are_given_as_one_tuple_are_asked_for_one_by_one():
    pair = (torch.zeros(1, 3), torch.zeros(1, 4))
    assert find_groups(nn.Bilinear(3, 4, 2), *pair) == ()
    with pytest.raises(InvalidOption, match=r"shape \(1, 3\), \(1, 4\).*; pass them one by one, as `\*inputs`\.$"):
        find_groups(nn.Bilinear(3, 4, 2), pair)


def test_a_sample_without_a_batch_dimension_is_refused():
    net = nn.Sequential(nn.Linear(10, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(InvalidOption, match=r"`.*` gets one sample without a batch dimension; expected example inputs"):
        find_groups(net, torch.zeros(10))


def test_a_layer_that_is_compiled_in_place_has_its_units_without_compilation(caplog):
    def compiled(*_):
        raise AssertionError

    net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))
    plain = find_groups(net, torch.zeros(2, 4))
    net[0].compile(backend=compiled)
    groups = find_groups(net, torch.zeros(2, 4))
    assert [(group.name, group.size) for group in groups] == [(group.name, group.size) for group in plain]
    assert not caplog.records


def test_a_compiled_module_is_refused():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(InvalidOption, match="`OptimizedModule` is compiled"):
        find_groups(torch.compile(net), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"x": torch.ones(3, dtype=torch.bool)}, "`x` is not a group"),
        ({"0": torch.ones(2, dtype=torch.bool)}, r"shape \(2,\), expected torch.bool of \(3,\)"),
        ({"0": torch.ones(3)}, "torch.float32"),
        ({"0": torch.zeros(3, dtype=torch.bool)}, "keeps none of 3 units"),
    ],
)
def test_unit_masks_that_do_not_fit_are_refused(kept, message):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(IncompatibleMasks, match=message):
        unit_masks(find_groups(net, torch.zeros(1, 2)), kept, net.state_dict())


@pytest.mark.parametrize(("density", "count"), [(1e-9, 1), (0.1, 1), (0.3, 2), (0.5, 3), (0.9, 5), (1.0, 5)])
def test_counts_round_halves_up(density, count):
    net = nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1))
    assert unit_counts(find_groups(net, torch.zeros(1, 1)), density) == {"0": count}


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan")])
def test_a_density_outside_is_refused(density):
    with pytest.raises(InvalidOption, match="`density="):
        unit_counts((), density)


def test_norms_keep_the_gradient():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    unit_norms(find_groups(net, torch.zeros(1, 2)), dict(net.named_parameters()))["0"].sum().backward()
    assert torch.equal(net[0].weight.grad, net[0].weight.sign())
    assert net[0].bias.grad is None
