"""`lightning_sparsefl.sparse` against its slow twins, on many small random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_sparsefl.sparse import density, masks, nm, prune, regrow, schedule, scores
from reference import sparse_reference as slow

SHAPES = [(), (1,), (5,), (0, 3), (4, 3), (2, 3, 2, 2), (17,), (8, 9)]


def numpy(tree):
    return {name: value.numpy() for name, value in tree.items()}


def agree(fast, reference):
    assert list(fast) == list(reference)
    for name, value in fast.items():
        assert value.shape == reference[name].shape
        assert np.array_equal(value.numpy(), reference[name]), name


@pytest.fixture(params=range(12))
def drawn(request):
    """Weights full of ties, and two trees of masks over some of them."""
    rng = torch.Generator().manual_seed(request.param)
    weights = {f"t{i}": torch.randint(-4, 5, shape, generator=rng).float() for i, shape in enumerate(SHAPES)}
    first, second = (
        {
            name: torch.rand(value.shape, generator=rng) < torch.rand((), generator=rng)
            for name, value in weights.items()
            if torch.rand((), generator=rng) < 0.7
        }
        for _ in range(2)
    )
    return weights, first, second


def test_mask_algebra(drawn):
    weights, a, b = drawn
    x, y = numpy(a), numpy(b)
    agree(masks.apply(weights, a), slow.apply(numpy(weights), x))
    agree(masks.intersect(a, b), slow.intersect(x, y))
    agree(masks.union(a, b), slow.union(x, y))
    agree(masks.dense_like(weights), slow.dense_like(numpy(weights)))
    assert masks.kept(a) == slow.kept(x)
    assert masks.density(a) == slow.density(x)
    assert masks.overlap(a, b) == slow.overlap(x, y)
    assert masks.changed(a, b) == slow.changed(x, y)
    assert masks.same(a, b) == slow.same(x, y)
    assert masks.same(a, dict(a)) == slow.same(x, x)
    for mask in a.values():
        packed = masks.pack(mask)
        assert packed.tolist() == slow.pack(mask.numpy())
        assert np.array_equal(masks.unpack(packed, mask.shape).numpy(), slow.unpack(packed.tolist(), mask.shape))


def test_weights_algebra(drawn):
    weights, a, _ = drawn
    part = {name: weights[name] * 3 for name in a}
    agree(masks.add(weights, part), slow.add(numpy(weights), numpy(part)))
    agree(masks.subtract(weights, part), slow.subtract(numpy(weights), numpy(part)))
    agree(scores.magnitude(weights), slow.absolute(numpy(weights)))
    agree(scores.gradient(weights), slow.absolute(numpy(weights)))
    assert density.maskable(weights) == slow.maskable(numpy(weights))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0])
def test_prune_and_regrow(drawn, fraction):
    weights, a, _ = drawn
    score = scores.magnitude(weights)
    pruned = prune.prune(score, a, fraction)
    agree(pruned, slow.prune(numpy(score), numpy(a), fraction))
    counts = masks.counts(a)
    agree(regrow.regrow(weights, pruned, counts), slow.regrow(numpy(weights), numpy(pruned), counts))
    agree(prune.prune_to(weights, counts), slow.prune_to(numpy(weights), counts))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_shrink(drawn, share):
    weights, a, _ = drawn
    score = scores.magnitude(weights)
    left = {name: int(share * count) for name, count in masks.counts(a).items() if name != "t5"}
    agree(prune.shrink(score, a, left), slow.shrink(numpy(score), numpy(a), left))
    count = int(share * masks.kept(a))
    agree(prune.shrink_globally(score, a, count), slow.shrink_globally(numpy(score), numpy(a), count))


def test_first_order_scores(drawn):
    weights, _, _ = drawn
    gradients = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(7)) for name, value in weights.items()
    }
    x, y = numpy(weights), numpy(gradients)
    fast, twin = scores.snip(weights, gradients), slow.snip(x, y)
    total = sum(float(value.double().sum()) for value in fast.values())
    for name, value in fast.items():
        assert value.shape == twin[name].shape
        np.testing.assert_allclose(value.double().numpy() / total, twin[name], rtol=1e-5)
    fast, twin = scores.taylor(weights, gradients), slow.taylor(x, y)
    for name, value in fast.items():
        np.testing.assert_allclose(value.double().numpy(), twin[name], rtol=1e-5)


def test_learned_scores_and_their_gates(drawn):
    weights, a, _ = drawn
    slopes = {name: torch.randn(mask.shape, generator=torch.Generator().manual_seed(5)) for name, mask in a.items()}
    gates, pull = slow.straight_through(numpy(weights), numpy(slopes), numpy(a))
    score = {name: slopes[name].clone().requires_grad_() for name in a}
    agree(scores.learned(score), numpy(slopes))
    for name, mask in a.items():
        gate = scores.straight_through(score[name], mask)
        (weights[name] * gate * slopes[name]).sum().backward()
        assert np.array_equal(gate.detach().numpy(), gates[name])
        np.testing.assert_allclose(score[name].grad.numpy(), pull[name], rtol=1e-6)


@pytest.mark.parametrize(("n", "m", "dim"), [(2, 4, None), (1, 2, None), (3, 3, None), (2, 4, 1), (1, 3, 1), (1, 2, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_n_of_m(n, m, dim, seed):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(3, 12), (2, 12, 2, 3), (0, 12), (1, 12, 4)] if dim != 2 else [(2, 5, 4), (1, 12, 2, 3)]
    score = {f"t{i}": torch.randint(-2, 3, shape, generator=rng).float() for i, shape in enumerate(shapes)}
    fast = nm.nm_masks(score, n, m, dim)
    agree(fast, slow.nm_masks(numpy(score), n, m, dim))
    assert nm.is_nm(fast, n, m, dim)
    for tree in (fast, {name: torch.rand(value.shape, generator=rng) < n / m - 0.2 for name, value in score.items()}):
        for other in ((n, m, dim), (1, m, dim), (n, 2 * m, dim)):
            assert nm.is_nm(tree, *other) == slow.is_nm(numpy(tree), *other)


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
def test_keep_largest(drawn, zeros):
    weights, _, _ = drawn
    rng = torch.Generator().manual_seed(1)
    for weight in weights.values():
        value = weight.abs() * (torch.rand(weight.shape, generator=rng) >= zeros) if zeros else weight
        above = int(torch.count_nonzero(value))
        for count in {0, value.numel() // 3, value.numel() // 2, value.numel(), above, min(above + 1, value.numel())}:
            fast = prune.keep_largest(value, count)
            assert np.array_equal(fast.numpy(), slow.keep_largest(value.numpy(), count))


POOLS = {
    "lenet": {"c1": (20, 1, 5, 5), "b1": (20,), "c2": (50, 20, 5, 5), "f1": (500, 800), "f2": (26, 500)},
    "tiny": {"a": (3, 2), "b": (2,), "c": (), "d": (0, 4), "e": (40, 30)},
    "wide": {"a": (1000, 2), "b": (7, 7, 3, 3), "c": (64, 64, 1, 1)},
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("budget", [0.02, 0.1, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_density_budgets(pool, budget):
    shapes = POOLS[pool]
    for fast, twin in (
        (density.uniform(shapes, budget), slow.uniform(shapes, budget)),
        (density.erk(shapes, budget), slow.erk(shapes, budget)),
        (density.erk(shapes, budget, power=2.0), slow.erk(shapes, budget, power=2)),
        (density.erdos_renyi(shapes, budget), slow.erdos_renyi(shapes, budget)),
    ):
        assert fast == pytest.approx({name: float(value) for name, value in twin.items()}, rel=1e-12)
        assert density.kept_counts(shapes, fast) == slow.kept_counts(shapes, twin)


@pytest.mark.parametrize("patterns", [{}, {"*": 0.5}, {"c?": 0.5, "f*": 0.25}, {"*1": 0.5, "c*": 0.5, "f2": 1.0}])
def test_explicit_densities(patterns):
    shapes = POOLS["lenet"]
    assert density.explicit(shapes, patterns, 0.1) == slow.explicit(shapes, patterns, 0.1)


@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_schedules(total):
    for step in range(total):
        assert schedule.constant(0.4, step, total) == slow.constant(0.4, step, total)
        assert schedule.linear(0.4, step, total) == pytest.approx(slow.linear(0.4, step, total), abs=1e-15)
        assert schedule.cosine(0.4, step, total) == pytest.approx(slow.cosine(0.4, step, total), abs=1e-15)
        assert schedule.cubic(0.9, 0.2, step, total) == pytest.approx(slow.cubic(0.9, 0.2, step, total))


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 9), (3, 5), (4, 14)])
@pytest.mark.parametrize("every", [1, 3, 40])
def test_windows(first, last, every):
    for step in range(20):
        assert schedule.recurs(step, first, last, every) == slow.recurs(step, first, last, every)
        twin = float(slow.gradual(1, 0.2, step, first, last))
        assert schedule.gradual(1.0, 0.2, step, first, last) == pytest.approx(twin)
