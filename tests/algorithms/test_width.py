"""HeteroFL and Split-Mix: who holds what, what it costs, and what is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, HeteroFL, PerFedMask, SplitMix
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.data import FederatedDigits
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.models import MLP, LeNet5, PreResNet18
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.width import block_units, prefix_units
from lightning_sparsefl.types import ClientView, CostFacts

CPU = torch.device("cpu")


class Model:
    """Knows the units of a module, as the engine does."""

    def __init__(self, module, side):
        self.module, self.sample = module, torch.zeros(1, *side)
        self.units = find_groups(module, self.sample)

    def start(self, method, *capacities):
        views = [view(i, capacity) for i, capacity in enumerate(capacities)]
        weights = {name: value.detach() for name, value in self.module.named_parameters()}
        return method.init(weights, Fleet(views, frozenset(), CPU, self)), views

    def facts(self, method, server, person):
        message = method.download(server, person)
        layers = count_layers(self.module, self.sample)
        return CostFacts(view=person, message=message, layers=layers, epochs=1, samples=1, batch_size=1)


def view(client, capacity, round=0):
    return ClientView(id=client, num_examples=7, capacity=capacity, round=round, max_rounds=9, seed=0)


def sent(message):
    kept = counts(message.masks)
    return sum(kept.get(name, value.numel()) for name, value in message.weights.items())


@pytest.fixture(scope="module")
def preresnet():
    return Model(PreResNet18(num_classes=10), (3, 32, 32))


@pytest.fixture
def mlp():
    return Model(MLP(num_classes=4, sample_shape=(1, 3, 3), hidden=(16, 8)), (1, 3, 3))


def test_published_means_of_heterofl(preresnet):
    """PerFedMask, Table 1: 5.674 M."""
    method = HeteroFL()
    server, views = preresnet.start(method, 0.125, 1.0)
    sizes = [sent(method.download(server, person)) for person in views]
    assert sizes == [176_178, 11_172_170]
    small = cut(preresnet.module, preresnet.units, prefix_units(preresnet.units, 0.125))
    assert sum(p.numel() for p in small.parameters()) == sizes[0]
    assert f"{sum(sizes) / 2e6:.3f}" == "5.674"


def test_published_means_of_splitmix(preresnet):
    """PerFedMask, Table 1: .793 M; eight biases of the head are one here."""
    method = SplitMix()
    server, views = preresnet.start(method, 0.125, 1.0)
    sizes = [sent(method.download(server, person)) for person in views]
    assert sizes == [176_178, 8 * 176_178 - 7 * 10]
    assert f"{sum(sizes) / 2e6:.3f}" == "0.793"


def test_a_client_has_the_largest_rate_within_its_capacity():
    method = HeteroFL(rates=(0.25, 1.0, 0.5))
    assert [method.rate(capacity) for capacity in (0.25, 0.4, 0.5, 0.99, 1.0)] == [0.25, 0.25, 0.5, 0.5, 1.0]
    with pytest.raises(InvalidOption, match=r"the capacity 0.2, and the smallest of `algorithm.rates` is 0.25"):
        method.rate(0.2)


@pytest.mark.parametrize("method", [HeteroFL(), SplitMix(bases=4)])
@pytest.mark.parametrize("capacity", [0.25, 0.5, 1.0])
def test_flops_are_those_of_the_narrow_networks(mlp, method, capacity):
    server, (person, _) = mlp.start(method, capacity, 1.0)
    costs = method.costs(mlp.facts(method, server, person))
    if isinstance(method, HeteroFL):
        kept = [prefix_units(mlp.units, capacity)]
    else:
        kept = [block_units(mlp.units, base, 4) for base in method.bases_of(person)]
    layers = [count_layers(cut(mlp.module, mlp.units, units), mlp.sample) for units in kept]
    work = sum(2 * layer.macs + layer.bias for net in layers for layer in net)
    work -= (len(kept) - 1) * 4  # the common bias of the four logits is counted once
    assert costs.flops_analytic == costs.flops_paper == pytest.approx(3 * work)
    weights = sum(p.numel() for units in kept for p in cut(mlp.module, mlp.units, units).parameters())
    weights -= (len(kept) - 1) * 4
    assert costs.bytes_down_paper == costs.bytes_up_paper == 4 * weights


def test_base_networks_share_nothing_and_take_turns(mlp):
    method = SplitMix(bases=4)
    server, _ = mlp.start(method, 0.25, 1.0)
    masks = [method.download(server, view(client, 0.25)).masks for client in range(4)]
    for name, union in server.masks.items():
        assert torch.equal(sum(tree[name].int() for tree in masks), union.int())
    assert [method.bases_of(view(1, 0.5, round=t)) for t in range(4)] == [[1, 2], [2, 3], [0, 3], [0, 1]]
    assert method.bases_of(view(3, 0.1)) == [3]
    for client in range(4):
        held = method.download(server, view(client, 0.25)).extra["bases"]
        assert {name: tensor.tolist() for name, tensor in held.items()} == {"net.fc3.weight": [client]}


def test_norms_over_several_base_networks_are_refused_by_name():
    module = L.LightningModule()
    module.norm = nn.GroupNorm(4, 16)
    SplitMix(bases=2).adapt(module)
    with pytest.raises(InvalidOption, match="`norm` normalizes over the units of several base networks"):
        SplitMix(bases=8).adapt(module)
    module.norm = nn.LayerNorm(16)
    with pytest.raises(InvalidOption, match="`norm` normalizes"):
        SplitMix(bases=2).adapt(module)


def test_too_many_base_networks_are_refused_by_name():
    with pytest.raises(InvalidOption, match=r"`net.conv1` has \d+ units, expected at least one for each of 100"):
        Model(LeNet5(num_classes=10), (1, 28, 28)).start(SplitMix(bases=100), 1.0)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        (HeteroFL, {"rates": ()}, "one or more numbers in"),
        (HeteroFL, {"rates": (0.5, 2.0)}, "one or more numbers in"),
        (HeteroFL, {"finetune_epochs": -1}, "a whole number >= 0"),
        (SplitMix, {"bases": 0}, "a whole number from 1 to 254"),
        (SplitMix, {"bases": 255}, "a whole number from 1 to 254"),
        (SplitMix, {"finetune_epochs": -1}, "a whole number >= 0"),
        (PerFedMask, {"base": FedAvg()}, "expected `HeteroFL` or `SplitMix`"),
    ],
)
def test_options_out_of_range_are_refused(method, options, expected):
    with pytest.raises(InvalidOption, match=expected):
        method(**options)


def test_plans_under_a_base_are_made_by_width(preresnet):
    method = PerFedMask(base=HeteroFL())
    server, views = preresnet.start(method, 0.125, 0.125, 1.0, 1.0)
    for person in views:
        message = method.download(server, person)
        kept = counts(message.masks)
        body = {n: kept.get(n, w.numel()) for n, w in message.weights.items() if not n.startswith("net.fc.")}
        trained = sum(size for name, size in body.items() if name not in message.trainable)
        assert {"net.fc.weight", "net.fc.bias"} <= set(message.trainable)
        if person.capacity == 1:
            assert trained == sum(body.values()) == 11_167_040
        else:
            assert 0.1 * sum(body.values()) < trained <= 0.125 * sum(body.values())
        costs = method.costs(preresnet.facts(method, server, person))
        assert costs.bytes_up_paper == 4 * trained


@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(finetune_epochs=2),
        SplitMix(bases=4, finetune_epochs=2),
        PerFedMask(base=SplitMix(bases=4), masking="sequential", finetune_epochs=2),
    ],
)
def test_a_whole_run_on_two_ranks(tmp_path, method):
    """Weak and strong clients, fine-tuning at the end, and the bytes of one rank."""
    states = []
    for devices in (1, 2):
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            algorithm=method,
            federation=Federation(clients_per_round=4, capacities=[0.25, 0.5, 1.0], execution="cut"),
            accelerator="cpu",
            devices=devices,
            strategy="client_parallel_fork" if devices > 1 else "auto",
            max_rounds=2,
            logger=False,
            seed=0,
            enable_progress_bar=False,
            default_root_dir=str(tmp_path / str(devices)),
        )
        summary = trainer.fit(
            MLP(hidden=(16, 8), sample_shape=(1, 8, 8)), FederatedDigits(num_clients=6, val_fraction=0.2)
        )
        assert summary["finetuned/val_acc"] > summary["selected/val_acc"]
        states.append(torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
