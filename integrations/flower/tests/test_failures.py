"""Nodes that restart, forget, or stay silent, and a server that is killed: what a run does then."""

import shutil

import pytest
from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.testing.contents import rows

from helpers.deployment import HOMES, simulated
from helpers.memory_grid import Silent
from lightning_sparsefl_flower.comparison import compare

METHODS = ["FedSpa", "SCAFFOLD", "FedRep"]
SKIP = {"on_client_error": "skip"}


class Killed(BaseException):
    """The end of the server's process, which nothing handles."""


def before_each(deployment, kind, act):
    """Call `act` with the node, and the number of requests of a kind that all nodes had before."""
    seen = []
    for number, (key, answer) in list(deployment.grid.nodes.items()):

        def watched(request, number=number, answer=answer):
            if request[0] == b"orders" and kind in request[2].decode(errors="replace").split("}", 1)[0]:
                act(deployment.numbers.index(number), len(seen))
                seen.append(number)
            return answer(request)

        deployment.grid.nodes[number] = (key, watched)
    return seen


TRAIN = '"task":"train"'


@pytest.mark.parametrize("method", METHODS)
def test_a_restarted_node_goes_on_from_its_disk(deploy, tmp_path, method):
    deployment, restarted = deploy(method), []

    def restart(place, before):
        if before == 4:
            deployment.daemons[place] = deployment.daemon(place)
            restarted.append(place)

    before_each(deployment, TRAIN, restart)
    there = deployment.fit()
    assert restarted
    here = simulated(deployment.config, tmp_path / "simulated")
    assert {part: where for part, where in compare(here, there).items() if where} == {}


def test_a_node_that_lost_its_records_gets_fresh_orders_which_are_charged(deploy, tmp_path):
    deployment, lost = deploy("FedSpa", federation={"clients_per_round": 6}), []

    def lose(place, before):
        if before == len(HOMES):
            shutil.rmtree(tmp_path / f"node-{place}" / "records")
            lost.append(place)

    before_each(deployment, TRAIN, lose)
    there = deployment.fit()
    trained = [row for row in rows(there / "clients.csv") if row["trained"] == "1"]
    assert len(trained) == 18
    for client in range(6):
        first, second, third = (int(row["downlink_bytes"]) for row in trained if int(row["client"]) == client)
        if client in HOMES[lost[0]]:
            assert second >= first > third  # the masks travel once more
        else:
            assert first > second


def test_a_damaged_record_counts_as_lost(deploy, tmp_path):
    deployment = deploy("SCAFFOLD", federation={"clients_per_round": 6})

    def damage(place, before):
        if before == len(HOMES):
            for path in (tmp_path / f"node-{place}").glob("records/*/*/round-*.pt"):
                path.write_bytes(path.read_bytes()[:-40])

    before_each(deployment, TRAIN, damage)
    assert len(rows(deployment.fit() / "metrics.csv")) == 3


def silent_from(place, count):
    """Make an action with which a node says nothing after so many requests to all nodes."""

    def act(node, before):
        if node == place and before >= count:
            raise Silent

    return act


def test_a_node_that_never_answers_fails_its_clients(deploy, caplog):
    deployment = deploy(federation={**SKIP, "clients_per_round": 6})
    before_each(deployment, TRAIN, silent_from(1, len(HOMES)))
    there = deployment.fit(timeout=0.3)
    table = rows(there / "metrics.csv")
    assert [(float(row["clients/trained"]), float(row["clients/failed"])) for row in table] == [(6, 0), (4, 2), (4, 2)]
    assert "Client 1 is left out of round 1: its node has not answered within 0.3 s" in caplog.text


def test_a_silent_node_ends_a_run_whose_failures_do(deploy):
    deployment = deploy()
    before_each(deployment, TRAIN, silent_from(0, 0))
    with pytest.raises(ClientFailed, match="its node has not answered within"):
        deployment.fit(timeout=0.3)


def test_a_client_that_cannot_be_scored_is_left_out_of_the_scores(deploy, caplog):
    deployment = deploy(federation=SKIP, trainer={"max_rounds": 1})
    before_each(deployment, '"task":"score"', silent_from(2, 0))
    there = deployment.fit(timeout=0.3)
    assert "Client 5 has no scores in round 1: its node has not answered" in caplog.text
    scored = {row["client"] for row in rows(there / "clients.csv") if row["personal/test_acc"]}
    assert scored == {"0", "1", "3", "4"}


def test_a_node_that_is_away_at_the_start_is_waited_for(deploy):
    deployment = deploy(trainer={"max_rounds": 1})
    del deployment.grid.nodes[deployment.numbers[2]]
    with pytest.raises(InvalidOption, match=r"No node has the clients 2, 5 after 0.3 s; expected all 6 clients"):
        deployment.fit(timeout=0.3)


def test_a_node_that_comes_back_takes_part_again(deploy):
    deployment = deploy(federation={**SKIP, "clients_per_round": 6}, trainer={"max_rounds": 4})
    number = deployment.numbers[1]
    there = []

    def leave(place, before):
        if before == len(HOMES):
            there.append(deployment.grid.nodes.pop(number))
        if before == len(HOMES) + 4:
            deployment.grid.nodes[number] = there.pop()

    before_each(deployment, TRAIN, leave)
    table = rows(deployment.fit(timeout=0.5) / "metrics.csv")
    failed = [float(row["clients/failed"]) for row in table]
    assert failed[1] == 2
    assert failed[-1] == 0


@pytest.mark.parametrize("ckpt_path", ["last", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_server_goes_on_with_the_same_bytes(deploy, tmp_path, method, ckpt_path):
    """The nodes have trained the lost rounds already, and go back."""
    deployment = deploy(method, federation={"checkpoint_every_n_rounds": 2}, trainer={"max_rounds": 5})
    answer = deployment.grid.pull_messages
    seen = before_each(deployment, TRAIN, lambda place, before: None)

    def pull(message_ids):
        replies = answer(message_ids)
        if len(seen) > 10:  # in round 3, after the commit of round 1
            raise Killed
        return replies

    deployment.grid.pull_messages = pull
    with pytest.raises(Killed):
        deployment.fit(ckpt_path="" if ckpt_path == "last" else "auto")
    deployment.grid.pull_messages = answer
    there = deployment.fit(ckpt_path=ckpt_path)
    assert there.name == "version_0"
    here = simulated(deployment.config, tmp_path / "simulated")
    assert {part: where for part, where in compare(here, there).items() if where} == {}


def test_the_comparison_finds_another_run(deploy, tmp_path):
    deployment = deploy()
    there = deployment.fit()
    text = deployment.config.read_text().replace("max_epochs: 1", "max_epochs: 2")
    deployment.config.write_text(text)
    differing = {
        part for part, where in compare(simulated(deployment.config, tmp_path / "other"), there).items() if where
    }
    assert {"global weights", "ledger", "clients.csv", "metrics.csv"} <= differing
