import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_sparsefl import Federation
from lightning_sparsefl.errors import InvalidOption, WorldSizeMismatch
from lightning_sparsefl.federated.distributed import fabric as fabric_module
from lightning_sparsefl.federated.distributed import launcher as launch
from lightning_sparsefl.federated.distributed import strategy as process
from lightning_sparsefl.federated.distributed.fabric import build_fabric
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.strategy import ClientParallelStrategy

CPU = torch.device("cpu")


def fabric(**options):
    settings = {"accelerator": "cpu", "devices": "auto", "num_nodes": 1, "strategy": "auto", "precision": "32-true"}
    return build_fabric(**{**settings, "timeout": 60, **options})


@pytest.fixture
def launched(monkeypatch):
    """As if torchrun had started so many processes on this node, and on others."""

    def start(local, *others):
        names = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": local}
        world = {"WORLD_SIZE": local + sum(others), "GROUP_WORLD_SIZE": 1 + len(others)}
        for name, value in {**names, **world}.items():
            monkeypatch.setenv(name, str(value))

    return start


@pytest.mark.parametrize(("devices", "workers", "ranks"), [(1, 1, 1), (2, 1, 2), (1, 3, 3), (2, 2, 4)])
def test_each_device_has_as_many_ranks_as_it_has_workers(devices, workers, ranks):
    built = fabric(devices=devices, workers_per_device=workers)
    assert built.world_size == ranks
    if ranks > 1:
        assert built.strategy.parallel_devices == [CPU] * ranks


@pytest.mark.parametrize("accelerator", ["auto", "mps", "gpu"])
def test_apples_gpus_are_refused_and_never_chosen(accelerator, monkeypatch):
    built, plain = [], fabric_module._fabric

    def of_an_apple(**options):
        built.append(options["accelerator"])
        if options["accelerator"] != "cpu":
            return SimpleNamespace(device=torch.device("mps"), strategy=None)
        return plain(**options)

    monkeypatch.setattr(fabric_module, "_fabric", of_an_apple)
    if accelerator == "auto":
        assert fabric(accelerator="auto").device == CPU
        assert built == ["auto", "cpu", "cpu"]
    else:
        with pytest.raises(InvalidOption, match=f"`trainer.accelerator` is '{accelerator}', which is MPS .*'cpu'"):
            fabric(accelerator=accelerator)


def test_a_launchers_processes_are_spread_evenly_over_devices(launched):
    launched(local=4)
    assert fabric(workers_per_device=2).strategy.parallel_devices == [CPU] * 4
    launched(4, 4)
    assert fabric(workers_per_device=4, num_nodes=2).world_size == 8
    launched(local=3)
    with pytest.raises(InvalidOption, match=r"`federation.workers_per_device` is 2, but the launcher started 3"):
        fabric(workers_per_device=2)
    launched(local=2)
    with pytest.raises(WorldSizeMismatch, match="The launcher started 2 processes on this machine"):
        fabric(devices=2, workers_per_device=2)


@pytest.mark.parametrize(("rank", "devices"), [(1, 1), (1, 3), (0, 3)])
def test_a_process_that_was_started_for_a_run_of_another_size_is_told_so(rank, devices, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises(WorldSizeMismatch, match=rf"rank {rank} of 2 .* whole script; .* asks for {devices} "):
        fabric(devices=devices)


def test_a_process_that_was_started_for_a_run_does_not_fork_another_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(WorldSizeMismatch, match=r"with `trainer\.strategy: client_parallel_fork`"):
        fabric(devices=2, strategy="client_parallel_fork")


@pytest.mark.parametrize(("rank", "devices"), [(0, 1), (0, 2), (1, 2)])
def test_a_process_that_was_started_for_a_run_of_this_size_goes_on(rank, devices, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert len(getattr(fabric(devices=devices).strategy, "parallel_devices", [CPU])) == devices


def test_machines_of_torchrun_may_differ_and_leave(launched):
    launched(1, 2, 4)
    built = fabric(num_nodes=2)  # as it was when the job began
    assert (built.world_size, len(built.strategy.parallel_devices)) == (7, 1)
    built.strategy.launcher.launch(lambda: None)  # Lightning's own check expects machines of one size
    launched(1)
    assert fabric(num_nodes=2).world_size == 1


def test_ranks_on_one_gpu_share_it_by_gloo_without_a_group_bound_to_it(monkeypatch):
    """NCCL refuses two ranks on one device; without a GPU, what is asked of torch is all that can be seen."""
    asked = []
    monkeypatch.setattr(process, "_init_dist_connection", lambda *args, **options: asked.append((args[1], options)))
    gpu = torch.device("cuda", 0)
    strategy = ClientParallelStrategy(shared=[gpu, gpu], cluster_environment=process_of_rank(1))
    assert (strategy.root_device, strategy.num_processes) == (gpu, 2)
    strategy._setup_distributed()
    assert [(backend, set(options)) for backend, options in asked] == [("gloo", {"timeout"})]


def process_of_rank(rank):
    environment = LightningEnvironment()
    environment.local_rank = lambda: rank
    environment.set_global_rank = environment.set_world_size = lambda number: None
    return environment


def test_at_least_one_worker():
    with pytest.raises(InvalidOption, match=r"`federation.workers_per_device` is 0; expected a whole number >= 1"):
        Federation(workers_per_device=0)


def test_a_rank_that_died_is_noticed_while_this_one_trains(monkeypatch, capfd):
    """Between two collectives, a thread alone can; it ends the others, and then this process."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    died, other = (subprocess.Popen(sleep) for _ in range(2))
    died.kill()
    monkeypatch.setattr(launch, "_PATIENCE", 0)
    monkeypatch.setattr(launch.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        launch._watch([died, other])
    assert left.value.code == 2
    assert (
        "sparsefl: error: Rank 1 was ended by signal 9, so the run was stopped; resume it from"
        in capfd.readouterr().err
    )
    assert other.wait(timeout=60) == -9


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_that_have_all_died_are_noticed(monkeypatch, capfd, number):
    died = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) for _ in range(number)]
    for child in died:
        child.wait()
    monkeypatch.setattr(launch, "_UNCONNECTED", 0)
    monkeypatch.setattr(launch.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        launch._watch(died)
    assert "sparsefl: error: Rank 1 was ended by the exit code 3" in capfd.readouterr().err


def test_ranks_that_end_well_are_not_waited_for():
    launch._watch([subprocess.Popen([sys.executable, "-c", ""])])


def test_a_rank_whose_launcher_has_died_ends(monkeypatch, capfd):
    monkeypatch.setattr(launch.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        launch._watch_launcher(os.getpid(), threading.Event())  # which is no parent of this process
    assert left.value.code == 2
    assert "sparsefl: error: The process that started this rank has died, so the run" in capfd.readouterr().err


def test_a_process_that_starts_several_runs_does_not_watch_itself(monkeypatch):
    """Lightning takes the second one for a rank that was started, which it is not."""
    watched = []
    monkeypatch.setattr(launch, "_watch_launcher", lambda launcher, returned: watched.append(launcher))
    monkeypatch.setenv("LOCAL_RANK", "0")
    environment = LightningEnvironment()
    for number in (os.getpid(), os.getppid()):
        monkeypatch.setenv(launch._LAUNCHER, str(number))
        launcher = launch.WatchedLauncher(environment, 2, 1)
        assert launcher.launch(lambda: 5) == 5
    assert watched == [os.getppid()]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_launcher_start_no_others(method, launched):
    launched(2)
    with pytest.raises(InvalidOption, match=rf"strategy` is 'client_parallel_{method}', but a launcher has started"):
        fabric(devices=2, strategy=f"client_parallel_{method}")


def test_a_rank_that_is_done_is_not_ended_with_its_launcher(monkeypatch):
    done = threading.Event()
    done.set()
    for launcher in (os.getppid(), os.getpid()):
        launch._watch_launcher(launcher, done)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # so that its threads run only while this one waits
    yield
    sys.setswitchinterval(interval)
    dist.destroy_process_group()


def test_the_threads_of_a_process_group_are_done_when_the_work_is(process_group):
    """They free the tensors of an exchange, and to do so while the interpreter ends would abort the process."""
    exchanged, freed = threading.Event(), []
    threading.Thread(target=lambda: exchanged.wait() and freed.append(True), daemon=True).start()
    launch.launch(Fabric(accelerator="cpu", devices=1), lambda fabric: exchanged.set())
    assert freed


def test_values_of_any_length_are_gathered_in_the_order_of_the_ranks(tmp_path):
    """The room for a value is the same on all ranks, also after a rank had a value that was too long for it."""

    def gather(fabric):
        ranks = Ranks(fabric)
        rounds = [[(rank, "x" * length * (1 + rank)) for rank in range(2)] for length in (0, 10, 3_000, 100_000, 10)]
        for values in rounds:
            assert ranks.gather(values[ranks.rank]) == values
        assert ranks._room == 2**16  # and not that of the longest value
        (tmp_path / str(ranks.rank)).touch()

    launch.launch(fabric(devices=2, strategy="client_parallel_fork"), gather)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_parts_are_exchanged_as_one_batch_of_sends_and_receives(tmp_path, monkeypatch):
    """With NCCL, two ranks that each wait for the other's part before they send their own would never end."""

    def exchange(fabric):
        ranks, batches, batched = Ranks(fabric), [], dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda work: batches.append(len(work)) or batched(work))
        me, other = ranks.rank, 1 - ranks.rank
        for length in (1, 50_000):
            parts = [{"from": me, "to": to, "values": torch.arange(length * (1 + me))} for to in range(2)]
            received = ranks.exchange(parts)
            assert received[me] is parts[me]
            assert (received[other]["from"], received[other]["to"]) == (other, me)
            assert torch.equal(received[other]["values"], torch.arange(length * (1 + other)))
        one_way = ranks.exchange([{}, {"a": 1} if me == 0 else {}])
        assert one_way[other] == ({"a": 1} if me == 1 else {})
        assert ranks.exchange([{}, {}]) == [{}, {}]
        assert batches == [2, 2, 1]
        (tmp_path / str(me)).touch()

    launch.launch(fabric(devices=2, strategy="client_parallel_fork"), exchange)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
