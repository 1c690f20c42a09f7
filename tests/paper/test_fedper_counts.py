"""FLOPs of FedPer and FedRep in FedLPS's Table I, which are those of FedAvg, and the bytes of their shared layers."""

from __future__ import annotations

import pytest

HEADS = {"mnist": 510, "cifar10": 5_130, "cifar100": 51_300}
"""Parameters of the last linear layer."""
COUNTED = {"mnist": ("2.8", "2.7881"), "cifar10": ("825.4", "825.3647"), "cifar100": ("4934.3", "4934.2622")}
"""FLOPs in 1e12 as printed, and as counted. MNIST's row charges 192 samples for a client's 180."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("data", "method"), [(data, method) for data in ("cifar10", "mnist", "cifar100") for method in ("fedper", "fedrep")]
)
def test_rows_of_partial_sharing(data, method, profile):
    cell, dense = (profile("fedlps", f"table1/{data}_{name}") for name in (method, "fedavg"))
    printed, counted = COUNTED[data]
    run = cell["run"]
    flops = run["paper"]["flops"] / 1e12
    assert flops == dense["run"]["paper"]["flops"] / 1e12
    if data != "mnist":
        assert (f"{flops:.1f}", f"{flops:.4f}") == (printed, counted)
    else:
        assert f"{flops * 192 / 180:.4f}" == counted
    own = 4 * HEADS[data] * 100 * 10
    for way in ("downlink_bytes", "uplink_bytes"):
        assert run["paper"][way] == dense["run"]["paper"][way] - own
        assert abs(run["wire"][way] - dense["run"]["wire"][way] + own) < 0.001 * run["wire"][way]
    ratio = run["analytic"]["flops"] / dense["run"]["analytic"]["flops"]
    assert ratio == 1 if method == "fedper" else 1.1 < ratio < 7 / 5  # 2 epochs without the body's gradients, and 5
