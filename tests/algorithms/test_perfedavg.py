from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedAvg, PerFedAvg
from lightning_sparsefl.callbacks import MetaStep
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.types import Message

WEIGHTS = {"w": torch.tensor([1.0, 2.0]), "buffer": torch.tensor([0.5])}
MESSAGE = Message(weights=WEIGHTS)
TRAINED = {"w": torch.tensor([3.0, 4.0]), "buffer": torch.tensor([0.7])}
SLOPES = {"w": torch.tensor([2.0, -2.0])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1}, r"`algorithm.alpha` is -1; expected a number >= 0"),
        ({"delta": 0}, r"`algorithm.delta` is 0; expected a number above 0"),
        ({"adapt_steps": -1}, r"`algorithm.adapt_steps` is -1; expected a whole number >= 0"),
        ({"order": "second"}, r"`algorithm.order` is 'second'; expected one of 'first', 'hessian'"),
    ],
)
def test_refuses_options_out_of_range(options, message):
    with pytest.raises(InvalidOption, match=message):
        PerFedAvg(**options)


def test_a_client_makes_meta_steps_and_keeps_the_adapted_weights(client):
    someone, script = client(TRAINED, SLOPES)
    method = PerFedAvg(alpha=0.5, order="hessian", delta=0.01, adapt_steps=2)
    update = method.train(MESSAGE, someone)
    ((weights, masks, trainable, (step,)),) = script.fits
    assert (weights, masks, trainable) == (WEIGHTS, {}, {})
    assert isinstance(step, MetaStep)
    assert (step.lr, step.order, step.delta) == (0.5, "hessian", 0.01)
    assert (update.weights, update.kind, update.weight, update.votes) == (TRAINED, "weights", 7, None)
    assert [weights["w"].tolist() for weights in script.gradients] == [[3.0, 4.0], [2.0, 5.0]]
    adapted = method.trained(MESSAGE, update)
    assert (adapted["w"].tolist(), adapted["buffer"].tolist()) == ([1.0, 6.0], TRAINED["buffer"].tolist())
    assert update.memory == {"weights": adapted}


def test_everybody_is_scored_after_an_adaptation_of_the_received_weights(client):
    someone, script = client(TRAINED, SLOPES, memory={"weights": TRAINED})
    adapted = PerFedAvg(alpha=0.5).personalize(MESSAGE, someone)
    assert (adapted["w"].tolist(), adapted["buffer"].tolist()) == ([0.0, 3.0], [0.5])
    assert WEIGHTS["w"].tolist() == [1.0, 2.0]
    assert len(script.gradients) == 1
    assert PerFedAvg(alpha=0.0).personalize(MESSAGE, someone) == WEIGHTS
    assert PerFedAvg(adapt_steps=0).personalize(MESSAGE, someone) == WEIGHTS
    assert len(script.gradients) == 1


def test_costs(facts):
    assert isinstance(PerFedAvg().reducer(), CoverageMean)
    dense = FedAvg().costs(facts())
    assert PerFedAvg().costs(facts()) == dense
    # Two epochs of two batches: a triple and a batch that is left over, in five gradients.
    hessian = PerFedAvg(order="hessian").costs(facts())
    assert hessian.flops_paper == hessian.flops_analytic == pytest.approx(5 / 4 * dense.flops_paper)
    assert hessian.bytes_up_paper == dense.bytes_up_paper
    # Fourteen batches: four triples and two batches, in eighteen gradients.
    hessian = PerFedAvg(order="hessian").costs(facts(batch_size=1))
    assert hessian.flops_paper == pytest.approx(18 / 14 * dense.flops_paper)
    # A client with fewer samples than a batch, where those are left out.
    assert PerFedAvg(order="hessian").costs(replace(facts(), samples=0)).flops_paper == 0


def test_the_adaptation_pays(federation):
    """On clients of different labels, a model adapted to each client is better than the common one."""
    trainer = federation(PerFedAvg(alpha=0.3, adapt_steps=3), rounds=4, num_train=600)
    assert trainer.summary["personal/val_acc"] > trainer.summary["global/val_acc"]
