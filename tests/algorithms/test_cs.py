"""Complement sparsification without a federation: what travels, how it is merged, and its costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import CS, FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import CoverageMean, PlainMean
from lightning_sparsefl.types import Merged, Message, ServerState

HIDDEN = {"a.weight": torch.tensor([[4.0, -3.0, 2.0, 1.0]]), "a.bias": torch.tensor([0.5])}
HEAD = {"b.weight": torch.tensor([[1.0], [2.0]]), "b.bias": torch.zeros(2)}


@pytest.fixture
def start(fleet):
    return lambda method: method.init({**HIDDEN, **HEAD}, fleet())


def test_the_first_round_is_dense_and_the_head_stays_so(start, view):
    server = start(CS())
    assert CS().download(server, view()).masks == {}
    assert {name: int(count) for name, count in server.extra["kept"].items()} == {"a.weight": 2}
    whole = start(CS(prune_head=True))
    assert {name: int(count) for name, count in whole.extra["kept"].items()} == {"a.weight": 2, "b.weight": 1}


def test_every_layer_keeps_a_weight(start):
    server = start(CS(density=0.1, prune_head=True))
    assert {name: int(count) for name, count in server.extra["kept"].items()} == {"a.weight": 1, "b.weight": 1}


def test_the_server_prunes_after_each_merge(start):
    zeros = {name: torch.zeros_like(value) for name, value in {**HIDDEN, **HEAD}.items()}
    server = CS().aggregate(start(CS()), Merged(weights=zeros, covered={}, kind="difference"))
    assert server.masks["a.weight"].tolist() == [[True, True, False, False]]
    assert server.weights["a.weight"].tolist() == [[4.0, -3.0, 0.0, 0.0]]
    moved = {**zeros, "a.weight": torch.tensor([[0.0, 0.0, 4.0, -2.5]]), "a.bias": torch.ones(1)}
    covered = {name: torch.ones_like(value, dtype=torch.bool) for name, value in zeros.items()}
    covered["a.weight"] = ~server.masks["a.weight"]
    server = CS(kappa=1.5).aggregate(server, Merged(weights=moved, covered=covered, kind="difference"))
    assert server.weights["a.weight"].tolist() == [[4.0, 0.0, 6.0, 0.0]]  # 4, -3, 6, -3.75 without the two smallest
    assert server.masks["a.weight"].tolist() == [[True, False, True, False]]
    assert server.weights["a.bias"].tolist() == [1.5]


def test_a_client_trains_everything_and_sends_the_complement(client):
    masks = {"a.weight": torch.tensor([[True, True, False, False]])}
    message = Message(weights={**HIDDEN, "a.weight": torch.tensor([[4.0, -3.0, 0.0, 0.0]])}, masks=masks)
    someone, script = client({"a.weight": torch.tensor([[1.0, 1.0, 1.0, 1.0]]), "a.bias": torch.ones(1)})
    update = CS().train(message, someone)
    assert script.fits[0][1] == {}
    assert (update.kind, update.votes, update.weight) == ("difference", None, 7)
    assert update.weights["a.weight"].tolist() == [[-3.0, 4.0, 1.0, 1.0]]
    assert CS().may_vote(message)["a.weight"].tolist() == [[False, False, True, True]]
    assert isinstance(CS().reducer(), CoverageMean)


def test_the_variant_sends_the_largest_changes(client):
    method = CS(upload="largest", kappa=1.0)
    masks = {"a.weight": torch.tensor([[True, True, True, False]])}
    message = Message(weights={"a.weight": torch.tensor([[4.0, -3.0, 1.0, 0.0]])}, masks=masks)
    someone, _ = client({"a.weight": torch.tensor([[1.0, 1.0, 1.0, 1.0]])})
    update = method.train(message, someone)
    assert update.votes["a.weight"].tolist() == [[False, True, False, False]]
    assert method.may_vote(message) == {}
    assert isinstance(method.reducer(), PlainMean)


def test_only_the_complement_can_be_private():
    assert CS().can_be_private
    assert not CS(upload="largest").can_be_private  # which changes are sent depends on the client's data


def test_down_and_up_are_one_dense_model(facts):
    plain = facts()
    masks = {"a.weight": torch.zeros(2, 5, dtype=torch.bool)}
    masks["a.weight"][0, :3] = True
    message = Message(weights=plain.message.weights, masks=masks)
    ours, dense = CS().costs(replace(plain, message=message)), FedAvg().costs(plain)
    assert ours.bytes_down_paper == 4 * (3 + 2 + 6)
    assert ours.bytes_up_paper == 4 * (7 + 2 + 6)
    buffered = CS().costs(replace(plain, message=message, buffers=frozenset(["a.bias"])))
    assert buffered.bytes_up_paper == 4 * (7 + 6)
    assert ours.flops_analytic == dense.flops_analytic
    assert ours.flops_paper == 2 * 7 * 3 * (20 * 0.3 + 2 + 12)
    assert CS().costs(plain) == dense


def test_profiles_know_the_dense_round(start):
    server = start(CS())
    assert CS().profile_state(server, 0).masks == {}
    later = CS().profile_state(server, 3)
    assert (later.round, int(later.masks["a.weight"].sum())) == (3, 2)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [CS(), CS(upload="largest", kappa=1.0)], ids=repr)
def test_the_uploads_of_a_run(federation, algorithm):
    """Half of the hidden layer's 128 weights goes down, and half up; only the variant sends masks up."""
    options = {"federation": {"wire": "encode", "buffers": "local"}, "max_epochs": 1}
    one = federation(algorithm, **options, rounds=1, folder="one").summary
    two = federation(algorithm, **options, rounds=2, folder="two").summary
    up = {name: two[f"comm/{name}_bytes_total"] - one[f"comm/{name}_bytes_total"] for name in ("uplink", "mask")}
    saved = one["comm/uplink_bytes_total"] - up["uplink"]
    masks = 4 * 128 / 8
    if algorithm.upload == "complement":
        assert saved == pytest.approx(4 * 64 * 4, abs=4 * 12)
        assert up["mask"] <= masks + 4 * 20
    else:
        assert saved == pytest.approx(4 * 64 * 4 - masks, abs=4 * 12)
        assert up["mask"] >= 1.5 * masks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": 0.0}, r"`algorithm.density` is 0.0; expected a number in \(0, 1\]"),
        ({"kappa": 0}, "`algorithm.kappa` is 0; expected a number above 0"),
        ({"upload": "all"}, "`algorithm.upload` is 'all'; expected one of 'complement', 'largest'"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options, said):
    with pytest.raises(InvalidOption, match=said):
        CS(**options)


def test_a_model_of_one_layer_is_refused(fleet):
    with pytest.raises(InvalidOption, match=r"finds no layer to prune but the last; set `algorithm.prune_head: true`"):
        CS().init(HEAD, fleet())
    assert isinstance(CS(prune_head=True).init(HEAD, fleet()), ServerState)
