"""FLOPs of Oort's row in Table I of FedLPS, which are those of FedAvg."""

from __future__ import annotations

import pytest

PRINTED = {"mnist": "2.6", "cifar10": "825.4", "cifar100": "4934.3"}
"""FLOPs in 1e12; for MNIST 2.8 are printed, since the published dense rows charge 192 samples for a client's 180."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", PRINTED)
def test_oort_costs_what_fedavg_does(data: str, profile):
    oort, fedavg = (profile("fedlps", f"table1/{data}_{method}")["run"] for method in ("oort", "fedavg"))
    assert oort == fedavg
    assert f"{oort['paper']['flops'] / 1e12:.1f}" == PRINTED[data]
