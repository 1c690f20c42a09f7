"""What `profile` says beforehand against what a run is charged."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import SCAFFOLD, FedAvg, FederatedTrainer, Federation, FedNova, FedSpa, Local
from lightning_sparsefl.algorithms import FedP3, PerFedMask
from lightning_sparsefl.data import IID, ClientDataModules, Dirichlet, FederatedDigits
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import CohortSampler, FederatedAlgorithm
from lightning_sparsefl.federated.commands.simulated_worker import SimulatedWorker
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.sampling.draws import uniform_cohort
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.models import MLP, Classifier
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.types import Message, Update

LEDGER = {
    ("paper", "flops"): "flops/paper_total",
    ("paper", "bytes"): "comm/paper_bytes_total",
    ("analytic", "flops"): "flops/train_total",
}
METRICS = len("train_loss") + len("train_acc") + 2 * (1 + 8)
"""Bytes of the metrics in an update, which a worker does not have."""


def trainer(algorithm: FederatedAlgorithm, root="runs", federation=None, **options) -> FederatedTrainer:
    settings = {"max_rounds": 8, "accelerator": "cpu", "devices": 1, "logger": False, "seed": 3} | options
    return FederatedTrainer(
        algorithm=algorithm,
        federation=federation or Federation(clients_per_round=5),
        enable_progress_bar=False,
        default_root_dir=str(root),
        **settings,
    )


def digits(**options) -> FederatedDigits:
    split = Dirichlet(alpha=0.5, min_examples=5)
    return FederatedDigits(**{"num_clients": 12, "partition": split, "batch_size": 16, "eval_split": "test"} | options)


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(num_classes=10, sample_shape=(1, 8, 8))


class BatchNormNet(Classifier):
    """Has floating-point buffers."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))
        super().__init__(net, num_classes=10)


@dataclass(frozen=True, kw_only=True)
class Narrow(FederatedAlgorithm):
    """Clients hold as many rows of each matrix as their capacity allows."""

    def download(self, server, view):
        masks = {
            name: (torch.arange(len(w)) < view.capacity * len(w))[:, None].expand_as(w).contiguous()
            for name, w in server.weights.items()
            if w.dim() == 2
        }
        return Message(weights=apply(server.weights, masks), masks=masks)


@dataclass(frozen=True, kw_only=True)
class SendsItsChange(FederatedAlgorithm):
    """And the weights too."""

    def train(self, message, client):
        update = super().train(message, client)
        return replace(update, extra={"change": subtract(update.weights, message.weights)})


CASES = {
    "FedAvg": FedAvg(),
    "Local": Local(),
    "static": FedSpa(search="static"),
    "DST": FedSpa(),
    "DST at 0.2 of all": FedSpa(density=0.2, mask_pool="all"),
    "DST, own first masks": FedSpa(mask_init="different"),
    "random growth": FedSpa(growth="random"),
    "capacities": Narrow(),
    "epochs": FedSpa(search="static"),
    "steps": FedNova(),
    "control variates": SCAFFOLD(),
}
OPTIONS = {
    "capacities": {"capacities": [0.25, 0.5, 1.0] * 4},
    "epochs": {"local_epochs": [1, [2, 4], 3]},
}
"""Options of the federation in some of the cases."""


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", CASES)
def test_a_profile_says_what_a_run_is_charged(name: str, tmp_path, capsys):
    algorithm, data = CASES[name], digits(batch_size=64)
    fleet = trainer(algorithm, tmp_path, Federation(clients_per_round=5, **OPTIONS.get(name, {})), max_epochs=2)
    data.setup()
    assert len(set(data.client_sizes)) > 6
    run = fleet.profile(mlp(), data).content["run"]
    charged = fleet.fit(mlp(), data)
    for (column, key), logged in LEDGER.items():
        assert run[column][key] == pytest.approx(charged[logged], rel=1e-12), (column, key)
    for key in ("downlink_bytes", "uplink_bytes"):
        assert run["wire"][key] + (key == "uplink_bytes") * 40 * METRICS == pytest.approx(
            charged[f"comm/{key}_total"], rel=0.02
        )
    assert run["wire"]["mask_bytes"] == pytest.approx(charged["comm/mask_bytes_total"], rel=0.2)
    if not searches(algorithm):
        assert_all_but_the_metrics_is_predicted(run, charged, client_rounds=40)


def unequal(algorithm, tmp_path, **options):
    """A profile and a run of clients that train different layers."""
    federation = Federation(clients_per_round=5, **options)
    fleet, data = trainer(algorithm, tmp_path, federation, max_epochs=2), digits(batch_size=64)
    data.setup()
    torch.manual_seed(0)
    module = MLP(num_classes=10, sample_shape=(1, 8, 8), hidden=(24, 16, 8))
    run = fleet.profile(module, data).content["run"]
    charged = fleet.fit(module, data)
    for (column, key), logged in LEDGER.items():
        assert run[column][key] == pytest.approx(charged[logged], rel=1e-12), (column, key)
    return run, charged


@pytest.mark.parametrize("masking", ["optimized", "random"])
def test_clients_that_train_different_layers_are_each_represented(masking, tmp_path, capsys):
    run, charged = unequal(PerFedMask(masking=masking, finetune_epochs=0), tmp_path, capacities=[0.5])
    assert run["wire"]["uplink_bytes"] == pytest.approx(charged["comm/uplink_bytes_total"] - 40 * METRICS, abs=40)


def test_clients_of_unequal_costs_are_each_represented(tmp_path, capsys):
    run, charged = unequal(FedP3(owned=1), tmp_path)
    assert run["wire"]["mask_bytes"] < charged["comm/mask_bytes_total"]  # in the run they change with the weights
    assert run["wire"]["downlink_bytes"] == pytest.approx(charged["comm/downlink_bytes_total"], rel=0.01)
    assert run["wire"]["uplink_bytes"] == pytest.approx(charged["comm/uplink_bytes_total"] - 40 * METRICS, abs=40)


@pytest.mark.slow_after_first("precision")
@pytest.mark.parametrize("algorithm", [FedAvg(), SCAFFOLD()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_weights_are_charged_in_the_precision_of_the_run(precision, algorithm, tmp_path, capsys):
    fleet = trainer(algorithm, tmp_path, max_rounds=2, precision=precision)
    run = fleet.profile(mlp(), digits()).content["run"]
    charged = fleet.fit(mlp(), digits())
    assert run["wire"]["downlink_bytes"] == pytest.approx(charged["comm/downlink_bytes_total"], rel=0.001)
    assert run["wire"]["uplink_bytes"] + 10 * METRICS == pytest.approx(charged["comm/uplink_bytes_total"], rel=0.02)


def test_capacities_of_each_round_are_those_of_the_run(tmp_path, capsys):
    """The costs of the papers and the FLOPs; masks are sent anew where the capacity has changed, which costs more."""
    redrawn = Federation(clients_per_round=5, capacities=[0.25, 0.5, 1.0], redraw_capacities=True)
    fleet, data = trainer(Narrow(), tmp_path, redrawn), digits(batch_size=64)
    data.setup()
    run = fleet.profile(mlp(), data).content["run"]
    charged = fleet.fit(mlp(), data)
    for (column, key), logged in LEDGER.items():
        assert run[column][key] == pytest.approx(charged[logged], rel=1e-12), (column, key)
    assert run["wire"]["mask_bytes"] < charged["comm/mask_bytes_total"]
    assert run["wire"]["downlink_bytes"] == pytest.approx(charged["comm/downlink_bytes_total"], rel=0.02)


@dataclass(frozen=True, kw_only=True)
class FirstOnes(CohortSampler):
    """Draws the first clients in every round."""

    def draw(self, state, candidates, rng):
        return candidates.clients[: candidates.count]


def test_a_profile_draws_uniformly_and_says_so(capsys):
    said, runs = "Cohorts are drawn uniformly here, not by FirstOnes(over_select=1.0).", []
    for sampler in (None, FirstOnes()):
        profile = trainer(FedAvg(), federation=Federation(clients_per_round=5, sampler=sampler)).profile(
            mlp(), digits()
        )
        runs.append(profile.content["run"])
        assert (said in capsys.readouterr().out) == (sampler is not None)
    assert runs[0] == runs[1]


def searches(algorithm: FederatedAlgorithm) -> bool:
    return isinstance(algorithm, FedSpa) and algorithm.search == "dst"


def assert_all_but_the_metrics_is_predicted(run, charged, client_rounds: int) -> None:
    """To the byte, but for the one by which a client of 128 samples has a longer number than one of 127."""
    missing = charged["comm/uplink_bytes_total"] - run["wire"]["uplink_bytes"] - client_rounds * METRICS
    assert abs(missing) <= client_rounds
    assert charged["comm/downlink_bytes_total"] == run["wire"]["downlink_bytes"]
    assert charged["comm/mask_bytes_total"] == run["wire"]["mask_bytes"]


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
def test_buffers_that_are_not_merged_are_not_charged(buffers: str, tmp_path, capsys):
    fleet = trainer(FedAvg(), tmp_path, Federation(clients_per_round=5, buffers=buffers), max_rounds=2)
    data = digits()
    data.setup()
    run = fleet.profile(BatchNormNet(), data).content["run"]
    charged = fleet.fit(BatchNormNet(), data)
    assert_all_but_the_metrics_is_predicted(run, charged, client_rounds=10)


def test_a_change_is_not_taken_for_a_tensor_of_zeros(capsys):
    content = trainer(SendsItsChange()).profile(mlp(), digits()).content
    both = 2 * 4 * content["parameters"]
    assert both < content["client_round"]["wire"]["uplink_bytes"] < both + 200


@dataclass(frozen=True, kw_only=True)
class PaysOnce(FederatedAlgorithm):
    """Something that a client does at its first time only."""

    def costs(self, facts):
        return replace(super().costs(facts), flops_analytic=float(not facts.again))


def test_a_client_s_first_time_is_charged_once(capsys):
    fleet = trainer(PaysOnce())
    run = fleet.profile(mlp(), digits()).content["run"]
    drawn = {client for number in range(8) for client in uniform_cohort(fleet.seed, number, list(range(12)), 5)}
    assert run["analytic"]["flops"] == len(drawn) < 40


def test_masks_that_come_to_rest_make_a_run_cheaper_than_its_first_rounds(capsys):
    whole = trainer(FedSpa(), max_rounds=40).profile(mlp(), digits()).content
    resting = trainer(FedSpa(exchange=0.0), max_rounds=40).profile(mlp(), digits()).content
    never = trainer(FedSpa(search="static"), max_rounds=40).profile(mlp(), digits()).content
    first = trainer(FedSpa(), max_rounds=1).profile(mlp(), digits()).content  # a single round does not search
    masks = [profile["client_round"]["wire"]["mask_bytes"] for profile in (whole, resting, never, first)]
    bits = sum(layer["size"] for layer in whole["layers"].values() if layer["density"] < 1) / 8
    assert 0.4 * bits < masks[0] - masks[1] < 0.9 * bits
    assert masks[1] == masks[2] < 0.1 * bits < masks[3]


def test_limits_of_local_training_are_charged(capsys):
    full = trainer(FedAvg()).profile(mlp(), digits()).content["run"]["analytic"]["flops"]
    short = trainer(FedAvg(), limit_train_batches=2, max_epochs=3).profile(mlp(), digits()).content
    share = 3 * 2 * 16 * 12 / 1442
    assert short["run"]["analytic"]["flops"] == pytest.approx(share * full, rel=0.01)


def test_the_module_and_the_random_state_stay_as_they_were(capsys):
    module, data = mlp(), digits()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    places = [parameter.data_ptr() for parameter in module.parameters()]
    trainer(FedSpa()).profile(module, data)
    assert places == [parameter.data_ptr() for parameter in module.parameters()]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_json_holds_what_was_promised(capsys):
    profile = trainer(FedSpa()).profile(mlp(), digits(), json=True)
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(profile.to_json())
    assert content["parameters"] == sum(p.numel() for p in mlp().parameters())
    assert content["density"] == pytest.approx(0.5, abs=1e-3)
    assert (content["rounds"], content["client_rounds"]) == (8, 40)
    keys = {
        "paper": {"flops", "bytes", "downlink_bytes", "uplink_bytes"},
        "analytic": {"flops"},
        "wire": {"bytes", "downlink_bytes", "uplink_bytes", "mask_bytes"},
    }
    for part in ("run", "client_round"):
        assert {column: set(costs) for column, costs in content[part].items()} == keys
    for column, costs in content["run"].items():
        for key, value in costs.items():
            assert content["client_round"][column][key] == value / 40


def test_one_process_prints(capsys, monkeypatch):
    """A script that a launcher started runs on every rank."""
    monkeypatch.setattr(Fabric, "is_global_zero", property(lambda fabric: False))
    assert trainer(FedSpa()).profile(mlp(), digits()).content["parameters"] > 0
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_stdout_is_nothing_but_json(tmp_path):
    arguments = ["profile", "--json", "--seed_everything", "7", "--algorithm", "FedAvg", "--model", "SmallCNN"]
    command = [sys.executable, "-m", "lightning_sparsefl.cli", *arguments, "--data", "FederatedDigits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["algorithm"] == "FedAvg"
    assert not list(tmp_path.iterdir())


class LongNames(Classifier):
    """A name that is too long for a table, and a product without a weight."""

    def __init__(self) -> None:
        inner = nn.ModuleDict({"a_projection_with_a_rather_long_name": nn.Linear(64, 64)})
        super().__init__(nn.ModuleDict({"the_encoder_of_everything": inner, "head": nn.Linear(64, 10)}), num_classes=10)

    def forward(self, inputs):
        hidden = self.net["the_encoder_of_everything"]["a_projection_with_a_rather_long_name"](inputs.flatten(1))
        return self.net["head"](hidden @ torch.ones(64, 64))


def test_tables_fit_into_80_columns(capsys):
    trainer(FedSpa(), max_rounds=2000).profile(LongNames(), digits())
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in out
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in lines)}
    assert rows["net.the_.._rather_long_name.weight"] == ["4,096", "0.4219", "3.520"]
    assert rows["(products without a weight)"] == ["8.192"]
    assert rows["total"] == ["4,810", "0.5077", "13.002"]
    assert len({len(line) for line in lines if line.startswith(("net.", "total"))}) == 1  # numbers end in one column
    assert [label for label in rows if label in LABELS] == LABELS
    assert "2,000 rounds, 10,000 client-rounds" in rows


LABELS = ["training FLOPs", "bytes down", "bytes up", "bytes, both ways", "of these, masks"]


class NeedsTwo(Classifier):
    """Its forward pass fails on one sample."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), num_classes=10)

    def forward(self, inputs):
        if len(inputs) < 2:
            raise RuntimeError("two or more, please")
        return super().forward(inputs)


def test_a_forward_that_fails_on_one_sample_costs_a_warning_and_counts_no_flops(capsys):
    with pytest.warns(UserWarning, match=r"`NeedsTwo.forward` fails on one sample .*two or more, .*example_input"):
        profile = trainer(FedSpa()).profile(NeedsTwo(), digits())
    content, run = profile.content, profile.content["run"]
    assert not any("flops" in costs for costs in (content, *content["layers"].values(), run["paper"], run["analytic"]))
    assert "forward_flops" not in content
    assert run["wire"]["bytes"] > run["paper"]["bytes"] > 0
    out = capsys.readouterr().out
    assert out.count("not counted") == len(content["layers"]) + 1 + 4
    assert "FLOP" not in profile.to_json().upper()


def test_data_without_a_sample_cost_a_warning():
    modules = ClientDataModules([L.LightningDataModule()] * 5, client_sizes=[10] * 5)
    with pytest.warns(UserWarning, match="FLOPs are not counted: .*first training sample of client 0 cannot be read"):
        content = trainer(FedAvg()).profile(mlp(), modules).content
    assert "flops" not in content["run"]["analytic"]


class NoSizes(L.LightningDataModule):
    num_clients, batch_size = 5, 4

    def num_examples(self, client):
        return 3

    def client_train_dataloader(self, client):
        raise AssertionError("nothing is read")

    client_val_dataloader = client_test_dataloader = client_train_dataloader


@dataclass(frozen=True, kw_only=True)
class ReadsItsLoss(FedAvg):
    def train(self, message, client):
        result = client.fit(message.weights)
        return Update(weights=result.weights, weight=client.num_examples * int(result.metrics["train_loss"]))


def test_a_method_may_read_the_metrics_of_a_fit():
    data = FederatedDigits(num_clients=2, partition=IID())
    options = Federation(clients_per_round=2)
    expected = trainer(FedAvg(), federation=options).profile(mlp(), data).content["run"]
    assert trainer(ReadsItsLoss(), federation=options).profile(mlp(), data).content["run"] == expected


def test_data_without_nominal_sizes_is_refused_in_a_sentence(monkeypatch):
    with pytest.raises(InvalidOption, match=r"^`data` is a NoSizes without `client_sizes`, which `profile` needs\.$"):
        trainer(FedAvg()).profile(mlp(), NoSizes())
    monkeypatch.setattr(NoSizes, "client_sizes", [0] * 5, raising=False)
    with pytest.raises(InvalidOption, match=r"starts with \[0, 0, 0\].*5 clients.*`setup\(\)` first"):
        trainer(FedAvg()).profile(mlp(), NoSizes())


def test_data_whose_sizes_are_unknown_before_it_is_loaded_is_loaded():
    modules = [FederatedDigits(num_clients=2, partition=IID()) for _ in range(3)]
    given = ClientDataModules(modules, client_sizes=[len(m.train_dataloader().dataset) for m in modules])
    unknown = ClientDataModules(modules)
    assert unknown.client_sizes == [0, 0, 0]
    options = Federation(clients_per_round=2)
    expected = trainer(FedAvg(), federation=options).profile(mlp(), given).content
    assert trainer(FedAvg(), federation=options).profile(mlp(), unknown).content == expected


class Hospital(L.LightningDataModule):
    """40 samples in batches of a size of its own."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        samples = TensorDataset(torch.zeros(40, 1, 8, 8), torch.arange(40) % 10)
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)

    test_dataloader = train_dataloader


def test_clients_with_batches_of_their_own_are_charged_for_these(tmp_path):
    data = ClientDataModules([Hospital(size) for size in (32, 8, 20)], num_classes=10, eval_split="test")
    options = {"federation": Federation(clients_per_round=3), "limit_train_batches": 1, "max_rounds": 2}
    content = trainer(FedAvg(), **options).profile(mlp(), data).content
    summary = trainer(FedAvg(), tmp_path, **options).fit(mlp(), data)
    forward = 2 * sum(p.numel() for p in mlp().parameters() if p.dim() == 2)
    biases = sum(p.numel() for p in mlp().parameters() if p.dim() == 1)
    assert summary["flops/train_total"] == 2 * 3 * (forward + biases) * (32 + 8 + 20)
    assert content["run"]["analytic"]["flops"] == summary["flops/train_total"]


def test_a_simulated_fit_moves_what_may_change_and_nothing_else():
    layout = Layout({"w": torch.zeros(4)}, {})
    worker = SimulatedWorker(layout, {"w": torch.zeros(4)}, seed=0)
    held, free = torch.tensor([True, True, True, False]), torch.tensor([True, False, True, True])
    weights: Mapping[str, torch.Tensor] = {"w": torch.tensor([1.0, 1.0, 0.0, 0.0])}
    moved = worker.fit(None, weights, {"w": held}, {"w": free}, []).weights["w"]
    assert (moved != weights["w"]).tolist() == [True, False, True, False]
    first, second = (worker.gradient(None, weights)["w"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(SimulatedWorker(layout, {}, seed=0).gradient(None, weights)["w"], first)


@dataclass(frozen=True, kw_only=True)
class Thinning(FederatedAlgorithm):
    """The server's mask loses an eighth of a layer each round, whatever is trained."""

    def aggregate(self, server, merged):
        return self._masked(super().aggregate(server, merged), server.round + 1)

    def profile_state(self, server, round):
        return replace(self._masked(server, round), round=round)

    def _masked(self, server, finished):
        weight = server.weights["net.fc1.weight"]
        mask = torch.arange(weight.numel()).reshape(weight.shape) >= weight.numel() * finished // 16
        return replace(server, masks={"net.fc1.weight": mask})


def test_masks_that_follow_a_schedule_are_foreseen(tmp_path):
    trained = trainer(Thinning(), tmp_path)
    summary = trained.fit(mlp(), digits())
    data = digits()
    data.setup()
    content = trainer(Thinning()).profile(mlp(), data).content
    assert content["final_density"] == 0.5
    for (column, key), total in LEDGER.items():
        assert content["run"][column][key] == summary[total]
    wire = summary["comm/uplink_bytes_total"] + summary["comm/downlink_bytes_total"]
    assert content["run"]["wire"]["bytes"] == pytest.approx(wire, rel=0.02)


@dataclass(frozen=True, kw_only=True)
class Asking(FederatedAlgorithm):
    """Starts from a sum over all clients, as pruning at initialization does."""

    def init(self, weights, fleet):
        merged = fleet.survey(Message(weights=weights))
        assert set(merged.reports) == set(range(12))
        return replace(super().init(weights, fleet), extra={"gradient": merged.weights})

    def survey(self, message, client):
        assert not client.memory
        return Update(weights=client.gradient(message.weights), weight=client.num_examples, metrics={"asked": 1.0})


def test_a_method_may_ask_the_fleet_before_the_first_round(tmp_path):
    """The answers are charged to the first round, and `profile` counts them too."""
    content = trainer(Asking()).profile(mlp(), digits()).content["run"]
    plain = trainer(FedAvg()).profile(mlp(), digits()).content["run"]
    assert content["paper"] == plain["paper"]
    summary = trainer(Asking(), tmp_path / "asking").fit(mlp(), digits())
    without = trainer(FedAvg(), tmp_path / "plain").fit(mlp(), digits())
    for way in ("up", "down"):
        asked = summary[f"comm/{way}link_bytes_total"] - without[f"comm/{way}link_bytes_total"]
        foreseen = content["wire"][f"{way}link_bytes"] - plain["wire"][f"{way}link_bytes"]
        assert asked == pytest.approx(foreseen, rel=1e-3)  # real gradients have zeros
        assert foreseen > 12 * 4 * 1000


def test_the_weights_of_a_survey_are_the_mean_over_all_clients(tmp_path):
    one = trainer(Asking(), tmp_path / "one", federation=Federation(clients_per_round=4))
    one.fit(mlp(), digits())
    path = one.run_folder / "checkpoints" / "last.ckpt"
    gradient = load_plain(path)["sparsefl"]["state"]["extra"]["gradient"]
    assert all(bool(tensor.abs().sum() > 0) for tensor in gradient.values())


@dataclass(frozen=True, kw_only=True)
class VotesOnTheHead(FederatedAlgorithm):
    """FedAvg, but that an upload may vote on the last layer alone."""

    def may_vote(self, message):
        held = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in message.weights.items() if "fc1" in name}
        return {**super().may_vote(message), **held}


def test_votes_that_a_method_restricts_are_charged_alike_by_profile_and_ledger(tmp_path):
    summary = trainer(VotesOnTheHead(), tmp_path).fit(mlp(), digits())
    wire = trainer(VotesOnTheHead()).profile(mlp(), digits()).content["run"]["wire"]
    dense = trainer(FedAvg()).profile(mlp(), digits()).content["run"]["wire"]
    metrics = 8 * 5 * METRICS
    assert summary["comm/uplink_bytes_total"] - wire["uplink_bytes"] == pytest.approx(metrics, rel=0.05)
    assert summary["comm/downlink_bytes_total"] == wire["downlink_bytes"] == dense["downlink_bytes"]
    assert wire["uplink_bytes"] < 0.5 * dense["uplink_bytes"]


@pytest.mark.parametrize(("algorithm", "estimated"), [(FedAvg(), False), (FedSpa(), True)], ids=["dense", "masks"])
def test_the_columns_are_explained(algorithm, estimated, capsys):
    trainer(algorithm).profile(mlp(), digits())
    out = capsys.readouterr().out
    for column in ("paper     by the formula of the method's paper", "analytic  operations", "wire      sizes"):
        assert f"\n  {column}" in out
    assert "A client-round is the work of one client in one round" in out
    assert "forward FLOPs are those\nof one sample" in out
    assert max(map(len, out.partition("The tensors are")[2].splitlines())) <= 80
    assert ("upper estimates" in out) == estimated
