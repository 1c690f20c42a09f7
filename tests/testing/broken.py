"""Methods, callbacks, samplers, reducers and partitions that break one promise each, and two that keep them all."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_sparsefl.callbacks import ProximalTerm, StepMeter
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.data import IID, Partition
from lightning_sparsefl.federated import CohortSampler, CoordinateReducer, FederatedAlgorithm, Reducer, Uniform
from lightning_sparsefl.federated.aggregation.grid import Grid
from lightning_sparsefl.federated.aggregation.reducers import Accumulator
from lightning_sparsefl.types import Update


@dataclass(frozen=True, kw_only=True)
class Sound(FederatedAlgorithm):
    """Federated averaging under a name of its own."""

    step: float = 1.0
    """Step of the server."""


@dataclass(frozen=True, kw_only=True)
class ReadsTheClock(FederatedAlgorithm):
    """Adds the time to a weight."""

    def aggregate(self, server, merged):
        state = super().aggregate(server, merged)
        return replace(state, weights={name: w + time.perf_counter() * 1e-6 for name, w in state.weights.items()})


@dataclass(frozen=True, kw_only=True)
class LooksAtTheRank(FederatedAlgorithm):
    """Trains differently on another rank than the first."""

    def train(self, message, client):
        update = super().train(message, client)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return replace(update, weights={name: w * (1 + rank) for name, w in update.weights.items()})


@dataclass(frozen=True, kw_only=True)
class Forgets(FederatedAlgorithm):
    """Counts rounds in an attribute that no checkpoint has."""

    def aggregate(self, server, merged):
        count = getattr(self, "count", 0) + 1
        object.__setattr__(self, "count", count)
        state = super().aggregate(server, merged)
        return replace(state, weights={name: w / count for name, w in state.weights.items()})


ROUNDS: dict[str, int] = {}
"""A variable of the module, which ends with the process."""


@dataclass(frozen=True, kw_only=True)
class CountsInAModule(FederatedAlgorithm):
    """Counts rounds in a variable of its module."""

    def aggregate(self, server, merged):
        count = ROUNDS["count"] = ROUNDS["count"] + 1 if server.round else 1
        state = super().aggregate(server, merged)
        return replace(state, weights={name: w / count for name, w in state.weights.items()})


@dataclass(frozen=True, kw_only=True)
class MutatesItsRecord(FederatedAlgorithm):
    """Counts its rounds in the tensor that the server keeps about a client."""

    def download(self, server, view):
        view.shared.get("rounds", torch.zeros(1)).add_(1)
        return super().download(server, view)

    def train(self, message, client):
        return replace(super().train(message, client), shared={"rounds": torch.zeros(1)})


@dataclass(frozen=True, kw_only=True)
class TrainsUnderMasksOfItsOwn(FederatedAlgorithm):
    """Holds masks that the message does not have, so that its FLOPs are charged as dense."""

    def train(self, message, client):
        masks = {name: weight.abs() > 0.01 for name, weight in message.weights.items() if weight.ndim > 1}
        return Update(weights=client.fit(message.weights, masks).weights, weight=client.num_examples)


@dataclass(frozen=True, kw_only=True)
class TrainsDense(FederatedAlgorithm):
    """Sends masks, and trains without them."""

    def init(self, weights, fleet):
        masks = {name: torch.arange(w.numel()).view_as(w) % 2 == 0 for name, w in weights.items() if w.ndim > 1}
        return replace(super().init(weights, fleet), masks=masks)

    def train(self, message, client):
        result = client.fit(message.weights, callbacks=self.callbacks(message, client))
        return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)


@dataclass(frozen=True, kw_only=True)
class LeavesItsCallbacksOut(FederatedAlgorithm):
    """Has callbacks, and trains without them."""

    def callbacks(self, message, client):
        return [ProximalTerm(strength=0.1)]

    def train(self, message, client):
        result = client.fit(message.weights, message.masks)
        return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)


LATEST: dict[str, StepMeter] = {}


@dataclass(frozen=True, kw_only=True)
class KeepsItsCallbackForAll(FederatedAlgorithm):
    """Reads a callback after the fit from a variable that the clients of a stack share."""

    def callbacks(self, message, client):
        LATEST["meter"] = StepMeter(mu=0)
        return [LATEST["meter"]]

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, metrics={**update.metrics, "path": LATEST["meter"].path})


@dataclass(frozen=True, kw_only=True)
class MutatesItsMessage(FederatedAlgorithm):
    """Scales the server's weights in place."""

    def train(self, message, client):
        message.weights["net.4.bias"].mul_(0.5)
        return super().train(message, client)


@dataclass(frozen=True, kw_only=True)
class MutatesItsMemory(FederatedAlgorithm):
    """Counts its rounds in the tensor of the client's record."""

    def train(self, message, client):
        rounds = client.memory.get("rounds", torch.zeros(1))
        rounds += 1
        return replace(super().train(message, client), memory={"rounds": rounds})


@dataclass(frozen=True, kw_only=True)
class MutatesTheState(FederatedAlgorithm):
    """Decays the server's weights in place."""

    def aggregate(self, server, merged):
        for weight in server.weights.values():
            weight.mul_(0.9)
        return super().aggregate(server, merged)


@dataclass(frozen=True, kw_only=True)
class LearnsNothing(FederatedAlgorithm):
    """Sends back what it got."""

    def train(self, message, client):
        return replace(super().train(message, client), weights=dict(message.weights))


@dataclass(frozen=True, kw_only=True)
class KeepsItsHead(FederatedAlgorithm):
    """Keeps a bias on the client, and does not say so in `trained`."""

    def download(self, server, view):
        message = super().download(server, view)
        return replace(message, weights={name: w for name, w in message.weights.items() if name != "net.4.bias"})

    def train(self, message, client):
        result = client.fit({**message.weights, **client.memory})
        shared = {name: w for name, w in result.weights.items() if name != "net.4.bias"}
        return Update(weights=shared, weight=client.num_examples, memory={"net.4.bias": result.weights["net.4.bias"]})

    def personalize(self, message, client):
        return {**message.weights, **client.memory}


@dataclass(frozen=True, kw_only=True)
class RemembersOutsideOfMemory(FederatedAlgorithm):
    """Asks in the client's hook what only the server's process knows."""

    def download(self, server, view):
        object.__setattr__(self, "scale", 0.5)
        return super().download(server, view)

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, weights={name: w * getattr(self, "scale", 1.0) for name, w in update.weights.items()})


class Rows(MaskingCallback):
    """Keeps every other weight of each layer."""

    def first_masks(self, weights):
        return {name: torch.arange(w.numel()).view(w.shape) % 2 > 0 for name, w in weights.items()}


class ForgetsAverages(Callback):
    """Zeroes after every step what its masks leave out, but not in averages of the weights."""

    def __init__(self):
        self.masks = {}

    def on_fit_start(self, trainer, pl_module):
        self.masks = self.masks or {"net.4.weight": torch.arange(pl_module.net[4].weight.numel()).view(-1, 8) % 2 > 0}
        self.zero(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.zero(pl_module)

    @torch.no_grad()
    def zero(self, module):
        for name, mask in self.masks.items():
            module.get_parameter(name).mul_(mask)

    def state_dict(self):
        return {"masks": self.masks}

    def load_state_dict(self, state_dict):
        self.masks = dict(state_dict["masks"])


class LetsWeightsGrow(ForgetsAverages):
    """Zeroes the weights at the start only."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        """Do nothing."""


class CountsAgain(Callback):
    """Starts to count anew when a fit is resumed."""

    def __init__(self):
        self.steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for parameter in pl_module.parameters():
            parameter.grad.div_(self.steps)


class CountsWithinAnEpoch(Callback):
    """Counts the steps of an epoch in an attribute that no checkpoint has."""

    def on_train_epoch_start(self, trainer, pl_module):
        self.steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps = getattr(self, "steps", 0) + 1
        for parameter in pl_module.parameters():
            parameter.grad.div_(self.steps)


class LeavesAHook(Callback):
    """Doubles what a layer returns, also after the fit."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.net[5].register_forward_hook(lambda layer, inputs, output: 2 * output)


class NeedsATrainer(Callback):
    """Does in a Trainer what it does not in a client."""

    def on_train_start(self, trainer, pl_module):
        if type(trainer).__name__ == "Trainer":
            with torch.no_grad():
                pl_module.net[0].weight.zero_()


class LeavesNames(Callback):
    """Leaves a parameter frozen."""

    def on_fit_end(self, trainer, pl_module):
        pl_module.net[0].weight.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class DrawsFromTheGlobalGenerator(CohortSampler):
    """Ignores the generator that it gets."""

    def draw(self, state, candidates, rng):
        return torch.randperm(len(candidates.clients))[: candidates.count].tolist()


@dataclass(frozen=True, kw_only=True)
class ChangesItsState(Uniform):
    """Counts rounds in the state that it gets."""

    def start(self):
        return {"rounds": [0]}

    def learn(self, state, candidates, seen):
        state["rounds"][0] += 1
        return state


@dataclass(frozen=True, kw_only=True)
class CountsItself(Uniform):
    """Counts rounds in an attribute that no checkpoint has."""

    def learn(self, state, candidates, seen):
        object.__setattr__(self, "rounds", getattr(self, "rounds", 0) + 1)
        return {"rounds": self.rounds}


@dataclass(frozen=True)
class Smallest(CoordinateReducer):
    """Takes the smallest vote times its factor, which is 0."""

    factor: float = 0.0

    def merge(self, votes):
        return self.factor * votes[0]


@dataclass(frozen=True)
class CountsMerges(CoordinateReducer):
    """Counts in an attribute that no checkpoint has."""

    def merge(self, votes):
        object.__setattr__(self, "count", getattr(self, "count", 0) + 1)
        return votes.nanmean(0) / self.count


class _OfAll(Accumulator):
    def add(self, update, message, num_examples):
        super().add(replace(update, votes={}), message, num_examples)


@dataclass(frozen=True)
class MergesWhatIsNotSent(Reducer):
    """Averages weights for which clients do not vote as well."""

    def start(self, layout, server, total_weight):
        return _OfAll(layout, Grid.of(layout, server, total_weight), silence_counts=False)


@dataclass(frozen=True)
class CountsRanks(CoordinateReducer):
    """Multiplies by the number of ranks."""

    def merge(self, votes):
        return votes.nanmean(0) * (dist.get_world_size() if dist.is_initialized() else 1)


@dataclass
class CanBeChanged(Partition):
    """Is not frozen."""

    def assign(self, labels, num_clients, rng):
        return list(torch.randperm(len(labels), generator=rng).tensor_split(num_clients))


@dataclass(frozen=True)
class GivesTwice(Partition):
    """Gives each client all examples."""

    def assign(self, labels, num_clients, rng):
        return [torch.arange(len(labels))] * num_clients


@dataclass(frozen=True)
class DrawsWithNumPy(Partition):
    """Ignores the generator that it gets."""

    def assign(self, labels, num_clients, rng):
        return list(torch.from_numpy(np.random.permutation(len(labels))).tensor_split(num_clients))


@dataclass(frozen=True)
class SeedsWithAHash(IID):
    """Seeds with the hash of a text, which Python salts in each process."""

    def assign(self, labels, num_clients, rng):
        return super().assign(labels, num_clients, rng.manual_seed(hash("site") % 2**31))


@dataclass(frozen=True)
class MovesAGenerator(IID):
    """Draws from torch's global generator what it does not use."""

    def assign(self, labels, num_clients, rng):
        torch.rand(1)
        return super().assign(labels, num_clients, rng)


@dataclass(frozen=True)
class WritesLabels(IID):
    """Counts labels from 0."""

    def assign(self, labels, num_clients, rng):
        labels.sub_(1)
        return super().assign(labels, num_clients, rng)


@dataclass(frozen=True)
class DeniesLabels(IID):
    """Sorts by labels."""

    def assign(self, labels, num_clients, rng):
        return list(labels.argsort(stable=True).tensor_split(num_clients))
