from __future__ import annotations

import math

import pytest
import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse import density as d

LENET = {"c1": (6, 1, 5, 5), "c2": (16, 6, 5, 5), "f1": (120, 400), "f2": (84, 120), "f3": (10, 84)}


def test_maskable_are_the_tensors_with_two_or_more_dimensions():
    weights = {"a": torch.zeros(2, 2), "b": torch.zeros(2), "c": torch.zeros(()), "d": torch.zeros(1, 1, 1, 1)}
    assert d.maskable(weights) == ("a", "d")


@pytest.mark.parametrize("spread", [d.uniform, d.erdos_renyi, d.erk])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_budget_is_met(spread, density):
    densities = spread(LENET, density)
    total = sum(math.prod(shape) for shape in LENET.values())
    assert sum(densities[name] * math.prod(shape) for name, shape in LENET.items()) == pytest.approx(density * total)
    assert all(0 < value <= 1 for value in densities.values())


@pytest.mark.parametrize("spread", [d.uniform, d.erdos_renyi, d.erk])
@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, float("nan")])
def test_a_density_outside_the_range_is_refused(spread, density):
    with pytest.raises(InvalidOption, match=rf"`density={density}`: expected a number in \(0, 1\]"):
        spread(LENET, density)


@pytest.mark.parametrize("spread", [d.uniform, d.erdos_renyi, d.erk])
def test_density_one_is_dense_to_the_last_weight(spread):
    counts = d.kept_counts(LENET, spread(LENET, 1.0))
    assert counts == {name: math.prod(shape) for name, shape in LENET.items()}
    assert spread(LENET, 1) == dict.fromkeys(LENET, 1.0)


def test_erk_counts_kernels_and_erdos_renyi_does_not():
    shapes = {"conv": (8, 8, 3, 3), "fc": (8, 72)}
    plain, kernel = d.erdos_renyi(shapes, 0.1), d.erk(shapes, 0.1)
    assert plain["conv"] / plain["fc"] == pytest.approx((16 / 64) / (80 / 576))
    assert kernel["conv"] / kernel["fc"] == pytest.approx((22 / 576) / (80 / 576))


def test_power_zero_is_uniform():
    assert d.erk(LENET, 0.3, power=0.0) == pytest.approx(d.uniform(LENET, 0.3))


def test_erk_makes_small_tensors_exactly_dense():
    densities = d.erk({"big": (100, 100), "bias": (100,), "scale": ()}, 0.5)
    assert densities["bias"] == densities["scale"] == 1.0
    assert densities["big"] == pytest.approx((0.5 * 10101 - 101) / 10000)


def test_tensors_stand_for_their_shapes_and_empty_ones_are_dense():
    tensors = {"a": torch.zeros(4, 5), "none": torch.zeros(0, 3)}
    assert d.erk(tensors, 0.5) == d.erk({"a": (4, 5), "none": (0, 3)}, 0.5)
    assert d.erk(tensors, 0.5)["none"] == 1.0
    assert d.kept_counts(tensors, {"a": 0.5, "none": 0.5}) == {"a": 10, "none": 0}


def test_kept_counts_floor_keep_one_and_treat_missing_as_dense():
    shapes = {"a": (10, 10), "b": (3,), "c": (2, 2)}
    assert d.kept_counts(shapes, {"a": 0.559, "b": 0.01}) == {"a": 55, "b": 1, "c": 4}


@pytest.mark.parametrize("total", [1, 3, 7, 10, 100, 1000, 2_359_296])
@pytest.mark.parametrize("percent", [1, 7, 10, 28, 29, 50, 57, 58, 99, 100])
def test_rounding_is_that_of_exact_arithmetic(percent, total):
    fraction = percent / 100
    assert d.floor_count(fraction, total) == percent * total // 100
    assert d.ceil_count(fraction, total) == -(-percent * total // 100)


def test_patterns_say_densities_and_the_rest_has_the_given_one():
    expected = {"c1": 0.5, "c2": 0.5, "f1": 0.1, "f2": 0.1, "f3": 1.0}
    assert d.explicit(LENET, {"c*": 0.5, "f3": 1}, 0.1) == expected
    assert d.explicit(LENET, {"f3": 1, "c*": 0.5}, 0.1) == expected
    assert d.explicit(LENET, {}, 0.1) == d.uniform(LENET, 0.1)
    assert d.explicit(LENET, {"c1": 0.5, "c*": 0.5, "f3": 1}, 0.1) == expected  # two that agree


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"c*": 0.5, "C*": 0.5}, r"pattern 'C\*' matches no tensor, expected one for `c1`, `c2`, `f1`, `f2`, `f3`"),
        ({"c": 0.5}, "pattern 'c' matches no tensor"),
        ({"*": 0.5, "f3": 1.0}, r"`f3` has density 0.5 by the pattern '\*' and 1.0 by 'f3'; expected one"),
        ({"f3": 0.0}, r"The density of 'f3' is 0.0, expected a number in \(0, 1\]"),
        ({"f3": float("nan")}, "The density of 'f3' is nan"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns, message):
    with pytest.raises(InvalidOption, match=message):
        d.explicit(LENET, patterns, 0.1)
    with pytest.raises(InvalidOption, match="`density=0`"):
        d.explicit(LENET, {}, 0)


def test_what_is_frozen_is_not_prunable():
    weights = {name: torch.zeros(2, 2) for name in ("body.weight", "mid.weight", "head.weight")} | {"b": torch.zeros(2)}
    assert d.prunable(weights, (), {"body.weight", "b"}) == ("mid.weight", "head.weight")
    assert d.prunable(weights, ("body.*", "head.*"), {"body.weight"}) == ("mid.weight",)  # a pattern may match it
    with pytest.raises(InvalidOption, match=r"The module freezes each layer that could be pruned .*, of `body.weight`"):
        d.prunable(weights, ("head.*",), {"body.weight", "mid.weight"})
    with pytest.raises(InvalidOption, match=r"leave no layer to prune"):
        d.prunable(weights, ("*",), {"body.weight"})
