import pytest
import torch
from torch import nn

from lightning_sparsefl.federated.aggregation.joint_reduce import reduce_together
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.federated.exchange.flat import FlatModule
from lightning_sparsefl.types import Message, Update


class Counted:
    """Sums as two equal ranks would, and notes what was sent."""

    def __init__(self):
        self.sent = []

    def __call__(self, tensor):
        self.sent.append((tensor.dtype, tensor.numel()))
        return tensor.mul_(2)


def test_equals_one_call_for_each_tensor():
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, 2, dtype=torch.float64, generator=generator),
        torch.randint(9, (5,), dtype=torch.int32, generator=generator),
        torch.randn((), dtype=torch.float64, generator=generator),
        torch.randint(9, (0,), dtype=torch.int32, generator=generator),
    ]
    one_by_one = [tensor.clone().mul_(2) for tensor in tensors]
    reduce = Counted()
    reduce_together(reduce, tensors)
    assert reduce.sent == [(torch.float64, 7), (torch.int32, 5)]
    for tensor, expected in zip(tensors, one_by_one, strict=True):
        assert torch.equal(tensor, expected)


def accumulated(reducer, total_weight=100, extra=None):
    flat = FlatModule(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    server, generator = flat.read(), torch.Generator().manual_seed(1)
    sums = reducer.start(flat.layout, server, total_weight)
    for weight in (3, 4):
        votes = {"0.weight": torch.rand(7, 5, generator=generator) < 0.5}
        weights = {name: value + weight for name, value in server.items()}
        update = Update(weights=weights, weight=weight, votes=votes, extra=extra or {})
        sums.add(update, Message(weights=server), weight)
    return flat.layout, sums


@pytest.mark.parametrize(("reducer", "rows"), [(CoverageMean(), 2), (PlainMean(), 1)])
def test_a_round_is_one_all_reduce_and_one_for_each_dtype_of_what_not_all_methods_have(reducer, rows):
    extra = {"control": {"0.weight": torch.full((7, 5), 1e20), "0.bias": torch.ones(7)}}
    layout, sums = accumulated(reducer, extra=extra)
    reduce = Counted()
    sums.all_reduce(reduce, sums.headers())
    digits, facts = 3 * (35 + 7), 7 + len(layout.names)
    assert reduce.sent == [
        (torch.float64, layout.size + len(layout.names) + facts),
        (torch.int32, rows * layout.size),
        (torch.float64, digits),
    ]


def test_weights_of_votes_that_do_not_fit_int32_are_summed_in_float64():
    _, small = accumulated(CoverageMean())
    _, large = accumulated(CoverageMean(), total_weight=2**31)
    assert [sums._votes.dtype for sums in (small, large)] == [torch.int32, torch.float64]
    for name, count in small.weights_of_votes().items():
        assert torch.equal(count, large.weights_of_votes()[name]), name
    few, many = (sums.result({}) for sums in (small, large))
    for name, count in few.voters.items():
        assert torch.equal(count, many.voters[name])
        assert many.voters[name].dtype is torch.int32
