from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.callbacks import StaticMask
from lightning_sparsefl.callbacks.sparse_inputs import SparseInputs, sparsified


def started(module):
    callback = SparseInputs()
    callback.on_fit_start(None, module)
    return callback


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(6, 4), (5, 6)),
        (nn.Linear(6, 4, bias=False), (2, 5, 6)),
        (nn.Conv1d(6, 4, 3, padding=1), (2, 6, 7)),
        (nn.Conv2d(6, 4, 3, stride=2, groups=2, padding=1, padding_mode="reflect"), (2, 6, 7, 7)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_only_the_gradient_of_the_weight_is_of_the_largest_inputs(layer, shape):
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.masked_fill_(torch.rand_like(layer.weight) < 0.5, 0)
    density = layer.weight.count_nonzero().item() / layer.weight.numel()
    inputs, other = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    inputs.requires_grad_(True), other.requires_grad_(True)
    exact = layer(other)
    pull = torch.randn(exact.shape)
    exact.backward(pull)
    expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer(sparsified(other.detach(), density)).backward(pull)
    expected["weight"] = layer.weight.grad.clone()
    layer.zero_grad()

    callback = started(layer)
    output = layer(inputs)
    assert torch.equal(output, exact)
    output.backward(pull)
    torch.testing.assert_close({n: p.grad for n, p in layer.named_parameters()}, expected)
    torch.testing.assert_close(inputs.grad, other.grad)

    layer.eval()
    assert torch.equal(layer(inputs), exact)
    callback.teardown(None, layer, "fit")
    assert "forward" not in vars(layer)


def test_how_many_inputs_are_kept():
    inputs = torch.arange(-10.0, 10.0).view(4, 5)
    for density, count in ((0.5, 10), (0.26, 5), (0.0, 1), (1.0, 19)):  # one of the twenty is 0
        assert int(sparsified(inputs, density).count_nonzero()) == count
    assert sparsified(inputs, 0.05).min() == -10


def test_an_empty_batch_and_a_keyword_are_taken():
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 1.0]]))
    started(layer)
    assert layer(torch.empty(0, 2)).shape == (0, 1)
    layer(input=torch.tensor([[1.0, 3.0]])).backward()
    assert layer.weight.grad.tolist() == [[0.0, 3.0]]


def test_a_dense_model_trains_as_without_it(net, fit, recipes):
    module, plain = net(recipes["momentum, decay"]), net(recipes["momentum, decay"])
    fit(module, [SparseInputs()], recipes["momentum, decay"])
    fit(plain, [], recipes["momentum, decay"])
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_a_sparse_model_trains_otherwise_and_is_left_as_it_was(net, fit):
    results = []
    for more in ([], [SparseInputs()]):
        module = net()
        fit(module, [*more, StaticMask(density=0.4, rescale=False)])
        results.append(F.linear(torch.eye(4), module.net[0].weight))
        assert not any("forward" in vars(layer) for layer in module.modules())
    assert not torch.equal(*results)


def test_a_copy_of_a_module_computes_with_its_own_weights():
    module = nn.Sequential(nn.Linear(3, 2))
    with torch.no_grad():
        module[0].weight[0] = 0
    started(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module[0].weight.mul_(2)
    inputs = torch.randn(4, 3)
    torch.testing.assert_close(copied(inputs), F.linear(inputs, copied[0].weight, copied[0].bias))
