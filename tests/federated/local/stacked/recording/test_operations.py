"""Recorded operations give with other tensors what the computation would have given."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.federated.local.stacked.recording.operations import _FUNCTIONS, OperationRecorder


def recorded(function, *inputs):
    """Record a function of tensors that returns a tuple of tensors."""
    with OperationRecorder(inputs) as recorder:
        outputs = function(*inputs)
    return recorder, recorder.operations(outputs).run


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
        (lambda x: (x / len(torch.unique(x)),), "shape depends on values"),
        (lambda x: (x / len(x[x > 0]),), "shape depends on values"),
        (lambda x: (x / len(torch.bincount(x.long())),), "shape depends on values"),
    ],
    ids=["number", "branch", "generator", "different values", "chosen values", "counts"],
)
def test_what_cannot_be_repeated_has_a_reason(function, reason):
    with OperationRecorder([torch.ones(3)]) as recorder:
        function(torch.ones(3))
    assert reason in recorder.reason


def test_a_table_of_counts_and_a_choice_by_numbers_have_a_fixed_shape():
    with OperationRecorder([ONES]) as recorder:
        torch.bincount(ONES.long(), minlength=4)
        ONES[torch.tensor([0, 2])]
    assert recorder.reason is None


X, Y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24.0).view(2, 3, 4)
IMAGES, KERNELS, ONES = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.ones(3)
CALLS = {
    "_log_softmax": [("default", (X, 1, False))],
    "_log_softmax_backward_data": [("default", (X, Y, 1, torch.float32))],
    "add": [("Tensor", (X, Y)), ("Scalar", (X, 2))],
    "add_": [("Tensor", (X.clone(), Y))],
    "addmm": [("default", (ONES, X[0].T, Y[1, :, :3]))],
    "argmax": [("default", (X, 2)), ("default", (X,))],
    "baddbmm": [("default", (X[:, :, :3], X, Y.mT))],
    "bmm": [("default", (X, Y.mT))],
    "clone": [("default", (X.mT,))],
    "convolution": [("default", (IMAGES, KERNELS, None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1))],
    "copy_": [("default", (X.clone(), Y))],
    "div": [("Tensor", (X, Y + 1)), ("Scalar", (X, 3))],
    "eq": [("Tensor", (X, Y)), ("Scalar", (Y, 5))],
    "expand": [("default", (X[:, :1], [2, 3, 4]))],
    "max_pool2d_with_indices": [("default", (IMAGES, [2, 2], [2, 2], [1, 1]))],
    "mean": [("dim", (X, [1])), ("dim", (X, [0, 2], True)), ("default", (X,))],
    "mm": [("default", (X[0], Y[1].T))],
    "mul": [("Tensor", (X, Y)), ("Scalar", (X, 2))],
    "mul_": [("Tensor", (X.clone(), Y)), ("Scalar", (X.clone(), 3))],
    "native_batch_norm": [("default", (IMAGES, ONES, ONES, ONES.clone(), ONES.clone(), True, 0.1, 1e-5))],
    "native_group_norm": [("default", (IMAGES, ONES, ONES, 2, 3, 36, 3, 1e-5))],
    "native_layer_norm": [("default", (X, [4], None, None, 1e-5))],
    "ne": [("Tensor", (X, Y)), ("Scalar", (Y, 5))],
    "new_empty_strided": [("default", (X, [3, 2], [1, 3]))],
    "permute": [("default", (X, [2, 0, 1]))],
    "relu": [("default", (X,))],
    "rsqrt": [("default", (Y + 1,))],
    "select": [("int", (X, 1, 2))],
    "sigmoid": [("default", (X,))],
    "sqrt": [("default", (Y,))],
    "squeeze": [("dim", (X[:, :1], 1)), ("dims", (X[:, :1, :1], [1, 2]))],
    "sub": [("Tensor", (X, Y)), ("Scalar", (X, 2))],
    "sum": [("dim_IntList", (X, [1])), ("dim_IntList", (X, [0, 2], True)), ("default", (X,))],
    "tanh": [("default", (X,))],
    "transpose": [("int", (X, -2, -1))],
    "unsqueeze": [("default", (X, 1))],
    "view": [("default", (X, [6, -1]))],
}


@pytest.mark.parametrize("name", sorted(_FUNCTIONS))
def test_functions_take_the_arguments_of_operations(name):
    for overload, arguments in CALLS[name]:
        ours, theirs = (
            function(*(value.clone() if isinstance(value, torch.Tensor) else value for value in arguments))
            for function in (_FUNCTIONS[name], getattr(getattr(torch.ops.aten, name), overload))
        )
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert name == "new_empty_strided" or torch.equal(a, b)
