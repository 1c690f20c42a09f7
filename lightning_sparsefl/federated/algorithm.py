"""The interface of a federated method. The defaults are FedAvg; a method is what it changes.

A whole method, for illustration::

    @dataclass(frozen=True, kw_only=True)
    class HalfWay(FederatedAlgorithm):
        '''The server moves half of the way to the clients' mean.'''

        step: float = 0.5
        '''Share of the way.'''

        def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
            mean = super().aggregate(server, merged).weights
            moved = {n: w + self.step * (mean[n] - w) for n, w in server.weights.items()}
            return replace(server, weights=moved)

A method is a frozen dataclass of hyper-parameters and has no other state: what changes lives in `ServerState`, in
what the server keeps per client (`shared`) and in what the client keeps (`memory`).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.cost import forward_flops, training_flops
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, Reducer
from lightning_sparsefl.sparse import masks as mask_algebra
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    Masks,
    Merged,
    Message,
    ServerState,
    Shared,
    Update,
    Weights,
)

if TYPE_CHECKING:
    from lightning_sparsefl.federated.client import Client
    from lightning_sparsefl.federated.fleet import Fleet

BYTES_PER_WEIGHT = 4
"""The papers count float32 values and take masks as free."""


class FederatedAlgorithm(ABC):  # noqa: B024 - every hook has a default, and jsonargparse needs a plain base
    """One federated method; the defaults are FedAvg (McMahan et al. 2017, arXiv:1602.05629)."""

    fixed_length = False
    """Whether the first state holds a plan for `max_rounds`, so that a run cannot go on with another number."""

    @property
    def can_be_private(self) -> bool:
        """Whether a client's data reach the server through the merged weights alone, as `federation.privacy` needs it.

        That is: updates have no `shared` and no `extra`; every client may change and votes on the same coordinates;
        these and the first state follow from no data but what the merged weights tell; and reports are not used.
        """
        return False

    def adapt(self, module: LightningModule) -> None:  # noqa: B027 - a default, as of every hook
        """Change the module once, before `init`, for example to add exits. Default: nothing."""

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """The server's state before round 0.

        Args:
            weights: The module's initial weights.
            fleet: All clients.
        """
        return ServerState(round=0, weights=weights)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """What the server sends to one client; it sees facts and uploads, never data or memory."""
        return Message(weights=mask_algebra.apply(server.weights, server.masks), masks=server.masks)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """How local training differs from the module's own; `message.masks` are held without asking."""
        return []

    def train(self, message: Message, client: Client) -> Update:
        """One client's local work."""
        result = client.fit(message.weights, message.masks, message.trainable, self.callbacks(message, client))
        return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)

    def reducer(self) -> Reducer:
        """How the round's updates are merged."""
        return CoverageMean()

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """The server's next state; the engine counts the round itself."""
        difference = merged.kind == "difference"
        weights = {
            name: _adopt(old, merged.weights[name], merged.covered.get(name), difference)
            for name, old in server.weights.items()
        }
        return replace(server, weights=weights)

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """What the server newly keeps about one participant, given its metrics; None = as before.

        With :meth:`seconds`, the metrics have them too, as ``seconds``.
        """
        return None

    def seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """How long a client-round would take on the client's own device; a round takes as long as the slowest.

        Args:
            view: Of the client.
            flops: Of its training, as charged to ``flops/train``.
            bytes_up: Of its encoded upload.

        Returns:
            Seconds, of which ``time/simulated`` is made; None = not simulated.
        """
        return None

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """The weights this client is scored with."""
        return mask_algebra.apply(server.weights, server.masks)

    def trained(self, message: Message, update: Update) -> Weights:
        """What a participant's local training ended with; its scores are ``personal_after/*``."""
        if update.kind == "difference":
            return mask_algebra.add(message.weights, update.weights)
        return {**message.weights, **update.weights}

    def finetune(self, server: ServerState, client: Client) -> Weights | None:
        """The client's weights after a last local fit, run once when the rounds are over; None = none.

        The server's state is that of the round that `federation.select` chose, else that of the last one. The scores
        are the table's ``finetuned/*``; the work is not charged to the ledger.
        """
        return None

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """What `profile` takes for the server's state at the start of a round, since nothing is trained there.

        A method whose masks follow a schedule overrides this. Default: the first state.

        Args:
            server: Before round 0.
            round: From 0.
        """
        return replace(server, round=round)

    def may_vote(self, message: Message) -> Masks:
        """Where an upload may vote; default: where the client holds and may change."""
        return mask_algebra.intersect(message.trainable, message.masks)

    def costs(self, facts: CostFacts) -> Costs:
        """FLOPs and paper bytes of one client-round, without training.

        The default charges training as three forward passes of the held density for every local sample, and
        4 bytes for every weight that the masks keep, in both directions; buffers are free, as in the papers.
        """
        message, samples = facts.message, facts.epochs * facts.samples
        held = mask_algebra.counts(message.masks)
        counted = {name: weight for name, weight in message.weights.items() if name not in facts.buffers}
        kept = sum(held.get(name, weight.numel()) for name, weight in counted.items())
        return Costs(
            flops_paper=3 * samples * forward_flops(facts.layers, message.masks),
            flops_analytic=training_flops(facts.layers, message.masks, message.trainable, samples),
            bytes_down_paper=BYTES_PER_WEIGHT * kept,
            bytes_up_paper=BYTES_PER_WEIGHT * kept,
        )


def _adopt(old: torch.Tensor, mean: torch.Tensor, covered: torch.Tensor | None, difference: bool) -> torch.Tensor:
    """The mean where somebody voted, the server's value elsewhere."""
    if difference:  # a mean of differences is zero where nobody voted
        return old + mean
    return mean if covered is None else torch.where(covered, mean, old)
