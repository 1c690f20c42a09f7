"""Recorded operations give with other tensors what the computation would have given."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.federated.local.stacked.recording.operations import OperationRecorder


def recorded(function, *inputs):
    """Record a function of tensors that returns a tuple of tensors."""
    with OperationRecorder(inputs) as recorder:
        outputs = function(*inputs)
    return recorder, recorder.function(outputs)


def slopes(function):
    """Return the function that gives the gradients of all its arguments."""

    def differentiate(*inputs):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    return differentiate


def with_number(x):
    return (x + torch.tensor([1.0, 2.0, 3.0]),)


def with_changed_constant(x):
    counter = torch.tensor(0.0)
    counter += x.sum()
    return (counter * 2,)


def in_place(x):
    y = x * 1
    y[0] = 7
    y.view(-1).mul_(3)
    return (y, x.mean())


def with_lists(x):
    first, *others = torch.cat([x, x * 2]).chunk(3)
    return (torch.stack([first, *others]), x[[True, False, True]])


def with_a_copy(x):
    return (torch.empty_like(x).copy_(x),)


FUNCTIONS = {
    "constant": with_number,
    "constant that is changed": with_changed_constant,
    "in place": in_place,
    "lists": with_lists,
    "copy of an input": with_a_copy,
    "view": lambda x: (x.t(), x.view(3), x.unsqueeze(0)),
    "gradient": slopes(lambda x: (x.exp() * x).tanh()),
    "equal gradients": slopes(lambda x: x + x.detach()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_recorded_operations_do_what_the_function_does(name):
    first, other = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 0.25, -1.0])
    _, again = recorded(FUNCTIONS[name], first.clone())
    for given in (other, first, other):
        wanted = FUNCTIONS[name](given.clone())
        found = again(given.clone())
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()


def test_gradients_of_a_network_are_returned_without_copies():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    images, labels = torch.randn(5, 1, 4, 4), torch.arange(5) % 4
    weights = list(net.parameters())

    def step(*tensors):
        F.cross_entropy(net(tensors[-2]), tensors[-1]).backward()
        return tuple(weight.grad for weight in weights)

    _, again = recorded(step, *weights, images, labels)
    for weight in weights:
        weight.grad = None
    others = (torch.randn_like(images), labels.flip(0))
    wanted = step(*weights, *others)
    found = again(*weights, *others)
    assert all(map(torch.equal, found, wanted))
    assert not [node for node in again.__self__.graph.nodes if "copy_" in str(node.target)]


def test_two_gradients_that_autograd_copies_are_two_tensors():
    """The gradient of a sum is the same tensor for both terms, and a callback may change one of them in place."""

    def step(x, y):
        leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
        (sum(leaves) * 3.0).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    _, again = recorded(step, torch.ones(2), torch.ones(2))
    first, second = again(torch.ones(2), torch.ones(2))
    first.zero_()
    assert torch.equal(second, torch.full((2,), 3.0))


def test_random_numbers_are_drawn_again():
    _, again = recorded(lambda x: (F.dropout(x, 0.5),), torch.ones(100))
    torch.manual_seed(3)
    wanted = [F.dropout(torch.ones(100), 0.5) for _ in range(2)]
    torch.manual_seed(3)
    assert torch.equal(again(torch.ones(100))[0], wanted[0])
    assert torch.equal(again(torch.ones(100))[0], wanted[1])
    assert not torch.equal(*wanted)


def test_statistics_are_written_even_if_nothing_else_is_used():
    norm = nn.BatchNorm1d(2, affine=False)
    inputs = torch.randn(8, 2)

    def step(x, mean, var):
        F.batch_norm(x, mean, var, training=True)
        return (x * 1,)

    _, again = recorded(step, inputs, norm.running_mean, norm.running_var)
    mean, var = torch.zeros(2), torch.ones(2)
    again(inputs, mean, var)
    assert torch.equal(mean, norm.running_mean)
    assert torch.equal(var, norm.running_var)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x * float(x.sum()),), "reads numbers"),
        (lambda x: (x * 2 if x.sum() > 0 else x,), "reads numbers"),
        (lambda x: (x + torch.rand(3, generator=torch.Generator()),), "generator"),
    ],
    ids=["number", "branch", "generator"],
)
def test_what_cannot_be_repeated_has_a_reason(function, reason):
    with OperationRecorder([torch.ones(3)]) as recorder:
        function(torch.ones(3))
    assert reason in recorder.reason
