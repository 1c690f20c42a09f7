"""Densities that layers cannot reach, and densities by pattern, refused alike by every callback that takes them."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradualPruning,
    StaticMask,
)
from lightning_sparsefl.callbacks.layers import choose
from lightning_sparsefl.errors import InvalidOption

SPREAD = [StaticMask, DynamicMask, GradualPruning]

pytestmark = pytest.mark.filterwarnings("ignore:.*never moves its mask.*")


@pytest.mark.parametrize("kind", SPREAD)
def test_less_than_one_weight_of_a_layer_is_refused(kind, net, fit):
    message = r"\(density=0.05\)`: `net.4.weight` cannot reach 0.05, .* one of its 18 weights; .* \('!net.4.weight'\)"
    with pytest.raises(InvalidOption, match=f"`{kind.__name__}{message}"):
        fit(net(), [kind(density=0.05, layer_density="uniform")])
    for remedy in ({"layers": "!net.4.weight"}, {"layer_density": {"net.4*": 0.1}}, {"density": 0.06}):
        fit(net(), [kind(**{"density": 0.05, "layer_density": "uniform", **remedy})], epochs=1)


@pytest.mark.parametrize("kind", [StaticMask, DynamicMask])
def test_the_kernel_rule_may_ask_for_less_than_one_weight(kind, net, fit):
    with pytest.raises(InvalidOption, match=r"`net.0.weight` cannot reach 0.0\d+, which is less than one of its 36"):
        fit(net(), [kind(density=0.01)])


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"conv*": 0.5}, "the pattern 'conv.*' matches no tensor, expected one for `net.0.weight`, `net.2.weight`, "),
        ({"*": 0.5, "net.4*": 1.0}, "`net.4.weight` has density 0.5 by the pattern"),
        ({"net.4*": 0.01}, "`net.4.weight` cannot reach 0.01"),
    ],
)
def test_patterns_that_do_not_fit_the_module_are_refused(kind, patterns, message, net, fit):
    with pytest.raises(InvalidOption, match=f"(?i)`{kind.__name__}.*{message}"):
        fit(net(), [kind(layer_density=patterns)])


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("spread", ["magic", {"*": 0}, {"*": 1.5}])
def test_a_spread_that_is_none_is_refused(kind, spread):
    expected = r"layer_density=.*expected 'erk' or 'uniform', or densities in \(0, 1\] by name pattern"
    with pytest.raises(InvalidOption, match=f"`{kind.__name__}\\({expected}"):
        kind(layer_density=spread)


def test_all_layers_together_have_no_density_of_each():
    with pytest.raises(InvalidOption, match=r"layer_density='erk'.*expected 'uniform' with `scope='global'`"):
        GradualPruning(scope="global", layer_density="erk")


@pytest.mark.parametrize(
    "callback",
    [
        lambda: GradualPruning(density=0.02, scope="global"),
        lambda: DynamicPruningWithFeedback(density=0.02),
        lambda: GlobalMagnitudePruning(fraction=0.98),
    ],
)
def test_fewer_weights_than_layers_are_refused(callback, net, fit):
    layers = "2 weights in all is too few for `net.0.weight`, `net.2.weight`, `net.4.weight`"
    with pytest.raises(
        InvalidOption, match=rf"\((density=0.02|fraction=0.98)\)`: .* each layer a weight, but {layers}"
    ):
        fit(net(), [callback()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticMask(density="a"), r"`StaticMask\(density='a'\)`: expected a number in \(0, 1\]"),
        (lambda: DynamicMask(density=0.1, every_n_steps=2.5), r"\(every_n_steps=2.5\)`: expected a whole number >= 1"),
        (lambda: choose(nn.Linear(2, 2), 5, "StaticMask"), r"`StaticMask\(layers=5\)`: expected a pattern, a list of"),
    ],
)
def test_values_of_another_type_are_refused(make, message):
    with pytest.raises(InvalidOption, match=message):
        make()
