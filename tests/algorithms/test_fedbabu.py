"""FedBABU: everybody trains the body."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, B, frozen, started, views
from lightning_sparsefl import FedBABU, PerFedMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.federated.fleet import Fleet


def test_refuses_options_out_of_range():
    with pytest.raises(InvalidOption, match=r"`algorithm.finetune_epochs` is -1; expected a whole number >= 0"):
        FedBABU(finetune_epochs=-1)


def test_fedbabu_freezes_the_head_of_everybody():
    assert frozen(FedBABU(), views(0.1, 1.0)) == [HEAD, HEAD]


def test_the_head_by_name():
    assert frozen(FedBABU(head="b"), views(1.0)) == [B]
    with pytest.raises(InvalidOption, match=r"no `z` to be its head; name one of .* with `algorithm\.head`\.$"):
        frozen(FedBABU(head="z"), views(1.0))


@pytest.mark.parametrize("method", [FedBABU(), PerFedMask()], ids=lambda method: type(method).__name__)
def test_a_head_of_zeros_is_refused(method):
    """It passes no gradient, and stays as it is."""
    head = {name: torch.zeros_like(WEIGHTS[name]) for name in HEAD}
    with pytest.raises(InvalidOption, match="is 0 and does not train in rounds, so that no gradient reaches"):
        method.init({**WEIGHTS, **head}, Fleet(views(1.0), BUFFERS, torch.device("cpu")))


def test_everything_travels_down_and_only_voters_count():
    method, people = FedBABU(), views(1 / 3, 1.0)
    server = started(method, people)
    message = method.download(server, people[0])
    assert set(message.weights) == set(WEIGHTS)
    assert set(method.may_vote(message)) == set(message.trainable)
    assert isinstance(method.reducer(), CoverageMean)


def test_fine_tuning_is_of_the_whole_model(client):
    people = views(1.0)
    message = FedBABU().download_for(started(FedBABU(), people), people[0], "finetune")
    tuned = {name: value + 1 for name, value in WEIGHTS.items()}
    someone, script = client(tuned)
    assert FedBABU(finetune_epochs=2).finetune(message, someone) == tuned
    ((weights, masks, trainable, callbacks),) = script.fits
    assert (weights, masks, trainable, list(callbacks)) == (WEIGHTS, {}, {}, [])
    assert FedBABU(finetune_epochs=0).finetune(message, someone) is None
    assert len(script.fits) == 1


def test_costs(facts):
    # The forward pass is 22 FLOPs in a and 12 in b, 14 samples. Of a frozen a neither gradient is computed below b.
    frozen_a = {name: torch.zeros(size, dtype=torch.bool) for name, size in (("a.weight", (2, 5)), ("a.bias", (2,)))}
    costs = FedBABU().costs(facts(trainable=frozen_a))
    assert costs.flops_analytic == costs.flops_paper == 14 * (34 + 2 * 12)
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * 18, 4 * 6)
    buffers = frozenset(["a.bias"])
    costs = FedBABU().costs(replace(facts(trainable={"a.weight": frozen_a["a.weight"]}), buffers=buffers))
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * 16, 4 * 6)  # buffers are free
    everything = FedBABU().costs(facts())
    assert (everything.flops_paper, everything.bytes_up_paper) == (14 * 3 * 34, 4 * 18)
