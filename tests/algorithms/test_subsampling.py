"""Subsampling without a federation: what is drawn, what is sent, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedAvg, Subsampling
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import PlainMean
from lightning_sparsefl.types import Message

SHAPES = {"w": (4, 5), "b": (3,), "one": (1,), "mean": (4,)}


@pytest.fixture
def start(fleet):
    def make(method, **options):
        return method.init({n: torch.zeros(s) for n, s in SHAPES.items()}, fleet(buffers=["mean"], **options))

    return make


def test_a_fixed_number_of_coordinates_is_drawn_anew_for_each_client_and_round(start, view):
    method = Subsampling(fraction=0.3)
    server, drawn = start(method), []
    for client, number in ((0, 0), (1, 0), (0, 1), (0, 0)):
        votes = method.may_vote(method.download(server, view(client=client, round=number)))
        assert {name: int(mask.sum()) for name, mask in votes.items()} == {"w": 6, "b": 1, "one": 1}
        drawn.append(votes["w"])
    assert torch.equal(drawn[0], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(("scale", "sent"), [(True, 20 / 6), (False, 1.0)])
def test_changes_are_divided_by_the_share_and_buffers_are_not(scale, sent, start, view, client):
    method = Subsampling(fraction=0.3, scale=scale)
    message = method.download(start(method), view())
    someone, _ = client({name: torch.ones(shape) for name, shape in SHAPES.items()})
    update = method.train(message, someone)
    assert (update.kind, update.weight, update.votes) == ("difference", 7, None)
    assert update.weights["w"].unique().tolist() == pytest.approx([sent])
    assert update.weights["one"].tolist() == update.weights["mean"].unique().tolist() == [1.0]
    assert method.trained(message, update)["w"].unique().tolist() == pytest.approx([1.0])


def test_silence_is_no_change(start, view):
    assert isinstance(Subsampling().reducer(), PlainMean)
    assert not Subsampling().download_for(start(Subsampling()), view(), "score").extra


def test_costs(facts, start, view):
    method = Subsampling()
    plain = facts()
    message = Message(weights=plain.message.weights, extra={"sample": {"seed": torch.tensor(1)}})
    ours, theirs = method.costs(replace(plain, message=message)), FedAvg().costs(plain)
    assert ours.bytes_up_paper == 4 * (5 + 1 + 3)
    assert replace(ours, bytes_up_paper=theirs.bytes_up_paper) == theirs
    buffered = replace(plain, message=message, buffers=frozenset({"a.bias"}))
    assert method.costs(buffered).bytes_up_paper == 4 * (5 + 3)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("wire", ["count", "encode"])
def test_a_whole_fraction_is_fedavg(federation, wire):
    ended = {}
    for algorithm in (Subsampling(fraction=1.0), FedAvg()):
        run = federation(algorithm, precision="64-true", folder=type(algorithm).__name__, federation={"wire": wire})
        checkpoint = torch.load(run.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
        ended[type(algorithm)] = checkpoint["state_dict"]
    for name, value in ended[FedAvg].items():
        assert torch.allclose(ended[Subsampling][name], value, rtol=0, atol=1e-6), name


def test_the_upload_shrinks_without_masks(federation):
    options = {"rounds": 1, "max_epochs": 1, "federation": {"wire": "encode", "buffers": "local"}}
    half = federation(Subsampling(), **options, folder="half").summary
    whole = federation(FedAvg(), **options, folder="whole").summary
    headers = 4 * 60
    assert half["comm/mask_bytes_total"] <= 4
    assert half["comm/uplink_bytes_total"] < 0.5 * whole["comm/uplink_bytes_total"] + headers
    assert half["comm/downlink_bytes_total"] < whole["comm/downlink_bytes_total"] + headers


@pytest.mark.parametrize("fraction", [0, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(InvalidOption, match=r"`algorithm.fraction` is .*; expected a number in \(0, 1\]"):
        Subsampling(fraction=fraction)
