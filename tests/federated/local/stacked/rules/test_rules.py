"""Each layer for several clients at once gives each client's outputs, gradients and buffers."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules.mode import RULES
from lightning_sparsefl.federated.local.stacked.states.leaves import StackedModule

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
SIZE = 3
IMAGE = (4, 8, 8)
LAYERS = {
    "linear": (nn.Linear(6, 5), (6,)),
    "linear without bias": (nn.Linear(6, 5, bias=False), (6,)),
    "linear over a sequence": (nn.Linear(6, 5), (7, 6)),
    "conv": (nn.Conv2d(4, 6, 3), IMAGE),
    "conv, grouped": (nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False), IMAGE),
    "conv, depthwise and dilated": (nn.Conv2d(4, 4, (3, 2), dilation=2, groups=4), IMAGE),
    "conv, one value": (nn.Conv2d(4, 6, 8), IMAGE),
    "conv1d": (nn.Conv1d(4, 6, 3), (4, 9)),
    "conv3d": (nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "max pool": (nn.MaxPool2d(3, stride=2, padding=1), IMAGE),
    "average pool": (nn.AvgPool2d(2, ceil_mode=True), IMAGE),
    "adaptive pool": (nn.AdaptiveAvgPool2d(2), IMAGE),
    "batch norm": (nn.BatchNorm1d(6), (6,)),
    "batch norm of images": (nn.BatchNorm2d(4), IMAGE),
    "batch norm, not affine": (nn.BatchNorm2d(4, affine=False), IMAGE),
    "batch norm, not tracking": (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    "batch norm in evaluation": (nn.BatchNorm2d(4).eval(), IMAGE),
    "group norm": (nn.GroupNorm(2, 4), IMAGE),
    "group norm, not affine": (nn.GroupNorm(2, 4, affine=False), IMAGE),
    "group norm of large groups": (nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(2, 16)), IMAGE),
    "group norm of features": (nn.GroupNorm(2, 6), (6,)),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), IMAGE),
    "layer norm": (nn.LayerNorm(6), (6,)),
    "layer norm of images": (nn.LayerNorm(IMAGE), IMAGE),
    "layer norm, not affine": (nn.LayerNorm(6, elementwise_affine=False), (7, 6)),
    "relu": (nn.ReLU(), IMAGE),
    "relu in place": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True)), (6,)),
    "activations": (nn.Sequential(nn.GELU(), nn.SiLU(), nn.Tanh(), nn.LeakyReLU(0.1)), IMAGE),
    "flatten": (nn.Flatten(), IMAGE),
    "flatten some": (nn.Flatten(2), IMAGE),
    "attention": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (5, 6)),
    "network": (
        nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3),
            nn.GroupNorm(1, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ),
        IMAGE,
    ),
}  # fmt: skip


def score(output):
    """A loss of which each number of the output has a share of its own."""
    flat = output.flatten(1)
    return (flat * torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)).square().sum()


def clients(module):
    """Weights of several clients."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: t + 0.3 * torch.rand(t.shape, generator=generator, dtype=t.dtype) for name, t in floats(module).items()}
        for _ in range(SIZE)
    ]


def floats(module):
    return {name: t.detach().clone() for name, t in module.state_dict().items() if t.is_floating_point()}


@pytest.mark.parametrize("samples", [2, 1, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_does_for_each_client_what_it_does_for_one(name, samples):
    layer, shape = LAYERS[name]
    if samples == 1 and "batch norm" in name and layer.training and len(shape) == 1:
        pytest.skip("torch refuses one value for each channel")
    module = copy.deepcopy(layer).double()
    trees, inputs = clients(module), torch.randn(SIZE, samples, *shape, dtype=torch.float64)
    stacked = StackedModule(module, SIZE)
    stacked.load(trees)
    losses = stacked.call(lambda batch, _: score(module(batch)), inputs)
    if losses.requires_grad:
        losses.sum().backward()
    for place, tree in enumerate(trees):
        alone = copy.deepcopy(layer).double()
        alone.load_state_dict(tree, strict=False)
        loss = score(alone(inputs[place]))
        torch.testing.assert_close(losses[place], loss, rtol=1e-12, atol=1e-12)
        if loss.requires_grad:
            loss.backward()
        for key, parameter in alone.named_parameters():
            torch.testing.assert_close(stacked.leaves[key].grad[place], parameter.grad, rtol=1e-11, atol=1e-11)
        for key, tensor in floats(alone).items():
            torch.testing.assert_close(stacked.leaves[key].detach()[place], tensor, rtol=1e-12, atol=1e-12)


WRITING = ("batch norm", "batch norm of images", "batch norm, not affine")
"""Layers that write statistics, which clients cannot share."""


@pytest.mark.parametrize("samples", [2, 1])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in WRITING])
def test_a_layer_whose_weights_all_clients_share(name, samples):
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double()
    if name == "network":
        layer.eval()
    tree = clients(layer)[0]
    inputs = torch.randn(SIZE, samples, *shape, dtype=torch.float64, requires_grad=True)
    stacked = StackedModule(layer, SIZE, tree)
    stacked.load([tree] * SIZE)
    losses = stacked.call(lambda batch, _: score(layer(batch)), inputs)
    (grad,) = torch.autograd.grad(losses.sum(), inputs)
    layer.load_state_dict(tree, strict=False)
    for place in range(SIZE):
        alone = score(layer(inputs[place]))
        torch.testing.assert_close(losses[place], alone, rtol=1e-12, atol=1e-12)
        (own,) = torch.autograd.grad(alone, inputs)
        torch.testing.assert_close(grad[place], own[place], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["batch norm in evaluation", "batch norm, not tracking"])
def test_clients_share_some_tensors_of_a_batch_norm(name):
    module = copy.deepcopy(LAYERS[name][0]).double()
    tree = clients(module)[0]
    shared = {key: tree[key] for key in tree if "running" in key} or {"weight": tree["weight"]}
    trees, inputs = [{**own, **shared} for own in clients(module)], torch.randn(SIZE, 2, *IMAGE).double()
    stacked = StackedModule(module, SIZE, shared)
    stacked.load(trees)
    with mock.patch.object(torch, "batch_norm", wraps=torch.batch_norm) as kernel:  # the rule of `vmap` fails on CUDA
        losses = stacked.call(lambda batch, _: score(module(batch)), inputs)
    assert kernel.call_args.args[0].shape == (2, SIZE * IMAGE[0], *IMAGE[1:])
    for place, tree in enumerate(trees):
        module.load_state_dict(tree, strict=False)
        torch.testing.assert_close(losses[place], score(module(inputs[place])), rtol=1e-12, atol=1e-12)


WEIGHT = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
LOSSES = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 2},
    {"label_smoothing": 0.2},
    {"label_smoothing": 0.2, "ignore_index": 1, "reduction": "sum"},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.1},
    {"weight": WEIGHT, "ignore_index": 255},
]


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_cross_entropy_does_for_each_client_what_it_does_for_one(options):
    module = nn.Linear(6, 4).double()
    trees, inputs = clients(module), torch.randn(SIZE, 5, 6, dtype=torch.float64)
    labels = torch.arange(SIZE * 5).view(SIZE, 5) % 4
    labels[labels == 2] = options.get("ignore_index", 2)
    stacked = StackedModule(module, SIZE)
    stacked.load(trees)
    losses = stacked.call(lambda batch, _: F.cross_entropy(module(batch[0]), batch[1], **options), (inputs, labels))
    losses.sum().backward()
    for place, tree in enumerate(trees):
        module.load_state_dict(tree)
        loss = F.cross_entropy(module(inputs[place]), labels[place], **options)
        (grad,) = torch.autograd.grad(loss.sum(), module.weight)
        torch.testing.assert_close(losses[place], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stacked.leaves["weight"].grad[place], grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}, {"weight": WEIGHT, "reduction": "sum"}], ids=str)
def test_an_embedding_and_the_loss_of_sequences_are_those_of_one_client(options):
    module = nn.Sequential(nn.Embedding(9, 5, padding_idx=0), nn.Linear(5, 4)).double()
    trees, tokens = clients(module), torch.randint(9, (SIZE, 6, 7))
    labels = tokens % 4
    stacked = StackedModule(module, SIZE)
    stacked.load(trees)

    def loss(batch, _=0):
        return F.cross_entropy(module(batch[0]).transpose(1, 2), batch[1], **options)

    losses = stacked.call(loss, (tokens, labels))
    losses.sum().backward()
    for place, tree in enumerate(trees):
        module.load_state_dict(tree)
        alone = loss((tokens[place], labels[place]))
        torch.testing.assert_close(losses[place], alone, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad(alone, module[0].weight)
        torch.testing.assert_close(stacked.leaves["0.weight"].grad[place], grad, rtol=1e-11, atol=1e-11)


def test_tied_weights_are_one_leaf():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    assert list(StackedModule(module, 2).leaves) == ["0.weight", "0.bias", "1.bias"]


def test_the_module_holds_its_own_tensors_after_an_error():
    module = nn.Linear(3, 3)
    before = dict(module.named_parameters())
    stacked = StackedModule(module, 2)
    stacked.load([floats(module)] * 2)
    with pytest.raises(NotStackable, match="reads a number"):
        stacked.call(lambda batch, _: module(batch).sum().item(), torch.ones(2, 1, 3))
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_the_rules_are_of_functions_that_layers_call():
    assert {F.linear, F.conv2d, torch.conv2d, F.batch_norm, F.cross_entropy, torch.relu} <= RULES.keys()


def test_a_tensor_of_scalars_has_one_of_each_client():
    scalars = torch.arange(6.0, dtype=torch.float64).view(SIZE, 2)
    whole = StackedModule(nn.Linear(1, 1), SIZE)
    assert torch.equal(whole.call(lambda batch, level: torch.tensor([batch[0], batch[1]]), scalars), scalars)
    assert torch.equal(whole.call(lambda batch, level: torch.tensor((batch[0].data,)), scalars), scalars[:, :1])
    with pytest.raises(RuntimeError, match="item"):
        whole.call(lambda batch, level: torch.tensor([batch[0], 1.0]), scalars)


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_for_each_client(order):
    module, generator = LAYERS["conv"][0], torch.Generator().manual_seed(0)
    whole, copies = StackedModule(module, SIZE), [copy.deepcopy(module) for _ in range(SIZE)]
    for name, leaf in whole.leaves.items():
        leaf.grad = torch.zeros_like(leaf).copy_(torch.randn(leaf.shape, generator=generator))
        for own, grad in zip(copies, leaf.grad, strict=True):
            own.get_parameter(name).grad = grad.clone()

    def clip(net):
        nn.utils.clip_grad_norm_(net.parameters(), 0.5, order)
        nn.utils.clip_grad_value_(net.parameters(), 0.04)

    whole.call_with_gradients(lambda tensors, level: clip(module))
    for place, own in enumerate(copies):
        clip(own)
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(whole.leaves[name].grad[place], parameter.grad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weight: setattr(weight, "grad", None), "removes a gradient"),
        (lambda weight: setattr(weight, "grad", weight.grad[:2]), "of another shape or type"),
        (lambda weight: setattr(weight.grad, "data", weight.grad), "mutating directly"),
        (lambda weight: (weight + 1).grad, "reads the gradient"),
    ],
)
def test_what_cannot_be_done_to_a_gradient_is_an_error(change, words):
    module = nn.Linear(2, 3)
    whole = StackedModule(module, SIZE)
    whole.leaves["weight"].grad = torch.ones(SIZE, 3, 2)
    with torch.no_grad(), pytest.raises((NotStackable, RuntimeError), match=words):
        whole.call_with_gradients(lambda tensors, level: change(module.weight))


def test_numbers_are_counted_for_all_clients_at_once():
    numbers = torch.tensor([[0, 2, 2], [1, 1, 1], [0, 1, 2]], dtype=torch.int32)
    whole = StackedModule(nn.Linear(1, 1), SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a loop over the clients
        found = whole.call(lambda batch, level: torch.bincount(batch, minlength=4), numbers)
    assert torch.equal(found, torch.stack([torch.bincount(row, minlength=4) for row in numbers]))
    for wrong in (numbers + 2, numbers - 1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            whole.call(lambda batch, level: torch.bincount(batch, minlength=4), wrong)


def test_the_largest_of_one_number_is_that_number():
    numbers = torch.tensor([1.0, -2.0, 3.0])
    whole = StackedModule(nn.Linear(1, 1), SIZE)
    assert torch.equal(whole.call(lambda batch, level: torch.max(batch) - batch.min(), numbers), torch.zeros(3))


def test_numbers_are_written_where_a_mask_is_true():
    def write(batch, level):
        numbers, slopes = 2 * batch, batch.clone()
        numbers[batch > 1] = 0.5
        slopes[slopes < 0] = 0
        return numbers * slopes

    numbers = torch.tensor([[1.0, -2.0], [3.0, 1.5], [-1.0, 0.0]], requires_grad=True)
    found = StackedModule(nn.Linear(1, 1), SIZE).call(write, numbers)
    assert torch.equal(found, torch.stack([write(row, 0) for row in numbers]))
    ours, theirs = (torch.autograd.grad(each.sum(), numbers)[0] for each in (found, write(numbers, 0)))
    assert torch.equal(ours, theirs)
