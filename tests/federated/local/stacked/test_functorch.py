"""The private names of ``torch.func``: what the stacked engine takes them to do."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_sparsefl.federated.local.stacked import functorch


def test_all_names_are_there():
    assert functorch.missing_name() is None


def test_a_missing_name_is_named(monkeypatch):
    monkeypatch.delattr(torch._C._functorch, "_unwrap_batched")
    assert functorch.missing_name() == "_unwrap_batched"


def test_a_level_maps_over_the_wrapped_dimension():
    plain = torch.arange(6.0).view(2, 3)
    with functorch.vmap_level(3) as level:
        wrapped = functorch.wrap(plain, 1, level)
        assert functorch.is_batched(wrapped)
        assert wrapped.shape == (2,)
        tensor, dim = functorch.unwrap(wrapped.sum(), level)
        assert functorch.unwrap(torch.ones(2), level)[1] is None
    assert dim == 0
    assert torch.equal(tensor, plain.sum(0))
    assert not functorch.is_batched(plain)
    assert not functorch.is_batched("text")


def test_a_level_is_closed_after_an_error():
    with pytest.raises(RuntimeError), functorch.vmap_level(2) as level:
        functorch.wrap(torch.ones(2), 0, level).item()
    assert torch.ones(1).item() == 1


def test_gradients_pass_through_a_rule_that_leaves_the_level():
    weight = torch.ones(3, 2, requires_grad=True)

    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is not torch.exp:
                return func(*args, **(kwargs or {}))
            with functorch.Outside():
                tensor, dim = functorch.unwrap(args[0], level)
                return functorch.wrap(2 * tensor, dim, level)

    with functorch.vmap_level(3) as level, Doubled():
        loss, _ = functorch.unwrap(torch.exp(functorch.wrap(weight, 0, level)).sum(), level)
    loss.sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 2), 2.0))


def test_members_draw_random_numbers_of_their_own():
    with functorch.vmap_level(2) as level:
        drawn, _ = functorch.unwrap(torch.rand_like(functorch.wrap(torch.ones(2, 4), 0, level)), level)
    assert not torch.equal(drawn[0], drawn[1])
