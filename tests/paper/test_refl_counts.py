"""FLOPs of REFL's row in Table I of FedLPS, which are whole client-rounds; a profile counts those of full cohorts."""

from __future__ import annotations

import pytest

PRINTED = {"cifar10": ("642.1", 778), "cifar100": ("2950.7", 598)}
"""FLOPs in 1e12, and the client-rounds of 1000 that they are."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("data", PRINTED)
def test_the_printed_flops_are_whole_client_rounds(data: str, profile):
    refl, fedavg = (profile("fedlps", f"table1/{data}_{method}")["run"] for method in ("refl", "fedavg"))
    assert refl == fedavg
    printed, client_rounds = PRINTED[data]
    assert f"{refl['paper']['flops'] / 1e15 * client_rounds:.1f}" == printed
