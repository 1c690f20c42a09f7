"""Clients whose losses are quadratics of one number, so that rounds can be computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import torch

from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.orders import ClientFacts, Order
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import ClientView, FitResult, Merged, Message

CURVES = ((1.0, 1.0), (3.0, -1.0))
"""Curvature and minimiser of the two clients' losses: (w - 1)^2 / 2 and 3 (w + 1)^2 / 2."""


class Quadratic(L.LightningModule):
    """A user's module with one weight."""

    def __init__(self, start):
        super().__init__()
        self.w = torch.nn.Parameter(start.clone())


class Descent:
    """The local work of a client: steps of torch's SGD, with the method's callbacks around each."""

    buffers: frozenset[str] = frozenset()

    def __init__(self, curve, steps, lr, momentum=0.0):
        self.curve, self.steps, self.sgd = curve, steps, {"lr": lr, "momentum": momentum}

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        module, (curvature, lowest) = Quadratic(weights["w"]), self.curve
        optimizer = torch.optim.SGD(module.parameters(), **self.sgd)
        trainer = SimpleNamespace(
            optimizers=[optimizer],
            callbacks=list(callbacks),
            lr_scheduler_configs=[],
            gradient_clip_val=None,
            precision_plugin=None,
        )
        self._call(callbacks, "on_fit_start", trainer, module)
        for _ in range(self.steps):
            optimizer.zero_grad()
            (curvature / 2 * (module.w - lowest) ** 2).sum().backward()
            self._call(callbacks, "on_before_optimizer_step", trainer, module, optimizer)
            optimizer.step()
        return FitResult(weights={"w": module.w.detach()}, metrics={}, steps=self.steps, callbacks=callbacks)

    @staticmethod
    def _call(callbacks, hook, *args):
        for callback in callbacks:
            getattr(callback, hook)(*args)


class Exact(Descent):
    """Local work that ends at the minimum of the loss with the method's linear and proximal terms."""

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        (curvature, lowest), linear, strength, anchor = self.curve, 0.0, 0.0, weights["w"]
        for callback in callbacks:
            linear = linear + callback.offset["w"] if hasattr(callback, "offset") else linear
            strength = getattr(callback, "strength", strength)
        end = (curvature * lowest - linear + strength * anchor) / (curvature + strength)
        return FitResult(weights={"w": end}, metrics={}, steps=1, callbacks=callbacks)


def rounds(method, workers, count, start=0.0):
    """Run rounds in which all clients take part; return the server's states, and the clients' memories."""
    views = [ClientView(k, 1, 1.0, 0, count, 0) for k in range(len(workers))]
    steps = [worker.steps for worker in workers]
    fleet = Fleet(views, frozenset(), torch.device("cpu"), batches=lambda view: steps[view.id])
    server, states = method.init({"w": torch.tensor([start], dtype=torch.float64)}, fleet), []
    memories = [{} for _ in workers]
    for number in range(count):
        updates = []
        for view, worker in zip(views, workers, strict=True):
            facts = ClientFacts(num_examples=1, capacity=1.0, max_rounds=count)
            order = Order("run", view.id, number, "train", facts, key=f"{view.id}", message=Message(weights={}))
            updates.append(method.train(method.download(server, view), Client(order, memories[view.id], worker)))
            memories[view.id] = updates[-1].memory or memories[view.id]
        server = method.aggregate(server, merged(updates))
        states.append(server)
    return states, memories


def merged(updates):
    """The mean of updates with equal weights."""
    share = 1 / len(updates)
    extra = {
        key: {name: sum(share * update.extra[key][name].double() for update in updates) for name in tree}
        for key, tree in updates[0].extra.items()
    }
    mean = {name: sum(share * update.weights[name] for update in updates) for name in updates[0].weights}
    reports = {number: {} for number in range(len(updates))}
    return Merged(weights=mean, covered={}, kind=updates[0].kind, extra=extra, reports=reports)


def path(states):
    """The server's weight after each round."""
    return [state.weights["w"].item() for state in states]
