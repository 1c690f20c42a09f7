"""A sum as integers, which other parts are added to, against the same updates added one by one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_sparsefl.federated.aggregation.exact_sum import ExactSum, SumHeader, merge_headers
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.federated.exchange.flat import FlatModule
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.types import Message, Update

WEIGHT = 1000


@pytest.fixture
def flat():
    torch.manual_seed(0)
    return FlatModule(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))


def plain(server, g, k):
    return Update(weights={n: w + 0.1 * torch.randn(w.shape, generator=g) for n, w in server.items()}, weight=k + 1)


def ragged(server, g, k):
    votes = {"0.weight": torch.rand(7, 5, generator=g) < 0.4, "2.weight": torch.rand(3, 7, generator=g) < 0.2}
    update = replace(plain(server, g, k), votes=votes)
    return replace(update, weights={n: w for n, w in update.weights.items() if k or n != "0.bias"})


def with_extra(server, g, k):
    tree = {n: 10.0 ** (k - 3) * torch.randn(w.shape, generator=g) for n, w in server.items()}
    if k == 2:
        tree.pop("0.bias")
    return replace(plain(server, g, k), extra={"control": tree})


def large(server, g, k):
    update = plain(server, g, k)
    return (
        replace(update, weights={**update.weights, "2.bias": 1e6 * torch.randn(3, generator=g)}) if k == 1 else update
    )


def mixed(server, g, k):
    """Some clients without masks, and one without weights."""
    return Update(weights={}, weight=3) if k == 4 else (plain if k < 2 else ragged)(server, g, k)


def differing(server, g, k):
    return replace(ragged(server, g, k), kind="difference")


MAKERS = [plain, ragged, with_extra, large, mixed, differing]


def parts_of(updates, reducer, flat, message):
    found = []
    for k, update in enumerate(updates):
        part = reducer.start(flat.layout, flat.read(), WEIGHT)
        part.add(update, message, 10 * k + 1)
        found.append(part)
    return found


def contents(merged):
    return pack_plain({**vars(merged), "kind": merged.kind})


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()], ids=repr)
@pytest.mark.parametrize("make", MAKERS)
def test_the_sum_of_masked_integers_is_the_sum_one_by_one(make, reducer, flat):
    g, server = torch.Generator().manual_seed(1), flat.read()
    message = Message(weights=server)
    updates = [make(server, g, k) for k in range(6)]
    slow = reducer.start(flat.layout, server, WEIGHT)
    for k, update in enumerate(updates):
        slow.add(update, message, 10 * k + 1)
    parts = parts_of(updates, reducer, flat, message)
    headers = merge_headers(part.headers() for part in parts)
    integers = [part.integers(headers) for part in parts]
    fast = reducer.start(flat.layout, server, WEIGHT)
    fast.add_integers({name: _sum_under_masks([each[name] for each in integers], g) for name in integers[0]}, headers)
    assert fast.coverage_min(6) == slow.coverage_min(6)
    assert same(contents(fast.result({})), contents(slow.result({})))


def _sum_under_masks(vectors, g):
    """The sum modulo 2**64 of vectors to which random ones are added that cancel; int64 wraps around."""
    limits = torch.iinfo(torch.int64)
    masks = [torch.randint(limits.min, limits.max, vectors[0].shape, generator=g) for _ in vectors]
    shown = [v + m - masks[k - 1] for k, (v, m) in enumerate(zip(vectors, masks, strict=True))]
    assert not any(torch.equal(each, vector) for each, vector in zip(shown, vectors, strict=True) if vector.numel())
    return sum(shown[1:], shown[0])


def test_integers_of_two_ranks_add_up(flat):
    """Each part of a sum may itself be the sum of several parts."""
    g, server, reducer = torch.Generator().manual_seed(1), flat.read(), CoverageMean()
    message = Message(weights=server)
    updates = [ragged(server, g, k) for k in range(6)]
    parts = parts_of(updates, reducer, flat, message)
    halves = [reducer.start(flat.layout, server, WEIGHT) for _ in range(2)]
    for k, part in enumerate(parts):
        halves[k % 2].add_integers(part.integers({}), {})
    whole = reducer.start(flat.layout, server, WEIGHT)
    for half in halves:
        whole.add_integers(half.integers({}), {})
    slow = reducer.start(flat.layout, server, WEIGHT)
    for k, update in enumerate(updates):
        slow.add(update, message, 10 * k + 1)
    assert same(contents(whole.result({})), contents(slow.result({})))


@pytest.mark.parametrize("value", [2.0**-1056, 1.0, -(2.0**90), 0.0])
def test_a_sum_without_a_grid_passes_as_integers(value):
    one, two = (ExactSum(torch.Size([1]), torch.device("cpu")) for _ in range(2))
    one.add(torch.tensor([value], dtype=torch.float64))
    header = one.header
    two.add_integers(one.integers(header), header)
    assert two.value().tolist() == [value]
    assert (
        ExactSum(torch.Size([2]), torch.device("cpu")).integers(SumHeader(torch.Size([2]), 0)).tolist() == [[0, 0]] * 3
    )
