from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.slow import first_then_slow
from lightning_sparsefl.models import PreResNet18
from lightning_sparsefl.sparse.unit_lasso import present_groups, unit_lasso, unit_lasso_gradients
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import find_groups, unit_masks
from lightning_sparsefl.sparse.width import live_units


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


NETS = {
    "linear": (nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), (1, 3)),
    "flattened map": (nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 2)), (1, 1, 4, 4)),
    "recurrent": (Recurrent(), (1, 2, 3)),
    "residual sums and norms": (PreResNet18(num_classes=4), (1, 3, 16, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_a_unit_of_zeros_has_no_gradient(dtype):
    """Its squared norm plus 1e-8 is 0 in float16, and the squares of small and large weights are 0 and infinite."""
    net = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False)).to(dtype)
    groups = find_groups(net, torch.zeros(1, 3, dtype=dtype))
    weights = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    for unit, value in enumerate((0.0, 1e-5, 300.0)):
        weights["0.weight"][unit] = weights["2.weight"][:, unit] = value
    found = unit_lasso_gradients(groups, weights)
    exact = unit_lasso_gradients(groups, {name: weight.float() for name, weight in weights.items()})
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, exact[name].to(dtype))
    assert not found["0.weight"][0].any()


@pytest.mark.parametrize("name", first_then_slow(NETS, by=lambda name: name if NETS[name][1][-1] < 16 else "linear"))
def test_gradients_are_those_of_the_penalty(name):
    net, side = NETS[name]
    groups = find_groups(net, torch.zeros(side))
    leaves = {n: p.detach().double().requires_grad_() for n, p in net.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:  # unit by unit
        for slot in group.slots:
            if slot.role != "buffer" and slot.name in leaves and leaves[slot.name].dim() > 1:
                for places in slot.positions:
                    own = leaves[slot.name].index_select(slot.dim, places)
                    total = total + (own.square().sum() + 1e-8).sqrt()
    assert unit_lasso(groups, leaves).item() == pytest.approx(total.item(), rel=1e-12)
    total.backward()
    found = unit_lasso_gradients(groups, leaves)
    for n, leaf in leaves.items():
        if leaf.grad is None:
            assert n not in found
        else:
            torch.testing.assert_close(found[n], leaf.grad)


@pytest.mark.parametrize("name", NETS)
def test_groups_come_back_from_a_state(name):
    net, side = NETS[name]
    groups = find_groups(net, torch.zeros(side))
    for ours, theirs in zip(groups_of(unit_tables(groups)), groups, strict=True):
        assert (ours.name, ours.size, ours.layers) == (theirs.name, theirs.size, theirs.layers)
        for slot, other in zip(ours.slots, theirs.slots, strict=True):
            assert (slot.name, slot.dim, slot.role) == (other.name, other.dim, other.role)
            assert torch.equal(slot.positions, other.positions)
    backwards = groups_of(dict(reversed(unit_tables(groups).items())))
    assert [group.name for group in backwards] == [group.name for group in groups]


def test_a_name_with_a_bar_comes_back_from_a_state():
    net = nn.Sequential()
    for name in ("a|b", "c%7C"):
        net.add_module(name, nn.Linear(2, 2))
    tables = unit_tables(find_groups(net, torch.zeros(1, 2)))
    assert [slot.name for slot in groups_of(tables)[0].slots] == ["a|b.weight", "a|b.bias", "c%7C.weight"]


def test_a_unit_of_zeros_has_no_gradient():
    net, side = NETS["linear"]
    groups = find_groups(net, torch.zeros(side))
    weights = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    assert not any(bool(gradient.any()) for gradient in unit_lasso_gradients(groups, weights).values())
    assert float(unit_lasso(groups, weights)) == pytest.approx(2 * (5 + 4) * 1e-4)


def test_a_unit_is_live_while_a_row_or_a_slice_is():
    net, side = NETS["linear"]
    groups = find_groups(net, torch.zeros(side))
    weights = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    weights["0.bias"] += 1  # keeps nobody alive
    weights["0.weight"][1, 2] = -2e-4
    weights["2.weight"][3, 4] = 1e-4
    live = live_units(groups, weights, 1e-4)
    assert live["0"].tolist() == [False, True, False, False, True]
    assert live["2"].tolist() == [False, False, False, True]
    nothing = live_units(groups, {name: value * 0 for name, value in weights.items()}, 1e-4)
    assert [int(units.sum()) for units in nothing.values()] == [1, 1]


def test_groups_of_a_narrow_module():
    net, side = NETS["linear"]
    groups = find_groups(net, torch.zeros(side))
    weights = {name: value.detach() for name, value in net.named_parameters()}
    kept = {"0": torch.tensor([True, False, True, True, False])}
    assert present_groups(groups, kept, weights, weights) is groups
    masked = {n: weights[n] * m for n, m in unit_masks(groups, kept, weights).items()}
    small = {**weights, "0.weight": weights["0.weight"][kept["0"]], "0.bias": weights["0.bias"][kept["0"]]}
    small["2.weight"] = weights["2.weight"][:, kept["0"]]
    narrow = present_groups(groups, kept, weights, small)
    assert [group.size for group in narrow] == [3, 4]
    full = unit_lasso_gradients(groups, {**weights, **masked})
    cut = unit_lasso_gradients(narrow, small)
    torch.testing.assert_close(cut["0.weight"], full["0.weight"][kept["0"]])
    torch.testing.assert_close(cut["2.weight"], full["2.weight"][:, kept["0"]])
