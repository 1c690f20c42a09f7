import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import DiskFull, InvalidOption, RankFailed
from lightning_sparsefl.federated.storage import run_folder
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
from lightning_sparsefl.federated.storage.run_folder import RunFolder, Table, last_run, new_version
from lightning_sparsefl.models import MLP


def test_new_columns_leave_old_rows_empty(tmp_path):
    table = Table(tmp_path / "t.csv")
    table.append([{"round": 0, "a": 1}])
    table.append([{"round": 1, "a": 2, "b": 3}])
    assert table.read() == [{"round": "0", "a": "1", "b": ""}, {"round": "1", "a": "2", "b": "3"}]


def test_cut_back_drops_what_was_not_committed_and_appending_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for number in range(4):
        folder.metrics.append([{"round": number, "x": number}])
    again = RunFolder(tmp_path / "run")
    again.cut_back(2)
    again.metrics.append([{"round": 2, "x": 20}])
    assert [(row["round"], row["x"]) for row in again.metrics.read()] == [("0", "0"), ("1", "1"), ("2", "20")]


def test_cut_back_drops_a_torn_row(tmp_path):
    """A part of round 12 is no round 1."""
    table = Table(tmp_path / "t.csv")
    table.append([{"round": number, "x": number} for number in (0, 1, 2)])
    table.path.write_text(table.path.read_text() + "1")
    table.cut_back(2)
    assert [row["round"] for row in table.read()] == ["0", "1"]
    table.cut_back(0)
    assert not table.path.exists()


DAMAGE = {
    "no header": lambda content: content.partition(b"\r\n")[2],
    "semicolons": lambda content: content.replace(b",", b";"),
    "zeros": lambda content: bytes(len(content)),
    "another encoding": lambda content: content + b"\xff\xfe\r\n",
    "a longer row": lambda content: content + b"3,1,2,3\r\n",
    "a round that is no number": lambda content: content + b"x,1\r\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_set_aside_and_a_new_one_begins(damage, tmp_path):
    table = Table(tmp_path / "metrics.csv")
    table.append([{"round": number, "x": number} for number in (0, 1, 2)])
    spoilt = DAMAGE[damage](table.path.read_bytes())
    for name in ("metrics.csv.damaged", "metrics.csv.damaged1"):
        table.path.write_bytes(spoilt)
        again = Table(table.path)
        with pytest.warns(UserWarning, match=rf"metrics\.csv is damaged .*; it was renamed to {name}, and"):
            again.cut_back(2)
        assert (tmp_path / name).read_bytes() == spoilt
    again.append([{"round": 2, "x": 2}])
    assert again.read() == [{"round": "2", "x": "2"}]


@pytest.mark.parametrize(("spoilt", "reason"), [("x", "a row has the client 'x'"), ("", "a row has the client ''")])
def test_a_damaged_cell_of_the_key_sets_a_table_aside(spoilt, reason, tmp_path):
    table = Table(tmp_path / "clients.csv")
    table.append([{"round": 0, "client": 3, "x": 1}, {"round": 0, "client": spoilt, "x": 2}])
    with pytest.warns(UserWarning, match=rf"clients\.csv is damaged \({reason}\)"):
        table.fill([{"round": 0, "client": 5, "x": 7}], ["round", "client"])
    assert table.read() == [{"round": "0", "client": "5", "x": "7"}]


def test_a_table_without_a_column_of_the_key_is_set_aside(tmp_path):
    table = Table(tmp_path / "clients.csv")
    table.append([{"round": 0, "x": 1}])
    with pytest.warns(UserWarning, match=r"clients\.csv is damaged \(it has no column `client`\)"):
        table.fill([{"round": 0, "client": 5}], ["round", "client"])


def test_a_table_that_is_deleted_during_a_run_begins_again_with_its_header(tmp_path):
    table = Table(tmp_path / "t.csv")
    table.append([{"round": 0, "x": 0}])
    table.path.unlink()
    table.append([{"round": 1, "x": 1}])
    assert table.read() == [{"round": "1", "x": "1"}]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_summary_counts_as_missing(content, tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_summary() == {}
    (tmp_path / "summary.json").write_bytes(content)
    assert folder.read_summary() == {}


# ---- one process

HOLD = """
import os, sys, time
from pathlib import Path
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
child = os.fork()  # outlives its parent, as a loader's worker may
print(child, flush=True) if child else None
time.sleep(60)
"""


@contextmanager
def held(folder):
    """Another process that holds the folder's lock, and a child of it; it is killed at the end, its child later."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        try:
            yield holder
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_folder_that_another_process_uses_is_refused_until_that_one_is_killed(tmp_path):
    lock = FolderLock(tmp_path)
    with held(tmp_path) as holder:
        with pytest.raises(InvalidOption, match=rf"is in use by process {holder.pid} on .*, since "):
            lock.acquire()
        holder.kill()
        holder.wait()
        lock.acquire()  # at once, although the child is alive
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        lock.release()


def fit(root, rounds, ckpt_path=None, devices=1, callbacks=None):
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2),
        accelerator="cpu",
        devices=devices,
        strategy="client_parallel_fork" if devices > 1 else "auto",
        max_rounds=rounds,
        default_root_dir=str(root),
        logger=False,
        enable_progress_bar=False,
        callbacks=callbacks,
    )
    data = FederatedBlobs(num_train=60, num_test=20, num_clients=3, num_classes=4, dim=8, val_fraction=0.2)
    torch.manual_seed(0)
    trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 8), hidden=(8,)), data, ckpt_path)
    return RunFolder(trainer.run_folder)


def test_a_run_goes_on_without_its_tables_and_never_beside_another_process(tmp_path):
    folder = fit(tmp_path, 1)
    folder.metrics.path.write_bytes(folder.metrics.path.read_bytes().partition(b"\n")[2])
    folder.clients.path.unlink()
    with held(folder.path), pytest.raises(InvalidOption, match=r"version_0 is in use by process"):
        fit(tmp_path, 2, "last")
    with pytest.warns(UserWarning, match="metrics.csv is damaged"):
        fit(tmp_path, 2, "last")
    assert [row["round"] for row in folder.metrics.read()] == ["1"]
    assert {row["round"] for row in folder.clients.read()} == {"1"}


def test_a_disk_that_is_full_before_the_first_round_is_reported_as_such(tmp_path, monkeypatch):
    def full(lock):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FolderLock, "acquire", full)
    with pytest.raises(DiskFull, match="No space left on device"):
        fit(tmp_path, 1)


class Rounds(Callback):
    """Notes the rounds that are trained."""

    def __init__(self):
        self.numbers = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.numbers.append(trainer.current_epoch)


@pytest.mark.parametrize("committed", [0, 1])
def test_what_another_process_commits_before_the_folder_is_locked_is_resumed_from(tmp_path, monkeypatch, committed):
    acquire, rounds = FolderLock.acquire, Rounds()
    if committed:
        fit(tmp_path, 1)
    else:
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, 1, callbacks=[Fail()])

    def late(lock):
        monkeypatch.setattr(FolderLock, "acquire", acquire)
        fit(tmp_path, 2, "last")
        lock.acquire()

    monkeypatch.setattr(FolderLock, "acquire", late)
    folder = fit(tmp_path, 3, "last", callbacks=[rounds])
    assert rounds.numbers == [2]
    assert [row["round"] for row in folder.metrics.read()] == ["0", "1", "2"]


class Fail(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        raise ZeroDivisionError


@pytest.mark.slow
def test_several_ranks_share_a_folder_which_a_second_run_cannot_enter(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    path = fit(tmp_path, 1, devices=2).path
    with held(path), pytest.raises((InvalidOption, RankFailed), match="version_0 is in use by process"):
        fit(tmp_path, 2, "last", devices=2)
    fit(tmp_path, 2, "last", devices=2)


def test_one_process_may_train_in_a_folder_again(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    first.acquire()
    first.release()
    second.acquire()
    second.release()
    assert (tmp_path / ".lock").read_text() == ""


TRY = """
import sys
from pathlib import Path
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
try:
    FolderLock(Path(sys.argv[1])).acquire()
except InvalidOption as error:
    print(error)
"""


def refusal(folder):
    """The error message of another process that locks a folder, or an empty text."""
    process = subprocess.run([sys.executable, "-c", TRY, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    return process.stdout


@pytest.mark.slow
def test_a_folder_stays_locked_when_its_process_copies_it_and_forks(tmp_path):
    folder, lock = tmp_path / "run", FolderLock(tmp_path / "run")
    folder.mkdir()
    lock.acquire()
    shutil.copytree(folder, tmp_path / "copy")
    child = os.fork()
    if child == 0:
        lock.release()  # of the parent, which a child must not end
        os._exit(0)
    os.waitpid(child, 0)
    assert f"is in use by process {os.getpid()} on " in refusal(folder)
    lock.release()
    assert refusal(folder) == ""


class Upload(Callback):
    """Copies the run folder, as a logger of artifacts does, and locks it in another process."""

    def on_train_epoch_end(self, trainer, pl_module):
        folder = Path(trainer.log_dir)
        shutil.copytree(folder, folder.with_name("copy"), dirs_exist_ok=True)
        self.refusal = refusal(folder)


@pytest.mark.slow
def test_a_run_that_copies_its_folder_stays_the_only_one_in_it(tmp_path):
    upload = Upload()
    fit(tmp_path, 1, callbacks=[upload])
    assert f"is in use by process {os.getpid()} on " in upload.refusal


def test_without_locks_in_the_file_system_there_is_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = FolderLock(tmp_path)
    with pytest.warns(UserWarning, match=r"without locks \(No locks available\)"):
        lock.acquire()
    lock.release()


def test_what_a_killed_process_half_wrote_is_deleted(tmp_path):
    folder = RunFolder(tmp_path)
    for path in (folder.path / ".metrics.csv.7.tmp", folder.checkpoints / "clients" / ".round-000001.pt.7.tmp"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    folder.cut_back(1)
    assert not list(tmp_path.rglob(".*.tmp"))


def test_empty_cells_of_a_table_are_filled_and_missing_rows_inserted(tmp_path):
    table = Table(tmp_path / "clients.csv")
    table.append([{"round": 0, "client": 1, "loss": 0.5}, {"round": 1, "client": 2, "loss": ""}])
    table.fill(
        [{"round": 1, "client": 2, "loss": 3, "acc": 1}, {"round": 0, "client": 1, "loss": 4}], ["round", "client"]
    )
    table.fill([{"round": 1, "client": 0, "acc": 0}], ["round", "client"])
    table.append([{"round": 2, "client": 5, "acc": 2}])
    assert (tmp_path / "clients.csv").read_text().splitlines() == [
        "round,client,loss,acc",
        "0,1,0.5,",
        "1,0,,0",
        "1,2,3,1",
        "2,5,,2",
    ]


def test_a_summary_with_scores_that_are_not_finite_is_json(tmp_path):
    def refused(name):
        raise AssertionError(f"{name} is not JSON")

    folder = RunFolder(tmp_path)
    folder.write_summary({"rounds": 2, "global/loss": math.nan, "personal/loss": math.inf, "global/acc": 0.5})
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refused)
    assert read == {"rounds": 2, "global/loss": None, "personal/loss": None, "global/acc": 0.5}
    again = folder.read_summary()
    assert math.isnan(again.pop("global/loss"))
    assert math.isnan(again.pop("personal/loss"))
    assert again == {"rounds": 2, "global/acc": 0.5}


def test_versions_count_up_and_the_last_run_is_the_newest(tmp_path):
    for version in (0, 9, 10):
        checkpoints = tmp_path / "FedAvg" / f"version_{version}" / "checkpoints"
        checkpoints.mkdir(parents=True)
        if version != 10:
            (checkpoints / "last.ckpt").touch()
    assert new_version(tmp_path / "FedAvg").name == "version_11"
    assert new_version(tmp_path / "FedAvg").name == "version_12"
    assert last_run(tmp_path, "FedAvg").name == "version_9"
    assert last_run(tmp_path, "FedSpa") is None


def test_a_folder_of_runs_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    new_version(tmp_path / "FedAvg")
    mkdir = Path.mkdir

    def denied(path, **options):
        if path.name == "version_1":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, **options)

    monkeypatch.setattr(Path, "mkdir", denied)
    expected = rf"`trainer\.default_root_dir` is '{tmp_path}', in which the folder 'FedAvg/version_1' cannot be created"
    with pytest.raises(InvalidOption, match=expected):
        new_version(tmp_path / "FedAvg")


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_file_in_the_place_of_the_root_folder_is_named(root, tmp_path):
    (tmp_path / "file").touch()
    expected = rf"`trainer\.default_root_dir` is '{tmp_path / root}', in which the folder 'FedAvg' cannot be created"
    with pytest.raises(InvalidOption, match=expected):
        new_version(tmp_path / root / "FedAvg")


def test_a_copy_of_a_run_is_no_run(tmp_path):
    for name in ("version_0", "version_1", "version_1_backup", "version_2.old"):
        (tmp_path / name).mkdir()
    assert run_folder._versions(tmp_path) == {0: tmp_path / "version_0", 1: tmp_path / "version_1"}
