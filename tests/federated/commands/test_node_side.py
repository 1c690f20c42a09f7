"""A run whose clients are elsewhere: its own process has no client's data, and the node's has no server parts."""

import copy
import re

import pytest
from lightning.fabric import Fabric

from lightning_sparsefl import Ditto, FedAvg, FederatedTrainer, Federation, FedSpa, Hermes, LotteryFL, SubFedAvg
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.commands import dispatch as dispatching
from lightning_sparsefl.federated.commands.node_side import NodeSide
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.local.wire_node import WireNode
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.models import MLP
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.testing.pipe import NodeStore


class Store(NodeStore):
    """Records that stay on the node."""

    def fetch(self, versions, plan): ...

    def settle(self, made): ...


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes fits ask a node of its own for all clients; the list of the nodes."""
    nodes, fit = [], dispatching.dispatch

    def connected(options, fabric, verb, module, data, ckpt_path, **asked):
        away, model = copy.deepcopy((data, module))
        data.client_train_dataloader = data.client_val_dataloader = data.client_test_dataloader = None

        def connect(run):
            ranks = Ranks(run.ranks.fabric)
            side = NodeSide(options, ranks, model, away, client=5)
            nodes.append(side.make_node(Store(), keep_masks=True))
            return RankCohort(ranks, WireNode(nodes[-1]), nodes[-1].records, run.about)

        return fit(options, fabric, verb, module, data, ckpt_path, connect, **asked)

    monkeypatch.setattr("lightning_sparsefl.federated.trainer.dispatch", connected)
    return nodes


@pytest.mark.parametrize("algorithm", [FedAvg(), FedSpa()], ids=lambda algorithm: type(algorithm).__name__)
def test_a_run_with_clients_elsewhere_ends_with_the_same_bytes(federation, last, algorithm, request):
    options = {"wire": "encode", "local_engine": "fast"}
    here = federation(algorithm, folder="here", federation=options)
    nodes = request.getfixturevalue("elsewhere")
    there = federation(algorithm, folder="there", federation=options)
    one, other = last(here), last(there)
    assert one["state_dict"] == other["state_dict"]
    assert one["sparsefl"]["ledger"] == other["sparsefl"]["ledger"]
    assert rows(here.run_folder / "metrics.csv") == rows(there.run_folder / "metrics.csv")
    kept = {client: versions[max(versions)] for client, versions in nodes[0].records.versions.items()}
    assert sorted(kept) == sorted(one["records"]["nodes"])
    assert other["records"]["nodes"] == {}


def test_a_node_needs_the_set_of_a_client_of_its_own(federation):
    trainer = federation(FedAvg(), rounds=1)
    fabric = Fabric(accelerator="cpu", devices=1)

    class Nobody:
        num_clients, eval_split = 6, "test"

        def prepare_data(self): ...

        def setup(self, stage): ...

        def client_test_dataloader(self, client):
            return None if client == 3 else ()

    with pytest.raises(InvalidOption, match="no test set"):
        NodeSide(trainer.options, Ranks(fabric), federation.module(), Nobody(), client=3)


@pytest.mark.parametrize(
    ("algorithm", "instead"),
    [
        (SubFedAvg(), "set `algorithm.gate: train`"),
        (LotteryFL(), "set `algorithm.gate: train`"),
        (Hermes(), "set `algorithm.gate: train`"),
        (Ditto(lams=(0.1, 1.0)), "set `algorithm.lams` to one value"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_method_that_scores_clients_in_training_is_refused_without_validation_sets(algorithm, instead, tmp_path):
    trainer = FederatedTrainer(
        algorithm=algorithm,
        federation=Federation(clients_per_round=2),
        max_rounds=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=str(tmp_path),
    )
    data = FederatedBlobs(num_clients=4, num_classes=3, dim=4, eval_split="test")
    with pytest.raises(InvalidOption, match=f"The data has no val set.*{re.escape(instead)}"):
        trainer.fit(MLP(num_classes=3, sample_shape=(1, 1, 4)), data)
    assert not any(tmp_path.rglob("last.ckpt"))
