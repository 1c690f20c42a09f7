"""A sampler of one's own: what its hooks return is checked where the engine receives it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_sparsefl import FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import CohortSampler
from lightning_sparsefl.testing.contents import rows


@dataclass(frozen=True, kw_only=True)
class First(CohortSampler):
    """The clients with the lowest numbers."""

    def draw(self, state, candidates, rng):
        return candidates.clients[: candidates.count]


@pytest.mark.parametrize(
    ("hook", "result", "error", "message"),
    [
        ("start", None, InvalidOption, r"`Mine\.start` returned None; expected a `Mapping`, so add a `return`"),
        ("draw", None, InvalidOption, r"`Mine\.draw` returned None; expected an `Iterable`, so add a `return`"),
        ("draw", [0], InvalidOption, r"which drew the clients \[0\] in round 0; expected 4 different ones of the 6"),
        ("draw", "0123", InvalidOption, r"`Mine\.draw` returned '0' among the clients of round 0; expected whole num"),
        ("draw", [0, 1.0, 2, 3], InvalidOption, r"`Mine\.draw` returned 1\.0 among the clients of round 0; expected"),
        ("needed", 0, InvalidOption, r"`Mine\.needed` returned 0 in round 0; expected a whole number from 1 to 4, the"),
        ("needed", 5, InvalidOption, r"`Mine\.needed` returned 5 in round 0; expected a whole number from 1 to 4, the"),
        ("needed", None, InvalidOption, r"`Mine\.needed` returned None in round 0; expected a whole number from 1"),
        ("callbacks", None, InvalidOption, r"`Mine\.callbacks` returned None; expected a `Sequence`, so add"),
        ("callbacks", [3], InvalidOption, r"`Mine\.callbacks` returned \[3\]; expected a list of Lightning callbacks"),
        ("learn", None, InvalidOption, r"`Mine\.learn` returned None; expected a `Mapping`, so add a `return`"),
        (
            "start",
            {"seen": {1}},
            InvalidOption,
            r"`Mine\.start\(\)\['seen'\]` holds a `set`; expected numbers, strings",
        ),
    ],
)
def test_the_hook_is_named(federation, hook, result, error, message):
    sampler = type("Mine", (First,), {hook: lambda self, *_: result})()
    with pytest.raises(error, match=message):
        federation(FedAvg(), rounds=1, federation={"sampler": sampler})


@pytest.mark.parametrize("drawn", [torch.arange(4), np.arange(4), list(torch.arange(4)), {0, 1, 2, 3}])
def test_numbers_of_clients_may_be_those_of_torch_or_numpy(federation, drawn):
    sampler = type("Mine", (First,), {"draw": lambda self, *_: drawn})()
    found = rows(federation(FedAvg(), rounds=1, federation={"sampler": sampler}).run_folder / "clients.csv")
    assert [row["client"] for row in found if row["trained"] == "1"] == ["0", "1", "2", "3"]
