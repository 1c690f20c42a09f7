"""Kills, damage, signals and full disks: what a run leaves, and that it goes on as if nothing had happened."""

import contextlib
import csv
import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sparsefl import FederatedTrainer, Federation, FedSpa, files
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch, DiskFull
from lightning_sparsefl.federated.commands import fit as fit_module
from lightning_sparsefl.federated.distributed import signals as interrupt
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StackedOptimizer
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage import run_folder as runfolder
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint, plain_hparams
from lightning_sparsefl.federated.storage.memory_store import MemoryStore
from lightning_sparsefl.federated.storage.record_database import RecordDatabase
from lightning_sparsefl.federated.storage.resume import find_resume_point
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.models import MLP

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning calls what torch renames
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # the processes that are killed are forked
]
PATIENCE = 60
"""Seconds to wait for what must happen."""
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "GLOBAL_RANK")


def fit(root, ckpt_path=None, *, devices=1, rounds=4, federation=None, **options):
    """A small run with memory on both sides, a selected round and fine-tuning; returns its folder."""
    before = {name: os.environ.get(name) for name in LAUNCHER}
    trainer = FederatedTrainer(
        algorithm=FedSpa(density=0.5),
        federation=Federation(
            **{"clients_per_round": 3, "select": "global/val_acc", "finetune_epochs": 1, **(federation or {})}
        ),
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=rounds,
        default_root_dir=str(root),
        enable_progress_bar=False,
        seed=1,
        timeout=120,
        **options,
    )
    data = FederatedBlobs(num_clients=4, dim=8, num_train=160, num_test=40, batch_size=16, val_fraction=0.2, seed=0)
    torch.manual_seed(0)
    wait_for_the_next_second(root)
    try:
        trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,)), data, ckpt_path)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
    return trainer.run_folder


def wait_for_the_next_second(root):
    """TensorBoard reads event files in the order of their names, which have seconds, and then numbers of processes."""
    stamps = [int(path.name.split(".")[3]) for path in root.rglob("events.out.tfevents.*")]
    while stamps and time.time() < max(stamps) + 1:
        time.sleep(0.02)


def left(folder):
    """All that a run leaves but times and its identifier; the checkpoint has checksums of the clients' records."""
    steps = {}
    for place in (folder, folder / "by_kilobytes"):
        board = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("time/")]
        steps |= {tag: [(point.step, point.value) for point in board.Scalars(tag)] for tag in tags}
    return {
        "checkpoint": fingerprint(committed(folder)),
        "files": sorted(path.name for path in (folder / "checkpoints").rglob("*") if "refused" not in path.name),
        "summary": json.loads((folder / "summary.json").read_text()),
        "steps": steps,
        **{name: table(folder / name) for name in ("metrics.csv", "clients.csv", "finetuned.csv")},
    }


def committed(folder):
    content = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    del content["sparsefl"]["run"]
    return content


def table(path):
    if not path.exists():
        return None
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    timed = [place for place, name in enumerate(rows[0]) if name.startswith("time/")]
    return (
        [[cell for place, cell in enumerate(row) if place not in timed] for row in rows] if timed else path.read_bytes()
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    torch.set_num_threads(1)
    return fit(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same with one client after another, as with a client callback of the user."""
    return fit(tmp_path_factory.mktemp("alone"), federation={"local_engine": "fast"})


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Die(Callback):
    """Kills its process at a hook's call of some number."""

    calls = 0

    def __init__(self, hook, number):
        def count(*_):
            Die.calls += 1
            if Die.calls == number:
                die()

        setattr(self, hook, count)

    def __deepcopy__(self, memo):
        return self


def at_call(patch, owner, name, number):
    """Kills the process within a function's call of some number, before it does anything."""
    function, calls = getattr(owner, name), []

    def count(*args, **kwargs):
        calls.append(name)
        return die() if len(calls) == number else function(*args, **kwargs)

    patch.setattr(owner, name, count)


def at_sync(patch, name, number, act=None):
    """Kills the process, or acts, when a file whose name begins so is written, but has not yet replaced the old one."""
    create, sync, names, calls = files._create, os.fsync, {}, []

    def note(path, mode):
        file = create(path, mode)
        names[file.fileno()] = path.name
        return file

    def count(descriptor):
        calls.extend([name] * names.pop(descriptor, "").startswith(f".{name}"))
        return (act or die)() if len(calls) == number else sync(descriptor)

    patch.setattr(files, "_create", note)
    patch.setattr(os, "fsync", count)


MOMENTS = {
    "inside a stack": lambda patch: at_call(patch, StackedOptimizer, "step", 6),
    "between rounds": lambda patch: {"callbacks": [Die("on_train_epoch_start", 3)]},
    "before the third commit": lambda patch: at_call(patch, fit_module, "commit_together", 3),
    "in a half-written record file": lambda patch: at_sync(patch, "server-", 2),
    "in a half-written checkpoint": lambda patch: at_sync(patch, "last.ckpt", 2),
    "before the checkpoint has its name": lambda patch: at_call(patch, files, "_keep", 2),
    "before what no checkpoint names is deleted": lambda patch: at_call(patch, MemoryStore, "discard_unreferenced", 4),
    "before the final table": lambda patch: at_call(patch, runfolder.RunFolder, "write_summary", 1),
}


ALONE = {"inside a client": lambda patch: {"client_callbacks": [Die("on_train_batch_end", 14)]}}
"""Moments of a run that trains one client after another."""


def killed(root, moment, **options):
    """Runs in a process of its own until it kills itself."""
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            patch = pytest.MonkeyPatch()
            fit(root, **({**MOMENTS, **ALONE}[moment](patch) or {}), **options)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow_after_first
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(moment, straight, tmp_path):
    killed(tmp_path, moment)
    assert left(fit(tmp_path, "last")) == left(straight)


@pytest.mark.parametrize("engine", ["fast", "auto"])
def test_a_run_that_trained_one_client_after_another_goes_on_so(engine, alone, tmp_path):
    """Also where `auto` would choose stacks, which it does not with a client callback of the user."""
    killed(tmp_path, "inside a client", federation={"local_engine": engine})
    assert left(fit(tmp_path, "last", federation={"local_engine": engine})) == left(alone)


def test_the_final_table_needs_no_pictures(tmp_path):
    """Without a logger the checkpoint holds no scores of single clients."""
    killed(tmp_path / "killed", "before the final table", logger=False)
    folders = fit(tmp_path / "killed", "last", logger=False), fit(tmp_path / "straight", logger=False)
    resumed, straight = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert resumed == straight
    assert resumed["clients_scored"] == 4


def test_a_run_killed_before_its_first_commit_is_written_starts_over(straight, tmp_path, monkeypatch):
    """What it has recorded of the round, in tables and in TensorBoard, is not there twice."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_: time.sleep(PATIENCE))
        killed(tmp_path, "inside a stack")
    assert not list(tmp_path.rglob("last.ckpt"))
    assert left(fit(tmp_path, "auto")) == left(straight)


@pytest.mark.slow
def test_killed_twice(straight, tmp_path):
    for moment in ("between rounds", "in a half-written checkpoint"):
        killed(tmp_path, moment)
    assert left(fit(tmp_path, "last")) == left(straight)


def final_table(capsys):
    """Return what was printed from the final table on."""
    out = capsys.readouterr().out
    assert out.count("FedSpa after") == 1
    return out[out.index("FedSpa after") :]


@pytest.mark.parametrize("ckpt_path", ["last", "auto"])
def test_a_run_that_ended_keeps_its_table_and_prints_it_again(ckpt_path, tmp_path, caplog, capsys):
    folder = fit(tmp_path)
    before, printed = left(folder), final_table(capsys)
    assert "personal val_acc" in printed
    assert f"tensorboard --logdir {folder}" in printed
    assert left(fit(tmp_path, ckpt_path)) == before
    assert "has finished 4 rounds" in caplog.text
    assert final_table(capsys) == printed


@pytest.mark.slow_after_first
@pytest.mark.parametrize("devices", [1, 2])
def test_a_copy_without_rounds_left_is_committed_in_its_new_folder(devices, tmp_path):
    folder = fit(tmp_path, rounds=2, callbacks=[ModelCheckpoint(save_top_k=-1)])
    copy = next(folder.rglob("epoch=1*.ckpt"))
    again = fit(tmp_path, str(copy), rounds=2, devices=devices)
    assert again != folder
    assert load_checkpoint(again / "checkpoints" / "last.ckpt")["epoch"] == 2
    ends = [fit(tmp_path, str(start), rounds=3) for start in (again, copy)]
    assert ends[0] == again  # which goes on, and does not start over
    ours, theirs = (load_checkpoint(end / "checkpoints" / "last.ckpt")["state_dict"] for end in ends)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_longer_run_deletes_the_table_of_finetuning_of_the_shorter_one(tmp_path):
    folder = fit(tmp_path, rounds=1, federation={"select": None})
    assert (folder / "finetuned.csv").exists()
    fit(tmp_path, "last", rounds=2, federation={"select": None, "finetune_epochs": 0})
    assert not (folder / "finetuned.csv").exists()
    assert "finetuned/val_acc" not in json.loads((folder / "summary.json").read_text())


def test_a_run_that_a_callback_stopped_ends_where_it_stopped(tmp_path, monkeypatch):
    def stopping(folder, ckpt_path=None):
        stop = EarlyStopping("density/all", patience=1, check_on_train_epoch_end=True)
        return fit(tmp_path / folder, ckpt_path, rounds=9, callbacks=[stop])

    whole = left(stopping("straight"))
    assert whole["summary"]["rounds"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(runfolder.RunFolder, "write_summary", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stopping("killed")
    assert left(stopping("killed", "last")) == whole


def test_a_run_that_a_callback_ended_is_finished_as_long_as_the_callback_is_there(tmp_path, caplog, capsys):
    stop = EarlyStopping("density/all", patience=1, check_on_train_epoch_end=True)
    ended = left(fit(tmp_path, rounds=9, callbacks=[stop]))
    assert (ended["summary"]["rounds"], ended["summary"]["stopped_by"]) == (2, stop.state_key)
    printed = final_table(capsys)
    assert f"{stop.state_key} has stopped the run after 2 of 9 rounds." in printed
    assert left(fit(tmp_path, "last", rounds=9, callbacks=[stop])) == ended
    assert f"has finished 2 rounds, and {stop.state_key} has stopped it; leave it out" in caplog.text
    assert final_table(capsys) == printed
    assert left(fit(tmp_path, "last", rounds=9)) == left(fit(tmp_path / "straight", rounds=9))


def test_a_run_that_a_timer_ended_goes_on_with_more_time(tmp_path, caplog):
    for limit, rounds, finished in (("short", 1, False), ("short", 1, True), ("long", 4, False)):
        caplog.clear()
        timer = Timer({"microseconds": 1} if limit == "short" else {"days": 1}, interval="epoch")
        fit(tmp_path, "auto", callbacks=[timer])
        assert newest(tmp_path) == rounds
        assert ("has finished 1 rounds, and Timer has stopped it" in caplog.text) is finished


# ---- damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    place = content.find(torch.load(path, weights_only=True)["state_dict"]["net.fc1.weight"].numpy().tobytes())
    content[place + 1] ^= 4
    path.write_bytes(content)


def foreign(path):
    torch.save({"state_dict": {}, "epoch": 3}, path)


def of_another_run(path):
    fit(path.parents[2] / "other", rounds=1, federation={"clients_per_round": 2})
    shutil.copy(path.parents[2] / "other/FedSpa/version_0/checkpoints/last.ckpt", path)


def its_newest_records(path):
    record = sorted((path.parent / "clients").iterdir())[-1]
    record.write_bytes(record.read_bytes()[:-100])


DAMAGE = {
    "missing": (lambda path: path.unlink(), "There is no checkpoint at"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or not"),
    "cut": (cut, "damaged or not"),
    "one bit": (flip, "is damaged: its checksum"),
    "foreign": (foreign, "is not a checkpoint of a federated run"),
    "of another run": (of_another_run, "is of another run"),
    "its records": (its_newest_records, "damaged or not"),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of four rounds with two on the disk."""
    folder = tmp_path_factory.mktemp("half")
    killed(folder, "before the third commit")
    return folder


@pytest.fixture
def spoil(half, tmp_path):
    """Copies the run and damages its last checkpoint; returns its path, and what is said of it."""

    def spoilt(damage):
        shutil.copytree(half, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "FedSpa/version_0/checkpoints/last.ckpt"
        DAMAGE[damage][0](path)
        return path, DAMAGE[damage][1]

    return spoilt


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(damage, spoil, tmp_path):
    path, said = spoil(damage)
    before = {file: file.read_bytes() for file in path.parent.rglob("*.*")}
    with pytest.raises(CheckpointMismatch, match=f"{said}(.|\n)*previous.ckpt; `ckpt_path: last` uses it"):
        fit(tmp_path, str(path))
    assert {file: file.read_bytes() for file in path.parent.rglob("*.*")} == before


@pytest.mark.slow_after_first
@pytest.mark.parametrize("damage", ["missing", "one bit", "its records"])
def test_the_checkpoint_before_stands_in_for_a_damaged_one(damage, spoil, straight, tmp_path, caplog):
    path, said = spoil(damage)
    folder = fit(tmp_path, "last")
    assert said in caplog.text
    assert f"Resuming from the previous checkpoint, {path.with_name('previous.ckpt')}, after round 1." in caplog.text
    assert left(folder) == left(straight)
    assert path.with_name("last.ckpt.refused").exists() == (damage != "missing")


def test_the_checkpoint_before_stands_in_for_a_torn_record_on_disk(tmp_path, caplog):
    def records(folder):
        run = load_checkpoint(folder / "checkpoints" / "last.ckpt")["sparsefl"]["run"]
        file = RecordDatabase(folder / "checkpoints" / "clients", "server-000")
        file.require(4, run)
        return {client: fingerprint(file.read(client, 4)) for client in file.clients(4)}

    on_disk = {"federation": {"store": "disk"}}
    straight = fit(tmp_path / "straight", **on_disk)
    killed(tmp_path / "killed", "before the third commit", **on_disk)
    path = tmp_path / "killed/FedSpa/version_0/checkpoints/clients/server-000.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE records SET content = substr(content, 1, 100) WHERE round = 2")
    folder = fit(tmp_path / "killed", "last", **on_disk)
    assert "holds a damaged record" in caplog.text
    assert "Resuming from the previous checkpoint" in caplog.text
    assert left(folder) == left(straight)
    assert records(folder) == records(straight)


def test_where_both_are_damaged_the_newest_is_named(half, tmp_path):
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "FedSpa/version_0/checkpoints"
    cut(checkpoints / "previous.ckpt")
    flip(checkpoints / "last.ckpt")
    before = {path: path.read_bytes() for path in checkpoints.rglob("*.*")}
    with pytest.raises(CheckpointMismatch, match=r"last\.ckpt is damaged"):
        fit(tmp_path, "last")
    assert {path: path.read_bytes() for path in checkpoints.rglob("*.*")} == before


def test_no_flipped_byte_goes_unnoticed(half, tmp_path):
    """Each changed byte is refused, or is one that says nothing, such as a date in the archive's list."""
    path = tmp_path / "last.ckpt"
    whole = (half / "FedSpa/version_0/checkpoints/last.ckpt").read_bytes()
    path.write_bytes(whole)
    content = fingerprint(load_checkpoint(path))
    refused = 0
    places = range(0, len(whole), len(whole) // 60)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert fingerprint(load_checkpoint(path)) == content, place
        except CheckpointMismatch:
            refused += 1
    assert refused > len(places) / 4


def test_auto_starts_a_run_or_goes_on_with_it_or_leaves_it_as_it_is(half, straight, tmp_path, caplog):
    shutil.copytree(half, tmp_path / "half")
    for root, times in ((tmp_path / "half", 1), (tmp_path / "new", 2)):
        for _ in range(times):
            folder = fit(root, "auto")
            assert folder.name == "version_0"
            assert left(folder) == left(straight)
    assert caplog.text.count("contains no run: a new one starts.") == 1
    with pytest.raises(CheckpointMismatch, match=r"`ckpt_path` is 'auto', but .* contains no run with a checkpoint"):
        find_resume_point("auto", tmp_path, "FedAvg", training=False)


def test_hyper_parameters_of_numpy_can_be_read_again(tmp_path):
    module = MLP(num_classes=4, sample_shape=(1, 1, 8), lr=np.float64(0.5))
    write_atomically(tmp_path / "x.ckpt", plain_hparams(module))
    found = load_plain(tmp_path / "x.ckpt")
    assert found["lr"] == 0.5
    assert found["sample_shape"] == (1, 1, 8)


# ---- where `last` starts


def test_a_run_that_has_committed_nothing_starts_over(straight, tmp_path, caplog):
    first = fit(tmp_path, rounds=1)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[FailBefore(0)])
    folder = fit(tmp_path, "last")
    assert folder.name == "version_1"
    told = caplog.text
    assert "version_1 is the newest run and has committed no round: it starts over" in told
    assert f"set `ckpt_path` to {first}/checkpoints/last.ckpt" in told
    assert left(folder) == left(straight)


class FailBefore(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.rounds:
            raise ZeroDivisionError


def test_a_copy_of_a_checkpoint_takes_its_records_along(half, straight, tmp_path):
    """The new run's own checkpoint needs nothing of the old folder."""
    shutil.copytree(half, tmp_path / "old")
    checkpoints = tmp_path / "old/FedSpa/version_0/checkpoints"
    shutil.copy(checkpoints / "last.ckpt", checkpoints / "copy.ckpt")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, str(checkpoints / "copy.ckpt"), callbacks=[FailBefore(3)])
    shutil.rmtree(tmp_path / "old")
    assert left(fit(tmp_path, "last"))["summary"] == left(straight)["summary"]


# ---- signals


class Signal(Callback):
    """Sends its process a signal at a batch of some number."""

    def __init__(self, number, batch, times=1, rank=0):
        self.number, self.batch, self.times, self.rank, self.calls = number, batch, times, rank, 0

    def __deepcopy__(self, memo):
        return self

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.calls += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.calls == self.batch and rank == self.rank:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.fixture
def handlers():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers of signals are set in the main thread, and the tests run in another one")
    mine = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    own = {number: signal.getsignal(number) for number in mine}
    yield own
    for number, handler in mine.items():
        signal.signal(number, handler)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_finishes_the_client_and_commits_the_last_round(number, ends, handlers, alone, tmp_path, caplog):
    """Also a round whose checkpoint was not due."""
    often = {"checkpoint_every_n_rounds": 3}
    seen = Signal(number, 13)  # first of two batches of the first client in the third round
    with pytest.raises(ends) as stopped:
        fit(tmp_path, client_callbacks=[seen], federation=often)
    assert getattr(stopped.value, "code", 143) == 143
    assert seen.calls == 14, "the client is finished, and no other one begins"
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert f"{number.name} in round 3: 2 of 4 rounds are committed" in caplog.text
    folder = tmp_path / "FedSpa/version_0"
    assert load_checkpoint(folder / "checkpoints/last.ckpt")["epoch"] == 2
    fit(tmp_path, "last", federation=often)
    found, expected = left(folder), left(alone)
    assert found["summary"] == expected["summary"]
    assert [found[name] for name in ("metrics.csv", "clients.csv", "steps")] == [
        expected[name] for name in ("metrics.csv", "clients.csv", "steps")
    ]


def test_a_second_ctrl_c_stops_at_once(handlers, tmp_path, monkeypatch):
    monkeypatch.setattr(interrupt, "_ECHO", -1.0)
    seen = Signal(signal.SIGINT, 13, times=2)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, client_callbacks=[seen])
    assert seen.calls == 13


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(alone, tmp_path):
    second = Signal(signal.SIGTERM, 3, rank=1)  # which trains one client of a round or more, by its speed
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, devices=2, client_callbacks=[second])
    assert stopped.value.code == 143
    assert left(fit(tmp_path, "last")) == left(alone)


# ---- a full disk


def test_a_write_that_finds_no_space_stops_the_run(straight, tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        at_sync(patch, "last.ckpt", 2, full)
        with pytest.raises(DiskFull, match="No space left"):
            fit(tmp_path)
    assert newest(tmp_path) == 1
    assert left(fit(tmp_path, "last")) == left(straight)


def newest(root):
    return load_checkpoint(root / "FedSpa/version_0/checkpoints/last.ckpt")["epoch"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Fill(Callback):
    """Leaves no byte free once the checkpoint of a round is on the disk."""

    def __init__(self, folder, rounds):
        self.path, self.rounds = Path(folder) / "filler", rounds

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.rounds:
            end = time.monotonic() + PATIENCE
            while newest(self.path.parent) < self.rounds and time.monotonic() < end:
                time.sleep(0.01)
            with self.path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 10))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard writes in a thread
def test_a_disk_that_is_full_stops_the_run_and_leaves_the_last_round(small_disk, straight):
    with pytest.raises(DiskFull, match=f"The disk of {small_disk}.* is full .*No space left on device"):
        fit(small_disk, callbacks=[Fill(small_disk, 2)])
    assert newest(small_disk) == 2
    (small_disk / "filler").unlink()
    assert left(fit(small_disk, "last")) == left(straight)
