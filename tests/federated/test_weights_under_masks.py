"""Weights under a mask are zero wherever they arrive, also if a method leaves them in its state or messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from lightning_sparsefl import FederatedAlgorithm
from lightning_sparsefl.sparse.masks import subtract
from lightning_sparsefl.types import Message, ServerState


def halves(weights):
    matrices = {name: weight for name, weight in weights.items() if weight.dim() > 1}
    return {name: torch.arange(weight.numel()).view(weight.shape) % 2 == 0 for name, weight in matrices.items()}


@dataclass(frozen=True, kw_only=True)
class MaskedState(FederatedAlgorithm):
    """Has a mask from the start, which its weights do not follow."""

    def init(self, weights, fleet):
        return ServerState(round=0, weights=weights, masks=halves(weights))

    def aggregate(self, server, merged):
        shifted = {name: weight - 0.01 for name, weight in merged.weights.items()}  # also where the mask is False
        return replace(server, weights=shifted)


@dataclass(frozen=True, kw_only=True)
class MaskedMessages(FederatedAlgorithm):
    """Sends each client a mask with dense weights, and gets the clients' changes as a further tree."""

    def download(self, server, view):
        return Message(weights=server.weights, masks=halves(server.weights))

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, extra={"changes": subtract(update.weights, message.weights)})


@pytest.mark.parametrize("method", [MaskedState(), MaskedMessages()], ids=lambda method: type(method).__name__)
def test_a_run_does_not_depend_on_whether_messages_are_encoded(method, federation):
    counted, encoded = (
        federation(method, folder=wire, federation={"wire": wire, "finetune_epochs": 1}).summary
        for wire in ("count", "encode")
    )
    for key, value in counted.items():
        assert "seconds" in key or encoded[key] == value, key


def test_the_module_after_a_run_is_the_model_that_was_scored(federation):
    trainer = federation(MaskedState())
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    weights = content["state_dict"]
    for name, mask in halves(weights).items():
        assert not weights[name][~mask].any()
    score = federation(MaskedState(), verb="export", ckpt_path="last", arguments={"check": True}).summary.scores
    assert score["ckpt"]["val_acc"] == trainer.summary["global/val_acc"]
