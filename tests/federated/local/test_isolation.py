"""What one client's code changes in the module is not there for the next client."""

from __future__ import annotations

import collections
import copy
import logging
import math
import os
import weakref
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import ClientDataModules, FederatedBlobs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local import isolation, tensor_contents
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.isolation import ModuleState, isolate_metrics
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.local_options import LocalOptions
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates
from lightning_sparsefl.testing.contents import rows


class Factor(nn.Module):
    factor = 2.0


class Net(L.LightningModule):
    """Does something to itself in the first batch of client 0, which has the first rounds of each rank."""

    def __init__(self, change: str = "nothing") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.change, self.scale, self.seen, self.gone = change, 1.0, [0], 1
        self.nested = Factor()
        self.on, self._mean = True, 1.0
        self.register_buffer("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.float())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.on and batch_idx == 0:
            CHANGES[self.change](self)
        logits = self(batch[0]) * self.scale * self.nested.factor * len(self.seen)
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def delete(module: Net) -> None:
    module.__dict__.pop("gone", None)


CHANGES = {
    "nothing": lambda module: None,
    "frozen": lambda module: module.net[1].requires_grad_(False),
    "mode": lambda module: module.net[3].eval(),
    "forward hook": lambda module: module.net.register_forward_hook(lambda m, i, out: out * 2),
    "pre-hook": lambda module: module.net[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "gradient hook": lambda module: module.net[1].weight.register_hook(lambda grad: grad * 2),
    "number": lambda module: setattr(module, "scale", 3.0),
    "submodule's number": lambda module: setattr(module.nested, "factor", 3.0),
    "layer's option": lambda module: setattr(module.net[3], "p", 0.9),
    "momentum": lambda module: setattr(module.net[2], "momentum", 0.9),
    "new attribute": lambda module: setattr(module, "fresh", torch.ones(3)),
    "private": lambda module: setattr(module, "_mean", 3.0),
    "new private attribute": lambda module: setattr(module.nested, "_fresh", 3.0),
    "new buffer": lambda module: module.register_buffer("late", torch.ones(2)),
    "new buffer that is not saved": lambda module: module.net.register_buffer("late", torch.ones(2), persistent=False),
    "filled buffer": lambda module: setattr(module, "empty", torch.ones(2)),
    "deleted": delete,
    "example": lambda module: setattr(module, "example_input_array", torch.ones(1, 8)),
    "strict loading": lambda module: setattr(module, "strict_loading", False),
    "another list": lambda module: setattr(module, "seen", [0, 1, 2]),
}


def facts(module: Net) -> dict[str, Any]:
    """Everything that a client could leave behind."""
    return {
        "flags": [p.requires_grad for p in module.parameters()],
        "gradient hooks": [len(p._backward_hooks or {}) for p in module.parameters()],
        "modes": [m.training for m in module.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
        "own": {key: value for key, value in vars(module).items() if key not in isolation.OF_LIGHTNING},
        "nested": sorted(vars(module.nested)),
        "buffers": [(name, buffer is None) for m in module.modules() for name, buffer in m._buffers.items()],
        "not saved": [m._non_persistent_buffers_set for m in module.modules()],
        "others": (module.nested.factor, module.net[3].p, module.net[2].momentum),
    }


@pytest.fixture
def loader() -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(4, (8,))), batch_size=4)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("engine", [FastEngine, LightningEngine])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_a_module_comes_back_as_it_was(engine: Any, change: str, loader: DataLoader) -> None:
    module = Net(change)
    module.net[1].register_forward_hook(lambda *_: None)  # one of the user's
    before = facts(module)
    engine(Fabric(accelerator="cpu", devices=1), LocalOptions()).fit(module, loader)
    assert facts(module) == before


def test_a_hook_that_a_client_removes_comes_back() -> None:
    module, calls = Net(), []
    handle = module.net.register_forward_hook(lambda *_: calls.append(1))
    state = ModuleState(module)
    handle.remove()
    state.restore()
    module.net(torch.ones(2, 8))
    assert calls == [1]


def test_a_gradient_hook_that_a_client_removes_comes_back() -> None:
    module, calls = Net(), []
    handle = module.net[1].weight.register_hook(lambda _: calls.append(1))
    state = ModuleState(module)
    handle.remove()
    state.restore()
    module.net(torch.ones(2, 8)).sum().backward()
    assert calls == [1]


def test_the_contents_of_containers_come_back_with_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    caplog.set_level(logging.INFO)
    module = Net()
    module.found = {"losses": [0.5], "names": {"a"}, "last": collections.deque([1], maxlen=2)}
    state = ModuleState(module)
    module.found["losses"].append(1.5)
    module.found["names"].add("b")
    module.found["last"].extend([2, 3])
    module.found["number"] = 2
    module.seen.append(1)
    state.restore()
    assert module.found == {"losses": [0.5], "names": {"a"}, "last": collections.deque([1])}
    assert module.found["last"].maxlen == 2
    assert module.seen == [0]
    said = [record.message for record in caplog.records]
    assert all(any(f"`Net.{name}`, which are restored" in text for text in said) for name in ("found", "seen"))


def attributes_with_numbers() -> dict[str, Any]:
    return {
        "tensor": torch.tensor([0.5, math.nan]),
        "large": torch.zeros(5000),
        "leaf": torch.zeros(3, requires_grad=True),
        "array": np.array([1.0, math.nan]),
        "queue": [torch.zeros(2), {"last": torch.ones(2)}],
        "pair": (torch.zeros(2), [torch.ones(2)]),
        "typed": torch.zeros(2),
        "shaped": np.zeros((2, 3)),
        "named": np.array(["a", "b"]),
    }


def write_numbers(module: Net) -> None:
    with torch.no_grad():
        module.tensor.mul_(2)
        module.tensor.data.add_(1)
        module.large.data[:10] = 1
        module.pair[0].add_(1)
        module.typed.data = torch.ones(3, dtype=torch.float64)
        module.shaped.resize(4, refcheck=False)
        module.named[0] = "c"
        module.leaf.add_(1)
        module.leaf.grad = torch.ones(3)
        module.array += 1
        module.queue[0].add_(1)
        module.queue[1]["last"].resize_(3)
        module.net[1].weight.add_(1)


def test_the_numbers_of_tensors_and_arrays_come_back_for_each_client_with_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    caplog.set_level(logging.INFO)
    module = Net()
    for name, value in attributes_with_numbers().items():
        setattr(module, name, value)
    module.view = module.net[1].weight.detach()[0]  # of what the client learns
    weight, before = module.net[1].weight.detach().clone(), attributes_with_numbers()
    for client in range(1, 3):
        state = ModuleState(module)
        write_numbers(module)
        state.restore()
        for name in ("tensor", "large", "leaf", "array", "typed", "shaped", "named"):
            np.testing.assert_array_equal(getattr(module, name).tolist(), before[name].tolist())
            assert getattr(module, name).dtype == before[name].dtype
        assert module.leaf.grad is None
        assert torch.equal(module.pair[0], torch.zeros(2))
        assert torch.equal(module.queue[0], torch.zeros(2))
        assert torch.equal(module.queue[1]["last"], torch.ones(2))
        torch.testing.assert_close(module.net[1].weight.detach(), weight + client)
    said = [record.message for record in caplog.records]
    for name in ("tensor", "large", "leaf", "array", "queue", "pair", "typed", "shaped", "named"):
        assert sum(f"numbers of `Net.{name}`, which are restored" in text for text in said) == 1
    assert not any("Net.view" in text for text in said)


def test_a_write_with_a_graph_is_undone_with_its_graph() -> None:
    module = Net()
    module.last = torch.zeros(4)
    for _ in range(2):
        state = ModuleState(module)
        module.last.copy_(module(torch.ones(2, 8)).mean(0))
        assert module.last.grad_fn is not None
        state.restore()
        assert module.last.grad_fn is None
        assert torch.equal(module.last, torch.zeros(4))


def test_what_a_client_learns_is_not_overwritten_through_an_attribute_that_shares_its_memory() -> None:
    module = Net()
    module.last, module.flat, module.array = torch.zeros(8, 8), torch.zeros(64), module.net[1].weight.detach().numpy()
    weight = module.net[1].weight.detach() + 1
    for _ in range(2):
        state = ModuleState(module)
        with torch.no_grad():
            module.net[1].weight.copy_(weight)
        module.last.data = module.net[1].weight.data  # a memory that it did not have before
        state.restore()
        assert torch.equal(module.net[1].weight, weight)
        assert torch.equal(module.last, torch.zeros(8, 8))
    state = ModuleState(module)
    module.net[1].weight.data = module.flat.view(8, 8)  # as a module that keeps its weights in one vector
    with torch.no_grad():
        module.net[1].weight.add_(1)
    state.restore()
    assert torch.equal(module.net[1].weight, torch.ones(8, 8))


@pytest.mark.parametrize("with_base", [False, True])
def test_a_view_that_is_written_with_a_graph_has_its_numbers_back(with_base: bool) -> None:
    module = Net()
    rows = torch.zeros(2, 4)
    module.view = rows[0]
    if with_base:
        module.rows = rows
    for _ in range(2):
        state = ModuleState(module)
        module.view.copy_(module(torch.ones(2, 8)).mean(0))
        state.restore()
        assert torch.equal(module.view, torch.zeros(4))
        assert torch.equal(rows, torch.zeros(2, 4))


def test_a_tensor_that_is_transposed_in_place_beside_a_view_has_its_numbers_back() -> None:
    module = Net()
    module.table = torch.arange(6.0).view(3, 2)
    module.row = module.table[1]
    for _ in range(2):
        state = ModuleState(module)
        module.table.t_().add_(1)
        state.restore()
        assert torch.equal(module.table, torch.arange(6.0).view(3, 2))
        module.row.add_(0)
        assert module.row.tolist() == [2, 3]
        assert module.row.data_ptr() == module.table[1].data_ptr()


@pytest.mark.parametrize("flag", [True, False])
def test_whether_a_tensor_requires_a_gradient_comes_back(flag: bool) -> None:
    module = Net()
    module.centre = torch.zeros(4, requires_grad=flag)
    state = ModuleState(module)
    module.centre.requires_grad_(not flag)
    state.restore()
    assert module.centre.requires_grad is flag
    module.centre.detach_()
    state.restore()
    assert module.centre.requires_grad is flag


def test_a_gradient_comes_back_to_a_tensor_of_another_shape() -> None:
    module = Net()
    module.centre = torch.zeros(4, requires_grad=True)
    module.centre.grad = before = torch.ones(4)
    state = ModuleState(module)
    module.centre.grad = None
    module.centre.data = torch.zeros(2)
    state.restore()
    assert module.centre.shape == (4,)
    assert module.centre.grad is before


def test_a_tensor_without_numbers_is_told_from_a_buffer_without_any() -> None:
    module = Net()
    module.register_buffer("none", torch.empty(0))
    module.queue = torch.empty(0)
    state = ModuleState(module)
    module.queue.resize_(2).zero_()
    state.restore()
    assert module.queue.shape == (0,)


def test_a_tensor_whose_memory_a_client_frees_has_its_numbers_back() -> None:
    module = Net()
    module.table = torch.ones(5)
    state = ModuleState(module)
    module.table.untyped_storage().resize_(0)
    state.restore()
    assert torch.equal(module.table, torch.ones(5))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_odd_arrays_and_tensors_that_nobody_writes_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    module = Net()
    module.odd = {
        "missing": np.array([math.nan, 1.0]),
        "dates": np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        "objects": np.array([[1], None], dtype=object),
        "mixed": np.zeros(2, dtype=[("a", "f4"), ("b", object)]),
        "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
        "fixed": np.broadcast_to(np.zeros(1), (3,)),
        "half": torch.zeros(2, dtype=torch.complex32),
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.zeros(0),
        "expanded": torch.zeros(1).expand(3),
        "meta": torch.zeros(2, device="meta"),
        "unknown": torch.tensor(math.nan),
    }
    module.data = [torch.zeros(1) for _ in range(2000)]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            ModuleState(module).restore()
    assert caplog.records == []


def test_what_a_user_writes_between_two_runs_stays() -> None:
    module = Net()
    module.table = torch.zeros(100_000)
    for value in (0.0, 7.0):
        module.table.data.fill_(value)
        tensor_contents.forget_copies()  # as a worker does
        state = ModuleState(module)
        module.table.add_(1)
        state.restore()
        assert torch.equal(module.table, torch.full((100_000,), value))


def test_a_tensor_is_copied_once_while_nothing_writes_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, copied, clone = Net(), [], torch.Tensor.clone
    module.data = torch.zeros(10_000)
    module.view = module.net[1].weight.detach()  # which every client writes
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda tensor: (copied.append(tensor), clone(tensor))[1])
        for _ in range(3):
            ModuleState(module).restore()
        assert len(copied) == 1
        module.data.add_(1)  # between two runs
        state = ModuleState(module)
    module.data.add_(1)
    state.restore()
    assert len(copied) == 2
    assert torch.equal(module.data, torch.ones(10_000))


def test_a_large_tensor_that_is_written_is_reported_once_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    monkeypatch.setattr(tensor_contents, "_LARGE", 10)
    module = Net()
    module.data = torch.zeros(10)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            state = ModuleState(module)
            module.data.add_(1)
            state.restore()
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "has changed `Net.data` in place" in said[0]
    assert module.data[0] == 2


def test_the_weights_of_a_module_in_a_list_come_back_unless_it_is_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    module = Net()
    module.others = {"small": [nn.Linear(1, 1)], "own": (module.net[1],), "twice": (nn.BatchNorm1d(2),) * 2}
    weight, own = module.others["small"][0].weight, module.net[1].weight
    for large in (False, True):
        monkeypatch.setattr(tensor_contents, "_LARGE", 2 if large else 100)
        before, state = weight.item(), ModuleState(module)
        with torch.no_grad():
            weight.add_(1)
            own.add_(1)
        module.others["twice"][0](torch.randn(4, 2))
        module.others["small"][0].requires_grad_(False)
        with caplog.at_level(logging.INFO):
            state.restore()
        assert weight.item() == pytest.approx(before + large)
        assert (int(module.others["twice"][1].num_batches_tracked), weight.requires_grad) == (int(large), True)
    assert own.mean().item() > 1.5
    said = [record.message for record in caplog.records]
    assert sum("has written into the numbers of `Net.others`" in text for text in said) == 1
    assert sum("has changed `Net.others` in place" in text for text in said) == 1


def test_the_parameters_and_layers_of_a_module_in_a_list_are_those_that_it_had() -> None:
    module, inputs = Net(), torch.ones(3, 2)
    own = module.net[1]
    first = nn.Linear(2, own.in_features)
    held = nn.Sequential(first, nn.BatchNorm1d(own.in_features), own)
    module.others, before = [held], held.eval()(inputs)
    state = ModuleState(module)
    held[0].weight = nn.Parameter(torch.zeros_like(first.weight))
    held[0].register_buffer("mask", torch.zeros(2))
    held[0].add_module("scale", nn.Linear(2, 2))
    held[1].running_mean = torch.ones(own.in_features)
    held[0], held[2] = nn.Linear(2, 2), nn.Identity()
    held.append(nn.Linear(2, 2))
    state.restore()
    assert list(held) == [first, held[1], own]
    assert not first._buffers
    assert not first._modules
    assert torch.equal(held(inputs), before)


def test_what_a_module_in_a_list_has_become_is_undone() -> None:
    module, inputs = Net(), torch.ones(3, 2)
    layer, entries, named = nn.Linear(2, 2), nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"a": torch.ones(2)})
    turned = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    module.others, before, turned_before = [layer, entries, named, turned], layer(inputs), turned(inputs)
    for _ in range(2):
        state = ModuleState(module)
        nn.utils.parametrize.remove_parametrizations(turned, "weight")
        nn.utils.parametrizations.weight_norm(layer)
        with torch.no_grad():
            layer.parametrizations.weight.original0.add_(1)
        entries.append(torch.zeros(2))
        named["b"] = torch.zeros(2)
        state.restore()
        assert type(layer) is nn.Linear
        assert torch.equal(layer(inputs), before)
        assert torch.equal(turned(inputs), turned_before)
        assert ([p.sum() for p in entries], list(named)) == ([2], ["a"])


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_layer_in_a_list_that_its_first_call_makes_another_stays_so(lazy: nn.Module) -> None:
    module, inputs = Net(), torch.rand(2, 3)
    module.others, module.own = [lazy], [module]
    state = ModuleState(module)
    first = lazy(inputs)
    state.restore()
    assert type(lazy) in (nn.Linear, nn.BatchNorm1d)
    assert torch.equal(lazy(inputs), first)


def test_a_batch_norm_over_ranks_in_a_list_is_refused() -> None:
    module = Net()
    module.others = [nn.SyncBatchNorm(2)]
    with pytest.raises(InvalidOption, match="a SyncBatchNorm, 'in a list or a dict', which would mix"):
        isolate_metrics(module)


class Centred(Net):
    """Adds the mean of its logits, which it keeps in a tensor without a name for torch, to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0]) + self.centre
        self.centre.mul_(0.5).add_(logits.detach().mean(0))
        return nn.functional.cross_entropy(logits, batch[1])


class Taught(Net):
    """Learns from a moving average of its weights, which a list keeps out of its `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits, theirs = self(batch[0]), self.teacher[0](batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + (logits - theirs).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for mean, weight in zip(self.teacher[0].parameters(), self.net.parameters(), strict=True):
                mean.lerp_(weight, 0.5)


class Measures(Net):
    """Collects its predictions in metric objects that torch does not register, and never resets them."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = {"all": [SumMetric()], "pair": (MeanMetric(),)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        self.meters["all"][0].update(logits.detach().abs().sum())
        self.meters["pair"][0].update(logits.detach())
        return nn.functional.cross_entropy(logits, batch[1]) / self.meters["all"][0].compute()

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.meters["pair"][0].compute())


@pytest.mark.parametrize("engine", ["trainer", "fast", "auto"])
@pytest.mark.parametrize("kind", [Centred, Taught, Measures])
def test_what_attributes_hold_makes_no_difference_to_other_clients(kind: type[Net], engine: str, tmp_path: Any) -> None:
    """A run that was resumed, whose first client follows no other one, ends where a straight one does."""
    ends = []
    for rounds in ((4,), (2, 4)):
        for limit in rounds:
            torch.manual_seed(0)
            trainer = FederatedTrainer(
                algorithm=FedAvg(),
                federation=Federation(clients_per_round=2, local_engine=engine),
                max_rounds=limit,
                accelerator="cpu",
                default_root_dir=str(tmp_path / str(len(rounds))),
                quiet=True,
                seed=0,
            )
            data = FederatedBlobs(num_clients=4, num_train=80, num_test=8, num_classes=4, dim=8, val_fraction=0.2)
            trainer.fit(kind(), data, "last" if limit != rounds[0] else None)
        ends.append(trainer.run_folder)
    straight, resumed = (rows(folder / "metrics.csv")[-1] for folder in ends)
    assert straight["global/val_loss"] == resumed["global/val_loss"]
    assert straight.get("local/mean") == resumed.get("local/mean")


def test_a_large_container_that_grows_is_reported_once_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "_messages", type(isolation._messages)())
    module = Net()
    module.seen = list(range(10_000))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            state = ModuleState(module)
            module.seen.append(1)
            state.restore()
    said = [record.message for record in caplog.records if "in place" in record.message]
    assert len(said) == 1
    assert "`Net.seen`" in said[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("engine", [FastEngine, LightningEngine])
def test_a_scripted_part_is_trained_and_frozen_parameters_come_back(engine: Any, loader: DataLoader) -> None:
    module = Net()
    module.net = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(8, 4)))
    before = next(module.parameters()).detach().clone()
    engine(Fabric(accelerator="cpu", devices=1), LocalOptions()).fit(module, loader)
    assert not torch.equal(next(module.parameters()), before)
    state = ModuleState(module)
    next(module.parameters()).requires_grad_(False)
    state.restore()
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_collection_of_metrics_groups_them_anew_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    """By what the first batch makes of their states: two that are equal there need not be so for the next client."""
    module = Net()
    module.scores = MetricCollection({"sum": SumMetric(), "mean": MeanMetric(), "most": MaxMetric()})
    with caplog.at_level(logging.INFO):
        for value, groups in ((1.0, 3), (0.0, 3)):
            state = ModuleState(module)
            isolate_metrics(module)
            module.scores.update(torch.tensor([value, value]))
            module.scores.update(torch.tensor([3.0, value]))
            found = {name: float(score) for name, score in module.scores.compute().items()}
            assert found == {"sum": 3 * value + 3, "mean": (3 * value + 3) / 4, "most": 3.0}
            state.restore()
            assert len(module.scores._groups) == groups
            assert not module.scores._groups_checked
    assert not [record for record in caplog.records if "in place" in record.message]


@dataclass(frozen=True)
class FirstClientActs(FedAvg):
    def train(self, message: Any, client: Any) -> Any:
        client._worker.module.on = client.id == 0
        return super().train(message, client)


def weights(root: Any, change: str, devices: int) -> bytes:
    trainer = FederatedTrainer(
        algorithm=FirstClientActs(),
        federation=Federation(clients_per_round=4),
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=2,
        check_val_every_n_round=2,
        default_root_dir=str(root / str(devices)),
        logger=False,
        enable_progress_bar=False,
    )
    torch.manual_seed(0)
    data = FederatedBlobs(num_train=80, num_test=20, num_clients=4, dim=8, val_fraction=0.2, batch_size=4)
    trainer.fit(Net(change), data)
    state = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return b"".join(value.numpy().tobytes() for value in state.values())


@pytest.mark.parametrize("change", ["frozen", "forward hook", "number"])
def test_what_a_client_changes_does_not_show_in_the_number_of_ranks(
    change: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # in which a launcher leaves its own
    assert weights(tmp_path, change, 1) == weights(tmp_path, change, 2)
    assert weights(tmp_path / "other", "nothing", 1) != weights(tmp_path / "again", change, 1)


class Positions(Net):
    """Has a cache that is no part of a checkpoint, and is replaced by a longer one where a batch needs it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(rows, dtype=torch.float32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) < len(x):
            self.register_buffer("positions", torch.arange(len(x), dtype=torch.float32), persistent=False)
        return super().forward(x.float().flatten(1) + 0.01 * self.positions[: len(x), None])


def trainer_of(folder: Any, rounds: int, **federation: Any) -> FederatedTrainer:
    return FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2, **federation),
        accelerator="cpu",
        max_rounds=rounds,
        run_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
    )


@pytest.mark.parametrize("engine", ["fast", "trainer"])
@pytest.mark.parametrize("rows", [1, 2], ids=["replaced in an evaluation", "replaced in training"])
@pytest.mark.filterwarnings("ignore")  # a real Trainer has some of its own
def test_a_cache_that_grows_has_its_first_length_again(engine: Any, rows: int, tmp_path: Any) -> None:
    module = Positions(rows)
    data = FederatedBlobs(num_train=80, num_test=20, num_clients=4, dim=8, val_fraction=0.2, batch_size=4)
    assert trainer_of(tmp_path, 2, local_engine=engine).fit(module, data)["rounds"] == 2
    assert len(module.positions) == rows


class Ordered(L.LightningDataModule):
    """Shuffles by a generator of its own, in the sampler of a batch sampler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        samples = TensorDataset(torch.randn(12, 8), torch.arange(12) % 4)
        sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(samples, batch_sampler=BatchSampler(sampler, 4, drop_last=False))

    def train_dataloader(self) -> DataLoader:
        return self.loader

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.loader.dataset, batch_size=4)


def test_a_generator_within_a_batch_sampler_begins_anew_in_each_round(tmp_path: Any) -> None:
    def trained(folder: str, *rounds: int) -> torch.Tensor:
        for number in rounds:  # a run that stopped after the first ones goes on
            torch.manual_seed(0)
            module, data = Net(), ClientDataModules([Ordered(), Ordered()], num_classes=4)
            trainer_of(tmp_path / folder, number).fit(module, data)
        return module.net[1].weight.detach().clone()

    assert torch.equal(trained("whole", 3), trained("parts", 1, 3))


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize("engine", ["fast", "auto"])
def test_a_loader_may_be_of_a_class_of_its_own(engine: str, tmp_path: Any) -> None:
    class Data(FederatedBlobs):
        def client_train_dataloader(self, client: int) -> Any:
            return Batches(super().client_train_dataloader(client))

    data = Data(num_train=80, num_test=20, num_clients=4, dim=8, val_fraction=0.2, batch_size=4)
    assert trainer_of(tmp_path, 1, local_engine=engine).fit(Net(), data)["rounds"] == 1


class Owner:
    """An object that a module refers to."""


def test_a_weak_reference_to_what_is_gone_is_left_alone(loader: DataLoader) -> None:
    module = Net()
    module.owner = weakref.proxy(owner := Owner())
    del owner
    state = ModuleState(module)
    module.late = 1
    state.restore()
    assert not hasattr(module, "late")
    states = ModuleStates(module)
    assert states.changed() is None
