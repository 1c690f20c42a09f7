"""Hand-made clients, whose engine is a script that notes what an algorithm asks of it, and networks to make narrow."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.exchange.orders import ClientFacts, Order
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.models import MLP, PreResNet18
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.uses import TensorUses, uses_of
from lightning_sparsefl.types import ClientView, CostFacts, FitResult, LayerFlops, Message


class Script:
    """Stands in for the bench: `trained` is what a fit yields, `slopes` what a gradient is."""

    uses, units = TensorUses(), ()

    def __init__(self, trained, slopes=None, initial=None, buffers=()):
        self.trained, self.slopes, self.fits, self.gradients = trained, slopes, [], []
        self.initial, self.buffers, self.epochs = initial or {}, frozenset(buffers), []
        self.kept = []

    def fit(self, client, weights, masks, trainable, callbacks, *, epochs=None, units=None):
        self.fits.append((weights, masks, trainable, callbacks))
        self.epochs.append(epochs)
        self.kept.append(units)
        return FitResult(weights=self.trained, metrics={"train_loss": 0.5}, steps=3)

    def gradient(self, client, weights):
        self.gradients.append(weights)
        return self.slopes


def view_of(client=0, round=0, max_rounds=5, shared=None, num_examples=7, seed=0, capacity=1.0, neighbours=None):
    return ClientView(
        id=client,
        num_examples=num_examples,
        capacity=capacity,
        round=round,
        max_rounds=max_rounds,
        seed=seed,
        shared=shared or {},
        neighbours=neighbours or {},
    )


def order_of(client=0, round=0, max_rounds=5, num_examples=7, capacity=1.0):
    facts = ClientFacts(num_examples=num_examples, capacity=capacity, max_rounds=max_rounds)
    return Order("run", client, round, "train", facts, key=f"key {client}", message=Message(weights={}))


@pytest.fixture
def view():
    return view_of


@pytest.fixture
def client():
    """A client and the script behind it."""

    def make(trained=None, slopes=None, memory=None, initial=None, buffers=(), **facts):
        script = Script(trained, slopes, initial, buffers)
        return Client(order_of(**facts), memory or {}, script), script

    return make


@pytest.fixture
def fleet():
    def make(clients=3, buffers=(), seed=0, **known):
        views = [view_of(client=i, seed=seed) for i in range(clients)]
        known = {"samples": lambda view: view.num_examples, **known}
        return Fleet(views, frozenset(buffers), torch.device("cpu"), **known)

    return make


@pytest.fixture
def facts():
    """Two epochs over seven samples, in batches of four, of a net whose forward pass is 2 * 10 + 2 + 2 * 6 = 34 FLOPs.

    Layer a: 5 x 2 weights and 2 biases; layer b: 3 x 2 weights. Together 18 numbers.
    """
    layers = (LayerFlops(weight="a.weight", macs=10, bias=2), LayerFlops(weight="b.weight", macs=6, bias=0))
    weights = {"a.weight": torch.ones(2, 5), "a.bias": torch.ones(2), "b.weight": torch.ones(3, 2)}

    def make(masks=None, trainable=None, batch_size=4, message=None, **view):
        return CostFacts(
            view=view_of(**view),
            message=message or Message(weights=weights, masks=masks or {}, trainable=trainable or {}),
            layers=layers,
            epochs=2,
            samples=7,
            batch_size=batch_size,
        )

    return make


class ExitModel:
    """What an engine knows of a module with early exits; its units are known where the sides of a sample are given."""

    def __init__(self, module, side=None):
        self.exits, self.uses = module.exits, uses_of(module)
        self.units = () if side is None else find_groups(module, torch.zeros(side))


@pytest.fixture
def start_exits():
    """The model, the server's state, and the views of clients with these capacities."""

    def make(method, module, *capacities, side=None):
        method.adapt(module)
        model = ExitModel(module, side)
        views = [view_of(i, capacity=capacity) for i, capacity in enumerate(capacities)]
        weights = {name: value.detach() for name, value in module.named_parameters()}
        return model, method.init(weights, Fleet(views, frozenset(), torch.device("cpu"), model)), views

    return make


class Network:
    """A network whose units are known, as the engine knows them."""

    uses = TensorUses()

    def __init__(self, module, side):
        self.module, self.sample = module, torch.zeros(1, *side)
        self.units = find_groups(module, self.sample)

    def start(self, method, *capacities):
        """The server's state and the views of clients with these capacities."""
        views = [view_of(i, capacity=capacity) for i, capacity in enumerate(capacities)]
        weights = {name: value.detach() for name, value in self.module.named_parameters()}
        return method.init(weights, Fleet(views, frozenset(), torch.device("cpu"), self)), views

    def facts(self, method, server, person):
        """Two epochs over five samples."""
        message = method.download(server, person)
        layers = count_layers(self.module, self.sample)
        return CostFacts(view=person, message=message, layers=layers, epochs=2, samples=5, batch_size=4, model=self)

    @staticmethod
    def sent(message):
        """How many numbers a message carries."""
        kept = counts(message.masks)
        return sum(kept.get(name, value.numel()) for name, value in message.weights.items())

    def check_costs(self, method, server, person, kept):
        """What a client is charged is the work and the size of the narrow networks with the units `kept`."""
        costs = method.costs(self.facts(method, server, person))
        narrow = [cut(self.module, self.units, units) for units in kept]
        work = sum(2 * layer.macs + layer.bias for net in narrow for layer in count_layers(net, self.sample))
        work -= (len(kept) - 1) * 4  # the common bias of the four logits is counted once
        assert costs.flops_analytic == costs.flops_paper == pytest.approx(2 * 5 * 3 * work)
        weights = sum(p.numel() for net in narrow for p in net.parameters()) - (len(kept) - 1) * 4
        assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * weights


@pytest.fixture
def network():
    return Network


@pytest.fixture(scope="module")
def preresnet():
    return Network(PreResNet18(num_classes=10), (3, 32, 32))


@pytest.fixture
def mlp():
    """16 and 8 hidden units, 4 classes."""
    return Network(MLP(num_classes=4, sample_shape=(1, 3, 3), hidden=(16, 8)), (1, 3, 3))
