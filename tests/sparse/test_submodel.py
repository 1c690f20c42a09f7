from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.models import ResNet18, SmallCNN
from lightning_sparsefl.sparse import masks
from lightning_sparsefl.sparse.submodel import NarrowGroupNorm, cut, narrow, widen
from lightning_sparsefl.sparse.units import find_groups, keep_units, unit_counts, unit_masks

_spec = importlib.util.spec_from_file_location(
    "units_reference", Path(__file__).parents[1] / "reference" / "units_reference.py"
)
slow = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slow)


def drawn(groups, density, seed=0):
    """Random units, as many of each group as the density says."""
    rng = torch.Generator().manual_seed(seed)
    return keep_units(
        {group.name: torch.rand(group.size, generator=rng) for group in groups}, unit_counts(groups, density)
    )


def masked(module, groups, kept):
    """A copy of the full module with zeros where units are dropped."""
    copied = copy.deepcopy(module)
    weights = module.state_dict()
    copied.load_state_dict(masks.apply(weights, unit_masks(groups, kept, weights)))
    return copied


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("density", [0.3, 0.5, 1.0])
def test_a_cut_module_computes_what_the_masked_one_does(net, density, training):
    """Outputs, gradients at the kept positions, and the statistics of norms."""
    module, inputs = net
    module.train(training)
    groups = find_groups(module, inputs)
    kept = drawn(groups, density)
    full, small = masked(module, groups, kept), cut(module, groups, kept)
    wide, thin = full(inputs), small(inputs)
    torch.testing.assert_close(thin, wide, rtol=0, atol=1e-10)
    target = torch.randn_like(wide)
    for outputs in (wide, thin):
        (outputs * target).sum().backward()
    expected = narrow({name: value.grad for name, value in full.named_parameters()}, groups, kept)
    for name, value in small.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=0, atol=1e-10)
    statistics = narrow(full.state_dict(), groups, kept)
    for name, value in small.state_dict().items():
        torch.testing.assert_close(value, statistics[name])


def test_steps_of_sgd_agree_too(net):
    """Masked gradients on the full weights, against the narrow module alone."""
    module, inputs = net
    groups = find_groups(module, inputs)
    kept = drawn(groups, 0.5, seed=1)
    full, small = masked(module, groups, kept), cut(module, groups, kept)
    held = unit_masks(groups, kept, module.state_dict())
    for network in (full, small):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            network(inputs).square().mean().backward()
            if network is full:
                for name, value in full.named_parameters():
                    value.grad.mul_(held.get(name, torch.tensor(True)))
            optimizer.step()
    expected = narrow(full.state_dict(), groups, kept)
    for name, value in small.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)


def test_narrow_and_widen_are_those_of_plain_loops(net):
    module, inputs = net
    groups, weights = find_groups(module, inputs), module.state_dict()
    kept = drawn(groups, 0.4, seed=2)
    small = narrow(weights, groups, kept)
    plain = slow.narrow(weights, groups, kept)
    assert list(small) == list(plain)
    assert all(torch.equal(small[name], plain[name]) for name in small)
    doubled = {name: 2 * value for name, value in small.items()}
    held = slow.unit_masks(groups, kept, weights)
    restored, zero = (widen(doubled, groups, kept, weights, zeros=zeros) for zeros in (False, True))
    for name, value in module.named_parameters():
        mask = held.get(name, torch.ones(value.shape, dtype=torch.bool))
        assert torch.equal(restored[name], torch.where(mask, 2 * value, value))
        assert torch.equal(zero[name], torch.where(mask, 2 * value, 0 * value))


def test_a_cut_module_looks_like_the_full_one(net):
    module, inputs = net
    module.get_parameter(next(iter(dict(module.named_parameters())))).requires_grad_(False)
    groups = find_groups(module, inputs)
    kept = drawn(groups, 0.5)
    small = cut(module, groups, kept)
    assert list(small.state_dict()) == list(module.state_dict())
    assert [(name, value.requires_grad) for name, value in small.named_parameters()] == [
        (name, value.requires_grad) for name, value in module.named_parameters()
    ]
    assert not {value.data_ptr() for value in small.parameters()} & {value.data_ptr() for value in module.parameters()}
    small.load_state_dict(narrow(module.state_dict(), groups, kept))
    if slow.mixes(module):  # the narrow norms over channels are not looked into
        return
    again = {group.name: group.size for group in find_groups(small, inputs)}
    assert again == {group.name: int(kept[group.name].sum()) for group in groups}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(3, 12), (3, 12, 5), (2, 12, 3, 4)])
def test_the_narrow_group_norm_counts_dropped_channels_as_zeros(seed, shape):
    rng = torch.Generator().manual_seed(seed)
    full, inputs = nn.GroupNorm(4, 12).double(), 3 + torch.randn(shape, generator=rng).double()
    with torch.no_grad():
        full.weight.copy_(torch.randn(12, generator=rng))
        full.bias.copy_(torch.randn(12, generator=rng))
    # A group may keep none of its channels.
    channels = torch.randperm(12, generator=rng)[: 2 + seed].sort().values
    inputs[:, [channel for channel in range(12) if channel not in channels]] = 0
    layer = copy.deepcopy(full)
    layer.weight, layer.bias = nn.Parameter(full.weight[channels]), nn.Parameter(full.bias[channels])
    expected = slow.group_norm(inputs, 4, full.weight, full.bias, full.eps)[:, channels]
    torch.testing.assert_close(NarrowGroupNorm(full, layer, channels)(inputs[:, channels]), expected)


def test_the_narrow_group_norm_is_exact_far_from_zero():
    full, inputs = nn.GroupNorm(2, 8), 100 + torch.randn(4, 8, 6, 6)
    inputs[:, ::2] = 0
    layer = copy.deepcopy(full)
    layer.weight, layer.bias = nn.Parameter(full.weight[1::2].clone()), nn.Parameter(full.bias[1::2].clone())
    thin = NarrowGroupNorm(full, layer, torch.arange(1, 8, 2))(inputs[:, 1::2])
    torch.testing.assert_close(thin, full(inputs)[:, 1::2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["group", "layer"])
def test_narrow_norms_keep_their_precision_under_autocast(kind):
    layers = (nn.Conv2d(1, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))
    if kind == "layer":
        layers = (nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    net, inputs = nn.Sequential(*layers), torch.randn(2, 1, 4, 4)
    groups = find_groups(net, inputs)
    small = cut(net, groups, drawn(groups, 0.5))
    hidden = small[0](inputs).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(small[1](hidden), small[1](hidden.float()))


def test_a_resnet_to_float32():
    module, inputs = ResNet18(num_classes=10), torch.randn(2, 3, 16, 16)
    groups = find_groups(module, inputs)
    kept = drawn(groups, 0.25)
    small = cut(module, groups, kept)
    torch.testing.assert_close(small(inputs), masked(module, groups, kept)(inputs), rtol=0, atol=1e-5)
    assert isinstance(small, ResNet18)
    assert sum(value.numel() for value in small.parameters()) < 0.07 * sum(v.numel() for v in module.parameters())


def test_a_module_in_a_trainer_can_be_cut():
    """The trainer stays with the full one and is not copied."""
    module = SmallCNN()
    groups = find_groups(module, torch.zeros(1, 1, 8, 8))
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    small = cut(module, groups, drawn(groups, 0.5))
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        small.trainer  # noqa: B018


def test_batch_norm_knows_its_new_width():
    norm = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = find_groups(norm, torch.zeros(2, 2))
    small = cut(norm, groups, {"0": torch.tensor([True, False, True, False])})
    assert (small[1].num_features, small[1].running_mean.shape) == (2, (2,))
    assert small[1].num_batches_tracked is not norm[1].num_batches_tracked


def test_batch_static_norms():
    """Batch statistics in training and evaluation: no buffers."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2)
    ).double()
    inputs = torch.randn(4, 1, 6, 6).double()
    groups = find_groups(net, inputs)
    kept = drawn(groups, 0.5)
    torch.testing.assert_close(cut(net, groups, kept)(inputs), masked(net, groups, kept)(inputs))


class Scaled(nn.Module):
    """A layer with a parameter for each channel, and a width that nobody can know."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return inputs * self.scale


def half(name, size):
    return {name: torch.arange(size) % 2 == 0}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (nn.Linear(4, 3), Scaled(), nn.Linear(3, 1)),
            "`1.scale`: a `Scaled` has no known narrow form; let `shrink` keep the units of `0`",
        ),
        (
            (
                nn.Linear(4, 3),
                nn.Unflatten(1, (3, 1)),
                nn.Flatten(),
                nn.LayerNorm(3, elementwise_affine=False),
                nn.Linear(3, 1),
            ),
            "affine",
        ),
        ((nn.Linear(4, 3), nn.Sigmoid(), nn.LayerNorm(3), nn.Linear(3, 1)), "constant there but not zero"),
    ],
)
def test_what_would_not_be_exact_is_refused(layers, message):
    net = nn.Sequential(*layers)
    groups = find_groups(net, torch.randn(2, 4))
    assert unit_masks(groups, half("0", 3), net.state_dict())
    with pytest.raises(InvalidOption, match=message):
        cut(net, groups, half("0", 3))
    assert cut(net, groups, {"0": torch.ones(3, dtype=torch.bool)})


class Own(nn.Module):
    """A module with a parameter of its own for the units of a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.last(self.first(inputs) * self.scale)


def test_a_parameter_of_the_module_itself_is_named_with_the_layer_of_its_units():
    net = Own()
    groups = find_groups(net, torch.randn(2, 4))
    expected = r"`scale`: a `Own` has no known narrow form; .* units of `first` \(`ignore=\['first'\]`\)"
    with pytest.raises(InvalidOption, match=expected):
        cut(net, groups, half("first", 3))


def test_layers_of_a_recurrent_network_must_keep_as_many():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.LSTM(2, 4, 2), nn.Linear(4, 1)

        def forward(self, inputs):
            return self.fc(self.rnn(inputs)[0])

    net = Net()
    groups = find_groups(net, torch.zeros(3, 1, 2))
    with pytest.raises(InvalidOption, match=r"`rnn` would keep \[2, 4\] hidden units"):
        cut(net, groups, half("rnn.l0", 4))


def test_weights_that_do_not_fit_are_refused():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups, weights = find_groups(net, torch.zeros(1, 2)), net.state_dict()
    with pytest.raises(IncompatibleMasks, match=r"Narrow `0.weight` has shape \(3, 2\), expected \(2, 2\)"):
        widen({"0.weight": weights["0.weight"]}, groups, half("0", 3), weights)
    with pytest.raises(IncompatibleMasks, match="`1` is not a group"):
        narrow(weights, groups, half("1", 1))


class Branches(nn.Module):
    """Joins the outputs of two layers, in turns or one behind the other."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(12, 3)

    def forward(self, x):
        return self.out(torch.stack([self.a(x), self.b(x)], self.dim).flatten(1))


@pytest.mark.parametrize("dim", [1, 2])
def test_units_that_are_stacked_beside_others_are_not_cut(dim):
    """Their numbers must be equal, and in turns they would stand in another order than the weights."""
    groups = find_groups(Branches(dim), torch.zeros(2, 4))
    reason = "`stack` needs equal numbers of units that are chosen apart"
    assert [(group.name, group.masks_only) for group in groups] == [("a", reason), ("b", reason)]


class LastStates(nn.Module):
    """Reads the last states of two recurrent layers, one behind the other or in turns."""

    def __init__(self, *order):
        super().__init__()
        self.order = order
        self.lstm, self.out = nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[1][0].permute(*self.order).flatten(1))


def test_states_of_several_layers_are_cut_one_behind_the_other():
    module, inputs = LastStates(1, 0, 2).double(), torch.randn(3, 2, 4, dtype=torch.float64)
    groups = find_groups(module, inputs)
    kept = drawn(groups, 0.6)
    assert not torch.equal(*kept.values())
    small = cut(module, groups, kept)
    torch.testing.assert_close(small(inputs), masked(module, groups, kept)(inputs), rtol=0, atol=1e-10)
    assert all("flatten" in group.masks_only for group in find_groups(LastStates(1, 2, 0).double(), inputs))


class GivenState(nn.Module):
    """Gives a recurrent layer a first state, and normalizes its outputs."""

    def __init__(self, kind, state):
        super().__init__()
        self.start, self.learned, self.state = nn.Linear(4, 6), nn.Parameter(torch.randn(1, 1, 6)), state
        self.rnn, self.norm, self.out = kind(4, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        state = self.state(self, x)
        state = None if state is None else (state, state) if isinstance(self.rnn, nn.LSTM) else state
        return self.out(self.norm(self.rnn(x, hx=state)[0]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (lambda net, x: None, ""),
        (lambda net, x: net.start(x[:, 0]).tanh()[None], ""),
        (lambda net, x: net.start(x[:, 0]).sigmoid()[None], "`layer_norm` would see the values of dropped units"),
        (lambda net, x: x.new_zeros(1, len(x), 6), "takes a first state of the full width"),
        (lambda net, x: net.learned.expand(-1, len(x), -1).contiguous(), "takes a first state of the full width"),
    ],
    ids=["none", "tanh", "sigmoid", "zeros", "learned"],
)
def test_a_first_state_that_is_not_0_is_not_cut(kind, state, reason):
    torch.manual_seed(0)
    module, inputs = GivenState(kind, state).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    (group,) = find_groups(module, inputs)
    assert reason in group.masks_only
    assert bool(group.masks_only) == bool(reason)
    assert not module.rnn._forward_pre_hooks
    kept = drawn([group], 0.5)
    if not reason:
        small = cut(module, [group], kept)
        torch.testing.assert_close(small(inputs), masked(module, [group], kept)(inputs), rtol=0, atol=1e-10)


class OwnState(nn.GRU):
    """Makes a first state that is not 0."""

    def forward(self, x, hx=None):
        return super().forward(x, torch.full((1, x.shape[1 - self.batch_first], self.hidden_size), 0.5, dtype=x.dtype))


def test_a_recurrent_layer_of_the_user_that_makes_its_state_is_not_cut():
    (group,) = find_groups(
        GivenState(OwnState, lambda net, x: None).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    )
    assert "takes a first state of the full width" in group.masks_only


@pytest.mark.slow_after_first
@pytest.mark.parametrize("net", ["flatten", "group norm", "lstm"], indirect=True)
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_cut_module_exports_to_onnx(net, dynamo, tmp_path, recwarn):
    pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    if dynamo:
        pytest.importorskip("onnxscript")
    module, inputs = net
    module = module.float()
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    groups = find_groups(module, inputs)
    small = cut(module, groups, drawn(groups, 0.5))
    path = tmp_path / "small.onnx"
    torch.onnx.export(small, (inputs,), str(path), dynamo=dynamo)
    session = evaluator(str(path))
    (exported,) = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(exported), small(inputs).detach(), rtol=1e-4, atol=1e-5)
