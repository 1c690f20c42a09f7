"""A deployment whose updates are summed under masks, in several messages a round."""

import sys
from pathlib import Path

import pytest
import torch
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.exchange.encoding import decode_answer, order_header
from lightning_sparsefl.testing.contents import rows
from lightning_sparsefl.types import Message

from helpers.deployment import HOMES, Deployment, configuration, simulated
from helpers.memory_grid import Silent
from lightning_sparsefl_flower.comparison import compare
from lightning_sparsefl_flower.configuration import read
from lightning_sparsefl_flower.credentials import write_node_key
from lightning_sparsefl_flower.node_command import main, make_daemon
from lightning_sparsefl_flower.replies import opened
from lightning_sparsefl_flower.secure_sum.errors import TooFewClients
from lightning_sparsefl_flower.secure_sum.key_files import read_signer, read_signers
from lightning_sparsefl_flower.secure_sum.messages import join, parts
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.signing import Signing

POLICY = "0.5,3,1"


class SecureDeployment(Deployment):
    """Three nodes that give updates to secure sums only."""

    policy = POLICY

    def daemon(self, place: int, config: Path | None = None):
        home = self.folder / f"node-{place}"
        configured = read(str(config or self.config), ["--trainer.default_root_dir", str(home)])
        policy, signing = Policy.read(self.policy), self.signing(place)
        return make_daemon(configured, HOMES[place], home, configured.trainer.fabric, policy, signing)

    def signing(self, place: int):
        """Return a node's keys, those of the first deployment of a test."""
        if not (self.folder / "signers").exists():
            for node in range(len(HOMES)):
                write_node_key(self.folder / f"key-{node}")
            keys = [(self.folder / f"key-{node}.pub").read_text() for node in range(len(HOMES))]
            lines = [f"{own[0]},{own[1]} {key}\n" for own, key in zip(HOMES, keys, strict=True)]
            (self.folder / "signers").write_text("".join(lines))
        return Signing(read_signer(self.folder / f"key-{place}"), read_signers(self.folder / "signers"))

    def fit(self, **options):
        return super().fit(**{"secure_sum": self.policy, **options})


@pytest.fixture
def deploy_securely(tmp_path):
    def make(algorithm="FedAvg", init_args=None, **changed):
        method = {"class_path": algorithm, "init_args": init_args or {}}
        return SecureDeployment(configuration(tmp_path / "run.yaml", method, **changed), tmp_path)

    return make


def weights(folder):
    content = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return {name: tensor.numpy().tobytes() for name, tensor in content["state_dict"].items()}


def differing(here, there):
    return {part for part, where in compare(here, there).items() if where}


@pytest.mark.parametrize(("method", "init_args"), [("FedAvg", {}), ("FedDIP", {}), ("SCAFFOLD", {})])
def test_the_weights_have_the_bytes_of_the_simulation(deploy_securely, tmp_path, method, init_args):
    deployment = deploy_securely(method, init_args)
    here = simulated(deployment.config, tmp_path / "simulated")
    there = deployment.fit()
    found = differing(here, there)
    assert found <= {"ledger", "clients.csv", "metrics.csv"}, found  # which hold the bytes of the sums
    for ours, theirs in zip(rows(here / "clients.csv"), rows(there / "clients.csv"), strict=True):
        apart = {key for key in ours if ours[key] != theirs[key]}
        assert all("bytes" in key for key in apart), apart


def test_a_node_that_is_cut_off_is_left_out(deploy_securely, tmp_path):
    """Its clients have shared their secrets, so that the others can take their masks off the sum."""
    deployment = deploy_securely(federation={"on_client_error": "skip", "clients_per_round": 6})
    answer, cut = deployment.daemons[1].answer, []

    def dying(request):
        if request[0] == b"secure" and request[2] == b"mask":
            cut.append(len(request) - 3)
            raise Silent
        return answer(request)

    deployment.daemons[1].answer = dying
    folder = deployment.fit(timeout=0.2)
    assert cut == [2, 2, 2]
    assert weights(folder) == weights(_without_training(tmp_path / "plain"))


def _without_training(folder):
    """Run a deployment in the clear, whose second node never answers an order to train."""
    folder.mkdir()
    method, options = {"class_path": "FedAvg"}, {"on_client_error": "skip", "clients_per_round": 6}
    deployment = Deployment(configuration(folder / "run.yaml", method, federation=options), folder)
    _silent_in_training(deployment.daemons[1])
    return deployment.fit(timeout=0.2)


def _silent_in_training(daemon):
    answer = daemon.answer

    def silent(request):
        if request[0] == b"orders" and order_header(request[2])[0]["task"] == "train":
            raise Silent
        return answer(request)

    daemon.answer = silent


def test_a_cut_off_node_ends_a_run_that_allows_no_failures(deploy_securely):
    deployment = deploy_securely(federation={"clients_per_round": 6})
    answer = deployment.daemons[2].answer

    def dying(request):
        if request[0] == b"secure" and request[2] == b"share":
            raise Silent
        return answer(request)

    deployment.daemons[2].answer = dying
    with pytest.raises(ClientFailed, match="left the secure sum: its node has not answered"):
        deployment.fit(timeout=0.2)


def test_a_round_without_any_client_ends_the_run_by_name(deploy_securely):
    """As without secure sums: too few clients are left."""
    deployment = deploy_securely(federation={"on_client_error": "skip", "clients_per_round": 6})
    for daemon in deployment.daemons:
        _silent_in_training(daemon)
    with pytest.raises(ClientFailed, match="its node has not answered"):
        deployment.fit(timeout=0.2)


def test_no_update_is_in_an_answer(deploy_securely):
    deployment = deploy_securely(trainer={"max_rounds": 1})
    updates, daemon = [], deployment.daemons[0]
    answer = daemon.answer

    def watched(request):
        found = answer(request)
        if request[0] == b"orders":
            answers = [decode_answer(opened(reply), daemon.node.codec, Message(weights={})) for reply in found]
            updates.extend(each.update for each in answers if each.task == "train")
        return found

    daemon.answer = watched
    deployment.fit()
    assert updates
    assert all(update.weights == update.extra == {} and update.metrics for update in updates)


def test_a_server_without_secure_sums_gets_no_answers(deploy_securely):
    with pytest.raises(InvalidOption):
        deploy_securely().fit(secure_sum="")


def test_a_method_that_shows_single_clients_is_refused_at_the_start(deploy_securely):
    with pytest.raises(InvalidOption, match="FedSpa uploads what the server keeps of each client"):
        deploy_securely("FedSpa")


def test_a_daemon_refuses_what_is_no_step(deploy_securely):
    daemon = deploy_securely().daemons[0]
    agreed = daemon._agreement
    assert daemon.answer([b"secure", agreed]) == []
    assert daemon.answer([b"secure", agreed, b"leak", bytes(4)])[0].startswith(b"RA secure sum has no step 'leak'")
    assert daemon.answer([b"secure", agreed, b"mask", bytes(4)])[0].startswith(b"RClient 0 takes part in no secure sum")
    assert daemon.answer([b"secure", agreed, b"mask", b"x"])[0].startswith(b"Ra step of a secure sum names no client")
    assert daemon.answer([b"secure", b"other", b"mask", bytes(4)])[0].startswith(b"R")


def test_an_error_in_a_step_is_a_refusal(deploy_securely, monkeypatch, capsys):
    daemon = deploy_securely().daemons[0]
    monkeypatch.setattr(daemon.secure, "step", lambda *_: 1 / 0)
    (reply,) = daemon.answer([b"secure", daemon._agreement, b"mask", bytes(4)])
    assert reply == b"RZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_plan_of_impossible_shapes_is_refused(deploy_securely, capsys):
    deployment = deploy_securely(federation={"clients_per_round": 6})
    answer = deployment.daemons[0].answer

    def hostile(request):
        if request[:1] != [b"secure"] or request[2] != b"share":
            return answer(request)
        plan, roster = parts(request[3][4:])
        plan["headers"] = {"extra/a": {"b": [[2**70], None]}}
        return answer([*request[:3], *(each[:4] + join(plan, roster) for each in request[3:])])

    deployment.daemons[0].answer = hostile
    with pytest.raises(ClientFailed, match="states extra trees that have no places, or no shapes"):
        deployment.fit()
    assert "sparsefl-node: refused: A client or the server states extra trees" in capsys.readouterr().out


def test_nodes_refuse_a_sum_with_a_key_that_they_do_not_know(deploy_securely, capsys):
    deployment = deploy_securely(federation={"clients_per_round": 6})
    write_node_key(deployment.folder / "another")
    secure = deployment.daemons[1].secure
    secure.signing = Signing(read_signer(deployment.folder / "another"), secure.signing.verifier)
    with pytest.raises(TooFewClients, match="0 of 6 clients are left to share"):
        deployment.fit()
    assert "The keys of client 1 are not signed by its node" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--key", "key-0", "--secure-sum", POLICY), "`--key` and `--signers` are given together"),
        (("--signers", "signers", "--secure-sum", POLICY), "`--key` and `--signers` are given together"),
        (("--key", "key-0", "--signers", "signers"), "and with `--secure-sum`"),
        (("--key", "key-1", "--signers", "signers", "--secure-sum", POLICY), "does not list key-1"),
    ],
)
def test_keys_that_do_not_fit_are_refused_at_the_start(deploy_securely, monkeypatch, capsys, options, words):
    deployment = deploy_securely()
    monkeypatch.chdir(deployment.folder)
    monkeypatch.setattr("sys.path", list(sys.path))
    given = ["--config", str(deployment.config), "--clients", "0,3", "--home", "home", *options]
    assert main(given) == 2
    assert words in capsys.readouterr().err
