import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import InvalidOption, InvalidUpdate
from lightning_sparsefl.federated.aggregation import reducers
from lightning_sparsefl.federated.aggregation.exact_sum import merge_headers
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, CoverageMean, PlainMean
from lightning_sparsefl.federated.aggregation.robust import CoverageMedian, TrimmedMean
from lightning_sparsefl.federated.exchange.flat import FlatModule
from lightning_sparsefl.sparse.masks import intersect
from lightning_sparsefl.types import Message, Update


def flat_module():
    torch.manual_seed(0)
    return FlatModule(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))


def updates(layout, server, count=6, kind="weights", seed=0):
    g = torch.Generator().manual_seed(seed)
    result = []
    for k in range(count):
        weights = {n: w + 0.1 * torch.randn(w.shape, generator=g) for n, w in server.items()}
        votes = {
            "0.weight": torch.rand(7, 5, generator=g) < 0.4,
            "2.weight": torch.rand(3, 7, generator=g) < 0.4,
        }
        result.append((Update(weights=weights, kind=kind, weight=k + 1, votes=votes), 10 * k + 1))
    return result


def merge(reducer, flat, server, parts, message):
    accumulators = []
    for part in parts:
        accumulator = reducer.start(flat.layout, server, 1000)
        for update, examples in part:
            accumulator.add(update, message, examples)
        accumulators.append(accumulator)
    return all_reduced(accumulators, merge_headers(a.headers() for a in accumulators)).result({})


def all_reduced(accumulators, headers):
    """What a process group does: every call sums the ranks' tensors."""
    calls = [[] for _ in accumulators]
    for calls_of, accumulator in zip(calls, accumulators, strict=True):
        if any(a._votes is not None for a in accumulators):
            accumulator._start_votes()

        def record(tensor, calls_of=calls_of):
            calls_of.append(tensor.clone())
            return tensor

        accumulator.all_reduce(record, headers)
    totals = [sum(tensors) for tensors in zip(*calls, strict=True)]
    replay = iter(totals)

    def reduce(tensor):
        return tensor.copy_(next(replay))

    accumulators[0]._kind = accumulators[0]._kind or accumulators[-1]._kind
    accumulators[0].all_reduce(reduce, headers)
    return accumulators[0]


def slow_mean(server, parts, message, silence_counts):
    """The definition, tensor by tensor, in double precision."""
    means, covered = {}, {}
    for name, old in server.items():
        total, count = torch.zeros_like(old, dtype=torch.float64), torch.zeros_like(old, dtype=torch.float64)
        covered[name] = torch.zeros_like(old, dtype=torch.bool)
        for update, examples in parts:
            weight = examples if name.startswith("1.running") else update.weight
            vote = update.votes.get(name, torch.ones_like(old, dtype=torch.bool)).double()
            value = update.weights[name] - (message.weights[name] if silence_counts else 0)
            total += weight * vote * value
            count += weight * (torch.ones_like(vote) if silence_counts else vote)
            covered[name] |= vote > 0  # a client that is silent counts in the mean, but votes on nothing
        means[name] = (total / count.clamp_min(1)).float()
    return means, covered


@pytest.mark.parametrize(("reducer", "silence"), [(CoverageMean(), False), (PlainMean(), True)])
def test_means_follow_the_definition(reducer, silence):
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server)
    parts = updates(flat.layout, server)
    merged = merge(reducer, flat, server, [parts], message)
    means, covered = slow_mean(server, parts, message, silence)
    assert not covered["0.weight"].all()
    for name in server:
        torch.testing.assert_close(merged.weights[name], means[name], rtol=1e-6, atol=1e-9)
        assert torch.equal(merged.covered.get(name, torch.ones_like(covered[name])), covered[name])
    assert merged.kind == ("difference" if silence else "weights")


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()])
def test_any_order_and_any_number_of_ranks_give_the_same_bytes(reducer):
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server)
    parts = updates(flat.layout, server, count=40)
    whole = merge(reducer, flat, server, [parts], message)
    rng = random.Random(0)
    for ranks in (1, 2, 3, 5):
        rng.shuffle(parts)
        split = merge(reducer, flat, server, [parts[i::ranks] for i in range(ranks)], message)
        assert split.weights.vector.numpy().tobytes() == whole.weights.vector.numpy().tobytes()


@pytest.mark.parametrize("votes", [True, False])
@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()])
def test_blocks_of_the_vector_and_tensors_one_by_one_give_the_same_bytes(reducer, votes, monkeypatch):
    flat = flat_module()
    server = flat.read()
    parts = updates(flat.layout, server)
    if not votes:
        parts = [(replace(update, votes=None), examples) for update, examples in parts]
    monkeypatch.setattr(reducers, "_BLOCK", 7)
    blocks = merge(reducer, flat, server, [parts], Message(weights=server))
    with monkeypatch.context() as patch:
        patch.setattr(Accumulator, "_on_grid", lambda *_: None)
        patch.setattr(Accumulator, "_add_vector", None)
        tensors = merge(reducer, flat, server, [parts], Message(weights=server))
    assert blocks.weights.vector.numpy().tobytes() == tensors.weights.vector.numpy().tobytes()


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()])
def test_values_far_beyond_the_servers_are_summed_exactly_too(reducer):
    """Two updates that cancel each other leave what the others say, on any number of ranks."""
    flat, server, rng = flat_module(), flat_module().read(), random.Random(0)
    parts = updates(flat.layout, server, count=12)
    quiet = [Update(weights=server, weight=6, votes=parts[0][0].votes) for _ in range(2)]
    expected = merge(reducer, flat, server, [[*parts, *((u, 5) for u in quiet)]], Message(weights=server))
    loud = [
        replace(u, weights={n: w + sign * 1e12 * (n != "2.bias") for n, w in server.items()})
        for u, sign in zip(quiet, (1, -1), strict=True)
    ]
    parts += [(update, 5) for update in loud]
    whole = merge(reducer, flat, server, [parts], Message(weights=server))
    for name, value in expected.weights.items():  # up to the weights below 1e12 that float32 cannot hold beside it
        torch.testing.assert_close(whole.weights[name], value, rtol=0, atol=0.3 if name != "2.bias" else 1e-6)
    for ranks in (2, 3, 5):
        rng.shuffle(parts)
        split = merge(reducer, flat, server, [parts[i::ranks] for i in range(ranks)], Message(weights=server))
        assert split.weights.vector.numpy().tobytes() == whole.weights.vector.numpy().tobytes()


@pytest.mark.parametrize("spread", [1, 60])
def test_extra_trees_too_are_the_same_bytes_in_any_order_and_on_any_number_of_ranks(spread):
    """Terms of one size, and of sizes 2**60 apart, which ranks that have only the small ones cannot know of."""
    flat, server, rng = flat_module(), flat_module().read(), random.Random(0)
    g = torch.Generator().manual_seed(0)
    parts = []
    for k in range(24):
        size = 2.0 ** (spread * (k % 3 - 1))
        extra = {
            "control": {"c": size * torch.randn(50, generator=g)},
            **({"rare": {"r": torch.randn(3)}} if k else {}),
        }
        parts.append((Update(weights={}, weight=k + 1, extra=extra), 1))
    whole = merge(CoverageMean(), flat, server, [parts], Message(weights=server)).extra
    for ranks in (1, 2, 3, 5):
        rng.shuffle(parts)
        split = merge(CoverageMean(), flat, server, [parts[i::ranks] for i in range(ranks)], Message(weights=server))
        assert list(split.extra) == list(whole)
        for key, tree in whole.items():
            assert all(torch.equal(split.extra[key][name], value) for name, value in tree.items())


def test_extra_trees_must_be_finite_and_leave_no_trace_otherwise():
    flat = flat_module()
    server = flat.read()
    accumulator = CoverageMean().start(flat.layout, server, 100)
    extra = {"a": {"x": torch.ones(2)}, "b": {"y": torch.tensor([1.0, float("nan")])}}
    with pytest.raises(InvalidOption, match=r"`Update.extra\['b'\]\['y'\]` has values that are not finite"):
        accumulator.add(Update(weights=server, extra=extra), Message(weights=server), 1)
    assert accumulator.headers() == {}


def test_extra_trees_of_different_shapes_are_refused_and_leave_no_trace():
    flat = flat_module()
    server = flat.read()
    one, other = accumulators = [CoverageMean().start(flat.layout, server, 100) for _ in range(2)]
    for accumulator, size in zip(accumulators, (2, 3), strict=True):
        accumulator.add(Update(weights=server, extra={"a": {"x": torch.ones(size)}}), Message(weights=server), 1)
    before = one.result({}).extra["a"]["x"]
    differing = Update(weights=server, extra={"a": {"first": torch.ones(1), "x": torch.ones(1)}})
    with pytest.raises(InvalidUpdate, match=r"`extra\['a'\]\['x'\]` has the shape \(2,\) from one client and \(1,\)"):
        one.add(differing, Message(weights=server), 1)
    assert list(one.result({}).extra["a"]) == ["x"]
    assert torch.equal(one.result({}).extra["a"]["x"], before)
    with pytest.raises(
        InvalidUpdate,
        match=r"^`extra\['a'\]\['x'\]` .* \(2,\) from one client and \(3,\) from another; expected equal shapes",
    ):
        merge_headers([one.headers(), other.headers()])


def test_plain_float64_sums_would_depend_on_the_order():
    """The test above can fail: without the grid, the order shows in the last bits of the float64 sum."""
    flat = flat_module()
    server = flat.read()
    parts = updates(flat.layout, server, count=40)
    sums = []
    for order in (parts, parts[::-1]):
        total = torch.zeros(flat.layout.size, dtype=torch.float64)
        for update, _ in order:
            total += update.weight * flat.layout.flatten(update.weights).double() * 1.1
        sums.append(total)
    assert not torch.equal(*sums)


def test_a_missing_name_does_not_vote():
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server)
    update = Update(weights={"0.bias": server["0.bias"] + 1}, weight=3)
    merged = merge(CoverageMean(), flat, server, [[(update, 3)]], message)
    assert merged.covered["0.bias"].all()
    assert not merged.covered["0.weight"].any()


def test_float64_weights_can_be_summed_on_a_grid_that_was_sent():
    flat = FlatModule(nn.Linear(7, 5).double())
    server = flat.read()
    whole = CoverageMean().start(flat.layout, server, 1000)
    part = Accumulator(flat.layout, replace(whole.grid, too_coarse=False), silence_counts=False)
    part.add(Update(weights=server), Message(weights=server), 1)
    assert part.headers() == {}  # no tensor needs a sum without a grid, as secure sums expect
    whole.add_integers(part.integers({}), {})
    for name, value in whole.result({}).weights.items():
        torch.testing.assert_close(value, server[name], rtol=0, atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_means_of_float64_weights_are_precise_to_their_last_bits(ranks):
    flat = FlatModule(nn.Linear(7, 5).double())
    server = flat.read()
    g = torch.Generator().manual_seed(0)
    moved = [{n: w + torch.randn(w.shape, generator=g, dtype=w.dtype) for n, w in server.items()} for _ in range(6)]
    parts = [(Update(weights=weights, weight=k + 1), 1) for k, weights in enumerate(moved)]
    merged = merge(CoverageMean(), flat, server, [parts[r::ranks] for r in range(ranks)], Message(weights=server))
    for name, value in merged.weights.items():
        expected = sum((k + 1) * weights[name] for k, weights in enumerate(moved)) / 21
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("weights", "extra"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_extra_trees_have_the_precision_of_the_weights(weights, extra):
    flat = FlatModule(nn.Linear(2, 2).to(weights))
    server = flat.read()
    third = torch.tensor([1 / 3], dtype=torch.float64)
    parts = [(Update(weights=server, extra={"control": {"c": third}}), 1)]
    merged = merge(CoverageMean(), flat, server, [parts], Message(weights=server))
    assert torch.equal(merged.extra["control"]["c"], third.to(extra))


def test_extra_trees_are_averaged_by_weight():
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server)
    parts = [(Update(weights=server, weight=w, extra={"control": {"c": torch.tensor([float(w)])}}), w) for w in (1, 3)]
    merged = merge(CoverageMean(), flat, server, [parts[:1], parts[1:]], message)
    assert merged.extra["control"]["c"].item() == pytest.approx((1 * 1 + 3 * 3) / 4)


def test_coverage_min_is_the_share_of_the_least_covered_coordinate():
    flat = flat_module()
    server = flat.read()
    accumulator = CoverageMean().start(flat.layout, server, 100)
    nothing = torch.zeros(7, 5, dtype=torch.bool)
    for votes in ({}, {"0.weight": nothing}):
        accumulator.add(Update(weights=server, votes=votes), Message(weights=server), 1)
    assert accumulator.coverage_min(2) == 0.5


@pytest.mark.parametrize("weight", [0, -1, 0.5])
def test_weights_must_be_positive_integers(weight):
    flat = flat_module()
    server = flat.read()
    accumulator = CoverageMean().start(flat.layout, server, 100)
    with pytest.raises(InvalidOption, match="expected a positive integer"):
        accumulator.add(Update(weights=server, weight=weight), Message(weights=server), 1)


def test_kinds_must_not_be_mixed_in_a_round():
    flat = flat_module()
    server = flat.read()
    accumulator = CoverageMean().start(flat.layout, server, 100)
    accumulator.add(Update(weights=server), Message(weights=server), 1)
    with pytest.raises(InvalidOption, match="expected 'weights'"):
        accumulator.add(Update(weights=server, kind="difference"), Message(weights=server), 1)


def test_kinds_must_not_be_mixed_between_ranks():
    flat = flat_module()
    server = flat.read()
    parts = [[(Update(weights=server, kind=kind), 1)] for kind in ("weights", "difference")]
    with pytest.raises(InvalidUpdate, match=r"kinds .* expected one kind"):
        merge(CoverageMean(), flat, server, parts, Message(weights=server))


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean(), CoverageMedian()])
@pytest.mark.parametrize("first", [True, False])
def test_an_update_without_weights_is_of_any_kind(reducer, first):
    flat = flat_module()
    server = flat.read()
    parts = [Update(weights={}), Update(weights=server, kind="difference")]
    accumulator = reducer.start(flat.layout, server, 100)
    for update in parts if first else reversed(parts):
        accumulator.add(update, Message(weights=server), 1)
    accumulator.collect(lambda value: [value])
    assert accumulator.result({}).kind == "difference"


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean()])
def test_bools_in_extra_trees_are_merged_as_exact_frequencies(reducer):
    """Frequencies by weight, where a client without the tree counts as False; those of all or nobody are 1 and 0."""
    flat, server = flat_module(), flat_module().read()
    bits = torch.tensor([[True, True, True, False], [True, True, False, False], [True, False, False, False]])
    parts = [
        (Update(weights=server, weight=weight, extra={"core": {"w": row, "z": row.reshape(2, 2)}}), 5)
        for weight, row in zip((3, 5, 9), bits, strict=True)
    ]
    for ranks in (1, 2, 3):
        extra = merge(reducer, flat, server, [parts[i::ranks] for i in range(ranks)], Message(weights=server)).extra
        assert torch.equal(extra["core"]["w"], torch.tensor([1.0, 8 / 17, 3 / 17, 0.0]))
        assert extra["core"]["z"].shape == (2, 2)
    silent = [*parts, (Update(weights=server, weight=3), 5)]
    extra = merge(reducer, flat, server, [silent], Message(weights=server)).extra
    assert torch.equal(extra["core"]["w"], torch.tensor([17, 8, 3, 0]) / 20)


def slow_voters(server, parts, message):
    """The number of clients that sent a tensor and voted on a coordinate."""
    voters = {name: torch.zeros_like(value, dtype=torch.int32) for name, value in server.items()}
    for update, _ in parts:
        votes = intersect(message.trainable, message.masks) if update.votes is None else update.votes
        for name in update.weights:
            voters[name] += votes.get(name, torch.ones_like(server[name], dtype=torch.bool))
    return voters


@pytest.mark.parametrize("reducer", [CoverageMean(), PlainMean(), CoverageMedian(), TrimmedMean(fraction=0.2)])
def test_voters_are_counted_by_coordinate_on_any_number_of_ranks(reducer):
    """Clients with votes, with the default votes of the message, without some tensors, and with nothing."""
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server, masks={"0.weight": torch.arange(35).reshape(7, 5) % 3 > 0})
    parts = updates(flat.layout, server, count=5)
    some = {name: value for name, value in server.items() if not name.startswith("2.")}
    parts += [(Update(weights=server), 5), (Update(weights=some), 5), (Update(weights=some, votes={}), 5)]
    parts += [(Update(weights=some, votes={"2.weight": torch.ones(3, 7, dtype=torch.bool)}), 5)]
    parts += [(Update(weights={}), 5)]
    expected = slow_voters(server, parts, message)
    for ranks in (1, 2, 3):
        merged = merge(reducer, flat, server, [parts[i::ranks] for i in range(ranks)], message)
        assert all(torch.equal(merged.voters[name], count) for name, count in expected.items())
        assert all(count.dtype == torch.int32 for count in merged.voters.values())


def test_voters_only_list_tensors_that_a_client_left_out():
    flat = flat_module()
    server = flat.read()
    message = Message(weights=server)
    everyone = [(Update(weights=server, weight=k + 1), 5) for k in range(3)]
    assert merge(CoverageMean(), flat, server, [everyone], message).voters == {}
    without = {name: value for name, value in server.items() if name != "2.bias"}
    for ranks in (1, 2):
        parts = [*everyone, (Update(weights=without), 5)]
        voters = merge(CoverageMean(), flat, server, [parts[i::ranks] for i in range(ranks)], message).voters
        assert list(voters) == ["2.bias"]
        assert voters["2.bias"].tolist() == [3, 3, 3]
    nobody = merge(CoverageMean(), flat, server, [[(Update(weights={}), 5)]], message).voters
    assert not any(bool(count.any()) for count in nobody.values())
    assert list(nobody) == list(server)
