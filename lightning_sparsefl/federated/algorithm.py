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
what the server keeps per client (`shared`) and in what the client keeps (`memory`). Its hooks stand on one of two
sides. The server's hooks see the server's state and :class:`~lightning_sparsefl.types.ClientView`. The client's hooks
(`callbacks`, `train`, `trained`, `personalize`, `finetune_for`, `finetune`, `survey`) see a message and the client with
its memory, and nothing else, so that they run on another machine unchanged.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.cost import BYTES_PER_WEIGHT, forward_flops, training_flops
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, Reducer
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
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


class FederatedAlgorithm(ABC):  # noqa: B024 - every hook has a default, and jsonargparse needs a plain base
    """One federated method; the defaults are FedAvg (McMahan et al. 2017, arXiv:1602.05629)."""

    plans_by_capacity = False
    """Whether the first state follows from the clients' capacities, so that they cannot be drawn anew in each round."""
    fixed_length = False
    """Whether the first state holds a plan for `max_rounds`, so that a run cannot go on with another number."""
    follows_length = False
    """Whether a schedule spans `max_rounds`; a run that goes on with another number is told that it differs from one
    that had it from the start."""
    needs_metrics = False
    """Whether the method learns from what the module logs in local training, so that no run can leave that out."""
    has_server_optimizer = False
    """Whether `aggregate` makes the step of an optimizer, to which `federation.server_optimizer` would be a second."""
    uploads_shared = False
    """Whether updates may have `shared`, which the server sees for each client by itself, also under a secure sum."""
    has_global_model = True
    """Whether rounds train the server's weights; else nothing scores or exports them."""
    mixes_buffers = False
    """Whether clients receive buffers of others in `Message.extra`, which `federation.buffers` does not leave out."""

    @property
    def at_full_capacity(self) -> str | None:
        """What the method does if all capacities are 1, a clause for a warning; None where capacities do not matter."""
        return None

    @property
    def without_validation(self) -> str | None:
        """What to set so that training needs no validation sets, a clause for an error; None if it needs none."""
        return None

    @property
    def needs_exact_mean(self) -> str | None:
        """Why `aggregate` needs the mean of the updates as clients sent them; None if it does not.

        The clause follows the name of the method, as "corrects the mean" does in "but MyMethod corrects the mean".
        Clipping, noise, robust reducers, late updates and optimizers of the server change it, and so they do nothing if
        no weights are merged, which is another reason to return a clause.
        """
        return None

    @property
    def sends_unreceived(self) -> str | None:
        """That clients send what they did not receive, and unless what; a clause for an error, None if they do not.

        Their changes, which clipping, `PlainMean` and late updates need, are not known then.
        """
        return None

    @property
    def can_be_private(self) -> bool:
        """Whether a client's data reach the server through the merged weights alone, as `federation.privacy` requires.

        That is: updates have no `shared` and no `extra`; every client may change and votes on the same coordinates;
        these and the first state follow from no data but what the merged weights tell; and reports are not used.
        """
        return False

    def adapt(self, module: LightningModule) -> None:  # noqa: B027 - a default, as of every hook
        """Change the module once, before `init`, for example to add exits. Default: nothing.

        Args:
            module: The user's module.
        """

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the server's state before round 0.

        Args:
            weights: Initial weights of the module.
            fleet: All clients.
        """
        return ServerState(round=0, weights=weights)

    def survey(self, message: Message, client: Client) -> Update:
        """Answer a question that `init` asks every client with :meth:`Fleet.survey`, before round 0.

        Args:
            message: Message that `init` passed to the fleet.
            client: The client; its memory is empty, and what it returns as memory is not kept.

        Raises:
            NotImplementedError: If the algorithm asks nothing.
        """
        raise NotImplementedError(f"`{type(self).__name__}` asks its fleet, and has no hook `survey`.")

    def neighbours_of(self, view: ClientView, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients whose views a client's messages and costs depend on, as `view.neighbours`. Default: none.

        With it a method can run without a global model: the server relays what clients uploaded as `Update.shared`.

        Args:
            view: Facts of the client.
            clients: Numbers of all clients that train, ascending; `view.id` may be another one, which is only scored.
        """
        return ()

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Return what the server sends to one client for training.

        Args:
            server: State of the server before the round.
            view: Facts of the client: facts and uploads, never its data or memory.
        """
        return Message(weights=mask_algebra.apply(server.weights, server.masks), masks=server.masks)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Return what the server sends to one client for scoring or for fine-tuning. Default: :meth:`download`.

        Args:
            server: State of the server.
            view: Facts of the client.
            task: Task of the client.
        """
        return self.download(server, view)

    def callbacks(self, message: Message, client: Client) -> list[Callback]:
        """Return callbacks that make local training differ from the module's own, without those of `message.masks`.

        The default :meth:`train` passes them to :meth:`Client.fit`, and so does a `train` of one's own, as do
        :meth:`survey` and :meth:`finetune` with those that they need.

        Args:
            message: Message that the client received.
            client: The client.
        """
        return []

    def train(self, message: Message, client: Client) -> Update:
        """Do one client's local work.

        `profile` calls it with a client whose `fit` calls no hook of a callback: what a callback learns is not there.

        Args:
            message: Message that the client received.
            client: The client.

        Returns:
            What the client uploads and keeps.
        """
        result = client.fit(message.weights, message.masks, message.trainable, self.callbacks(message, client))
        return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)

    def reducer(self) -> Reducer:
        """Return how the round's updates are merged."""
        return CoverageMean()

    def weights_to_step(self, server: ServerState) -> Weights:
        """Return the weights that updates refer to and `federation.server_optimizer` steps. Default: the server's.

        Args:
            server: State of the server before the round.
        """
        return server.weights

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Return the server's next state; the engine counts the round itself.

        Args:
            server: State of the server before the round.
            merged: The round's updates after the reduction.
        """
        difference = merged.kind == "difference"
        weights = {
            name: _adopt(old, merged.weights[name], merged.covered.get(name), difference)
            for name, old in server.weights.items()
        }
        return replace(server, weights=weights)

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """Return what the server newly keeps about one participant, given its metrics; None = as before.

        Args:
            server: State of the server after the round; `round` is one more than that of the view.
            view: Facts of the client in the round, its newest upload included.
            report: Metrics of the client's update. With :meth:`simulated_seconds`, also that time, as ``seconds``.
        """
        return None

    def simulated_seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """Return how long a client-round would take on the client's own device; a round takes as long as the slowest.

        Args:
            view: Facts of the client.
            flops: FLOPs of its training, as charged to ``flops/train``.
            bytes_up: Size of its encoded upload in bytes.

        Returns:
            Seconds, of which ``time/simulated`` is made; None = by `federation.devices`, if that is set.
        """
        return None

    def alike(self, server: ServerState, view: ClientView) -> Hashable:
        """Return what must agree for clients to train as one stack (`federation.local_engine: stacked`).

        Clients whose fits differ in more than numbers, such as the layers that they train, cannot be stacked; where
        this says so beforehand, stacks are made of clients that can.

        Args:
            server: State of the server before the round.
            view: Facts of the client.

        Returns:
            Any hashable value. Default: None, so that all clients may be in one stack.
        """
        return None

    def equal_costs(self, server: ServerState, view: ClientView) -> Hashable:
        """Return what must agree, besides the capacity, for clients to have equal costs in `profile`.

        Args:
            server: First state of the server.
            view: Facts of the client.

        Returns:
            Any hashable value. Default: None, so that costs depend on the capacity and the client's data alone.
        """
        return None

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the weights that a client is scored with. Default: those of the message.

        Args:
            message: Message from :meth:`download_for`.
            client: The client, with its memory.
        """
        return message.weights

    def trained(self, message: Message, update: Update) -> Weights:
        """Return what a participant's local training ended with; its scores are ``personal_after/*``.

        A method whose clients keep weights for themselves adds them, as from ``update.memory``: initial weights take
        the place of missing ones.

        Args:
            message: Message that the client received.
            update: Update that :meth:`train` returned.
        """
        if update.kind == "difference":
            return mask_algebra.add(message.weights, update.weights)
        return {**message.weights, **update.weights}

    def finetune(self, message: Message, client: Client) -> Weights | None:
        """Return the client's weights after a last local fit, run once when the rounds are over; None = not done.

        The message is made from the state of the round that `federation.select` chose, else from that of the last
        round. The scores are the table's ``finetuned/*``; the work is not charged to the ledger.

        Args:
            message: Message from :meth:`download_for`.
            client: The client, with its memory.
        """
        return None

    def finetune_for(self, message: Message, client: Client, epochs: int) -> Weights | None:
        """Return the client's weights after a last local fit by `federation.finetune_epochs`, as :meth:`finetune` does.

        A method overrides this if its models are not trained by their losses alone. Default: None, so that the model of
        :meth:`personalize` is trained without the method's callbacks, and its weights that are 0 stay so.

        Args:
            message: Message from :meth:`download_for`.
            client: The client, with its memory.
            epochs: Number of epochs.
        """
        return None

    def profile_state(self, server: ServerState, round: int) -> ServerState:
        """Return what `profile` takes for the server's state at the start of a round, since nothing is trained there.

        A method overrides this if its masks follow a schedule, or if what it sends is 0 at first and thus encoded in
        fewer bytes than later. Default: the first state.

        Args:
            server: State of the server before round 0.
            round: Number of the round, from 0.
        """
        return replace(server, round=round)

    def may_vote(self, message: Message) -> Masks:
        """Return where an upload may vote. Default: where the client holds and may change.

        Args:
            message: Message that the client received.
        """
        return mask_algebra.intersect(message.trainable, message.masks)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the FLOPs and the paper's bytes of one client-round, without training.

        The default charges training as three forward passes of the held density for every local sample, and
        4 bytes for every weight that the masks keep, in both directions; buffers are free, as in the papers. It is of
        one fit: a method whose `train` fits several times overrides it, for example with
        ``super().costs(replace(facts, epochs=2 * facts.epochs))``.

        Args:
            facts: Facts that the cost depends on.
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
    """Return the mean where a client voted, the server's value elsewhere."""
    if difference:  # a mean of differences is zero where nobody voted
        return old + mean
    return mean if covered is None else torch.where(covered, mean, old)
