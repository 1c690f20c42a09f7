"""A sampler of one's own: what its hooks return is checked where the engine receives it."""

from dataclasses import dataclass

import pytest

from lightning_sparsefl import FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import CohortSampler


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
