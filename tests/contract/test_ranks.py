import pytest
import torch
import torch.distributed as dist

from lightning_sparsefl import FedAvg
from lightning_sparsefl.errors import RanksDisagree
from lightning_sparsefl.federated.agreement import agree, fingerprint
from lightning_sparsefl.types import ServerState


class FakeRanks:
    """What the processes would see, each with its server."""

    size = 2
    waited = 0.5

    def __init__(self, others):
        self.others = others

    def gather(self, value):
        return [*self.others, value]


def server(**changed):
    state = {"weights": {"w": torch.ones(3)}, "masks": {}, "extra": {"plan": {"rounds": torch.tensor(3)}}}
    return ServerState(round=5, **{**state, **changed})


def seen_by_the_first(state, observed=None):
    sent = []
    ranks = FakeRanks([])
    ranks.gather = lambda value: sent.append(value) or [value]
    agree(state, observed or {}, ranks)
    return sent


@pytest.mark.parametrize(
    ("part", "changed", "observed"),
    [
        ("weights", {"weights": {"w": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}}, {}),
        ("weights", {"weights": {"w": torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)}}, {}),
        ("weights", {"weights": {"v": torch.ones(3)}}, {}),
        ("masks", {"masks": {"w": torch.tensor([True, True, False])}}, {}),
        ("extra", {"extra": {"plan": {"rounds": torch.tensor(4)}}}, {}),
        ("shared", {}, {7: {"pulls": 2}}),
    ],
)
def test_a_rank_with_another_server_is_named_with_the_round_and_the_part(part, changed, observed):
    first = seen_by_the_first(server())
    assert agree(server(), {}, FakeRanks(first)) == [0.5, 0.5]
    with pytest.raises(RanksDisagree, match=f"After round 4 the server's {part} on rank 1") as caught:
        agree(server(**changed), observed, FakeRanks(first))
    assert (caught.value.parts, caught.value.round, caught.value.rank) == ((part,), 4, 1)


def test_every_bit_and_every_name_is_in_the_fingerprint():
    g = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2**31, (50,), generator=g, dtype=torch.int32)
    whole = fingerprint({"a": values})
    for place in range(50):
        for bit in (0, 13, 30):
            flipped = values.clone()
            flipped[place] ^= 1 << bit
            assert fingerprint({"a": flipped}) != whole
    assert fingerprint({"b": values}) != whole
    assert fingerprint({"a": values.view(5, 10)}) != whole
    assert fingerprint({"a": values.view(5, 10).T}) != fingerprint({"a": values.view(10, 5)})
    assert fingerprint([1, None, "x", True]) != fingerprint([1, None, "x", False])
    assert fingerprint(torch.zeros((), dtype=torch.bfloat16)) != fingerprint(torch.ones((), dtype=torch.bfloat16))


class Astray(FedAvg):
    """From round 1 on, the last rank's server is another one, by a single bit."""

    def aggregate(self, server, merged):
        state = super().aggregate(server, merged)
        if state.round == 1 and dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            next(iter(state.weights.values())).view(torch.int32).view(-1)[0] ^= 1
        return state


def test_a_run_whose_ranks_part_ways_ends_with_the_round_and_without_committing_it(federation, tmp_path):
    with pytest.raises(Exception, match="After round 1 the server's weights on rank 2 are not those on rank 0"):
        federation(Astray(), devices=3, rounds=4)
    last = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert last["sparsefl"]["round"] == 1
