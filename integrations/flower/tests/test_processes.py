"""Deployments of real processes on this machine; some minutes each."""

import os
import signal
import time
from pathlib import Path

import pytest
from lightning_sparsefl.testing.contents import rows

import demo
from lightning_sparsefl_flower.comparison import compare
from lightning_sparsefl_flower.localhost import Localhost, descendants

pytestmark = pytest.mark.slow
PATIENCE = 600.0


@pytest.fixture
def folder(tmp_path_factory):
    """A folder with a short path, as Unix sockets need."""
    return tmp_path_factory.mktemp("d")


def wait_for_rounds(deployment, count):
    """Wait until the server has committed so many rounds."""
    until = time.monotonic() + PATIENCE
    while True:
        tables = list(deployment.folder.glob("deployed/*/version_0/metrics.csv"))
        if tables and len(rows(tables[0])) >= count:
            return
        assert time.monotonic() < until, deployment.log("run")
        assert deployment.processes["run"].poll() is None, deployment.log("run")
        time.sleep(1)


def running(deployment, name, program):
    """The identifiers of the processes below one of this deployment's that run a program."""
    found = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(deployment.processes[name].pid)}
    words = {pid: path.read_text().split("\0") for pid, path in found.items() if path.exists()}
    return [pid for pid in words if any(Path(word).name == program for word in words[pid])]


def lives(pid):
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_equal(folder, config):
    simulated = demo.simulate(config, folder)
    (deployed,) = (folder / "deployed").glob("*/version_*")
    assert {part: where for part, where in compare(simulated, deployed).items() if where} == {}


@pytest.mark.parametrize(("method", "secure_sum", "parts"), [("FedSpa", "", 6), ("FedDIP", "0.67,3,2", 3)])
def test_the_demonstration_ends_with_equal_runs(folder, method, secure_sum, parts, capsys):
    assert demo.demonstrate(method, folder, PATIENCE, secure_sum) == 0
    assert capsys.readouterr().out.count("  equal\n") == parts


def test_killed_nodes_and_a_killed_server_go_on_with_the_same_bytes(folder):
    config = demo.CONFIGS / "SCAFFOLD.yaml"
    with Localhost(folder, config, demo.HOMES) as deployment:
        deployment.submit(timeout=PATIENCE, holdout=True)
        wait_for_rounds(deployment, 1)
        (server,) = running(deployment, "superlink", "flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        deployment.end("run")
        for name in ("daemon-0", "supernode-1", "daemon-1"):
            deployment.end(name, signal.SIGKILL)
        deployment.start_daemon(0)
        deployment.start_daemon(1)
        deployment.restart_node(1)
        run = deployment.run(timeout=PATIENCE, holdout=True, ckpt_path="last")
        assert run["status"].endswith("completed"), deployment.log("run")
    assert_equal(folder, config)


def test_all_processes_end_where_a_run_breaks_off(folder):
    below = []

    def broken_off():
        with Localhost(folder, demo.CONFIGS / "FedAvg.yaml", demo.HOMES) as deployment:
            deployment.submit(timeout=PATIENCE)
            until = time.monotonic() + PATIENCE
            while not running(deployment, "superlink", "flwr-serverapp"):
                assert time.monotonic() < until
                time.sleep(1)
            below.extend(pid for process in deployment.processes.values() for pid in descendants(process.pid))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert len(below) > len(demo.HOMES)
    time.sleep(5)
    assert [pid for pid in below if lives(pid)] == []


def test_a_node_that_hangs_is_left_out(folder):
    config = folder / "run.yaml"
    config.write_text(
        (demo.CONFIGS / "FedAvg.yaml").read_text().replace("clients_per_round: 4", "clients_per_round: 6")
    )
    with Localhost(folder, config, demo.HOMES) as deployment:
        deployment.submit(timeout=90.0, holdout=True)
        wait_for_rounds(deployment, 1)
        os.kill(deployment.processes["daemon-2"].pid, signal.SIGSTOP)
        run = deployment.wait_for_run()
        os.kill(deployment.processes["daemon-2"].pid, signal.SIGCONT)
        assert run["status"].endswith("completed"), deployment.log("run")
    table = rows(next(folder.glob("deployed/*/version_0/metrics.csv")))
    assert float(table[0]["clients/failed"]) == 0
    assert float(table[-1]["clients/failed"]) == 2
