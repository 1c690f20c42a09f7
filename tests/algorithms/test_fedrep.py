"""FedRep: the head first, then the body."""

from __future__ import annotations

import pytest
import torch

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, started, views
from lightning_sparsefl import FedAvg, FedRep, Local
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.testing.contents import comparable
from lightning_sparsefl.types import Message

BODY = set(WEIGHTS) - HEAD - BUFFERS
TRAINED = {name: value + 1 for name, value in WEIGHTS.items()}
MESSAGE = Message(weights={name: value for name, value in WEIGHTS.items() if name not in HEAD})


@pytest.mark.parametrize("name", ["head_epochs", "body_epochs", "finetune_epochs"])
def test_refuses_negative_epochs(name):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{name}` is -1; expected a whole number >= 0"):
        FedRep(**{name: -1})


def test_refuses_a_round_without_an_epoch():
    with pytest.raises(InvalidOption, match=r"`algorithm.head_epochs` and `algorithm.body_epochs` are 0"):
        FedRep(head_epochs=0, body_epochs=0)


def test_the_head_trains_before_the_body(client):
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    update = FedRep().train(MESSAGE, someone)
    (start, _, first, _), (between, _, second, _) = script.fits
    assert (set(first), set(second)) == (BODY, HEAD)  # frozen, and no buffer among them
    assert not any(mask.any() for mask in [*first.values(), *second.values()])
    assert script.epochs == [4, 1]
    assert comparable(start) == comparable(WEIGHTS)
    assert between == TRAINED
    assert set(update.weights) == set(MESSAGE.weights)
    assert set(update.memory["own"]) == HEAD
    assert set(FedRep().download(started(FedRep(), views(1.0)), views(1.0)[0]).weights) == set(MESSAGE.weights)


@pytest.mark.parametrize(("options", "frozen"), [({"head_epochs": 0}, HEAD), ({"body_epochs": 0}, BODY)])
def test_a_part_without_epochs_does_not_train(client, options, frozen):
    someone, script = client(TRAINED, initial=WEIGHTS, buffers=BUFFERS)
    FedRep(**options).train(MESSAGE, someone)
    ((_, _, trainable, _),) = script.fits
    assert set(trainable) == frozen


def test_fine_tuning_is_of_the_head(client):
    own = {name: WEIGHTS[name] + 3 for name in HEAD}
    someone, script = client(TRAINED, memory={"own": own}, initial=WEIGHTS, buffers=BUFFERS)
    assert FedRep().finetune(MESSAGE, someone) == TRAINED
    ((start, _, trainable, _),) = script.fits
    assert set(trainable) == BODY
    assert script.epochs == [10]
    assert all(torch.equal(start[name], own[name]) for name in HEAD)
    assert FedRep(finetune_epochs=0).finetune(MESSAGE, someone) is None
    assert FedRep(own=()).finetune(Message(weights=WEIGHTS), someone) is None
    assert len(script.fits) == 1


def test_costs(facts):
    # The forward pass is 22 FLOPs in the body a and 12 in the head b. While the head trains, only its two gradients are
    # computed; while the body trains, both gradients of a and the input's of b. The epochs have 7 samples.
    message = Message(weights={"a.weight": torch.ones(2, 5), "a.bias": torch.ones(2)})
    costs = FedRep().costs(facts(message=message))
    assert costs.flops_analytic == 28 * (34 + 2 * 12) + 7 * (34 + 34 + 22)
    assert costs.flops_paper == FedAvg().costs(facts()).flops_paper == 14 * 3 * 34  # of two epochs, as FedLPS prints it
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * 12
    assert FedRep(own=(), head_epochs=0, body_epochs=2).costs(facts()) == FedAvg().costs(facts())


@pytest.mark.filterwarnings("ignore:Clients keep the whole model")
@pytest.mark.parametrize(
    ("method", "other"),
    [
        (FedRep(own=(), body_epochs=2, finetune_epochs=0), FedAvg()),
        (FedRep(own=("*",), head_epochs=2, finetune_epochs=0), Local()),
    ],
    ids=["FedAvg", "Local"],
)
def test_a_part_that_is_everything(federation, method, other):
    runs = [federation(each, folder=type(each).__name__) for each in (method, other)]
    ours, theirs = ({k: v for k, v in run.summary.items() if k.startswith("personal/")} for run in runs)
    assert ours == theirs
    assert ours
